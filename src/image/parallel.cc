#include "image/parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "base/processors.h"
#include "base/threads.h"

namespace stasis {

Result<void> run_parallel(std::size_t count, std::uint64_t total, std::string_view phase,
                          Progress& progress, const Interrupt& interrupt,
                          const std::function<Result<std::uint64_t>(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::atomic<std::uint64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;
  const std::size_t workers = std::min<std::size_t>(count, usable_processors());
  std::size_t running = workers;
  std::optional<Error> failure;

  const auto worker = [&](std::size_t) {
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

  at_once(workers, worker, [&] {
    std::unique_lock lock(mutex);
    while (!finished.wait_for(lock, std::chrono::milliseconds(100), [&] { return running == 0; })) {
      lock.unlock();
      progress.update(phase, done.load(), total);
      lock.lock();
    }
  });
  progress.update(phase, done.load(), total);
  if (failure) return fail(std::move(*failure));
  return {};
}

}  // namespace stasis
