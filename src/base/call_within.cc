#include "base/call_within.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

namespace stasis {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirst{5000};
constexpr milliseconds kLeast{50};
constexpr std::size_t kMostLeft = 64;

// Those that were left behind, by the process that holds them up.
struct Left {
  std::mutex mutex;
  std::multiset<Pid> processes;
};

Left& left() {
  static auto* const all = new Left;  // they may come back while this program ends
  return *all;
}

// How long one about this process may take. All of them together keep the caller for less than a
// quarter of a minute.
std::optional<milliseconds> limit_of(Pid process) {
  const std::scoped_lock lock(left().mutex);
  const auto& others = left().processes;
  if (others.contains(process) || others.size() >= kMostLeft) return std::nullopt;
  milliseconds out = kFirst;
  for (std::size_t i = others.size(); i > 0 && out > kLeast; --i)
    out /= 2;
  return std::max(out, kLeast);
}

struct Call {
  std::mutex mutex;
  std::condition_variable came;
  bool is_back = false;
  bool is_left = false;
};

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

bool run_within(Pid process, std::function<void()> work) {
  const auto limit = limit_of(process);
  if (!limit) return false;
  const auto call = std::make_shared<Call>();
  std::thread thread = start([call, work, process] {
    // Also for some time after it was joined, a thread with its program's folders would keep that
    // from entering another mount namespace (setns(2)).
    (void)::unshare(CLONE_FS);
    work();
    const std::scoped_lock lock(call->mutex);
    call->is_back = true;
    call->came.notify_all();
    if (!call->is_left) return;
    const std::scoped_lock all(left().mutex);
    left().processes.erase(left().processes.find(process));
  });
  if (!thread.joinable()) {
    work();
    return true;
  }
  std::unique_lock lock(call->mutex);
  if (call->came.wait_for(lock, *limit, [&] { return call->is_back; })) {
    lock.unlock();
    thread.join();
    return true;
  }
  call->is_left = true;
  const std::scoped_lock all(left().mutex);
  left().processes.insert(process);
  thread.detach();
  return false;
}

}  // namespace stasis
