// A copy of this process for what the process itself cannot risk: a call that may never come back,
// or that is to be made by one that ends.
//
// It has all descriptors and one thread, takes no signals, ends with this process, and its own end
// gives no signal. One thread at a time.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "base/fd.h"

namespace stasis::proc {

class SilentChild {
 public:
  // `act` runs in the copy, which ends when it returns. It may use no lock that another thread of
  // this process may hold, so it allocates nothing where there are such threads.
  template <class Act>
  static SilentChild start(Act&& act) {
    SilentChild out;
    if (!out.copy()) return out;
    std::forward<Act>(act)();
    ::_exit(0);
  }
  SilentChild(SilentChild&&) = default;
  SilentChild(const SilentChild&) = delete;
  SilentChild& operator=(const SilentChild&) = delete;
  SilentChild& operator=(SilentChild&&) = delete;
  ~SilentChild() { end(std::chrono::milliseconds(0)); }

  // False if the system has given no process.
  bool is_there() const { return pidfd_.valid(); }
  bool ends_within(std::chrono::milliseconds limit) const;
  // Kills it, and collects it if it ends within that time; otherwise it is left behind: a call that
  // a program has begun to serve ends with that program alone.
  void end(std::chrono::milliseconds limit);

 private:
  SilentChild() = default;
  // True in the copy.
  bool copy();

  pid_t pid_ = -1;
  UniqueFd pidfd_;
};

}  // namespace stasis::proc
