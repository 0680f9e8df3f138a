// The gate under many threads. Under a checker of threads it fences in every call, because such a
// checker knows nothing of membarrier.
#include <linux/filter.h>
#include <linux/membarrier.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <iterator>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "gate.h"

namespace stasis::preload {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

#if defined(__SANITIZE_THREAD__)
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif

bool close_within(milliseconds timeout) { return Gate::close(Timeout(Clock::now() + timeout)); }

// Threads that go in and out all the time, and what they may only do while it is open.
class Crowd {
 public:
  explicit Crowd(int count) {
    for (int i = 0; i < count; ++i)
      threads_.emplace_back([this] { run(); });
    // A first call takes memory, which a handler may not.
    while (begun_ < count)
      std::this_thread::yield();
  }
  ~Crowd() {
    stop_ = true;
    for (auto& thread : threads_)
      thread.join();
  }
  void signal_all(int number) {
    for (auto& thread : threads_)
      ::pthread_kill(thread.native_handle(), number);
  }
  // A call. Also from a handler of a signal, in the middle of another one.
  void pass() {
    const Gate::Pass pass;
    // The compiler may not join the two looks.
    const long before = *static_cast<volatile long*>(&guarded_);
    for (int i = 0; i < 20; ++i)
      std::atomic_signal_fence(std::memory_order_seq_cst);
    const long after = *static_cast<volatile long*>(&guarded_);
    if (before != after) torn_.fetch_add(1, std::memory_order_relaxed);
    passes_.fetch_add(1, std::memory_order_relaxed);
  }
  // By the closer, while it is closed. Not atomic: the gate itself has to keep them apart.
  void write(long value) { guarded_ = value; }
  long passes() const { return passes_.load(std::memory_order_relaxed); }
  long torn() const { return torn_.load(std::memory_order_relaxed); }

 private:
  void run() {
    pass();
    ++begun_;
    while (!stop_.load(std::memory_order_relaxed))
      pass();
  }

  long guarded_ = 0;
  std::atomic<int> begun_{0};
  std::atomic<bool> stop_{false};
  std::atomic<long> passes_{0};
  std::atomic<long> torn_{0};
  std::vector<std::thread> threads_;
};

void no_thread_is_inside_while_closed() {
  constexpr int kRounds = 3000;
  long value = 0;
  Crowd crowd(4);
  int moved = 0;
  // On a busy machine its threads may have had no processor while the gate was open.
  const auto timeout = Clock::now() + milliseconds(30000);
  for (int round = 0; round < kRounds || (crowd.passes() <= kRounds / 10 && Clock::now() < timeout);
       ++round) {
    ASSERT_TRUE(close_within(milliseconds(60000)));
    const long before = crowd.passes();
    for (int i = 0; i < 50; ++i)
      crowd.write(++value);
    if (crowd.passes() != before) ++moved;
    Gate::open();
    // Otherwise they would hardly ever get in between.
    if (round % 64 == 0) std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(moved, 0) << "threads went through a closed gate";
  EXPECT_EQ(crowd.torn(), 0) << "threads were inside while it was closed";
  EXPECT_GT(crowd.passes(), kRounds / 10) << "they starved";
}

// As containers' filters may: from now on membarrier is not permitted to this process.
bool forbid_membarrier() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{std::size(program), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0 &&
         ::syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0) == -1;
}

// First, because the gate fences in every call from the first time on that it had to.
TEST(Gate, NoThreadIsInsideWhereMembarrierIsForbidden) {
  if (kChecked) GTEST_SKIP() << "the checker does not take forks among threads";
  for (const bool late : {false, true}) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      if (late) {
        { const Gate::Pass pass; }
        EXPECT_TRUE(close_within(milliseconds(60000)));
        Gate::open();
      }
      if (!forbid_membarrier()) ::_exit(77);
      no_thread_is_inside_while_closed();
      // Most machines would let it pass without.
      EXPECT_TRUE(Gate::fences_in_every_call());
      ::_exit(HasFailure() ? 1 : 0);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no seccomp filters here";
    EXPECT_EQ(status, 0) << (late ? "forbidden later" : "forbidden from the beginning");
  }
}

TEST(Gate, NoThreadIsInsideWhileItIsClosed) {
  if (kChecked) GTEST_SKIP() << "the checker knows nothing of membarrier";
  no_thread_is_inside_while_closed();
}

TEST(Gate, NoThreadIsInsideWhileItIsClosedByFences) {
  Gate::fence_in_every_call();
  no_thread_is_inside_while_closed();
}

std::atomic<Crowd*> g_crowd{nullptr};

// Programs call the driver from handlers of signals at their own risk, not at that of their memory.
TEST(Gate, NoThreadIsInsideByAHandlerOfASignal) {
  if (kChecked) Gate::fence_in_every_call();
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) { g_crowd.load()->pass(); };
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  std::optional<Crowd> crowd(std::in_place, 2);
  g_crowd = &*crowd;
  long value = 0;
  int moved = 0;
  for (int round = 0; round < 300; ++round) {
    crowd->signal_all(SIGUSR1);
    EXPECT_TRUE(close_within(milliseconds(60000)));
    const long passes = crowd->passes();
    // Those that wait in front of the gate are met here.
    crowd->signal_all(SIGUSR1);
    for (int i = 0; i < 50; ++i)
      crowd->write(++value);
    std::this_thread::sleep_for(milliseconds(1));
    if (crowd->passes() != passes) ++moved;
    Gate::open();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  EXPECT_EQ(moved, 0) << "handlers went through a closed gate";
  EXPECT_EQ(crowd->torn(), 0) << "handlers were inside while it was closed";
  // Its threads end before the handler is away.
  crowd.reset();
  ::sigaction(SIGUSR1, &before, nullptr);
}

