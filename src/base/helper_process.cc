#include "base/helper_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include <fmt/format.h>

namespace stasis {
namespace {

constexpr int kEndPatienceMs = 5000;

// Signals of a terminal, or of a service that is stopped, are for the owner, which rolls back and
// needs the helper for that. Faults keep their default, so that the owner sees them as they are.
void ignore_signals() {
  struct sigaction action {};
  for (int number = 1; number < NSIG; ++number) {
    const bool fault = number == SIGSEGV || number == SIGBUS || number == SIGILL ||
                       number == SIGFPE || number == SIGABRT || number == SIGTRAP;
    action.sa_handler = fault || number == SIGCHLD ? SIG_DFL : SIG_IGN;
    (void)::sigaction(number, &action, nullptr);
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

// A lock of a journal, or the pipe that somebody reads our output from, must not stay open for the
// moment by which a helper outlives its owner.
void close_all_but(int kept) {
  if (const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC); null >= 0) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd)
      (void)::dup2(null, fd);
  }
  const auto last = static_cast<unsigned>(kept);
  const unsigned first = STDERR_FILENO + 1;
  if (last > first) (void)::syscall(SYS_close_range, first, last - 1, 0);
  (void)::syscall(SYS_close_range, last + 1, ~0U, 0);
}

[[noreturn]] void run(const char* name, int owner, Channel channel,
                      const std::function<void(const Channel&)>& serve) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != owner) ::_exit(0);  // it ended before the line above
  ::prctl(PR_SET_NAME, name);
  (void)::setpgid(0, 0);
  ignore_signals();
  close_all_but(channel.fd());
  serve(channel);
  ::_exit(0);
}

}  // namespace

Result<HelperProcess> HelperProcess::start(const char* name,
                                           const std::function<void(const Channel&)>& serve) {
  auto ends = Channel::pair();
  if (!ends) return fail(std::move(ends.error()));
  const int self = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return fail(errno_error(fmt::format("cannot start a process ({})", name), errno));
  if (pid == 0) {
    ends->first.close();
    run(name, self, std::move(ends->second), serve);
  }
  auto process = Pidfd::open(Pid{pid});
  if (!process) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    return fail(std::move(process.error()));
  }
  return HelperProcess(pid, std::move(*process), std::move(ends->first));
}

bool HelperProcess::end_after(int patience_ms) {
  if (pid_ != 0) (void)process_.wait_exit(patience_ms);
  return end();
}

bool HelperProcess::end() {
  if (pid_ == 0) return true;
  const bool ran = process_.alive();
  channel_.close();
  if (ran) (void)process_.signal(SIGKILL);
  if (!process_.wait_exit(kEndPatienceMs)) return false;
  int status = 0;
  const pid_t got = ::waitpid(std::exchange(pid_, 0), &status, 0);
  if (ran) return true;
  if (got > 0 && WIFSIGNALED(status)) {
    end_ = fmt::format("was killed by signal {} ({})", WTERMSIG(status),
                       ::strsignal(WTERMSIG(status)));
  } else if (got > 0 && WIFEXITED(status)) {
    end_ = fmt::format("ended with status {}", WEXITSTATUS(status));
  } else {
    end_ = "ended";
  }
  return true;
}

}  // namespace stasis
