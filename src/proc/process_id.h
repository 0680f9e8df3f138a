// Which process is meant: its number, and when it was started, which tells two lives of a number
// apart. Plain values; thread-safe.
#pragma once

#include <cstdint>

#include "base/ids.h"

namespace stasis {

struct ProcessId {
  Pid pid;
  // Since boot, in clock ticks, in the machine's first time namespace, so that it is the same seen
  // from any. 0: not known yet.
  std::uint64_t start_ticks = 0;

  bool operator==(const ProcessId&) const = default;
};

// Of the calling process; its start is 0 if /proc does not tell it.
ProcessId own_id();

// They can be one process: where a start is not known, the number decides.
bool may_be_same(const ProcessId& a, const ProcessId& b);

// It is there, by its number and start, and a thread of it runs, be it not the first.
bool is_alive(const ProcessId& id);

}  // namespace stasis
