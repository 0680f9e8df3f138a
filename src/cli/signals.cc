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
// The restored root is in our process group, so it gets the terminal's signals by itself.
volatile std::sig_atomic_t g_same_group = 0;

void on_signal(int signal_number, siginfo_t* info, void* /*context*/) {
  const int saved = errno;
  if (g_forward_to > 0) {
    // The root is our child and not yet reaped, so its number is its own. The kernel sends what was
    // typed at a terminal (SI_KERNEL), to the whole group.
    const bool has_it = g_same_group != 0 && info != nullptr && info->si_code == SI_KERNEL;
    if (!has_it) ::kill(static_cast<pid_t>(g_forward_to), signal_number);
  } else if (g_interrupt != nullptr) {
    g_interrupt->request(signal_number);
  }
  errno = saved;
}

void handle(int signal_number) {
  struct sigaction old {};
  // nohup and its like have said that a signal is to be ignored.
  if (::sigaction(signal_number, nullptr, &old) == 0 && old.sa_handler == SIG_IGN) return;
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  ::sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  ::sigaction(signal_number, &action, nullptr);
}

}  // namespace

void install_signal_handlers(Interrupt& interrupt) {
  g_interrupt = &interrupt;
  for (const int signal_number : std::array{SIGINT, SIGTERM, SIGHUP})
    handle(signal_number);
  // A reader of our output that goes away must not end us in the middle of an operation.
  ::signal(SIGPIPE, SIG_IGN);
}

Result<int> attend(Pid pid) {
  g_same_group = ::getpgid(pid.value) == ::getpgrp() ? 1 : 0;
  g_forward_to = pid.value;
  for (const int signal_number : std::array{SIGQUIT, SIGUSR1, SIGUSR2})
    handle(signal_number);
  // One that came while its memory was on the way back, when it was too late to stop.
  if (g_interrupt != nullptr && g_interrupt->requested()) {
    ::kill(pid.value, g_interrupt->signal_number());
  }
  // Not reaped while a handler may still send to its number.
  siginfo_t ended{};
  while (::waitid(P_PID, static_cast<id_t>(pid.value), &ended, WEXITED | WNOWAIT) != 0) {
    if (errno != EINTR) return fail(errno_error("cannot wait for the restored process", errno));
  }
  g_forward_to = 0;
  (void)::waitpid(pid.value, nullptr, 0);
  return ended.si_code == CLD_EXITED ? ended.si_status : 128 + ended.si_status;
}

}  // namespace stasis::cli
