// Fault points: a closed list of named points before and after every step of an operation, at which
// a test can make something go wrong, and see what is left then.
//
// Only in builds with STASIS_FAULT_POINTS (docs/adr/0010); in all others the functions here are
// empty. There they act when the environment asks for it, which is read once:
//
//   STASIS_FAULT=POINT:ACTION[@N]   at the Nth time (the first) that POINT is reached, once
//     kill         this process is killed (SIGKILL)
//     error        the step returns an error
//     target-dies  the root of the tree under operation is killed
//     criu-dies    the criu that runs is killed
//     mover-dies   the mover is killed
//     disk-full    the disk with STASIS_FAULT_FILL, a directory, is filled to its last byte
//     no-memory    this process and the two helpers above get no more memory than they have, nor do
//                  those that they start: mmap(), malloc() and new threads fail (RLIMIT_AS, _DATA)
//     target-no-memory  the same for the root of the tree under operation
//     stop         this process stops itself (SIGSTOP): a test does something meanwhile
//   STASIS_FAULT_LOG=FILE           one line for each point that is reached, and one for the fault
//
// Thread-safe.
#pragma once

#include <span>
#include <string_view>

#include "base/ids.h"
#include "base/result.h"

namespace stasis {

enum class FaultPoint {
#define STASIS_FAULT_POINT(point, name, fails, when) point,
#include "base/fault_points.inc"
#undef STASIS_FAULT_POINT
};

struct FaultPointInfo {
  FaultPoint point;
  std::string_view name;
  bool can_fail;  // the step returns an error; otherwise there is nothing to return one from
  std::string_view what;  // where it is
};

// The list, in the order of the enum.
std::span<const FaultPointInfo> fault_points();

#ifdef STASIS_FAULT_POINTS

// To be called once at the start: kUsage for a fault that cannot be, so that no test passes because
// it has misspelt one.
Result<void> check_fault_setting();
// A fault was asked for and has not come to pass. Empty if all is as it should be.
std::string_view fault_not_reached();

// At a point where can_fail.
Result<void> fault(FaultPoint point);
// At one where not.
void fault_only(FaultPoint point);

// The process that target-dies, criu-dies, mover-dies and no-memory are about; zero: none.
void set_fault_target(Pid pid);
void set_fault_criu(Pid pid);
void set_fault_mover(Pid pid);

#else

// kUsage if the environment asks for a fault, which this build does not have.
Result<void> check_fault_setting();
inline std::string_view fault_not_reached() { return {}; }
inline Result<void> fault(FaultPoint) { return {}; }
inline void fault_only(FaultPoint) {}
inline void set_fault_target(Pid) {}
inline void set_fault_criu(Pid) {}
inline void set_fault_mover(Pid) {}

#endif

// A step between its two points.
template <class Step>
Result<void> between(FaultPoint before, FaultPoint after, const Step& step) {
  STASIS_TRY(fault(before));
  if (Result<void> done = step(); !done) return done;
  return fault(after);
}

}  // namespace stasis
