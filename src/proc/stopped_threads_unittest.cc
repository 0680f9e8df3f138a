#include "proc/stopped_threads.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <ctime>
#include <thread>

#include <gtest/gtest.h>

#include "proc/bounded_seize.h"
#include "proc/procfs.h"
#include "tests/fakes/child.h"
#include "tests/fakes/held_execve.h"

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

// Wine and emulators have it. Ours would be one of the system calls that become a signal.
TEST(StoppedThreads, ASystemCallOfOursIsMadeInSpiteOfDispatch) {
  constexpr int kSetDispatch = 59;  // PR_SET_SYSCALL_USER_DISPATCH
  const auto* const code = reinterpret_cast<const unsigned char*>(&::syscall);
  constexpr std::array<unsigned char, 2> kInstruction = {0x0f, 0x05};
  const auto* const instruction =
      std::search(code, code + 64, kInstruction.begin(), kInstruction.end());
  ASSERT_NE(instruction, code + 64);
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const fakes::Child child([&] {
    static volatile char blocks = 0;
    const bool on = ::prctl(kSetDispatch, 1UL, 0UL, 0UL, &blocks) == 0;
    (void)!::write(ready[1], on ? "y" : "n", 1);
    blocks = 1;
    for (;;) {
    }
  });
  char on = 0;
  ASSERT_EQ(::read(ready[0], &on, 1), 1);
  ::close(ready[0]);
  ::close(ready[1]);
  const Tid thread{child.pid().value};
  const auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  // Until it blocks.
  ::usleep(50000);
  {
    auto stopped = StoppedThreads::stop(*space, thread);
    ASSERT_TRUE(stopped) << stopped.error().to_string();
    if (on != 'y' || !stopped->dispatches_system_calls(thread))
      GTEST_SKIP() << "this kernel has no dispatch of system calls, or does not tell";
    const auto registers = stopped->registers(thread);
    ASSERT_TRUE(registers);
    const auto answer =
        stopped->system_call(thread, reinterpret_cast<std::uint64_t>(instruction), SYS_getpid, {});
    ASSERT_TRUE(answer) << answer.error().to_string();
    EXPECT_EQ(*answer, child.pid().value);
    EXPECT_TRUE(stopped->set_registers(thread, *registers));
    EXPECT_TRUE(stopped->dispatches_system_calls(thread));
  }
  ::usleep(20000);
  const auto after = ProcFs().process(child.pid());
  ASSERT_TRUE(after);
  EXPECT_EQ(after->state, 'R');
}

char state_of(Pid pid) {
  const auto info = ProcFs().process(pid);
  return info ? info->state : '-';
}

bool comes_to(Pid pid, char state) {
  for (int looks = 0; looks < 5000 && state_of(pid) != state; ++looks)
    ::usleep(1000);
  return state_of(pid) == state;
}

// By a user, say, while the tool is at work. Its own thread takes the signal, or another one of the
// process, which the tool has not stopped.
class StoppedInACall : public testing::TestWithParam<bool> {};

