// Room in the kernel's table of a process's descriptors, before it is needed.
//
// The table doubles when it is full, and a process with threads waits each time until every
// processor has seen that (expand_fdtable() and its synchronize_rcu() in fs/file.c): some 6 ms on a
// machine with 16 processors, while a job stands still. It never shrinks. Header only, for the
// agent too.
#pragma once

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

namespace stasis {

// For `more` descriptors besides those that are open, or as many as are allowed. What cannot be had
// is done without.
inline void make_descriptor_room(int more) {
  const int lowest = ::eventfd(0, EFD_CLOEXEC);
  if (lowest < 0) return;
  rlimit limit{};
  rlim_t wanted = static_cast<rlim_t>(lowest) + static_cast<rlim_t>(more);
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur > 0)
    wanted = std::min(wanted, limit.rlim_cur - 1);
  const int highest = ::fcntl(lowest, F_DUPFD_CLOEXEC, static_cast<int>(wanted));
  if (highest >= 0) ::close(highest);
  ::close(lowest);
}

}  // namespace stasis
