// Shows, on a thread of its own, the phase that is under way where the operation itself tells no
// progress: one that takes over a second is seen to go on. Nothing where there is no moving line.
//
// From its making to its end the process has a thread more; not for what needs to have one alone,
// nor beside a restore, whose image may want the thread's number.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "cli/terminal.h"

namespace stasis::cli {

class Ticker {
 public:
  explicit Ticker(Terminal& terminal);
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;
  ~Ticker();

 private:
  void run(Terminal& terminal);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace stasis::cli
