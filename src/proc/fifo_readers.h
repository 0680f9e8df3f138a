// FIFOs with a name that processes read and that never had a writer: a poll(2) of such a descriptor
// does not say POLLHUP, as it does of one that had some (fifo_open() of the kernel's fs/pipe.c).
//
// Stateless; thread-safe. The FIFOs are looked at through copies of the descriptors (pidfd_getfd).
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace stasis::proc {

struct FifoReaders {
  // All the descriptors of a FIFO, which would all be as they are if they were opened by its name.
  std::vector<std::pair<Pid, int>> as_opened;
  // Others that do not say POLLHUP, and have no writer.
  std::vector<std::pair<Pid, int>> others;
};
// Of these processes, which stand still; not where another process writes.
FifoReaders unwritten_fifos(std::span<const Pid> tree);

}  // namespace stasis::proc
