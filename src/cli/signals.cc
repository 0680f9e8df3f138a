#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>

#include "base/fd.h"
#include "cli/verbs.h"

namespace stasis::cli {
namespace {

// What a handler may touch.
Interrupt* g_interrupt = nullptr;
volatile std::sig_atomic_t g_forward_to = 0;
// The restored root is in our process group, so it gets the terminal's signals by itself.
volatile std::sig_atomic_t g_same_group = 0;
volatile std::sig_atomic_t g_tell_of_stop_key = 0;
// Begins a line, where another may be shown.
const char* g_line_start = "";

// Ask us to stop, and to roll back.
constexpr std::array kStopping = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
// Would end us at once, with the target suspended, and are not about that.
constexpr std::array kNotForUs = {SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGPOLL};
// Would stop us, with the target suspended: one that we write to a terminal of somebody else, too.
constexpr std::array kJobControl = {SIGTSTP, SIGTTIN, SIGTTOU};

// Ignored when we were started: nohup and its like have said that a signal is to be.
std::array<bool, NSIG> g_ignored_before{};

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

// Ctrl-Z. Says so once, if that does not block: a terminal may be halted.
void on_stop_key(int /*signal_number*/) {
  const int saved = errno;
  pollfd standard_error{STDERR_FILENO, POLLOUT, 0};
  if (g_tell_of_stop_key != 0 && ::poll(&standard_error, 1, 0) == 1) {
    g_tell_of_stop_key = 0;
    constexpr std::string_view kText =
        "note: this cannot be stopped in the middle; Ctrl-C rolls it back\n";
    (void)!::write(STDERR_FILENO, g_line_start, std::strlen(g_line_start));
    (void)!::write(STDERR_FILENO, kText.data(), kText.size());
  }
  errno = saved;
}

void handle(int signal_number) {
  if (g_ignored_before.at(static_cast<std::size_t>(signal_number))) return;
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  ::sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  ::sigaction(signal_number, &action, nullptr);
}

}  // namespace

void install_signal_handlers(Interrupt& interrupt, const Terminal& terminal) {
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction old {};
    const bool ignored = ::sigaction(number, nullptr, &old) == 0 && old.sa_handler == SIG_IGN;
    g_ignored_before.at(static_cast<std::size_t>(number)) = ignored;
  }
  g_interrupt = &interrupt;
  for (const int signal_number : kStopping)
    handle(signal_number);
  for (const int signal_number : kNotForUs)
    ::signal(signal_number, SIG_IGN);
  for (const int signal_number : kJobControl)
    ::signal(signal_number, SIG_IGN);
  if (!g_ignored_before.at(SIGTSTP)) {
    g_tell_of_stop_key = terminal.quiet() ? 0 : 1;
    g_line_start = terminal.has_moving_line() ? "\r\x1b[K" : "";
    struct sigaction action {};
    action.sa_handler = on_stop_key;
    ::sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGTSTP, &action, nullptr);
  }
  // A reader of our output that goes away must not end us in the middle of an operation, nor must a
  // limit on the size of files (ulimit -f): a write fails then, and all is rolled back.
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);
}

Result<int> attend(Pid root) {
  g_same_group = ::getpgid(root.value) == ::getpgrp() ? 1 : 0;
  g_forward_to = root.value;
  for (const int signal_number : kNotForUs)
    handle(signal_number);
  // Now Ctrl-Z stops the job, and us with it, as any other in the foreground.
  for (const int signal_number : kJobControl) {
    if (!g_ignored_before.at(static_cast<std::size_t>(signal_number))) {
      ::signal(signal_number, SIG_DFL);
    }
  }
  // One that came while its memory was on the way back, when it was too late to stop.
  if (g_interrupt != nullptr && g_interrupt->requested()) {
    ::kill(root.value, g_interrupt->signal_number());
  }
  // Not reaped while a handler may still send to its number.
  siginfo_t ended{};
  while (::waitid(P_PID, static_cast<id_t>(root.value), &ended, WEXITED | WNOWAIT) != 0) {
    if (errno != EINTR) return fail(errno_error("cannot wait for the restored process", errno));
  }
  g_forward_to = 0;
  (void)::waitpid(root.value, nullptr, 0);
  return ended.si_code == CLD_EXITED ? ended.si_status : 128 + ended.si_status;
}

}  // namespace stasis::cli
