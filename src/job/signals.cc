#include "job/signals.h"

#include <cstring>

#include <fmt/format.h>

namespace stasis::job {

bool lets_go_on(int signal_number) { return signal_number == SIGUSR1 || signal_number == SIGUSR2; }

std::string signal_name(int number) {
  const char* name = ::sigabbrev_np(number);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", number);
}

sigset_t taken_signals() {
  sigset_t set;
  ::sigfillset(&set);
  for (const int ours : {SIGKILL, SIGSTOP, SIGTSTP, SIGCONT, SIGCHLD, SIGSEGV, SIGBUS, SIGILL,
                         SIGFPE, SIGTRAP, SIGABRT, SIGSYS, SIGURG, SIGWINCH})
    ::sigdelset(&set, ours);
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action {};
    if (::sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN)
      ::sigdelset(&set, number);
  }
  // To write to a terminal from the background is no reason to be stopped.
  ::sigaddset(&set, SIGTTIN);
  ::sigaddset(&set, SIGTTOU);
  ::sigaddset(&set, SIGPIPE);
  return set;
}

Notice::Notice(const std::set<int>& signals) {
  const sigset_t taken = taken_signals();
  ::sigemptyset(&set_);
  for (const int number : signals)
    if (::sigismember(&taken, number) == 1) ::sigaddset(&set_, number);
  ::sigprocmask(SIG_BLOCK, &set_, &before_);
}

int Notice::to_end() const {
  sigset_t pending;
  ::sigpending(&pending);
  for (int number = 1; number < NSIG; ++number) {
    if (::sigismember(&set_, number) == 1 && ::sigismember(&pending, number) == 1 &&
        !lets_go_on(number))
      return number;
  }
  return 0;
}

}  // namespace stasis::job
