#include "proc/thread_state.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

Tid self() { return Tid{static_cast<int>(::syscall(SYS_gettid))}; }

TEST(ThreadState, ListsOfProcessorsAreReadStrictly) {
  const auto list = parse_list("0-2,64,66-66", 128);
  ASSERT_TRUE(list);
  EXPECT_EQ(list->at(0), 7U);
  EXPECT_EQ(list->at(1), 5U);
  for (const char* bad :
       {"x", "1-", "-1", "2-1", "1,", "1;2", "0-128", "128", "1 2", "99999999999999999999999"})
    EXPECT_FALSE(parse_list(bad, 128)) << bad;
}

TEST(ThreadState, PoliciesAreWhatTheKernelWrites) {
  const auto bind = parse_memory_policy("bind:0,2-3");
  ASSERT_TRUE(bind);
  EXPECT_EQ(bind->mode, MPOL_BIND);
  EXPECT_EQ(bind->nodes.at(0), 0b1101U);
  EXPECT_EQ(parse_memory_policy("bind=static:1")->mode, MPOL_BIND | 1 << 15);
  EXPECT_EQ(parse_memory_policy("prefer (many):0")->mode, 5);
  EXPECT_TRUE(parse_memory_policy("local")->nodes.empty());
  for (const char* bad : {"", "bind", "bind:", "default:0", "bind:0-5000", "bind=x:0", "wild:0"})
    EXPECT_FALSE(parse_memory_policy(bad)) << bad;
}

TEST(ThreadState, IsReadAsItWasSet) {
  const auto cpus = affinity(self());
  ASSERT_TRUE(cpus);
  EXPECT_TRUE(set_affinity(self(), *cpus));
  EXPECT_EQ(affinity(self()).value(), *cpus);
  EXPECT_FALSE(set_affinity(self(), "8000-8001"));
  EXPECT_TRUE(set_io_priority(self(), 2 << 13 | 6));
  EXPECT_EQ(io_priority(self()).value(), static_cast<std::uint32_t>(2 << 13 | 6));
  EXPECT_TRUE(set_timer_slack(self(), 70000));
  EXPECT_EQ(timer_slack(self()), 70000U);
  const Pid pid{::getpid()};
  EXPECT_TRUE(set_core_dump_filter(pid, 0x7b));
  EXPECT_EQ(core_dump_filter(pid), 0x7bU);
  EXPECT_EQ(machine_check(pid, self()), "");
  ASSERT_EQ(::prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0L, 0L), 0);
  EXPECT_EQ(machine_check(pid, self()), "early");
  const unsigned long node = 1;
  if (::syscall(SYS_set_mempolicy, MPOL_BIND, &node, 8UL) != 0) GTEST_SKIP() << "no NUMA";
  EXPECT_EQ(memory_policy(pid, self()), "bind:0");
}

TEST(ThreadState, SlicesAreReadAsTheyWereSet) {
  const auto before = scheduling(self());
  ASSERT_TRUE(before);
  EXPECT_EQ(before->policy, static_cast<std::uint32_t>(SCHED_OTHER));
  if (before->slice == 0) GTEST_SKIP() << "no slices before Linux 6.12";
  const std::uint64_t other = before->slice == 20'000'000 ? 10'000'000 : 20'000'000;
  ASSERT_TRUE(set_slice(self(), other));
  EXPECT_EQ(scheduling(self())->slice, other);
  EXPECT_TRUE(set_slice(self(), before->slice));
}

TEST(ThreadState, TheLoadIsReadAsItWasSet) {
  if (!set_load(self(), 100, 700)) GTEST_SKIP() << "no CONFIG_UCLAMP_TASK";
  EXPECT_EQ(scheduling(self())->least_load, 100U);
  EXPECT_EQ(scheduling(self())->most_load, 700U);
  EXPECT_TRUE(set_load(self(), 0, kMostLoad));
}

TEST(ThreadState, AThreadThatHasChosenNoLoadHasTheWholeRange) {
  const auto now = scheduling(self());
  ASSERT_TRUE(now);
  EXPECT_EQ(now->least_load, 0U);
  EXPECT_EQ(now->most_load, kMostLoad);
}

TEST(ThreadState, TheNiceValueOfASessionIsReadAsItWasSet) {
  const Pid pid{::getpid()};
  if (::access("/proc/self/autogroup", F_OK) != 0) GTEST_SKIP() << "no CONFIG_SCHED_AUTOGROUP";
  (void)::setsid();  // not that of the user's shell
  ASSERT_TRUE(set_autogroup_nice(pid, 7));
  EXPECT_EQ(autogroup_nice(pid), 7);
  EXPECT_EQ(set_autogroup_nice(pid, 0).has_value(), ::geteuid() == 0);
}

}  // namespace
}  // namespace stasis::proc
