#include "group/group_rounds.h"

#include <algorithm>
#include <utility>

namespace stasis {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How long nothing may happen before the quiesced parts are let go on, and for how long, as in
// quiesce_round.cc; a command takes two polls to be heard and answered.
constexpr milliseconds kFirstWait{20};
constexpr microseconds kFirstGroupMoment{500};
constexpr microseconds kLongestGroupMoment{1'000'000};
// After a slice both begin anew; during its second half no part is let go on.
constexpr milliseconds kFirstGroupSlice{2000};
constexpr milliseconds kLongestGroupSlice{16000};

}  // namespace

void GroupRounds::begin(Clock::time_point now) {
  wait_ = kFirstWait;
  slice_ = kFirstGroupSlice;
  slice_end_ = now + slice_;
  quiet_since_ = now;
}

void GroupRounds::part_quiesced(Clock::time_point now, std::uint64_t asked) {
  quiet_since_ = now;
  others_came_ = others_came_ || asked != round_;
}

bool GroupRounds::is_due(Clock::time_point now, std::size_t rest) {
  if (now >= slice_end_) {
    slice_ = std::min(slice_ * 2, kLongestGroupSlice);
    slice_end_ = now + slice_;
    wait_ = kFirstWait;
    moment_ = kFirstGroupMoment;
  }
  if (rest == 0 || now - quiet_since_ < wait_ || now >= slice_end_ - slice_ / 2) return false;
  wait_ = others_came_ ? kFirstWait : wait_ + wait_ / 2;
  if (round_ == 0 || others_came_)
    moment_ = kFirstGroupMoment;
  else
    moment_ = std::min(moment_ * 2, kLongestGroupMoment);
  others_came_ = false;
  ++round_;
  quiet_since_ = now;
  return true;
}

}  // namespace stasis
