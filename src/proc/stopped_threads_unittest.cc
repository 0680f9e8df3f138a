#include "proc/stopped_threads.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <ctime>

#include <gtest/gtest.h>

#include "proc/procfs.h"
#include "tests/fakes/child.h"

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
  const auto space = AddressSpace::open(pid);
  ASSERT_TRUE(space);
  auto stopped = StoppedThreads::stop(*space, Tid{child});
  EXPECT_TRUE(stopped) << stopped.error().to_string();
  if (stopped) stopped->let_go();
  ::kill(child, SIGKILL);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

// A setuid program, say. The tool reads it as it is, and changes nothing.
TEST(StoppedThreads, ChangeNothingInTheProgramThatAProcessHasBecome) {
  int go[2];
  ASSERT_EQ(::pipe2(go, O_CLOEXEC), 0);
  const fakes::Child child([&] {
    char byte = 0;
    (void)!::read(go[0], &byte, 1);
    ::execlp("sleep", "sleep", "1000", nullptr);
  });
  const Tid thread{child.pid().value};
  auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  ASSERT_EQ(::write(go[1], "x", 1), 1);
  const auto name = [&] {
    const auto info = ProcFs().process(child.pid());
    return info ? info->comm : "";
  };
  for (int looks = 0; looks < 10000 && name() != "sleep"; ++looks)
    ::usleep(1000);
  {
    auto stopped = StoppedThreads::stop(*space, thread);
    ASSERT_TRUE(stopped) << stopped.error().to_string();
    auto registers = stopped->registers(thread);
    ASSERT_TRUE(registers);
    const std::array<std::uint64_t, 1> word{0};
    const std::array<std::uint64_t, 1> none{0};
    for (const auto& result :
         {stopped->set_registers(thread, *registers), stopped->set_signal_mask(thread, ~0ULL),
          stopped->write(thread, registers->rsp, word)}) {
      ASSERT_FALSE(result);
      EXPECT_EQ(result.error().code, ErrorCode::kProcessGone);
    }
    EXPECT_FALSE(stopped->system_call(thread, registers->rip, 39, none));
  }
  const auto status = ProcFs().thread_status(child.pid(), thread);
  ASSERT_TRUE(status);
  EXPECT_EQ(status->blocked, 0U);
  EXPECT_EQ(status->tracer, 0);
  EXPECT_EQ(name(), "sleep");
  ::close(go[0]);
  ::close(go[1]);
}

}  // namespace
}  // namespace stasis::proc