TEST_P(StoppedInACall, TheCallIsMadeAndTheProgramStaysStoppedUntilItIsToGoOn) {
  const fakes::Child child([&] {
    std::thread other;
    if (GetParam()) {
      other = std::thread([] {
        for (;;)
          ::pause();
      });
    }
    for (;;)
      ::pause();
  });
  const Pid pid = child.pid();
  const auto space = AddressSpace::open(pid);
  ASSERT_TRUE(space);
  const std::size_t threads = GetParam() ? 2 : 1;
  for (int looks = 0; looks < 5000 && ProcFs().threads(pid).size() != threads; ++looks)
    ::usleep(1000);
  for (const bool goes_on : {false, true}) {
    ASSERT_TRUE(comes_to(pid, 'S'));
    {
      const Tid thread{pid.value};
      auto stopped = StoppedThreads::stop(*space, thread);
      ASSERT_TRUE(stopped) << stopped.error().to_string();
      const auto registers = stopped->registers(thread);
      ASSERT_TRUE(registers);
      const auto mask = stopped->signal_mask(thread);
      ASSERT_TRUE(mask);
      ASSERT_TRUE(stopped->set_signal_mask(thread, kAllSignals));
      const auto call = [&] {
        // It is in pause(), just after the instruction.
        const auto answer = stopped->system_call(thread, registers->rip - 2, SYS_getppid, {});
        ASSERT_TRUE(answer) << answer.error().to_string();
        EXPECT_EQ(*answer, ::getpid());
      };
      ::kill(pid.value, SIGSTOP);
      call();
      call();
      if (goes_on) ::kill(pid.value, SIGCONT);
      call();
      EXPECT_TRUE(stopped->set_registers(thread, *registers));
      EXPECT_TRUE(stopped->set_signal_mask(thread, *mask));
    }
    ASSERT_TRUE(comes_to(pid, goes_on ? 'S' : 'T')) << state_of(pid);
    ::kill(pid.value, SIGCONT);
  }
}
INSTANTIATE_TEST_SUITE_P(Threads, StoppedInACall, testing::Bool());

// The kernel has it make a call for which the filter ends the program.
TEST(StoppedThreads, OneThatMayNotRestartACallGoesOn) {
  const fakes::Child child([] {
    const sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_restart_syscall, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog all{static_cast<unsigned short>(std::size(program)),
                         const_cast<sock_filter*>(program)};
    const bool set = ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
                     ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &all) == 0;
    for (;;)
      if (!set || ::poll(nullptr, 0, 60000) != 0) ::_exit(1);
  });
  const Tid thread{child.pid().value};
  const auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  for (int times = 0; times < 3; ++times) {
    ::usleep(50000);
    auto stopped = StoppedThreads::stop(*space, thread);
    ASSERT_TRUE(stopped) << stopped.error().to_string();
    ASSERT_EQ(stopped->threads().size(), 1U);
    ASSERT_TRUE(stopped->let_run(thread, std::chrono::milliseconds(1)));
  }
  ::usleep(50000);
  const auto after = ProcFs().process(child.pid());
  ASSERT_TRUE(after);
  EXPECT_EQ(after->state, 'S');
}

TEST(StoppedThreads, OneWhoseProcessExecutesAFileThatDoesNotComeIsNotWaitedForLong) {
  const fakes::HeldExecve child;
  if (!child.is_held()) GTEST_SKIP() << "not root, or no FUSE here";
  const auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  // Or the test would not end, if it were waited for.
  const fakes::ServerEnd end(child.server(), 20);
  const auto start = std::chrono::steady_clock::now();
  const auto done = trace_on_own_thread([&]() -> Result<void> {
    STASIS_TRY(StoppedThreads::stop(*space, Tid{child.pid().value}));
    return {};
  });
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kBusy);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
}

// Another program may have a thread and let it go again before it is looked for.
TEST(StoppedThreads, ATracerThatComesAndGoesIsNoMissingRight) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to trace what is no child of the tracer";
  const fakes::Child child;
  const Tid thread{child.pid().value};
  const fakes::Child tracer([thread] {
    for (;;) {
      if (::ptrace(PTRACE_SEIZE, thread.value, nullptr, nullptr) != 0) continue;
      (void)::ptrace(PTRACE_INTERRUPT, thread.value, nullptr, nullptr);
      (void)::waitpid(thread.value, nullptr, __WALL);
      (void)::ptrace(PTRACE_DETACH, thread.value, nullptr, nullptr);
    }
  });
  const auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  constexpr int kTimes = 30;
  int stopped = 0;
  for (int i = 0; i < kTimes; ++i) {
    const auto now = StoppedThreads::stop(*space, thread);
    stopped += now ? 1 : 0;
    if (!now) {
      EXPECT_EQ(now.error().code, ErrorCode::kBusy) << now.error().to_string();
    }
  }
  EXPECT_GT(stopped, 0);
}

}  // namespace
}  // namespace stasis::proc
