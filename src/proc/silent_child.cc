#include "proc/silent_child.h"

#include <linux/sched.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>

namespace stasis::proc {

bool SilentChild::copy() {
  int pidfd = -1;
  clone_args how{};
  how.flags = CLONE_PIDFD;
  how.pidfd = reinterpret_cast<std::uint64_t>(&pidfd);
  const pid_t own = ::getpid();
  const long child = ::syscall(SYS_clone3, &how, sizeof how);
  if (child > 0) {
    pid_ = static_cast<pid_t>(child);
    pidfd_ = UniqueFd(pidfd);
  }
  if (child != 0) return false;
  sigset_t all;
  ::sigfillset(&all);
  (void)::sigprocmask(SIG_SETMASK, &all, nullptr);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != own) ::_exit(0);
  return true;
}

bool SilentChild::ends_within(std::chrono::milliseconds limit) const {
  const auto until = std::chrono::steady_clock::now() + limit;
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd end{pidfd_.get(), POLLIN, 0};
    const int got = ::poll(&end, 1, static_cast<int>(std::max<std::int64_t>(left.count(), 0)));
    if (got > 0) return true;
    if (got == 0 || errno != EINTR) return false;
  }
}

void SilentChild::end(std::chrono::milliseconds limit) {
  if (!is_there()) return;
  (void)::syscall(SYS_pidfd_send_signal, pidfd_.get(), SIGKILL, nullptr, 0U);
  (void)ends_within(limit);
  (void)TEMP_FAILURE_RETRY(::waitpid(pid_, nullptr, __WALL | WNOHANG));
  pidfd_ = UniqueFd();
}

}  // namespace stasis::proc
