// What processes have taken of System V semaphores with SEM_UNDO: the kernel gives it back when
// they end, at the end of a dump too, and a restored process has taken nothing. It tells for no
// process what that is, but for each semaphore who has changed it last.
#include <sys/sem.h>

#include <algorithm>

#include <fmt/format.h>

#include "doctor/criu_checks.h"
#include "proc/in_namespace.h"

namespace stasis::doctor {
namespace {

constexpr Kind kUndo{
    "sysv-semaphore", Severity::kYellow,
    "uses System V semaphores: what it has taken of them with SEM_UNDO is given back when a dump "
    "ends it, and is not taken again by a restore",
    "dump while it has taken nothing of them; without SEM_UNDO nothing changes"};

constexpr int kMostSets = 4096;
constexpr int kMostOfSet = 1024;

// As semctl(2) has it; the C library leaves the definition to its caller.
union SemaphoreArgument {
  int value;
  semid_ds* status;
  seminfo* info;
};

// By process, the sets that it was the last one to change a semaphore of; in the IPC namespace of
// the calling thread.
std::map<int, std::set<int>> last_users() {
  std::map<int, std::set<int>> out;
  seminfo info{};
  SemaphoreArgument argument{};
  argument.info = &info;
  const int highest = ::semctl(0, 0, SEM_INFO, argument);
  for (int index = 0; index <= std::min(highest, kMostSets); ++index) {
    semid_ds status{};
    argument.status = &status;
    const int id = ::semctl(index, 0, SEM_STAT, argument);
    if (id < 0) continue;
    const int size = std::min(static_cast<int>(status.sem_nsems), kMostOfSet);
    for (int number = 0; number < size; ++number) {
      if (const int pid = ::semctl(id, number, GETPID); pid > 0) out[pid].insert(id);
    }
  }
  return out;
}

// In that of another process. Nothing where that may not be entered.
std::map<int, std::set<int>> last_users_beside(Facts& facts, Pid pid) {
  if (facts.has_our_namespace(pid, "ipc")) return last_users();
  std::map<int, std::set<int>> out;
  proc::in_namespace(pid, proc::Namespace::kIpc, [&] { out = last_users(); });
  return out;
}

}  // namespace

void probe_semaphores(Facts& facts, const Processes& processes, Signs& out) {
  std::map<ino_t, std::map<int, std::set<int>>> known;  // by namespace
  for (const proc::ProcessInfo& info : processes) {
    const ino_t space = facts.namespace_of(info.pid, "ipc");
    if (space == 0) continue;
    const auto [users, is_new] = known.try_emplace(space);
    if (is_new) users->second = last_users_beside(facts, info.pid);
    const auto own = users->second.find(info.pid.value);
    if (own == users->second.end()) continue;
    for (const int id : own->second)
      out.add(info.pid, kUndo, fmt::format("set {}", id));
  }
}

}  // namespace stasis::doctor
