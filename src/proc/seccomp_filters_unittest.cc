#include "proc/seccomp_filters.h"

#include <sys/syscall.h>

#include <cstddef>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

sock_filter load(std::uint32_t offset) { return BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset); }
sock_filter answer(std::uint32_t action) { return BPF_STMT(BPF_RET | BPF_K, action); }

TEST(SeccompFilter, OneThatEndsAProgramForACallDoes) {
  const std::vector<sock_filter> program{
      load(offsetof(seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 1),
      answer(SECCOMP_RET_KILL_PROCESS), answer(SECCOMP_RET_ALLOW)};
  EXPECT_EQ(run_filter(program, call_of(SYS_clone)), SECCOMP_RET_KILL_PROCESS);
  EXPECT_EQ(run_filter(program, call_of(SYS_mmap)), SECCOMP_RET_ALLOW);
}

// As Docker's filter looks at the flags of clone(2).
TEST(SeccompFilter, ArgumentsAreLookedAt) {
  const std::vector<sock_filter> program{load(offsetof(seccomp_data, args)),
                                         BPF_STMT(BPF_ALU | BPF_AND | BPF_K, 0x7e020000),
                                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 1),
                                         answer(SECCOMP_RET_ALLOW), answer(SECCOMP_RET_ERRNO | 1)};
  const std::uint64_t threads[] = {0x3d0f00};
  const std::uint64_t users[] = {0x10000000};
  EXPECT_EQ(run_filter(program, call_of(SYS_clone, threads)), SECCOMP_RET_ALLOW);
  EXPECT_EQ(run_filter(program, call_of(SYS_clone, users)), SECCOMP_RET_ERRNO | 1);
}

TEST(SeccompFilter, RegistersAndMemoryAreKept) {
  const std::vector<sock_filter> program{
      BPF_STMT(BPF_LD | BPF_IMM, 5),          BPF_STMT(BPF_ST, 3),
      BPF_STMT(BPF_LDX | BPF_W | BPF_MEM, 3), BPF_STMT(BPF_LD | BPF_IMM, 2),
      BPF_STMT(BPF_ALU | BPF_MUL | BPF_X, 0), BPF_STMT(BPF_MISC | BPF_TAX, 0),
      BPF_STMT(BPF_MISC | BPF_TXA, 0),        BPF_STMT(BPF_RET | BPF_A, 0)};
  EXPECT_EQ(run_filter(program, call_of(0)), 10U);
}

TEST(SeccompFilter, WhatIsNotKnownIsNotAnswered) {
  EXPECT_FALSE(run_filter({}, call_of(0)));
  const std::vector<sock_filter> asks_where{load(offsetof(seccomp_data, instruction_pointer)),
                                            answer(SECCOMP_RET_ALLOW)};
  EXPECT_FALSE(run_filter(asks_where, call_of(0)));
  const std::vector<sock_filter> leads_out{BPF_STMT(BPF_JMP | BPF_JA, 7),
                                           answer(SECCOMP_RET_ALLOW)};
  EXPECT_FALSE(run_filter(leads_out, call_of(0)));
  const std::vector<sock_filter> divides{BPF_STMT(BPF_ALU | BPF_DIV | BPF_K, 0),
                                         answer(SECCOMP_RET_ALLOW)};
  EXPECT_FALSE(run_filter(divides, call_of(0)));
}

TEST(SeccompFilter, AnyProgramEnds) {
  std::mt19937 random(3);
  for (int round = 0; round < 20000; ++round) {
    std::vector<sock_filter> program(random() % 20);
    for (sock_filter& one : program)
      one = {static_cast<std::uint16_t>(random() % 256), static_cast<std::uint8_t>(random() % 8),
             static_cast<std::uint8_t>(random() % 8), static_cast<std::uint32_t>(random() % 80)};
    (void)run_filter(program, call_of(SYS_mmap));
  }
}

}  // namespace
}  // namespace stasis::proc
