#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "cli/verbs.h"

namespace stasis::cli {
namespace {

constexpr const char* kAttendVerb = "attend";

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
// Would stop us, with the target suspended; also when we write to a terminal of another session.
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

sigset_t our_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal_number : kStopping)
    ::sigaddset(&set, signal_number);
  for (const int signal_number : kNotForUs)
    ::sigaddset(&set, signal_number);
  for (const int signal_number : kJobControl)
    ::sigaddset(&set, signal_number);
  return set;
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
  // After attend_afresh() they are blocked, and one that waits would be lost.
  sigset_t blocked;
  ::sigemptyset(&blocked);
  ::sigprocmask(SIG_BLOCK, nullptr, &blocked);
  for (const int signal_number : kNotForUs)
    if (::sigismember(&blocked, signal_number) == 0) ::signal(signal_number, SIG_IGN);
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

void pass_signals_on_to(Pid root) {
  g_same_group = ::getpgid(root.value) == ::getpgrp() ? 1 : 0;
  g_forward_to = root.value;
  for (const int signal_number : kNotForUs)
    handle(signal_number);
}

void attend_afresh(Pid root) {
  const sigset_t ours = our_signals();
  // What comes from here on waits until it can be passed on.
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &ours, &before);
  const int requested = g_interrupt != nullptr ? g_interrupt->signal_number() : 0;
  std::array<struct sigaction, NSIG> dispositions{};
  for (int number = 1; number < NSIG; ++number) {
    const auto at = static_cast<std::size_t>(number);
    ::sigaction(number, nullptr, &dispositions.at(at));
    // An ignored signal stays so through exec, and is then taken for one that nohup has ignored.
    // The handlers pass on what another thread gets, until they end with this program.
    if (!g_ignored_before.at(at) && dispositions.at(at).sa_handler == SIG_IGN)
      ::signal(number, SIG_DFL);
  }
  // The name of the file, and not /proc/self/exe, is what `ps` shows.
  std::array<char, PATH_MAX> path{};
  if (::readlink("/proc/self/exe", path.data(), path.size() - 1) > 0) {
    std::string verb = kAttendVerb;
    std::string pid = std::to_string(root.value);
    std::string signal_text = std::to_string(requested);
    std::array<char*, 5> argv{path.data(), verb.data(), pid.data(), signal_text.data(), nullptr};
    // Marked and not closed, because we may have to stay.
    constexpr unsigned kCloseRangeCloexec = 4;
    (void)::syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, kCloseRangeCloexec);
    ::execv(path.data(), argv.data());
  }
  for (int number = 1; number < NSIG; ++number)
    ::sigaction(number, &dispositions.at(static_cast<std::size_t>(number)), nullptr);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
}

Verb add_attend(CLI::App& app) {
  struct Options {
    int pid = 0;
    int requested = 0;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(kAttendVerb)->group("");  // not for people
  command->add_option("PID", options->pid)->required();
  command->add_option("SIGNAL", options->requested)->required();
  return {command, [options](Context& context) -> Result<int> {
            if (options->requested != 0) context.interrupt.request(options->requested);
            return attend(Pid{options->pid});
          }};
}

Result<int> attend(Pid root) {
  pass_signals_on_to(root);
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
  // After attend_afresh() they are blocked.
  const sigset_t ours = our_signals();
  ::sigprocmask(SIG_UNBLOCK, &ours, nullptr);
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
