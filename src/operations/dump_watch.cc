#include "operations/dump_watch.h"

#include <chrono>

#include <fmt/format.h>

#include "operations/dump_checks.h"
#include "proc/procfs.h"

namespace stasis {

Result<void> DumpWatch::refuse_held_up(const ProcessTree& tree) {
  STASIS_TRY(refuse_held(env_, tree.members(), files_));
  asked_ = Clock::now();
  return {};
}

Result<void> DumpWatch::check(const ProcessTree& tree) {
  constexpr std::chrono::seconds kGrace{2};
  constexpr std::chrono::seconds kBetween{5};
  if (Clock::now() - asked_ > kBetween) STASIS_TRY(refuse_held_up(tree));
  for (const TreeMember& member : tree.members()) {
    if (!member.initial) continue;
    if (member.process.alive() && !proc::ProcFs().has_ended(member.process.pid())) continue;
    if (!dead_since_) dead_since_ = Clock::now();
    if (Clock::now() - *dead_since_ < kGrace) return {};
    return fail(
        ErrorCode::kProcessGone,
        fmt::format("process {} has ended while CRIU dumped it", member.process.pid().value),
        "start it anew, or restore it from an earlier image");
  }
  return {};
}

}  // namespace stasis
