// What a caller of the checkpoint functions and its target agree on: a block of the target's memory
// that the caller reads, and the messages that it sends to the target's restore thread.
//
// The caller finds the block in the target's mappings of libcuda.so.*, at the start of a page, by
// its magic. It then takes (pidfd_getfd) a copy of the target's own end of a socket pair, whose
// other end the restore thread reads. Both ends live in the target, so no connection leaves it and
// CRIU can dump it; and taking a descriptor needs the permission to trace, as the real driver
// demands. Each request carries one end of a socket pair of the caller's, on which the reply comes;
// its hang-up tells the restore thread that the caller has given up.
//
// kControlVersion changes with every change of anything in here: two builds that differ refuse each
// other with CUDA_ERROR_UNKNOWN. Threads: the block is written by the target, atomically.
#pragma once

#include <atomic>
#include <cstdint>

#include "abi/cuda_abi.h"

namespace stasis::sim {

inline constexpr std::uint32_t kControlVersion = 2;
inline constexpr char kControlMagic[16] = "stasis-sim-ctl";
inline constexpr std::size_t kControlAlignment = 4096;
inline constexpr int kMaxGpus = 64;

struct ControlBlock {
  char magic[16];
  std::uint32_t version;
  std::uint32_t size;
  std::atomic<std::uint32_t> active;      // 0: the process has not called cuInit (or is a fork)
  std::atomic<std::uint32_t> state;       // CUprocessState
  std::atomic<std::int32_t> restore_tid;  // in the target's own PID namespace
  std::atomic<std::int32_t> client_fd;    // the end to take
};

enum class Action : std::uint32_t { kLock = 1, kCheckpoint, kRestore, kUnlock, kState };

// A machine as the caller sees it, for the restore: after a migration it is not the one that the
// target knows.
struct WireGpu {
  cuda::CUuuid uuid;
  std::uint64_t capacity;
  std::uint32_t pci_bus;
  char name[64];
};

struct Request {
  std::uint32_t version;
  Action action;
  std::uint32_t timeout_ms;
  std::uint32_t pair_count;
  cuda::CUcheckpointGpuPair pairs[kMaxGpus];
  std::uint32_t gpu_count;
  WireGpu gpus[kMaxGpus];
  char dir[200];
  char faults[4096];  // of the caller's environment and file; the target has its own besides
};

struct Reply {
  std::uint32_t result;  // CUresult
  std::uint32_t state;   // CUprocessState after it
};

}  // namespace stasis::sim
