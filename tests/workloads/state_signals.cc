// Signals that wait, and those to come.
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <fstream>

#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

constexpr const char* kSignalsSubject = "signals";
std::atomic<int> g_parent_ended{0};

Problem block(int signal) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  errno = pthread_sigmask(SIG_BLOCK, &set, nullptr);
  return errno == 0 ? std::nullopt : Problem(because("pthread_sigmask"));
}

// Takes all that wait of one signal, and tells the sender and value of each.
std::string waiting(int signal) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  const timespec at_once{};
  siginfo_t info{};
  std::string text;
  while (sigtimedwait(&set, &info, &at_once) == signal)
    text += "(code " + std::to_string(info.si_code) + " value " +
            std::to_string(info.si_value.sival_int) + " from " + std::to_string(info.si_pid) + ")";
  return text.empty() ? "none" : text;
}

long send(int signal, int value, bool to_thread) {
  siginfo_t info{};
  info.si_signo = signal;
  info.si_code = SI_QUEUE;
  info.si_pid = getpid();
  info.si_value.sival_int = value;
  return to_thread ? syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), signal, &info)
                   : syscall(SYS_rt_sigqueueinfo, getpid(), signal, &info);
}

// Taking them tells what waits; so it is done once, at the check, and they are sent anew then.
Problem pending(int signal, int count, bool to_thread) {
  if (auto unset = block(signal)) return unset;
  for (int i = 1; i <= count; ++i)
    if (send(signal, i, to_thread) != 0) return because("sending a signal to itself");
  return std::nullopt;
}
Problem check_pending(int signal, int count, bool to_thread) {
  std::string expected;
  for (int i = 1; i <= count; ++i)
    expected += "(code -1 value " + std::to_string(i) + " from " + std::to_string(getpid()) + ")";
  const std::string now = waiting(signal);
  (void)pending(signal, count, to_thread);
  return now == expected ? std::nullopt : Problem("waiting: " + now);
}

std::string handler() {
  struct sigaction now {};
  sigaction(SIGWINCH, nullptr, &now);
  return "flags " + std::to_string(now.sa_flags & ~0x04000000) + " mask " +
         std::to_string(sigismember(&now.sa_mask, SIGHUP)) +
         (now.sa_handler == SIG_IGN ? " ignored" : " handler");
}

std::string alternate_stack() {
  stack_t now{};
  sigaltstack(nullptr, &now);
  char text[64];
  std::snprintf(text, sizeof text, "%p, %zu bytes, flags %d", now.ss_sp, now.ss_size, now.ss_flags);
  return text;
}

std::string mask() {
  sigset_t set;
  pthread_sigmask(SIG_BLOCK, nullptr, &set);
  std::string text;
  for (int signal = 1; signal < 65; ++signal)
    text += sigismember(&set, signal) == 1 ? "1" : "0";
  return text;
}

const int kQueued = SIGRTMIN + 5;
const int kOfFiles = SIGRTMIN + 10;

}  // namespace

void block_signals_that_wait() {
  for (const int signal : {SIGUSR2, kQueued, kQueued + 1, kOfFiles, kOfFiles + 1, kOfFiles + 2})
    (void)block(signal);
}

int signals_of_files() { return kOfFiles; }

void add_signals(Probe& probe) {
  const int queued = kQueued;
  probe.add_check(
      kSignalsSubject, "signal that waits for the process",
      [] { return pending(SIGUSR2, 1, false); }, [] { return check_pending(SIGUSR2, 1, false); });
  probe.add_check(
      kSignalsSubject, "signals that wait for the process, their order and values",
      [=] { return pending(queued, 3, false); }, [=] { return check_pending(queued, 3, false); });
  Worker& worker = probe.worker();
  probe.add_check(
      kSignalsSubject, "signals that wait for a thread, their order and values",
      [=, &worker] {
        Problem problem;
        worker.run([&] { problem = pending(queued + 1, 3, true); });
        return problem;
      },
      [=, &worker] {
        Problem problem;
        worker.run([&] { problem = check_pending(queued + 1, 3, true); });
        return problem;
      });
  probe.add(
      kSignalsSubject, "handler, its mask and flags",
      [] {
        struct sigaction action {};
        action.sa_handler = [](int) {};
        action.sa_flags = SA_RESTART | SA_ONSTACK | SA_NODEFER;
        sigaddset(&action.sa_mask, SIGHUP);
        return answer(sigaction(SIGWINCH, &action, nullptr), "sigaction");
      },
      handler);
  probe.add_for_thread(
      kSignalsSubject, "signal mask of a thread", [] { return block(SIGTSTP); }, mask);
  probe.add_for_thread(
      kSignalsSubject, "alternate signal stack of a thread",
      [] {
        static char stack[65536];
        const stack_t wanted{stack, 0, sizeof stack};
        return answer(sigaltstack(&wanted, nullptr), "sigaltstack");
      },
      alternate_stack);
  // The root of the tree is restored by a tool that ends; a child's parent is in the tree.
  probe.add_check(
      kSignalsSubject, "parent-death signal: none comes of a restore",
      [] {
        struct sigaction action {};
        action.sa_handler = [](int) { ++g_parent_ended; };
        action.sa_flags = SA_RESTART;
        sigaction(SIGUSR1, &action, nullptr);
        return answer(prctl(PR_SET_PDEATHSIG, static_cast<unsigned long>(SIGUSR1)), "prctl");
      },
      []() -> Problem {
        if (g_parent_ended != 0) return "it came";
        return std::nullopt;
      });
  if (probe.is_child()) {
    probe.add(
        kSignalsSubject, "parent-death signal of a child", [] { return Problem(); },
        [] {
          int signal = -1;
          return prctl(PR_GET_PDEATHSIG, &signal) != 0 ? because("prctl") : std::to_string(signal);
        });
  }
}

}  // namespace stasis::workloads
