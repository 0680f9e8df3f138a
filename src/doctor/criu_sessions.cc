// Sessions whose leader has ended: CRIU 4.2.1 makes one anew for a child of the root alone, and
// that helper's end gives the process another parent.
#include <unistd.h>

#include <set>

#include <fmt/format.h>

#include "doctor/criu_checks.h"

namespace stasis::doctor {
namespace {

constexpr Kind kLeaderless{
    "dead-session", Severity::kRed,
    "is in a session whose leader has ended (a daemon that has forked twice); CRIU cannot restore "
    "that, or not with its parent",
    "let the leader of the session live, or start the program so that it stays in its parent's "
    "session"};

constexpr Kind kOutsideSession{
    "session-outside", Severity::kYellow,
    "has a session in which processes outside of the tree are, too; while one "
    "of them lives, a restore on this machine is refused: its number is in use",
    "end them before a restore, or start such helpers in a session of their own"};

void probe_outside(Facts& facts, const Processes& processes, Signs& out) {
  std::set<int> tree;
  for (const proc::ProcessInfo& info : processes)
    tree.insert(info.pid.value);
  const auto all = facts.procfs().all();
  if (!all) return;
  for (const proc::ProcessInfo& info : *all) {
    if (!tree.contains(info.session) || tree.contains(info.pid.value) || info.has_ended() ||
        info.pid.value == ::getpid())
      continue;
    if (descends_from(facts.procfs(), tree, info)) continue;
    out.add(Pid{info.session}, kOutsideSession,
            fmt::format("process {} ({})", info.pid.value, info.comm));
  }
}

}  // namespace

void probe_sessions(Facts& facts, const Processes& processes, Signs& out) {
  probe_outside(facts, processes, out);
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
