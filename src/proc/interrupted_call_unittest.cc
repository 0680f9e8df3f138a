#include "proc/interrupted_call.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <ctime>
#include <functional>

#include <gtest/gtest.h>

#include "proc/procfs.h"
#include "proc/stopped_threads.h"

namespace stasis::proc {
namespace {

constexpr timespec kLong{1000, 0};

bool reaches(Pid pid, char state) {
  constexpr int kLooks = 5000;
  for (int looks = 0; looks < kLooks; ++looks) {
    const auto now = ProcFs().thread(pid, Tid{pid.value});
    if (now && now->state == state) return true;
    ::usleep(1000);
  }
  return false;
}

// What a child that has made `call`, and was stopped and continued in it, is taken to have made.
std::uint64_t made_after_stop(const std::function<void()>& call) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    call();
    ::_exit(1);
  }
  const Pid pid{child};
  EXPECT_TRUE(reaches(pid, 'S'));
  ::kill(child, SIGSTOP);
  EXPECT_TRUE(reaches(pid, 'T'));
  ::kill(child, SIGCONT);
  EXPECT_TRUE(reaches(pid, 'S'));
  std::uint64_t made = 0;
  const auto space = AddressSpace::open(pid);
  EXPECT_TRUE(space);
  if (auto stopped = StoppedThreads::stop(*space, Tid{child})) {
    const auto now = stopped->registers(Tid{child});
    const auto later = stopped->registers_to_stop_with(Tid{child});
    EXPECT_TRUE(now && later);
    if (now && later) {
      // By the kernel's own words the number is lost.
      EXPECT_EQ(now->orig_rax, static_cast<std::uint64_t>(SYS_restart_syscall));
      EXPECT_EQ(static_cast<std::int64_t>(later->rax), kRestartNoHand);
      made = later->orig_rax;
    }
    stopped->let_go();
  }
  ::kill(child, SIGKILL);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  return made;
}

// By the C library's functions, whose code loads the number.
TEST(InterruptedCall, IsFoundBehindRestartSyscall) {
  EXPECT_EQ(made_after_stop([] { ::poll(nullptr, 0, 1'000'000); }), SYS_poll);
  EXPECT_EQ(made_after_stop([] { ::clock_nanosleep(CLOCK_BOOTTIME, 0, &kLong, nullptr); }),
            SYS_clock_nanosleep);
}

// By syscall(), whose code does not.
TEST(InterruptedCall, IsFoundByItsArguments) {
  static std::uint32_t word = 0;
  EXPECT_EQ(made_after_stop([] {
              timespec limit = kLong;
              ::syscall(SYS_nanosleep, &limit, &limit);
            }),
            SYS_nanosleep);
  EXPECT_EQ(made_after_stop([] { ::syscall(SYS_clock_nanosleep, 1, 0, &kLong, nullptr); }),
            SYS_clock_nanosleep);
  EXPECT_EQ(made_after_stop([] { ::syscall(SYS_nanosleep, &kLong, nullptr); }), SYS_nanosleep);
  for (const int operation : {FUTEX_WAIT_PRIVATE, FUTEX_WAIT}) {
    EXPECT_EQ(made_after_stop([=] { ::syscall(SYS_futex, &word, operation, 0, &kLong); }),
              SYS_futex);
  }
  EXPECT_EQ(made_after_stop([] { ::syscall(SYS_poll, nullptr, 0, 1'000'000); }), SYS_poll);
  EXPECT_EQ(made_after_stop([] {
              pollfd file{-1, POLLIN, 0};
              ::syscall(SYS_poll, &file, 1, 1'000'000);
            }),
            SYS_poll);
}

TEST(InterruptedCall, IsNotGuessed) {
  const auto own = AddressSpace::open(Pid{::getpid()});
  ASSERT_TRUE(own);
  EXPECT_EQ(call_made(*own, {SYS_read, 0, 0, 0, 0, 0}), SYS_read);
  // What the addresses have is no time, or cannot be read.
  static const std::int64_t words[2] = {-1, -1};
  void* const nothing = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_EQ(::munmap(nothing, 4096), 0);
  for (const std::uint64_t address :
       {reinterpret_cast<std::uint64_t>(words), reinterpret_cast<std::uint64_t>(nothing)})
    EXPECT_EQ(call_made(*own, {SYS_restart_syscall, 0, address, 0, 0, 0}), std::nullopt);
}

}  // namespace
}  // namespace stasis::proc
