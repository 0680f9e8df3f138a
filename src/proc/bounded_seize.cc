#include "proc/bounded_seize.h"

#include <pthread.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/scope_guard.h"
#include "proc/procfs.h"
#include "proc/ptrace_status.h"

namespace stasis {
namespace {

using std::chrono::milliseconds;

constexpr std::int64_t kLimitMs = 5000;
constexpr milliseconds kBetween{500};

std::int64_t now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<milliseconds>(now).count();
}

// Since when the thread waits for a seize, 0: it does not.
using Since = std::atomic<std::int64_t>;
thread_local Since* t_since = nullptr;

// Of those that the C library leaves to programs.
int signal_to_break_off() { return SIGRTMAX - 2; }

// The kernel has set the thread back to the call that it is to make again: it comes past it.
void on_break_off(int /*signal_number*/, siginfo_t* /*info*/, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  if (t_since == nullptr || *t_since == 0) return;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): our own code
  const auto* const code = reinterpret_cast<const unsigned char*>(registers[REG_RIP]);
  if (registers[REG_RAX] != SYS_ptrace || code[0] != 0x0f || code[1] != 0x05) return;
  registers[REG_RIP] += 2;
  registers[REG_RAX] = -EINTR;
}

// Not where the program that we are in has a handler for that signal.
void break_off(pthread_t thread) {
  struct sigaction ours {};
  struct sigaction before {};
  ours.sa_sigaction = on_break_off;
  ours.sa_flags = SA_SIGINFO | SA_RESTART;
  if (::sigaction(signal_to_break_off(), nullptr, &before) != 0) return;
  const bool is_free = (before.sa_flags & SA_SIGINFO) == 0 && before.sa_handler == SIG_DFL;
  const bool is_ours = (before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction == on_break_off;
  if (!is_ours && (!is_free || ::sigaction(signal_to_break_off(), &ours, nullptr) != 0)) return;
  (void)::pthread_kill(thread, signal_to_break_off());
}

}  // namespace

Result<void> trace_on_own_thread(const std::function<Result<void>()>& act) {
  Result<void> result;
  std::mutex mutex;
  std::condition_variable ended;
  bool has_ended = false;
  Since since = 0;
  CallThread* const calls = KeptCallThread::current();
  try {
    std::jthread thread([&] {
      const KeptCallThread lent(calls);
      t_since = &since;
      const ScopeGuard tell([&] {
        const std::scoped_lock lock(mutex);
        has_ended = true;
        ended.notify_one();
      });
      result = act();
    });
    std::unique_lock lock(mutex);
    while (!ended.wait_for(lock, kBetween, [&] { return has_ended; })) {
      const std::int64_t begun = since;
      // It stays while `lock` is held.
      if (begun != 0 && now_ms() - begun >= kLimitMs) break_off(thread.native_handle());
    }
  } catch (const std::system_error&) {
    // Where the system gives no thread it runs on this one. A job must not stand still for that.
    return act();
  }
  return result;
}

namespace proc {

long seize(Tid thread, long options) {
  const auto now = [&] {
    return ::ptrace(PTRACE_SEIZE, thread.value, nullptr,
                    as_pointer(static_cast<std::uint64_t>(options)));
  };
  if (t_since == nullptr) return now();
  sigset_t one;
  sigset_t before;
  ::sigemptyset(&one);
  ::sigaddset(&one, signal_to_break_off());
  (void)::pthread_sigmask(SIG_UNBLOCK, &one, &before);
  *t_since = now_ms();
  const long result = now();
  const int number = errno;
  *t_since = 0;
  (void)::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = number;
  return result;
}

Error held_by_an_execve(Pid pid) {
  return Error{
      ErrorCode::kBusy,
      fmt::format("process {} cannot be traced: it is executing another program, whose "
                  "file does not come (FUSE, NFS)",
                  pid.value),
      fmt::format("end what holds that file back, or the process (`kill -9 {}`)", pid.value)};
}

namespace {

// How often it was taken off a processor, if it is in such a call now.
std::optional<std::uint64_t> uninterrupted(Pid pid, Tid thread) {
  const ProcFs procfs;
  const auto info = procfs.thread(pid, thread);
  if (!info || info->state != 'D') return std::nullopt;
  const auto status = procfs.thread_status(pid, thread);
  return status ? std::optional(status->switches) : std::nullopt;
}

Result<void> check_is_interrupted(Pid pid) {
  constexpr milliseconds kLimit{2000};
  constexpr milliseconds kPause{20};
  std::map<Tid, std::uint64_t> waiting;
  for (const Tid thread : ProcFs().threads(pid))
    if (const auto switches = uninterrupted(pid, thread)) waiting.emplace(thread, *switches);
  const auto end = std::chrono::steady_clock::now() + kLimit;
  while (!waiting.empty() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kPause);
    std::erase_if(waiting,
                  [&](const auto& one) { return uninterrupted(pid, one.first) != one.second; });
  }
  if (waiting.empty()) return {};
  const Tid thread = waiting.begin()->first;
  return fail(
      ErrorCode::kBusy,
      fmt::format("thread {} of process {} is in a system call that nothing interrupts, for "
                  "seconds already, so that it cannot be stopped",
                  thread.value, pid.value),
      fmt::format("try again when that has ended; what it waits for is in "
                  "/proc/{}/task/{}/wchan (a file system that does not answer, or a child "
                  "by vfork)",
                  pid.value, thread.value));
}

}  // namespace

Result<void> check_can_be_stopped(Pid pid) {
  const auto caller = std::this_thread::get_id();
  // One thread will do: the kernel's lock is the process's.
  STASIS_TRY(trace_on_own_thread([&]() -> Result<void> {
    // Where there is none for it, this one would go on tracing the process.
    if (std::this_thread::get_id() == caller) return {};
    if (seize(Tid{pid.value}, 0) != 0 && errno == EINTR) return fail(held_by_an_execve(pid));
    return {};
  }));
  return check_is_interrupted(pid);
}

}  // namespace proc
}  // namespace stasis
