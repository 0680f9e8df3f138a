// Descriptors of device memory that the agent has exported: to a tool, and to pin memory that was
// given up until its content is elsewhere.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>

#include "abi/agent_protocol.h"
#include "eviction.h"

namespace stasis::preload {

// Descriptors of exported memory. Changed under a mutex that a fork waits for: a child that kept
// one would keep the memory from the GPU for as long as it lives.
extern pthread_mutex_t g_exporting;

template <std::uint32_t kMost>
struct Exported {
  int fds[kMost] = {};
  // What they were when they were made: a program may close all that it did not open, and open
  // others, which get the same numbers.
  dev_t devices[kMost] = {};
  ino_t inodes[kMost] = {};
  std::uint32_t count = 0;

  // One more, by `make`, which is given where to put it.
  template <class Make>
  Outcome add(Make make) {
    ::pthread_mutex_lock(&g_exporting);
    int& fd = fds[count];
    fd = -1;
    const Outcome outcome = make(fd);
    if (outcome.ok()) {
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);
      struct stat status {};
      if (::fstat(fd, &status) == 0) {
        devices[count] = status.st_dev;
        inodes[count] = status.st_ino;
      }
      ++count;
    }
    ::pthread_mutex_unlock(&g_exporting);
    return outcome;
  }
  void close_all() {
    if (count == 0) return;
    ::pthread_mutex_lock(&g_exporting);
    close_held();
    ::pthread_mutex_unlock(&g_exporting);
  }
  // Where a thread may be kept still in the middle of a fork, with the mutex: it changes nothing
  // here then, and its child closes what it gets.
  void close_while_held() {
    const bool ours = ::pthread_mutex_trylock(&g_exporting) == 0;
    close_held();
    if (ours) ::pthread_mutex_unlock(&g_exporting);
  }
  // With the mutex held.
  void close_held() {
    for (std::uint32_t i = 0; i < count; ++i) {
      struct stat status {};
      const bool same = ::fstat(fds[i], &status) == 0 && status.st_dev == devices[i] &&
                        status.st_ino == inodes[i];
      if (same) ::close(fds[i]);
    }
    count = 0;
  }
};
// To a tool at this moment.
extern Exported<direct::kExportBatch> g_exported;
// What pins evicted memory and its content until they are elsewhere (kPin).
inline constexpr std::uint32_t kMostPinned = FD_SETSIZE;
extern Exported<kMostPinned> g_pinned;

// The program may need descriptors meanwhile: half of what it may have stays free for it. And what
// it opens then must not get a number that select() cannot take.
bool may_have_descriptors(std::uint64_t more);

}  // namespace stasis::preload
