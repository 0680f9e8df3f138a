// Faults on demand: what a checkpoint call, or one of the process's own calls, shall do instead of,
// or besides, its work.
//
// The grammar is in docs/simulated-driver.md. Unknown text is an error, never ignored.
// Threads: a pure parser and plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace stasis::sim {

enum class FaultAction {
  kLock,
  kCheckpoint,
  kRestore,
  kUnlock,
  kCopy,
  // Calls of the process itself.
  kContext,   // a context is made
  kImport,    // memory of another process is imported by descriptor
  kTransfer,  // content is copied
  kModule,    // kernels are loaded
  kLimit,     // a context's limit is set
  kReserve,   // addresses are reserved
  kAllocate,  // plain device memory is allocated
};
// The process's own, which are counted from the first of them.
inline constexpr FaultAction kFirstOwnCall = FaultAction::kContext;
inline constexpr std::size_t kOwnCalls = 7;
inline bool is_own_call(FaultAction action) { return action >= kFirstOwnCall; }

enum class FaultEffect {
  kError,    // value: the result code; nothing is done
  kTimeout,  // lock only: as if work never ended, so NOT_READY at the time-out (at once if none)
  kHang,     // no answer for as long as the caller waits; nothing is done
  kDelay,    // value: nanoseconds to wait first
  kRate,     // value: bytes per second for content that moves
  kDie,      // the target is killed in the middle
  kFailed,   // the target ends in state 3, failed
};

inline constexpr int kAnyGpu = -1;

struct Fault {
  FaultAction action = FaultAction::kLock;
  FaultEffect effect = FaultEffect::kError;
  std::uint64_t value = 0;
  std::uint64_t nth = 0;  // 0: every call
  std::uint64_t pid = 0;  // in the target's own PID namespace; 0: every process
  int gpu = kAnyGpu;      // transfer only: the device that the process copies on
};

bool parse_faults(std::string_view text, std::vector<Fault>& out, std::string& error);

// The faults for one call, combined: `nth` is how often the action was asked of this process.
struct Plan {
  std::uint64_t error = 0;
  bool timeout = false;
  bool hang = false;
  bool die = false;
  bool failed = false;
  std::uint64_t delay_ns = 0;
  std::uint64_t rate = 0;
};
Plan plan_for(const std::vector<Fault>& faults, FaultAction action, std::uint64_t nth,
              std::uint64_t pid, int gpu = kAnyGpu);

}  // namespace stasis::sim
