// Where, when and how urgently threads run.
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>

#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

constexpr const char* kSchedulingSubject = "scheduling";

Problem set_cpu(bool last) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return because("sched_getaffinity");
  if (CPU_COUNT(&set) < 2) return "there is one CPU only";
  int chosen = -1;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set) && (last || chosen < 0)) chosen = cpu;
  }
  CPU_ZERO(&set);
  CPU_SET(chosen, &set);
  return answer(sched_setaffinity(0, sizeof set, &set), "sched_setaffinity");
}

std::string cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return because("sched_getaffinity");
  std::string text = "CPU";
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) text += " " + std::to_string(cpu);
  return text;
}

constexpr int kOfThread = 1;  // IOPRIO_WHO_PROCESS: 0 is the calling thread
Problem set_io_priority(int kind, int level) {
  return answer(syscall(SYS_ioprio_set, kOfThread, 0, kind << 13 | level), "ioprio_set");
}
std::string io_priority() {
  const long value = syscall(SYS_ioprio_get, kOfThread, 0);
  return value < 0 ? because("ioprio_get")
                   : "class " + std::to_string(value >> 13) + " level " + std::to_string(value & 7);
}

std::string timer_slack() { return std::to_string(prctl(PR_GET_TIMERSLACK)) + " ns"; }

// struct sched_attr of linux/sched/types.h, as long as it has been since Linux 5.3
struct Attributes {
  std::uint32_t size = sizeof(Attributes);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime = 0;
  std::uint64_t deadline = 0;
  std::uint64_t period = 0;
  std::uint32_t least = 0;
  std::uint32_t most = 0;
};
constexpr std::uint64_t kKeepAll = 0x18;  // SCHED_FLAG_KEEP_ALL
constexpr std::uint64_t kClamps = 0x60;   // SCHED_FLAG_UTIL_CLAMP
std::string policy_text() {
  Attributes now;
  if (syscall(SYS_sched_getattr, 0, &now, sizeof now, 0) != 0) return because("sched_getattr");
  return "policy " + std::to_string(now.policy) + " priority " + std::to_string(now.priority) +
         " nice " + std::to_string(now.nice) + " flags " + std::to_string(now.flags) +
         (now.policy == SCHED_BATCH || now.policy == SCHED_IDLE || now.policy == SCHED_OTHER
              ? ""
              : " runtime " + std::to_string(now.runtime) + " deadline " +
                    std::to_string(now.deadline));
}
Problem set_policy(const Attributes& wanted) {
  return answer(syscall(SYS_sched_setattr, 0, &wanted, 0), "sched_setattr");
}

void add_policy(Probe& probe, const char* name, const Attributes& wanted) {
  probe.add_for_own_thread(
      kSchedulingSubject, name, [=] { return set_policy(wanted); }, policy_text);
}

std::uint64_t slice() {
  Attributes now;
  return syscall(SYS_sched_getattr, 0, &now, sizeof now, 0) != 0 ? 0 : now.runtime;
}

std::string clamps() {
  Attributes now;
  if (syscall(SYS_sched_getattr, 0, &now, sizeof now, 0) != 0) return because("sched_getattr");
  return std::to_string(now.least) + " to " + std::to_string(now.most);
}

}  // namespace

void add_scheduling(Probe& probe) {
  probe.add(
      kSchedulingSubject, "CPU affinity of the first thread", [] { return set_cpu(true); }, cpus);
  probe.add_for_thread(
      kSchedulingSubject, "CPU affinity of another thread", [] { return set_cpu(false); }, cpus);
  probe.add(
      kSchedulingSubject, "nice value of the first thread",
      [] { return answer(setpriority(PRIO_PROCESS, 0, 3), "setpriority"); }, policy_text);
  probe.add_for_thread(
      kSchedulingSubject, "nice value of another thread",
      [] { return answer(setpriority(PRIO_PROCESS, 0, 7), "setpriority"); }, policy_text);
  add_policy(probe, "SCHED_BATCH", {.policy = SCHED_BATCH, .nice = 5});
  add_policy(probe, "SCHED_IDLE", {.policy = SCHED_IDLE});
  add_policy(probe, "SCHED_FIFO and its priority", {.policy = SCHED_FIFO, .priority = 3});
  add_policy(probe, "SCHED_RR and its priority", {.policy = SCHED_RR, .priority = 4});
  add_policy(probe, "SCHED_FLAG_RESET_ON_FORK", {.policy = SCHED_BATCH, .flags = 1, .nice = 4});
  probe.add_for_own_thread(
      kSchedulingSubject, "time slice of a thread (sched_setattr)",
      []() -> Problem {
        if (slice() == 0) return "the kernel tells none";
        return set_policy({.runtime = 20'000'000});
      },
      [] { return std::to_string(slice()) + " ns"; });
  probe.add_for_own_thread(
      kSchedulingSubject, "utilisation clamps of a thread (sched_setattr)",
      [] { return set_policy({.flags = kKeepAll | kClamps, .least = 100, .most = 700}); }, clamps);
  probe.add(
      kSchedulingSubject, "nice value of the session (autogroup)",
      []() -> Problem {
        // Of a session of its own, which nothing outside of the tree is in.
        if (getsid(0) != getpid() && setsid() < 0) return "it leads no session";
        std::ofstream file("/proc/self/autogroup");
        file << "7" << std::flush;
        return file ? std::nullopt : Problem(because("writing /proc/self/autogroup"));
      },
      [] {
        std::ifstream file("/proc/self/autogroup");
        std::string group;
        std::string rest;
        file >> group;
        std::getline(file, rest);
        return rest;
      });
  probe.add(
      kSchedulingSubject, "IO priority of the first thread", [] { return set_io_priority(2, 6); },
      io_priority);
  probe.add_for_thread(
      kSchedulingSubject, "IO priority of another thread", [] { return set_io_priority(3, 0); },
      io_priority);
  probe.add(
      kSchedulingSubject, "timer slack of the first thread",
      [] { return answer(prctl(PR_SET_TIMERSLACK, 123456UL), "prctl"); }, timer_slack);
  probe.add_for_thread(
      kSchedulingSubject, "timer slack of another thread",
      [] { return answer(prctl(PR_SET_TIMERSLACK, 654321UL), "prctl"); }, timer_slack);
}

}  // namespace stasis::workloads
