// The parts of examine_machine(), one for each concern. Private to src/doctor.
//
// Each appends what it finds to `out`. They read files and start no threads; one thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/interrupt.h"
#include "base/obstacle.h"
#include "doctor/machine.h"
#include "driver/driver.h"

namespace stasis::doctor {

using Obstacles = std::vector<Obstacle>;

// Other than these only in tests.
struct KernelFolders {
  std::string proc = "/proc";
  std::string sys = "/sys";
  std::string boot = "/boot";
  std::string dev = "/dev";
};

Obstacle green(ObstacleId id, std::string what);
Obstacle yellow(ObstacleId id, std::string what, std::string remedy);
Obstacle red(ObstacleId id, std::string what, std::string remedy);
// The error with what the driver itself answered. `remedy` is for one that has none.
Obstacle from_error(Severity severity, ObstacleId id, const Error& error,
                    const std::string& remedy = {});

// Is the kernel of this release as new as that?
bool kernel_at_least(const std::string& release, int major, int minor);

// machine_gpus.cc
void probe_driver(const Driver& driver, Obstacles& out);
void probe_gpus(const Driver& driver, const Result<std::vector<Gpu>>& gpus, Obstacles& out);
void probe_mps(const KernelFolders& folders, Obstacles& out);
// Bytes in use on all GPUs.
std::uint64_t gpu_memory_in_use(Driver& driver, const std::vector<Gpu>& gpus);

// machine_criu.cc
void probe_criu(const std::optional<std::string>& path, const Interrupt& interrupt, Obstacles& out);
// `directories`: where CRIU takes its plugins from.
void probe_plugin(const std::vector<std::string>& directories, Obstacles& out);
std::vector<std::string> plugin_directories();

// machine_kernel.cc
void probe_proc(Obstacles& out);
void probe_permissions(const KernelFolders& folders, Obstacles& out);
void probe_kernel(const KernelFolders& folders, const std::string& release, Obstacles& out);
void probe_clock(const KernelFolders& folders, Obstacles& out);
void probe_limits(const KernelFolders& folders, Obstacles& out);

// machine_huge_pages.cc
void probe_huge_pages(const KernelFolders& folders, std::uint64_t gpu_bytes, Obstacles& out);

// machine_room.cc
void probe_shared_memory(const KernelFolders& folders, Obstacles& out);
void probe_host_memory(const KernelFolders& folders, std::uint64_t gpu_bytes, Obstacles& out);
void probe_disk(const std::string& directory, std::uint64_t gpu_bytes, const Interrupt& interrupt,
                Obstacles& out);
void probe_state_directory(Obstacles& out);

}  // namespace stasis::doctor
