#include "proc/awake_thread.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proc/bounded_seize.h"
#include "proc/procfs.h"
#include "tests/fakes/child.h"
#include "tests/fakes/held_execve.h"

namespace stasis::proc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// In memory that the test shares with its child.
struct Shared {
  std::atomic<int> worker{0};  // a thread's number
  std::atomic<std::uint64_t> by_main{0};
  std::atomic<std::uint64_t> by_worker{0};
  std::atomic<int> signals{0};
};
Shared* shared = nullptr;

void sleep_for(milliseconds time) { std::this_thread::sleep_for(time); }

bool comes_true(const std::function<bool()>& condition) {
  const auto start = std::chrono::steady_clock::now();
  while (!condition()) {
    if (std::chrono::steady_clock::now() - start > seconds(60)) return false;
    sleep_for(milliseconds(1));
  }
  return true;
}

// A program whose two threads count, and that counts the signals it gets.
void count_for_ever() {
  struct sigaction action {};
  action.sa_handler = [](int) { shared->signals.fetch_add(1); };
  ::sigaction(SIGUSR1, &action, nullptr);
  std::thread([] {
    sigset_t own;
    sigemptyset(&own);
    sigaddset(&own, SIGHUP);
    ::pthread_sigmask(SIG_SETMASK, &own, nullptr);
    shared->worker = static_cast<int>(::syscall(SYS_gettid));
    for (;;) {
      shared->by_worker.fetch_add(1);
      ::usleep(200);
    }
  }).detach();
  for (;;) {
    shared->by_main.fetch_add(1);
    ::usleep(200);
  }
}

class AwakeThreadTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    void* map =
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(map, MAP_FAILED);
    shared = new (map) Shared;
  }
  void SetUp() override {
    shared->worker = 0;
    child_ = std::make_unique<fakes::Child>(count_for_ever);
    ASSERT_TRUE(comes_true([] { return shared->worker != 0; }));
  }
  // A traced thread that has ended stays until its tracer has seen it, and its process with it.
  void TearDown() override {
    const auto threads = ProcFs().threads(pid());  // the thread sanitizer adds one
    ::kill(pid().value, SIGKILL);
    (void)::waitpid(worker().value, nullptr, __WALL);
    for (const Tid thread : threads) {
      if (thread != Tid{pid().value}) (void)::waitpid(thread.value, nullptr, __WALL);
    }
  }

  Pid pid() const { return child_->pid(); }
  Tid main_thread() const { return Tid{pid().value}; }
  static Tid worker() { return Tid{shared->worker}; }
  std::uint64_t mask() const { return ProcFs().thread_status(pid(), worker())->blocked; }
  char state(Tid thread) const { return ProcFs().thread(pid(), thread)->state; }

  // As CRIU does it.
  void hold_all() const {
    for (const Tid thread : ProcFs().threads(pid())) {
      ASSERT_EQ(::ptrace(PTRACE_SEIZE, thread.value, nullptr, nullptr), 0);
      ASSERT_EQ(::ptrace(PTRACE_INTERRUPT, thread.value, nullptr, nullptr), 0);
      int status = 0;
      ASSERT_EQ(::waitpid(thread.value, &status, __WALL), thread.value);
    }
  }
  static bool goes_on(const std::atomic<std::uint64_t>& counter) {
    return comes_true([&, before = counter.load()] { return counter != before; });
  }
  static bool counts(const std::atomic<std::uint64_t>& counter) {
    const std::uint64_t before = counter;
    sleep_for(milliseconds(30));
    return counter != before;
  }

  std::unique_ptr<fakes::Child> child_;
};

constexpr std::uint64_t bit(int signal) { return 1ULL << (signal - 1); }

TEST_F(AwakeThreadTest, RunsAloneAndIsHeldAgainAsItWas) {
  hold_all();
  const std::uint64_t before = mask();
  EXPECT_EQ(before, bit(SIGHUP));
  {
    auto awake = AwakeThread::wake(pid(), worker());
    ASSERT_TRUE(awake) << awake.error().message;
    EXPECT_TRUE(goes_on(shared->by_worker));
    EXPECT_FALSE(counts(shared->by_main));
    EXPECT_NE(mask() & bit(SIGUSR1), 0u);
    EXPECT_EQ(mask() & bit(SIGTRAP), 0u);
    auto done = awake->stop();
    ASSERT_TRUE(done) << done.error().message;
    EXPECT_FALSE(counts(shared->by_worker));
    EXPECT_EQ(mask(), before);
    EXPECT_EQ(state(worker()), 't');
  }
  EXPECT_EQ(state(worker()), 't');
}

TEST_F(AwakeThreadTest, IsHeldAgainOnEveryPathOut) {
  hold_all();
  { auto awake = AwakeThread::wake(pid(), worker()); }
  EXPECT_EQ(state(worker()), 't');
  EXPECT_EQ(mask(), bit(SIGHUP));
}

TEST_F(AwakeThreadTest, GetsNoSignalOfTheProgramsMeanwhile) {
  shared->signals = 0;
  hold_all();
  auto awake = AwakeThread::wake(pid(), worker());
  ASSERT_TRUE(awake);
  ::kill(pid().value, SIGUSR1);
  ::syscall(SYS_tgkill, pid().value, worker().value, SIGUSR1);
  std::vector<AwakeThread> all;
  all.push_back(std::move(*awake));
  EXPECT_TRUE(run_beside(all, [] { sleep_for(milliseconds(50)); }));
  EXPECT_EQ(shared->signals, 0);
  ASSERT_TRUE(all.front().stop());
  for (const Tid thread : ProcFs().threads(pid()))
    ::ptrace(PTRACE_DETACH, thread.value, nullptr, nullptr);
  EXPECT_TRUE(comes_true([] { return shared->signals == 2; }));
}

