#include "proc/silent_child.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <new>

#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::atomic<int> g_ended_children{0};

// No child is left to be collected.
bool all_collected() { return ::waitpid(-1, nullptr, __WALL | WNOHANG) < 0 && errno == ECHILD; }

TEST(SilentChild, DoesItsWorkAndItsEndGivesNoSignal) {
  void* const memory = ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto& by_child = *new (memory) std::atomic<int>(0);
  const auto before = std::signal(SIGCHLD, [](int) { ++g_ended_children; });
  {
    const auto child = SilentChild::start([&] { by_child = ::getpid(); });
    ASSERT_TRUE(child.is_there());
    EXPECT_TRUE(child.ends_within(seconds(20)));
    EXPECT_NE(by_child, 0);
    EXPECT_NE(by_child, ::getpid());
  }
  EXPECT_TRUE(all_collected());
  EXPECT_EQ(g_ended_children, 0);
  (void)std::signal(SIGCHLD, before);
  ::munmap(memory, sizeof(std::atomic<int>));
}

TEST(SilentChild, IsKilledWhereItsWorkHasNoEnd) {
  auto child = SilentChild::start([] {
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(child.is_there());
  EXPECT_FALSE(child.ends_within(milliseconds(20)));
  child.end(seconds(20));
  EXPECT_FALSE(child.is_there());
  EXPECT_TRUE(all_collected());
}

}  // namespace
}  // namespace stasis::proc
