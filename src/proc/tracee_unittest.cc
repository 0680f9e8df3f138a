#include "proc/tracee.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <ctime>

#include <gtest/gtest.h>

#include "proc/procfs.h"

namespace stasis::proc {
namespace {

// A thread that nothing interrupts for three seconds, as one that writes to a disk that others keep
// busy: the parent of vfork() until its child ends.
void sleep_uninterruptibly() {
  const timespec time{3, 0};
  // NOLINTNEXTLINE(clang-analyzer-security.insecureAPI.vfork): that is the point
  const pid_t child = ::vfork();
  if (child == 0) {
    ::nanosleep(&time, nullptr);
    ::_exit(0);
  }
}

TEST(StoppedThreads, WaitsForOneThatNothingInterruptsForSeconds) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    sleep_uninterruptibly();
    for (;;)
      ::pause();
  }
  const Pid pid{child};
  constexpr int kLooks = 5000;
  for (int looks = 0; looks < kLooks; ++looks) {
    const auto now = ProcFs().thread(pid, Tid{child});
    if (!now || now->state == 'D') break;
    ::usleep(1000);
  }
  auto stopped = StoppedThreads::stop(pid, Tid{child});
  EXPECT_TRUE(stopped) << stopped.error().to_string();
  if (stopped) stopped->let_go();
  ::kill(child, SIGKILL);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

}  // namespace
}  // namespace stasis::proc