TEST_F(AwakeThreadTest, IsLetGoOnWhenAStopSignalComes) {
  hold_all();
  auto awake = AwakeThread::wake(pid(), worker());
  ASSERT_TRUE(awake);
  std::vector<AwakeThread> all;
  all.push_back(std::move(*awake));
  ::syscall(SYS_tgkill, pid().value, worker().value, SIGSTOP);
  bool counted = false;
  EXPECT_TRUE(run_beside(all, [&] {
    sleep_for(milliseconds(50));
    counted = goes_on(shared->by_worker);
  }));
  EXPECT_TRUE(counted);
}

TEST_F(AwakeThreadTest, OneThatIsNotHeldIsRefusedAndLeftAlone) {
  auto awake = AwakeThread::wake(pid(), worker());
  ASSERT_FALSE(awake);
  EXPECT_EQ(awake.error().code, ErrorCode::kBusy);
  EXPECT_EQ(mask(), bit(SIGHUP));
  EXPECT_TRUE(goes_on(shared->by_worker));
}

TEST_F(AwakeThreadTest, MayEndMeanwhile) {
  hold_all();
  auto awake = AwakeThread::wake(pid(), worker());
  ASSERT_TRUE(awake);
  ::kill(pid().value, SIGKILL);
  EXPECT_TRUE(comes_true([&] { return !awake->tend(); }));
  EXPECT_TRUE(awake->stop());
}

TEST_F(AwakeThreadTest, OfAStoppedProcessItAloneRuns) {
  ::kill(pid().value, SIGSTOP);
  // On a busy machine the threads may take longer to come to the stop than they are waited for.
  ASSERT_TRUE(comes_true([&] { return state(worker()) == 'T' && state(main_thread()) == 'T'; }));
  {
    auto awake = AwakeThread::seize(pid(), worker());
    ASSERT_TRUE(awake) << awake.error().message;
    EXPECT_NE(state(worker()), 't');
    EXPECT_TRUE(goes_on(shared->by_worker));
    EXPECT_FALSE(counts(shared->by_main));
    auto done = awake->stop();
    ASSERT_TRUE(done) << done.error().message;
  }
  EXPECT_TRUE(comes_true([&] { return state(worker()) == 'T'; }));
  EXPECT_EQ(mask(), bit(SIGHUP));
  EXPECT_EQ(ProcFs().thread_status(pid(), worker())->tracer, 0);
  ::kill(pid().value, SIGCONT);
  EXPECT_TRUE(goes_on(shared->by_main));
  EXPECT_TRUE(goes_on(shared->by_worker));
}

TEST_F(AwakeThreadTest, OfAProcessThatRunsNoneIsSeized) {
  auto awake = AwakeThread::seize(pid(), worker());
  ASSERT_FALSE(awake);
  EXPECT_EQ(awake.error().code, ErrorCode::kBusy);
  EXPECT_TRUE(goes_on(shared->by_worker));
}

TEST(RunBeside, ComesBackWhenTheTimeIsOver) {
  std::vector<AwakeThread> none;
  struct Flags {
    std::atomic<bool> may_end{false};
    std::atomic<bool> ended{false};
  };
  const auto flags = std::make_shared<Flags>();
  const auto act = [flags] {
    (void)comes_true([&] { return flags->may_end.load(); });
    flags->ended = true;
  };
  EXPECT_FALSE(run_beside(none, act, milliseconds(30)));
  EXPECT_FALSE(flags->ended);
  flags->may_end = true;
  EXPECT_TRUE(comes_true([&] { return flags->ended.load(); }));
}

// A process that has another thread can enter no mount namespace and no user namespace.
TEST(RunBeside, LeavesNoThread) {
  struct SlowEnd {
    ~SlowEnd() { sleep_for(milliseconds(20)); }
  };
  std::vector<AwakeThread> none;
  const auto before = ProcFs().threads(Pid{::getpid()}).size();
  EXPECT_TRUE(run_beside(none, [] {
    thread_local const SlowEnd ends_with_the_thread;
    (void)&ends_with_the_thread;
  }));
  // One of an earlier test may have been about to end.
  EXPECT_LE(ProcFs().threads(Pid{::getpid()}).size(), before);
}

TEST(RunBeside, TakesNoSignals) {
  std::vector<AwakeThread> none;
  sigset_t seen;
  sigemptyset(&seen);
  EXPECT_TRUE(run_beside(none, [&] { ::pthread_sigmask(SIG_SETMASK, nullptr, &seen); }));
  EXPECT_EQ(sigismember(&seen, SIGALRM), 1);
  sigset_t ours;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &ours);
  EXPECT_EQ(sigismember(&ours, SIGALRM), 0);
}

TEST(AwakeThread, OneWhoseProcessExecutesAFileThatDoesNotComeIsNotWaitedForLong) {
  const fakes::HeldExecve child;
  if (!child.is_held()) GTEST_SKIP() << "not root, or no FUSE here";
  ASSERT_EQ(::kill(child.pid().value, SIGSTOP), 0);
  const fakes::ServerEnd end(child.server(), 20);
  const auto start = std::chrono::steady_clock::now();
  const auto done = trace_on_own_thread([&]() -> Result<void> {
    STASIS_TRY(AwakeThread::seize(child.pid(), Tid{child.pid().value}));
    return {};
  });
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kBusy);
  EXPECT_NE(done.error().message.find("executing"), std::string::npos) << done.error().message;
  const auto may = check_can_be_stopped(child.pid());
  ASSERT_FALSE(may);
  EXPECT_EQ(may.error().code, ErrorCode::kBusy);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
}

}  // namespace
}  // namespace stasis::proc
