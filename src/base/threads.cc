#include "base/threads.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/processors.h"

namespace stasis {
namespace {

// EAGAIN: a limit on processes (RLIMIT_NPROC), or of the cgroup.
template <class Work>
bool start(std::vector<std::jthread>& threads, const Work& work) {
  try {
    threads.emplace_back(work);
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace

Error no_thread(const std::system_error& why) {
  return {ErrorCode::kOutOfHostMemory, fmt::format("cannot start a thread: {}", why.what()),
          "free host memory, or raise the limits of it (ulimit -v) and of processes (ulimit -u)"};
}

unsigned on_threads(unsigned count, const std::function<void(unsigned)>& work) {
  std::vector<std::jthread> others;
  unsigned begun = 1;
  while (begun < count && start(others, [&work, begun] { work(begun); }))
    ++begun;
  work(0);
  return begun;
}

void at_once(std::size_t count, const std::function<void(std::size_t)>& work) {
  at_once(count, work, [] {});
}

void at_once(std::size_t count, const std::function<void(std::size_t)>& work,
             const std::function<void()>& meanwhile) {
  std::vector<std::jthread> threads;
  threads.reserve(count);
  for (std::size_t i = 0; i < count; ++i)
    if (!start(threads, [&work, i] { work(i); })) work(i);
  meanwhile();
}

void share_out(std::size_t count, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next = 0;
  const auto threads =
      std::min({count, std::size_t{kMostSharers}, std::size_t{usable_processors()}});
  on_threads(static_cast<unsigned>(threads), [&](unsigned) {
    const KeptCallThread calls;
    for (std::size_t i = next++; i < count; i = next++)
      work(i);
  });
}

unsigned default_threads(unsigned gpus) {
  constexpr unsigned kMost = 16;
  return std::clamp(usable_processors() / std::max(1U, gpus), 1U, kMost);
}

}  // namespace stasis
