// A process to act on: a child of the test that sleeps until it is told to go. Killed and collected
// on every path out.
#pragma once

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <utility>

#include "base/ids.h"

namespace stasis::fakes {

class Child {
 public:
  explicit Child(const std::function<void()>& body = [] { ::pause(); }) : pid_(::fork()) {
    if (pid_ == 0) {
      // A test that is aborted has no destructors.
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      body();
      ::_exit(0);
    }
  }
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  Pid pid() const { return Pid{pid_}; }
  // Ends it and leaves it waiting to be collected.
  void become_zombie() const {
    ::kill(pid_, SIGKILL);
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }
  // Waits for it to end by itself; its exit status, or -1.
  int wait() {
    int status = 0;
    const pid_t got = ::waitpid(std::exchange(pid_, -1), &status, 0);
    return got > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_;
};

}  // namespace stasis::fakes
