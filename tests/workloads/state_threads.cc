// What the kernel and the processor keep for a thread.
#include <cpuid.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>

#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

constexpr const char* kThreadsSubject = "threads";

std::string in_hex(std::uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "%#lx", static_cast<unsigned long>(value));
  return text;
}

// The C library has registered an area for each thread, and a thread has one.
std::string sequence() {
  alignas(32) static std::uint32_t another[8] = {};
  constexpr std::uint32_t kSignature = 0x53053053;  // RSEQ_SIG of sys/rseq.h
  if (syscall(SYS_rseq, another, sizeof another, 0, kSignature) != 0) return "registered";
  syscall(SYS_rseq, another, sizeof another, 1, kSignature);
  return "not registered";
}

std::string robust_list() {
  void* head = nullptr;
  std::size_t size = 0;
  if (syscall(SYS_get_robust_list, 0, &head, &size) != 0) return because("get_robust_list");
  return in_hex(reinterpret_cast<std::uintptr_t>(head)) + ", " + std::to_string(size) + " bytes";
}

std::string address_to_clear() {
  void* address = nullptr;
  if (prctl(PR_GET_TID_ADDRESS, &address, 0UL, 0UL, 0UL) != 0) return because("PR_GET_TID_ADDRESS");
  return in_hex(reinterpret_cast<std::uintptr_t>(address));
}

bool has_protection_keys() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (c >> 4 & 1) != 0;  // OSPKE
}
std::uint32_t rights_by_key() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  asm volatile("rdpkru" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}
void set_rights_by_key(std::uint32_t value) {
  asm volatile("wrpkru" : : "a"(value), "c"(0), "d"(0) : "memory");
}

// linux/prctl.h: the thread's system calls become signals (SIGSYS) while its byte says so.
constexpr int kSetDispatch = 59;
constexpr char kPass = 0;
constexpr char kSignal = 1;
thread_local volatile char t_calls = kPass;
thread_local volatile int t_signals = 0;

Problem dispatch_calls() {
  struct sigaction action {};
  // The handler's own return is a system call.
  action.sa_handler = [](int) {
    t_calls = kPass;
    t_signals = t_signals + 1;
  };
  if (sigaction(SIGSYS, &action, nullptr) != 0) return because("sigaction");
  return answer(prctl(kSetDispatch, 1UL, 0UL, 0UL, &t_calls), "PR_SET_SYSCALL_USER_DISPATCH");
}
std::string dispatched() {
  t_signals = 0;
  t_calls = kSignal;
  syscall(SYS_getppid);
  t_calls = kPass;
  return t_signals == 1 ? "a signal comes" : "no signal comes";
}

std::string time_stamp() {
  int now = 0;
  return prctl(PR_GET_TSC, &now) != 0 ? because("PR_GET_TSC") : std::to_string(now);
}

}  // namespace

void add_threads(Probe& probe) {
  const auto nothing = [] { return Problem(); };
  probe.add(kThreadsSubject, "restartable sequences of the first thread (rseq)", nothing, sequence);
  probe.add_for_thread(kThreadsSubject, "restartable sequences of another thread", nothing,
                       sequence);
  probe.add(kThreadsSubject, "robust list of the first thread", nothing, robust_list);
  probe.add_for_thread(kThreadsSubject, "robust list of another thread", nothing, robust_list);
  probe.add(kThreadsSubject, "what is cleared when the first thread ends (set_tid_address)",
            nothing, address_to_clear);
  probe.add_for_thread(kThreadsSubject, "what is cleared when another thread ends", nothing,
                       address_to_clear);
  probe.add_for_thread(
      kThreadsSubject, "rights by protection keys of another thread (PKRU)",
      []() -> Problem {
        if (!has_protection_keys()) return "the processor has none, or the kernel uses none";
        set_rights_by_key(0x55555550);  // the default but for key 1
        return std::nullopt;
      },
      [] { return has_protection_keys() ? in_hex(rights_by_key()) : "none"; });
  // No other item may run in these threads: a clock is read by the time stamp counter.
  probe.add_for_own_thread(
      kThreadsSubject, "no time stamp counter for another thread (PR_SET_TSC)",
      [] { return answer(prctl(PR_SET_TSC, PR_TSC_SIGSEGV), "PR_SET_TSC"); }, time_stamp);
  probe.add_for_own_thread(
      kThreadsSubject,
      "system calls of a thread that become signals (PR_SET_SYSCALL_USER_DISPATCH)", dispatch_calls,
      dispatched);
}

}  // namespace stasis::workloads
