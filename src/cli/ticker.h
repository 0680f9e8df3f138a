// Shows, on a thread of its own, the phase that is under way where the operation itself tells no
// progress: one that takes over a second is seen to go on. Nothing where there is no moving line.
//
// Once a stop is asked for, it says that instead, until the operation rolls back: that may take
// seconds more.
//
// From its making to its end the process has a thread more; not for what needs to have one alone.
// Beside a restore the thread must not have a number that the image needs: make it after
// proc::keep_free().
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/interrupt.h"
#include "cli/terminal.h"

namespace stasis::cli {

class Ticker {
 public:
  Ticker(Terminal& terminal, const Interrupt& interrupt);
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;
  ~Ticker();

 private:
  void run(Terminal& terminal, const Interrupt& interrupt);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace stasis::cli
