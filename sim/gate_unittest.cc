#include "sim/gate.h"

#include <chrono>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace stasis::sim {
namespace {

using namespace std::chrono_literals;
constexpr auto kNotAbandoned = [] { return false; };

Deadline in(std::int64_t ms) { return now_ns() + ms * 1'000'000; }

TEST(Gate, ClosesWhenNoThreadIsInside) {
  Gate gate;
  gate.enter();
  EXPECT_FALSE(gate.close(in(30), kNotAbandoned));
  gate.leave();
  EXPECT_TRUE(gate.close(in(60'000), kNotAbandoned));
}

TEST(Gate, AFailedCloseLeavesItOpen) {
  Gate gate;
  gate.enter();
  EXPECT_FALSE(gate.close(in(10), kNotAbandoned));
  gate.enter();  // would hang
  gate.leave();
  gate.leave();
  gate.enter();
  gate.leave();
}

TEST(Gate, AnAbandonedCloserGivesUp) {
  Gate gate;
  gate.enter();
  EXPECT_FALSE(gate.close(kNever, [] { return true; }));
}

TEST(Gate, TheLastReaderHandsItToAWaitingCloser) {
  Gate gate;
  gate.enter();
  std::atomic<bool> closed{false};
  std::thread closer([&] { closed = gate.close(in(60'000), kNotAbandoned); });
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(closed);
  gate.leave();
  closer.join();
  EXPECT_TRUE(closed);
}

TEST(Gate, CallersWaitWhileItIsClosedAndPassBeforeTheNextClose) {
  Gate gate;
  ASSERT_TRUE(gate.close(in(60'000), kNotAbandoned));
  std::atomic<int> here{0};
  std::atomic<int> inside{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      ++here;
      gate.enter();
      ++inside;
      while (!go)
        std::this_thread::sleep_for(1ms);
      gate.leave();
    });
  }
  while (here < 4)
    std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(inside, 0);
  gate.open();
  // All four were admitted by the opening itself, so a close right after it cannot come first.
  EXPECT_FALSE(gate.close(in(50), kNotAbandoned));
  for (int i = 0; i < 30'000 && inside < 4; ++i)
    std::this_thread::sleep_for(1ms);
  EXPECT_EQ(inside, 4);
  go = true;
  for (auto& caller : callers)
    caller.join();
  EXPECT_TRUE(gate.close(in(60'000), kNotAbandoned));
}

TEST(Gate, SurvivesManyThreadsAndManyCloses) {
  Gate gate;
  std::atomic<bool> stop{false};
  std::atomic<int> inside{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      while (!stop) {
        gate.enter();
        ++inside;
        --inside;
        gate.leave();
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    if (!gate.close(in(200), kNotAbandoned)) continue;  // starved, as may be
    EXPECT_EQ(inside, 0);
    gate.open();
  }
  stop = true;
  for (auto& caller : callers)
    caller.join();
}

TEST(Outstanding, IsWaitedForUntilTheDeadline) {
  Outstanding work;
  EXPECT_TRUE(work.wait_for_none(in(0), kNotAbandoned));
  work.add();
  EXPECT_FALSE(work.wait_for_none(in(20), kNotAbandoned));
  std::thread worker([&] {
    std::this_thread::sleep_for(50ms);
    work.done();
  });
  EXPECT_TRUE(work.wait_for_none(in(60'000), kNotAbandoned));
  worker.join();
}

}  // namespace
}  // namespace stasis::sim
