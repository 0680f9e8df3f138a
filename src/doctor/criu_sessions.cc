// Sessions whose leader has ended: CRIU 4.2.1 makes one anew for a child of the root alone, and
// that helper's end gives the process another parent.
#include <fmt/format.h>

#include "doctor/criu_checks.h"

namespace stasis::doctor {
namespace {

constexpr Kind kLeaderless{
    "dead-session", Severity::kRed,
    "is in a session whose leader has ended, as a daemon that has forked twice, and which CRIU "
    "cannot "
    "restore, or not with its parent",
    "let the leader of the session live, or start the program so that it stays in its parent's "
    "session"};

}  // namespace

void probe_sessions(Facts& facts, const Processes& processes, Signs& out) {
  const proc::ProcessInfo& root = processes.front();
  const auto details = facts.procfs().details(root.pid);
  // What has lost its parent there is the child of the first process again: not tried.
  if (details && details->ns_pid == 1) return;
  for (const proc::ProcessInfo& info : processes) {
    if (info.session <= 0 || info.session == root.session || info.session == info.pid.value)
      continue;
    const auto leader = facts.procfs().process(Pid{info.session});
    if (!leader ? leader.error().code == ErrorCode::kNoSuchProcess : leader->has_ended())
      out.add(info.pid, kLeaderless, fmt::format("session {}", info.session));
  }
}

}  // namespace stasis::doctor