TEST(Gate, OpensAgainWhenAThreadStaysInside) {
  if (kChecked) Gate::fence_in_every_call();
  std::atomic<int> step{0};
  std::thread slow([&] {
    const Gate::Pass pass;
    step = 1;
    while (step < 2)
      std::this_thread::yield();
  });
  while (step < 1)
    std::this_thread::yield();
  const auto start = Clock::now();
  EXPECT_FALSE(close_within(milliseconds(50)));
  EXPECT_GE(Clock::now() - start, milliseconds(50));
  EXPECT_LT(Clock::now() - start, milliseconds(30000));
  { const Gate::Pass others_go_on; }
  step = 2;
  slow.join();
  EXPECT_TRUE(close_within(milliseconds(60000)));
  Gate::open();
}

TEST(Gate, LetsCallsWithinACallThrough) {
  std::atomic<int> step{0};
  std::thread caller([&] {
    const Gate::Pass outer;
    step = 1;
    while (step < 2)
      std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(30));  // the closer has begun
    { const Gate::Pass inner; }
    step = 3;
  });
  while (step < 1)
    std::this_thread::yield();
  step = 2;
  EXPECT_TRUE(close_within(milliseconds(60000)));
  EXPECT_EQ(step, 3) << "it closed while the outer call was in progress";
  Gate::open();
  caller.join();
}

TEST(Gate, LetsOneThatDoesNotWaitInOnlyWhileItIsOpen) {
  EXPECT_TRUE(Gate::TryPass().is_in());
  ASSERT_TRUE(close_within(milliseconds(60000)));
  EXPECT_FALSE(Gate::TryPass().is_in());
  Gate::open();
  const auto before = Gate::changes();
  std::atomic<int> step{0};
  std::thread caller([&] {
    const Gate::TryPass outer;
    step = 1;
    while (Gate::changes() == before || step < 2)
      std::this_thread::yield();
    EXPECT_TRUE(Gate::TryPass().is_in()) << "a call within a call";
    step = 3;
  });
  while (step < 1)
    std::this_thread::yield();
  step = 2;
  EXPECT_TRUE(close_within(milliseconds(60000)));
  EXPECT_EQ(step, 3) << "it closed while the outer call was in progress";
  EXPECT_FALSE(Gate::TryPass().is_in());
  Gate::open();
  caller.join();
}

// Tries to pass a closed gate in a new thread: true if it was held back until it opened.
bool holds_back_a_new_thread() {
  if (!close_within(milliseconds(60000))) return false;
  std::atomic<bool> through{false};
  std::thread other([&] {
    const Gate::Pass pass;
    through = true;
  });
  std::this_thread::sleep_for(milliseconds(30));
  const bool held = !through;
  Gate::open();
  other.join();
  return held && through;
}

TEST(Gate, ForgetsThreadsThatHaveEnded) {
  for (int i = 0; i < 200; ++i)
    std::thread([] { const Gate::Pass pass; }).join();
  EXPECT_TRUE(holds_back_a_new_thread());
}

// Cancelled, or ended by itself in a callback: the destructor of its pass never runs.
TEST(Gate, ForgetsThreadsThatEndInACall) {
  for (int i = 0; i < 3; ++i) {
    std::thread([] {
      alignas(Gate::Pass) static thread_local char room[sizeof(Gate::Pass)];
      new (room) Gate::Pass;
      new (room) Gate::Pass;
    }).join();
  }
  ASSERT_TRUE(close_within(milliseconds(60000))) << "a thread that is gone counts as inside";
  Gate::open();
  for (int i = 0; i < 4; ++i)
    EXPECT_TRUE(holds_back_a_new_thread()) << "a place was handed on with its thread inside";
}

TEST(Gate, ClosesWhileThreadsComeAndGo) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> makers;
  for (int i = 0; i < 2; ++i) {
    makers.emplace_back([&] {
      while (!stop)
        std::thread([] {
          for (int pass = 0; pass < 3; ++pass)
            const Gate::Pass here;
        }).join();
    });
  }
  for (int i = 0; i < 300; ++i) {
    EXPECT_TRUE(close_within(milliseconds(60000)));
    Gate::open();
  }
  stop = true;
  for (auto& maker : makers)
    maker.join();
}

TEST(Gate, LeavesErrnoAlone) {
  std::atomic<bool> waits{false};
  int seen = 0;
  ASSERT_TRUE(close_within(milliseconds(60000)));
  std::thread held([&] {
    errno = 4711;
    waits = true;
    { const Gate::Pass pass; }
    seen = errno;
  });
  while (!waits)
    std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(20));
  Gate::open();
  held.join();
  EXPECT_EQ(seen, 4711);
}

TEST(Gate, IsOpenInAForkedChild) {
  if (kChecked) GTEST_SKIP() << "the checker does not take forks among threads";
  std::atomic<int> step{0};
  std::thread inside([&] {
    const Gate::Pass pass;
    step = 1;
    while (step < 2)
      std::this_thread::yield();
  });
  while (step < 1)
    std::this_thread::yield();
  const pid_t child = ::fork();
  if (child == 0) {
    Gate::reset_after_fork();
    // The thread that was inside is not here.
    ::_exit(close_within(milliseconds(60000)) ? 0 : 1);
  }
  step = 2;
  inside.join();
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace stasis::preload
