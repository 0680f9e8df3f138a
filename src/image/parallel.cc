#include "image/parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/processors.h"

namespace stasis {

Result<void> run_parallel(std::size_t count, std::uint64_t total, std::string_view phase,
                          Progress& progress, const Interrupt& interrupt,
                          const std::function<Result<std::uint64_t>(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::atomic<std::uint64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;
  std::size_t running = 0;
  std::optional<Error> failure;

  const auto worker = [&] {
    for (std::size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      auto stop = interrupt.check();
      Result<std::uint64_t> bytes =
          stop ? work(i) : Result<std::uint64_t>(fail(std::move(stop.error())));
      if (!bytes) {
        next.store(count);
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::move(bytes).error();
        break;
      }
      done.fetch_add(*bytes);
    }
    const std::lock_guard lock(mutex);
    --running;
    finished.notify_one();
  };

  std::vector<std::jthread> threads;
  const std::size_t wanted = std::min<std::size_t>(count, usable_processors());
  threads.reserve(wanted);
  for (std::size_t i = 0; i < wanted; ++i) {
    {
      const std::lock_guard lock(mutex);
      ++running;
    }
    try {
      threads.emplace_back(worker);
    } catch (const std::system_error&) {
      const std::lock_guard lock(mutex);
      --running;
      break;
    }
  }
  if (threads.empty() && count != 0) {  // no thread to be had: do it here, slowly
    running = 1;
    worker();
  }
  {
    std::unique_lock lock(mutex);
    while (!finished.wait_for(lock, std::chrono::milliseconds(100), [&] { return running == 0; })) {
      lock.unlock();
      progress.update(phase, done.load(), total);
      lock.lock();
    }
  }
  threads.clear();
  progress.update(phase, done.load(), total);
  if (failure) return fail(std::move(*failure));
  return {};
}

}  // namespace stasis
