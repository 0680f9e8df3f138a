#include "checkpoint/gpu_reservation.h"

#include <fcntl.h>
#include <sys/file.h>

#include <chrono>
#include <thread>

#include "base/units.h"
#include "checkpoint/journal.h"

namespace stasis {
namespace {

constexpr std::chrono::seconds kRoomTimeout{30};
constexpr std::chrono::milliseconds kRoomPoll{5};

UniqueFd open_lock(const char* name) {
  const auto directory = journal_directory();
  if (!directory) return {};
  auto fd = open_file(AT_FDCWD, *directory + "/" + name, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
  return fd ? std::move(*fd) : UniqueFd();
}

// Does not wait.
bool lock(const UniqueFd& fd, int kind) {
  if (!fd.valid()) return false;
  const auto done = TEMP_FAILURE_RETRY(::flock(fd.get(), kind | LOCK_NB));
  return done == 0;
}

}  // namespace

Result<void> GpuReservation::come_back(const Interrupt& interrupt) {
  back_ = open_lock("gpu-room.lock");
  const auto deadline = Clock::now() + kRoomTimeout;
  while (back_.valid() && !lock(back_, LOCK_SH)) {
    STASIS_TRY(interrupt.check());
    if (Clock::now() >= deadline) break;
    std::this_thread::sleep_for(kRoomPoll);
  }
  return {};
}

bool GpuReservation::reserve_prefetch() {
  if (!prefetch_.valid()) prefetch_ = open_lock("gpu-ahead.lock");
  if (lock(prefetch_, LOCK_EX)) return true;
  prefetch_.reset();
  return false;
}

bool GpuReservation::reserve_twice() {
  if (!back_.valid()) back_ = open_lock("gpu-room.lock");
  if (lock(back_, LOCK_EX)) return true;
  back_.reset();
  return false;
}

void GpuReservation::leave() {
  back_.reset();
  prefetch_.reset();
}

}  // namespace stasis
