#include "base/call_within.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace stasis {
namespace {

constexpr Pid kOne{101};
constexpr Pid kOther{102};
constexpr Pid kThird{103};

std::thread::id thread_of_a_call() {
  return call_within(kOne, [] { return std::this_thread::get_id(); }).value();
}

TEST(CallWithin, GivesWhatTheCallGives) {
  EXPECT_EQ(call_within(kOne, [] { return 7; }), 7);
  EXPECT_NE(thread_of_a_call(), std::this_thread::get_id());
}

TEST(CallWithin, OneThreadThatIsKeptMakesAllCalls) {
  const KeptCallThread calls;
  const auto first = thread_of_a_call();
  for (int i = 0; i < 100; ++i)
    EXPECT_EQ(thread_of_a_call(), first);
  const KeptCallThread within;
  EXPECT_EQ(thread_of_a_call(), first);
}

TEST(CallWithin, AThreadMayBorrowTheOneThatIsKept) {
  const KeptCallThread calls;
  const auto ours = thread_of_a_call();
  std::thread::id theirs;
  std::thread::id without;
  std::jthread([&, lent = KeptCallThread::current()] {
    without = thread_of_a_call();
    const KeptCallThread borrowed(lent);
    theirs = thread_of_a_call();
  }).join();
  EXPECT_EQ(theirs, ours);
  EXPECT_NE(without, ours);
}

TEST(CallWithin, AForkedChildHasAThreadOfItsOwn) {
  const KeptCallThread calls;
  (void)thread_of_a_call();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(call_within(kOne, [] { return 7; }) == 7 ? 0 : 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(CallWithin, EachIsCalledInTurn) {
  std::vector<std::size_t> seen;
  const auto came =
      run_within_each({kOne, kOther, kThird}, [&](std::size_t i) { seen.push_back(i); });
  EXPECT_EQ(came, std::vector<bool>({true, true, true}));
  EXPECT_EQ(seen, std::vector<std::size_t>({0, 1, 2}));
  EXPECT_TRUE(run_within_each({}, [](std::size_t) {}).empty());
}

// It takes the five seconds that one call may.
TEST(CallWithin, OneThatIsHeldUpIsLeftBehindAndTheOthersCome) {
  struct Held {
    std::atomic<bool> lets_go = false;
    std::atomic<bool> is_back = false;
  };
  const auto held = std::make_shared<Held>();
  const KeptCallThread calls;
  const auto before = thread_of_a_call();
  const auto came = run_within_each({kOne, kOther, kThird}, [held](std::size_t i) {
    if (i != 1) return;
    held->lets_go.wait(false);
    held->is_back = true;
  });
  EXPECT_EQ(came, std::vector<bool>({true, false, true}));
  EXPECT_NE(thread_of_a_call(), before);
  // No further call about the same process as long as it holds that one up.
  EXPECT_FALSE(call_within(kOther, [] { return 7; }).has_value());
  held->lets_go = true;
  held->lets_go.notify_all();
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!call_within(kOther, [] { return 7; }) && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(held->is_back);
  EXPECT_EQ(call_within(kOther, [] { return 7; }), 7);
}

}  // namespace
}  // namespace stasis
