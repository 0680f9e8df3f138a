#include "tests/workloads/runner.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <utility>

#include "tests/workloads/kernels.h"

namespace stasis::workloads {
namespace {

using programs::die;

std::atomic<bool> g_stop{false};

// One record of fixed size at the start of the file, overwritten in place: CRIU restores a process
// only if its open files have the size they had, and a reader never sees half of it.
constexpr std::size_t kRecordSize = 64;

std::uint64_t random_seed() {
  std::uint64_t seed = 0;
  if (getrandom(&seed, sizeof seed, 0) != static_cast<ssize_t>(sizeof seed)) {
    die(1, std::string("cannot get a random seed: ") + std::strerror(errno));
  }
  return seed;
}

// Of all threads, in nanoseconds.
std::uint64_t processor_time() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace

Run::Run(Options options) : options_(std::move(options)) {
  struct sigaction action {};
  action.sa_handler = [](int) { g_stop.store(true); };
  sigaction(SIGTERM, &action, nullptr);
  if (options_.seed == 0) options_.seed = random_seed();
  if (!options_.status.empty()) {
    status_ = UniqueFd(open(options_.status.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
    if (!status_.valid()) {
      die(1, "cannot open " + options_.status + ": " + std::strerror(errno));
    }
    heartbeat();
  }
}

bool Run::stop_requested() { return g_stop.load(); }

bool Run::next() {
  if (stop_requested() || (options_.rounds != 0 && round_ == options_.rounds)) return false;
  ++round_;
  return true;
}

void Run::finish() {
  if (verified_ + 1 != round_) mismatch("this round was already verified");
  verified_ = round_;
  if (status_.valid()) heartbeat();
  const std::uint64_t nanoseconds = pause();
  used_ = processor_time();
  if (nanoseconds == 0 || stop_requested()) return;
  const timespec pause{static_cast<time_t>(nanoseconds / 1'000'000'000),
                       static_cast<long>(nanoseconds % 1'000'000'000)};
  nanosleep(&pause, nullptr);  // a signal may end it early
}

std::uint64_t Run::pause() const {
  constexpr std::uint64_t kLeast = 40'000'000;
  constexpr std::uint64_t kMost = 250'000'000;
  if (options_.pause_ms) return std::uint64_t{*options_.pause_ms} * 1'000'000;
  // In a restored process it begins anew.
  const std::uint64_t now = processor_time();
  return std::clamp(3 * (now > used_ ? now - used_ : 0), kLeast, kMost);
}

void Run::pause_ahead() const {
  if (options_.ahead_ms == 0) return;
  const timespec pause{options_.ahead_ms / 1000, (options_.ahead_ms % 1000) * 1'000'000L};
  nanosleep(&pause, nullptr);
}

std::uint64_t Run::seed(std::uint64_t round, std::uint64_t which) const {
  return word(round, word(which, options_.seed));
}

void Run::mismatch(const std::string& what) const {
  die(1, "MISMATCH in round " + std::to_string(round_) + " of " + options_.kind + ": " + what +
             " (seed " + std::to_string(options_.seed) + ")");
}

void Run::heartbeat() {
  char record[kRecordSize + 1];
  const std::string text = "round " + std::to_string(verified_) + " ok";
  std::snprintf(record, sizeof record, "%-*s\n", static_cast<int>(kRecordSize - 1), text.c_str());
  if (pwrite(status_.get(), record, kRecordSize, 0) != static_cast<ssize_t>(kRecordSize)) {
    die(1, "cannot write " + options_.status + ": " + std::strerror(errno));
  }
}

}  // namespace stasis::workloads
