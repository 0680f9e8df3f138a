#include "base/helper_start.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <vector>

namespace stasis {

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

void close_all_but(std::span<const int> kept) {
  std::vector<int> sorted(kept.begin(), kept.end());
  std::sort(sorted.begin(), sorted.end());
  unsigned first = STDERR_FILENO + 1;
  for (const int fd : sorted) {
    const auto number = static_cast<unsigned>(fd);
    if (number < first) continue;
    if (number > first) (void)::syscall(SYS_close_range, first, number - 1, 0);
    first = number + 1;
  }
  (void)::syscall(SYS_close_range, first, ~0U, 0);
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (null < 0) return;
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd)
    (void)::dup2(null, fd);
  if (null > STDERR_FILENO) ::close(null);
}

}  // namespace stasis
