#include "checkpoint/gpu_room.h"

#include <fcntl.h>
#include <sys/file.h>

#include <thread>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/journal.h"
#include "driver/gpu_plan.h"

namespace stasis {

using std::chrono::steady_clock;

namespace {

constexpr std::chrono::milliseconds kRoomPollTime{5};
constexpr std::chrono::seconds kTellAfter{1};

bool lock_at_once(const UniqueFd& fd) {
  return TEMP_FAILURE_RETRY(::flock(fd.get(), LOCK_EX | LOCK_NB)) == 0 || errno != EWOULDBLOCK;
}

}  // namespace

Result<GpuRoom> GpuRoom::hold(const std::set<GpuUuid>& gpus, const Wait& wait) {
  GpuRoom room;
  const auto directory = journal_directory();
  if (!directory) return room;
  const auto start = steady_clock::now();
  bool told = !wait.tell;
  // All take them in the same order.
  for (const GpuUuid& gpu : gpus) {
    auto fd = open_file(AT_FDCWD, fmt::format("{}/{}.lock", *directory, gpu.to_string()),
                        O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
    if (!fd) continue;
    while (!lock_at_once(*fd)) {
      STASIS_TRY(wait.interrupt.check());
      const auto waited = steady_clock::now() - start;
      if (waited >= wait.longest)
        return fail(ErrorCode::kTimeout,
                    fmt::format("another operation has brought GPU memory back to {} for {} s",
                                gpu.to_string(),
                                std::chrono::duration_cast<std::chrono::seconds>(waited).count()),
                    "see which (`stasis ps`), and try again when it is over");
      if (!std::exchange(told, told || waited >= kTellAfter) && told)
        wait.tell(fmt::format("another operation brings GPU memory back to {}: waiting for it",
                              gpu.to_string()));
      std::this_thread::sleep_for(kRoomPollTime);
    }
    room.locks_.push_back(std::move(*fd));
  }
  return room;
}

void GpuRoom::leave() {
  // A caller of the C interface may have forked, and its child has the descriptors.
  for (const UniqueFd& lock : locks_)
    (void)::flock(lock.get(), LOCK_UN);
  locks_.clear();
}

Result<GpuRoom> GpuRoom::find(Driver& driver, std::span<const GpuUse> needed,
                              std::span<const GpuPair> pairs, const Wait& wait) {
  STASIS_TRY_ASSIGN(auto room, hold(targets_of(needed, pairs), wait));
  if (needed.empty()) return room;
  if (const auto gpus = driver.gpus()) STASIS_TRY(check_gpu_memory(needed, pairs, *gpus));
  return room;
}

}  // namespace stasis
