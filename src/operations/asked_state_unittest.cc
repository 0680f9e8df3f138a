#include "operations/asked_state.h"

#include <unistd.h>

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis {
namespace {

using ::testing::HasSubstr;

// Two live processes, of which the second is below the first.
std::vector<ProcessRecord> two_processes() {
  std::vector<ProcessRecord> processes(2);
  processes[0].pid = Pid{::getpid()};
  processes[1].pid = Pid{::getppid()};
  processes[1].parent = processes[0].pid;
  for (ProcessRecord& process : processes)
    process.kernel_state.emplace();
  return processes;
}

TEST(AskedState, OneThatWasStartedSinceHasWhatItInherits) {
  auto processes = two_processes();
  AskedStates answers;
  AskedState& answer = answers[processes[0].pid];
  answer.state.deny_new_code = 1;
  answer.state.lock_new = 2;      // not handed down by fork(2)
  answer.state.futex_slots = 64;  // nor this
  answer.lost = {"keys"};
  const auto lost = note_answers(answers, processes);
  EXPECT_EQ(processes[0].kernel_state->own.lock_new, 2);
  EXPECT_EQ(processes[1].kernel_state->own.deny_new_code, 1U);
  EXPECT_EQ(processes[1].kernel_state->own.lock_new, 0);
  EXPECT_EQ(processes[0].kernel_state->own.futex_slots, 64U);
  EXPECT_EQ(processes[1].kernel_state->own.futex_slots, std::nullopt);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_THAT(lost[0], HasSubstr("keys"));
}

TEST(AskedState, AFutexTableIsTheKernelsChoiceOrNot) {
  EXPECT_TRUE(may_be_kernels_choice(0, 1, 8));
  EXPECT_FALSE(may_be_kernels_choice(0, 2, 8));  // that of the machine
  EXPECT_TRUE(may_be_kernels_choice(16, 2, 8));
  EXPECT_TRUE(may_be_kernels_choice(16, 5, 8));
  EXPECT_FALSE(may_be_kernels_choice(16, 6, 8));
  EXPECT_TRUE(may_be_kernels_choice(32, 100, 8));
  EXPECT_TRUE(may_be_kernels_choice(32, 1, 8));  // it had more threads
  EXPECT_FALSE(may_be_kernels_choice(64, 100, 8));
  EXPECT_FALSE(may_be_kernels_choice(8, 1, 8));
  EXPECT_TRUE(may_be_kernels_choice(16, 50, 2));
}

TEST(AskedState, OneThatDidNotAnswerIsTold) {
  auto processes = two_processes();
  AskedStates answers;
  answers[processes[0].pid];
  answers[processes[1].pid].answered = false;
  const auto lost = note_answers(answers, processes);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_THAT(lost[0], HasSubstr("could not be asked"));
}

TEST(AskedState, SpeculationIsToldWhereItIsTheThreadsChoice) {
  const std::string before = "Seccomp:\t0\nSpeculation_Store_Bypass:\t";
  const std::string after = "\nSpeculationIndirectBranch:\t";
  EXPECT_FALSE(limits_speculation(before + "vulnerable" + after + "always enabled\n"));
  EXPECT_FALSE(limits_speculation(before + "thread vulnerable" + after + "conditional enabled\n"));
  EXPECT_FALSE(limits_speculation(before + "globally mitigated" + after + "always disabled\n"));
  EXPECT_TRUE(limits_speculation(before + "thread force mitigated" + after + "unknown\n"));
  EXPECT_TRUE(limits_speculation(before + "vulnerable" + after + "conditional disabled\n"));
}

TEST(AskedState, LockedMemoryThatIsNotThereIsCounted) {
  std::istringstream smaps(
      "7f0000000000-7f0040000000 rw-p 00000000 00:00 0\nSize:            1048576 kB\nRss:      4 "
      "kB\nSwap:                  8 kB\nVmFlags: rd wr mr mw me lo ac\n"
      // All there; not locked; of which nothing can be there.
      "7f0040000000-7f0040001000 rw-p 00000000 00:00 0\nSize: 4 kB\nRss: 4 kB\nVmFlags: rd wr lo\n"
      "7f0050000000-7f0050001000 rw-p 00000000 00:00 0\nSize: 4 kB\nRss: 0 kB\nVmFlags: rd wr mr\n"
      "7f0060000000-7f0060001000 ---p 00000000 00:00 0\nSize: 4 kB\nRss: 0 kB\nVmFlags: mr mw "
      "lo\n");
  std::vector<LockedRecord> locked;
  EXPECT_EQ(locked_and_not_there(smaps, locked), (1048576ULL - 12) << 10);
  EXPECT_EQ(locked.back(), (LockedRecord{0x7f0060000000, 4096}));
}

}  // namespace
}  // namespace stasis
