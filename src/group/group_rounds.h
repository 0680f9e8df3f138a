// When the part that leads a group lets the quiesced parts go on for a moment, so that those that
// wait for them can be quiesced, too: a kernel of one may wait for a message of another's.
// quiesce_round.cc does the same for the processes of one node.
// docs/adr/0058-jobs-of-several-nodes.md.
//
// Private to src/group. Touches nothing; one thread at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/units.h"

namespace stasis {

class GroupRounds {
 public:
  // All parts are there, and begin to be quiesced.
  void begin(Clock::time_point now);
  // A part is quiesced. `asked`: the last round in which it was let go on.
  void part_quiesced(Clock::time_point now, std::uint64_t asked);
  // Whether the quiesced parts are to go on for moment(), in round(), which is a new one then.
  // `rest`: how many do.
  bool is_due(Clock::time_point now, std::size_t rest);

  std::uint64_t round() const { return round_; }
  std::chrono::microseconds moment() const { return moment_; }

 private:
  std::uint64_t round_ = 0;
  std::chrono::microseconds moment_{0};
  std::chrono::milliseconds wait_{0};
  std::chrono::milliseconds slice_{0};
  Clock::time_point slice_end_;
  Clock::time_point quiet_since_;
  bool others_came_ = false;  // in this round, who were not let go on in it
};

}  // namespace stasis
