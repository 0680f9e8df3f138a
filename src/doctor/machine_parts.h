// The parts of examine_machine(), one for each concern. Private to src/doctor.
//
// Each appends what it finds to `out`. They read files and start no threads; one thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/interrupt.h"
#include "doctor/finding.h"
#include "doctor/machine.h"
#include "driver/driver.h"

namespace stasis::doctor {

using Findings = std::vector<Finding>;

// Other than these only in tests.
struct KernelFolders {
  std::string proc = "/proc";
  std::string sys = "/sys";
  std::string boot = "/boot";
  std::string dev = "/dev";
};

Finding green(std::string id, std::string what);
Finding yellow(std::string id, std::string what, std::string remedy);
Finding red(std::string id, std::string what, std::string remedy);
// The error with what the driver itself answered. `remedy` is for one that has none.
Finding from_error(Light light, std::string id, const Error& error, const std::string& remedy = {});

// Is the kernel of this release as new as that?
bool kernel_at_least(const std::string& release, int major, int minor);

// machine_gpus.cc
void probe_driver(const Driver& driver, Findings& out);
void probe_gpus(const Driver& driver, const Result<std::vector<Gpu>>& gpus, Findings& out);
void probe_mps(const KernelFolders& folders, Findings& out);
// Bytes in use on all GPUs.
std::uint64_t gpu_memory_in_use(Driver& driver, const std::vector<Gpu>& gpus);

// machine_criu.cc
void probe_criu(const std::optional<std::string>& path, const Interrupt& interrupt, Findings& out);
// `directories`: where CRIU takes its plugins from.
void probe_plugin(const std::vector<std::string>& directories, Findings& out);
std::vector<std::string> plugin_directories();

// machine_kernel.cc
void probe_permissions(const KernelFolders& folders, Findings& out);
void probe_kernel(const KernelFolders& folders, const std::string& release, Findings& out);
void probe_clock(const KernelFolders& folders, Findings& out);
void probe_limits(const KernelFolders& folders, Findings& out);

// machine_huge_pages.cc
void probe_huge_pages(const KernelFolders& folders, std::uint64_t gpu_bytes, Findings& out);

// machine_room.cc
void probe_shared_memory(const KernelFolders& folders, Findings& out);
void probe_host_memory(const KernelFolders& folders, std::uint64_t gpu_bytes, Findings& out);
void probe_disk(const std::string& directory, std::uint64_t gpu_bytes, const Interrupt& interrupt,
                Findings& out);
void probe_state_directory(Findings& out);

}  // namespace stasis::doctor
