#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>

#include "base/fd.h"
#include "cli/verbs.h"

namespace stasis::cli {
namespace {

// What a handler may touch.
Interrupt* g_interrupt = nullptr;
volatile std::sig_atomic_t g_forward_to = 0;

void on_signal(int signal_number) {
  const int saved = errno;
  if (g_forward_to > 0) {
    // The root is our child and not yet reaped, so its number is its own.
    ::kill(static_cast<pid_t>(g_forward_to), signal_number);
  } else if (g_interrupt != nullptr) {
    g_interrupt->request(signal_number);
  }
  errno = saved;
}

}  // namespace

void install_signal_handlers(Interrupt& interrupt) {
  g_interrupt = &interrupt;
  struct sigaction action {};
  action.sa_handler = on_signal;
  ::sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (const int signal_number : std::array{SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction old {};
    // nohup and its like have said that a signal is to be ignored.
    if (::sigaction(signal_number, nullptr, &old) == 0 && old.sa_handler == SIG_IGN) continue;
    ::sigaction(signal_number, &action, nullptr);
  }
  // A reader of our output that goes away must not end us in the middle of an operation.
  ::signal(SIGPIPE, SIG_IGN);
}

Result<int> attend(Pid pid) {
  // In one process group with us it gets the terminal's signals by itself.
  if (::getpgid(pid.value) != ::getpgrp()) {
    g_forward_to = pid.value;
  } else {
    g_interrupt = nullptr;
  }
  int status = 0;
  pid_t done = 0;
  do {
    done = ::waitpid(pid.value, &status, 0);
  } while (done < 0 && errno == EINTR);
  g_forward_to = 0;
  if (done < 0) return fail(errno_error("cannot wait for the restored process", errno));
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace stasis::cli
