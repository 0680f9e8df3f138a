// A process that executes a file which does not come: the kernel lets no tracer begin meanwhile,
// whatever signals that gets.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>

#include "tests/fakes/child.h"
#include "tests/fakes/served_file.h"

namespace stasis::fakes {

class HeldExecve {
 public:
  HeldExecve() {
    while (place_->step == 0)
      ::usleep(1000);
    if (is_held()) ::usleep(200000);  // it has begun
  }
  ~HeldExecve() { ::munmap(place_, kPage); }
  HeldExecve(const HeldExecve&) = delete;
  HeldExecve& operator=(const HeldExecve&) = delete;

  // False where that cannot be: open_served_file().
  bool is_held() const { return place_->step == 1; }
  Pid pid() const { return child_.pid(); }
  // For the test to kill: the process waits until it has ended.
  pid_t server() const { return place_->server; }

 private:
  static constexpr std::size_t kPage = 4096;
  struct Place {
    std::atomic<int> step = 0;
    pid_t server = 0;
  };
  // Which parent and child share.
  static Place* make_place() {
    void* const memory =
        ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return new (memory) Place;
  }

  Place* place_ = make_place();
  Child child_{[this] {
    if (open_served_file(place_->server, O_RDONLY) < 0) place_->step = 2;
    std::thread([this] {
      place_->step = std::max(place_->step.load(), 1);
      ::execl("/mnt/file", "file", nullptr);
    }).detach();
    for (;;)
      ::pause();
  }};
};

}  // namespace stasis::fakes
