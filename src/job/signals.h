// The signals of a process that looks after a job: which it takes, and which of them ask for a
// save.
//
// Of the calling thread, while the process has one.
#pragma once

#include <csignal>
#include <set>
#include <string>

namespace stasis::job {

// Does the signal save the job and let it go on?
bool lets_go_on(int signal_number);

// "SIGTERM"; "signal 40" where it has no name.
std::string signal_name(int number);

// The signals that the supervisor takes and passes on, or obeys. Not those that the kernel sends
// for a fault, nor those about the supervisor's own children and terminal, nor those that it was
// started to ignore (nohup).
sigset_t taken_signals();

// Blocks the signals that ask for a save, from now on: one that comes before the job is there waits
// until it is read. Any other signal does what it does to any program.
class Notice {
 public:
  explicit Notice(const std::set<int>& signals);

  // The signals that were blocked before.
  const sigset_t& before() const { return before_; }
  // Signals are as they were before.
  void end() const { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  // The pending signal that wants the job ended; 0 if there is none.
  int to_end() const;

 private:
  sigset_t set_{};
  sigset_t before_{};
};

}  // namespace stasis::job
