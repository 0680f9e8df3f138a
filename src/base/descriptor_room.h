// Room in the kernel's table of a process's descriptors, before it is needed.
//
// The table doubles when it is full, and a process with threads waits each time until every
// processor has seen that (expand_fdtable() and its synchronize_rcu() in fs/file.c): some 6 ms on a
// machine with 16 processors, while a job stands still. It never shrinks. Header only, for the
// agent too.
#pragma once

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace stasis {

// For `more` descriptors besides those that are open. What cannot be had is done without.
inline void make_descriptor_room(int more) {
  const int lowest = ::eventfd(0, EFD_CLOEXEC);
  if (lowest < 0) return;
  const int highest = ::fcntl(lowest, F_DUPFD_CLOEXEC, lowest + more);
  if (highest >= 0) ::close(highest);
  ::close(lowest);
}

}  // namespace stasis
