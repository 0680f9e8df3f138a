#include "proc/bounded_seize.h"

#include <pthread.h>
#include <sys/ptrace.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/scope_guard.h"
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

struct Seizing {
  std::atomic<std::int64_t> since = 0;  // 0: it does not wait for one
  std::atomic<int> thread = 0;
};
thread_local Seizing* t_seizing = nullptr;

Error takes_too_long(int thread) {
  return {ErrorCode::kBusy,
          fmt::format("thread {} cannot be traced: its process is executing another program, whose "
                      "file does not come (FUSE, NFS)",
                      thread),
          fmt::format("end what holds that file back, or the process (`kill -9 {}`)", thread)};
}

}  // namespace

Result<void> trace_on_own_thread(const std::function<Result<void>()>& act) {
  std::optional<Result<void>> result;  // none of a thread that was cancelled
  std::mutex mutex;
  std::condition_variable ended;
  bool has_ended = false;
  Seizing seizing;
  try {
    std::jthread thread([&] {
      (void)::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, nullptr);
      t_seizing = &seizing;
      const ScopeGuard tell([&] {
        const std::scoped_lock lock(mutex);
        has_ended = true;
        ended.notify_one();
      });
      result = act();
    });
    std::unique_lock lock(mutex);
    bool cancelled = false;
    while (!ended.wait_for(lock, kBetween, [&] { return has_ended; })) {
      const std::int64_t begun = seizing.since;
      if (begun == 0 || now_ms() - begun < kLimitMs || std::exchange(cancelled, true)) continue;
      // Nothing else ends it.
      (void)::pthread_cancel(thread.native_handle());
    }
    lock.unlock();
    thread.join();
  } catch (const std::system_error&) {
    // Where the system gives no thread it runs on this one. A job must not stand still for that.
    return act();
  }
  return result ? std::move(*result) : Result<void>(fail(takes_too_long(seizing.thread)));
}

namespace proc {

long seize(Tid thread, long options) {
  const auto now = [&] {
    return ::ptrace(PTRACE_SEIZE, thread.value, nullptr,
                    as_pointer(static_cast<std::uint64_t>(options)));
  };
  if (t_seizing == nullptr) return now();
  int before = 0;
  (void)::pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &before);
  t_seizing->thread = thread.value;
  t_seizing->since = now_ms();
  (void)::pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, nullptr);
  const long result = now();
  const int number = errno;
  (void)::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, nullptr);
  t_seizing->since = 0;
  (void)::pthread_setcanceltype(before, nullptr);
  errno = number;
  return result;
}

}  // namespace proc
}  // namespace stasis
