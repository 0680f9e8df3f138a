#include "cli/ticker.h"

#include <chrono>
#include <csignal>
#include <system_error>

#include "base/phases.h"
#include "operations/rollback.h"

namespace stasis::cli {

Ticker::Ticker(Terminal& terminal, const Interrupt& interrupt) {
  if (!terminal.has_moving_line()) return;
  // Signals are for the thread that waits in the operation.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    thread_ = std::thread([this, &terminal, &interrupt] { run(terminal, interrupt); });
  } catch (const std::system_error&) {
    // No thread to be had: the operation is no worse for it.
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Ticker::~Ticker() {
  if (!thread_.joinable()) return;
  {
    const std::scoped_lock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Ticker::run(Terminal& terminal, const Interrupt& interrupt) {
  constexpr std::chrono::milliseconds kTick{200};
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kTick, [this] { return ends_; })) {
    const std::string phase = CurrentPhase::get();
    terminal.set_stopping(interrupt.requested() && phase != kRollBackPhase);
    terminal.tick(phase);
  }
}

}  // namespace stasis::cli
