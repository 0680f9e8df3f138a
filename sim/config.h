// What the simulated driver is asked to look like, from the environment: GPUs, machine, driver
// version, where its state lies. The variables are described in docs/simulated-driver.md.
//
// Ownership: plain values. Threads: load() reads the environment and touches nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "abi/cuda_abi.h"

namespace stasis::sim {

struct GpuSpec {
  std::string name;
  std::uint64_t capacity = 0;  // bytes
  cuda::CUuuid uuid{};
  unsigned pci_bus = 0;
};

struct Config {
  std::vector<GpuSpec> gpus;  // all of the machine, in NVML's order
  std::vector<int> visible;   // indices into gpus, in the order of CUDA's ordinals
  std::string dir;            // state outside the processes
  // What a checkpoint saves of each context beside its memory's content, nearly all zeros; bytes.
  std::uint64_t context_bytes = std::uint64_t{4} << 20;
  int driver_version = 580;
  bool persistence = true;
  bool mig = false;
  // Memory of the driver's own on the host takes the addresses of an area as soon as that is given
  // up.
  bool takes_freed = false;
  // Memory of that size and more cannot be exported when a restore has made it anew; bytes.
  std::uint64_t exports_restored_below = std::uint64_t{512} << 20;

  // As long may a kernel of a restored context run when another program makes a context on its GPU;
  // in ns.
  std::uint64_t switch_ns = 4'400'000'000;

  int cuda_version() const;  // 13000 for driver 580
  bool has_checkpoint() const { return driver_version >= 570; }
  bool has_gpu_pairs() const { return driver_version >= 580; }
  std::string driver_text() const;  // "580.159.04"
};

// All of `text` is a number.
bool parse_number(std::string_view text, std::uint64_t& out);
// Each parser fills `out` or explains in `error` and returns false; nothing is guessed.
// "500ms", "2s"; in ns.
bool parse_duration(std::string_view text, std::uint64_t& out_ns);
bool parse_size(std::string_view text, std::uint64_t& out, std::string& error);
bool parse_gpus(std::string_view text, std::string_view machine, std::vector<GpuSpec>& out,
                std::string& error);
bool load(Config& out, std::string& error);

// "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
std::string to_text(const cuda::CUuuid& uuid);
bool same(const cuda::CUuuid& a, const cuda::CUuuid& b);
std::string pci_text(unsigned bus);  // "0000:1A:00.0"

}  // namespace stasis::sim
