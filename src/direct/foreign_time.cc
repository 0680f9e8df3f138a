#include "direct/foreign_time.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>

namespace stasis::direct {
namespace {

constexpr std::chrono::milliseconds kForeignTime{1000};
constexpr std::chrono::seconds kForeignAgain{30};

struct Spent {
  std::mutex mutex;
  Clock::time_point since;
  Clock::duration time{0};
};
Spent& spent() {
  static Spent all;
  return all;
}

}  // namespace

ForeignTime::ForeignTime() {
  Spent& all = spent();
  const std::scoped_lock lock(all.mutex);
  if (begun_ - all.since > kForeignAgain) {
    all.since = begun_;
    all.time = Clock::duration(0);
  }
  until_ = begun_ + std::max<Clock::duration>(kForeignTime - all.time, Clock::duration(0));
}

ForeignTime::~ForeignTime() {
  Spent& all = spent();
  const std::scoped_lock lock(all.mutex);
  all.time += Clock::now() - begun_;
}

KnownUsers::KnownUsers(const std::vector<proc::ProcessInfo>& ours) : users_{0, ::geteuid()} {
  for (const proc::ProcessInfo& info : ours)
    if (const auto details = proc::ProcFs().details(info.pid)) users_.push_back(details->uid);
}

bool KnownUsers::has_owner_of(Pid pid) const {
  const auto details = proc::ProcFs().details(pid);
  return !details || std::find(users_.begin(), users_.end(), details->uid) != users_.end();
}

}  // namespace stasis::direct
