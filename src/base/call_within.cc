#include "base/call_within.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "base/units.h"

namespace stasis {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirst{5000};
// The process mostly stands still meanwhile, and a network brings a page in some milliseconds.
constexpr milliseconds kFirstPage{1000};
constexpr milliseconds kLeast{50};
constexpr std::size_t kMostLeft = 64;

// Those that were left behind, by the process that holds them up, and how.
using Held = std::pair<Pid, HeldUpBy>;
struct Left {
  std::mutex mutex;
  std::multiset<Held> calls;
};

Left& left() {
  static auto* const all = new Left;  // they may come back while this program ends
  return *all;
}

// How long one about this process may take. All of them together keep the caller for less than a
// quarter of a minute.
std::optional<milliseconds> limit_of(const Held& held) {
  const std::scoped_lock lock(left().mutex);
  const auto& others = left().calls;
  if (others.contains(held) || others.size() >= kMostLeft) return std::nullopt;
  milliseconds out = held.second == HeldUpBy::kPage ? kFirstPage : kFirst;
  for (std::size_t i = others.size(); i > 0 && out > kLeast; --i)
    out /= 2;
  return std::max(out, kLeast);
}

// Calls about some processes, in order.
struct Calls {
  std::vector<Pid> processes;
  HeldUpBy cause;
  std::function<void(std::size_t)> work;

  Held held(std::size_t i) const { return {processes[i], cause}; }
};

struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
};

// What a thread that makes calls and its caller tell each other.
struct Desk {
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<const Calls> calls;
  Range left;               // of them to be made
  Clock::time_point begun;  // the first of these
  bool is_left = false;     // in the middle of a call
  bool ends = false;
};

// True if it was left behind.
bool make_calls(Desk& desk, const Calls& calls, const Range& range) {
  for (std::size_t i = range.begin; i < range.end; ++i) {
    calls.work(i);
    const std::scoped_lock lock(desk.mutex);
    if (desk.is_left) {
      const std::scoped_lock all(left().mutex);
      left().calls.erase(left().calls.find(calls.held(i)));
      return true;
    }
    desk.left.begin = i + 1;
    desk.begun = Clock::now();
  }
  return false;
}

void serve(const std::shared_ptr<Desk>& desk) {
  // Also for some time after it was joined, a thread with its program's folders would keep that
  // from entering another mount namespace (setns(2)).
  (void)::unshare(CLONE_FS);
  for (;;) {
    std::unique_lock lock(desk->mutex);
    desk->changed.wait(lock, [&] { return desk->calls || desk->ends; });
    if (!desk->calls) return;
    auto calls = desk->calls;
    const Range range = desk->left;
    lock.unlock();
    if (make_calls(*desk, *calls, range)) return;
    calls.reset();
    lock.lock();
    desk->calls.reset();
    lock.unlock();
    desk->changed.notify_all();
  }
}

// Without this program's handlers of signals.
std::thread start(std::function<void()> work) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread out;
  try {
    out = std::thread(std::move(work));
  } catch (const std::system_error&) {
    // The caller sees it.
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return out;
}

}  // namespace

class CallThread {
 public:
  CallThread() = default;
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;
  ~CallThread() { end(); }

  bool is_of_this_process() const { return owner_ == ::getpid(); }

  // Up to which of the calls all have come back: the end of the range, or one that is left behind.
  std::size_t make(const std::shared_ptr<const Calls>& calls, const Range& range,
                   milliseconds limit) {
    if (!thread_.joinable()) {
      desk_ = std::make_shared<Desk>();
      thread_ = start([desk = desk_] { serve(desk); });
    }
    if (!thread_.joinable()) {  // the system gives none
      for (std::size_t i = range.begin; i < range.end; ++i)
        calls->work(i);
      return range.end;
    }
    std::unique_lock lock(desk_->mutex);
    desk_->calls = calls;
    desk_->left = range;
    desk_->begun = Clock::now();
    lock.unlock();
    desk_->changed.notify_all();
    lock.lock();
    while (!desk_->changed.wait_until(lock, desk_->begun + limit, [&] { return !desk_->calls; })) {
      // Or another one has begun meanwhile.
      const bool is_late = Clock::now() >= desk_->begun + limit;
      if (is_late && desk_->left.begin < range.end) return leave(*calls);
    }
    return range.end;
  }

 private:
  std::size_t leave(const Calls& calls) {
    const std::size_t at = desk_->left.begin;
    desk_->is_left = true;
    const std::scoped_lock all(left().mutex);
    left().calls.insert(calls.held(at));
    thread_.detach();
    return at;
  }

  void end() {
    if (!thread_.joinable()) return;
    // A forked child has no such thread.
    if (!is_of_this_process()) return thread_.detach();
    {
      const std::scoped_lock lock(desk_->mutex);
      desk_->ends = true;
    }
    desk_->changed.notify_all();
    thread_.join();
  }

  std::shared_ptr<Desk> desk_;
  std::thread thread_;
  const pid_t owner_ = ::getpid();
};

namespace {

thread_local CallThread* t_kept = nullptr;

CallThread* kept() { return t_kept != nullptr && t_kept->is_of_this_process() ? t_kept : nullptr; }

}  // namespace

KeptCallThread::KeptCallThread() : before_(t_kept) {
  if (kept() != nullptr) return;
  own_ = std::make_unique<CallThread>();
  t_kept = own_.get();
}

KeptCallThread::KeptCallThread(CallThread* lent) : before_(t_kept) {
  if (lent != nullptr) t_kept = lent;
}

KeptCallThread::~KeptCallThread() { t_kept = before_; }

CallThread* KeptCallThread::current() { return kept(); }

std::vector<bool> run_within_each(std::vector<Pid> processes, std::function<void(std::size_t)> work,
                                  HeldUpBy cause) {
  std::vector<bool> came(processes.size(), false);
  const auto calls =
      std::make_shared<const Calls>(Calls{std::move(processes), cause, std::move(work)});
  CallThread own;
  CallThread& thread = kept() != nullptr ? *kept() : own;
  for (std::size_t i = 0; i < came.size();) {
    const auto limit = limit_of(calls->held(i));
    Range range{i, limit ? i + 1 : i};
    while (limit && range.end < came.size() && limit_of(calls->held(range.end)))
      ++range.end;
    const std::size_t end = limit ? thread.make(calls, range, *limit) : i;
    std::fill(came.begin() + static_cast<std::ptrdiff_t>(i),
              came.begin() + static_cast<std::ptrdiff_t>(end), true);
    // The one at which it has ended early is left out.
    i = end == range.end && limit ? end : end + 1;
  }
  return came;
}

bool run_within(Pid process, std::function<void()> work, HeldUpBy cause) {
  return run_within_each(
             {process}, [work = std::move(work)](std::size_t) { work(); }, cause)
      .front();
}

}  // namespace stasis
