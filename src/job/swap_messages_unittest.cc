#include "job/swap_messages.h"

#include <fcntl.h>

#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "base/channel.h"

namespace stasis::job {
namespace {

Report report_of(int processes) {
  Report report;
  report.root = Pid{7};
  for (int i = 0; i < processes; ++i)
    report.processes.push_back({Pid{100 + i}, "worker", true, CudaState::kCheckpointed, 1U << 20});
  report.phases = {{"lock", 0.25, 1.5}};
  report.lost = {"process 7: a thing"};
  report.total = Seconds(2.5);
  report.downtime = Seconds(0.125);
  report.moved_before = MemoryPath::kDirect;
  report.lock_tries = 3;
  report.direct_bytes = std::uint64_t{5} << 40;
  return report;
}

TEST(SwapMessages, AReportArrivesWithAllItsProcessesAndTheTraceBesideIt) {
  auto ends = Channel::pair();
  ASSERT_TRUE(ends);
  for (const int processes : {1, 5000}) {
    UniqueFd trace(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
    ASSERT_TRUE(send(ends->first, SideResult{report_of(processes), {"a note"}}, std::move(trace)));
    auto message = ends->second.receive(0);
    ASSERT_TRUE(message && *message);
    const auto event = parse_side_event(**message);
    EXPECT_EQ((*message)->descriptors.size(), 1U) << "the trace";
    const auto* result = event ? std::get_if<SideResult>(&*event) : nullptr;
    const auto* back = result != nullptr ? std::get_if<Report>(&result->what) : nullptr;
    ASSERT_NE(back, nullptr);
    EXPECT_EQ(result->notes, std::vector<std::string>{"a note"});
    ASSERT_EQ(back->processes.size(), static_cast<std::size_t>(processes));
    EXPECT_EQ(back->processes.back().pid, Pid{99 + processes});
    EXPECT_EQ(back->processes.back().state, CudaState::kCheckpointed);
    EXPECT_EQ(back->phases, report_of(0).phases);
    EXPECT_EQ(back->total, Seconds(2.5));
    EXPECT_EQ(back->downtime, Seconds(0.125));
    EXPECT_EQ(back->moved_before, MemoryPath::kDirect);
    EXPECT_EQ(back->direct_bytes, std::uint64_t{5} << 40);
  }
}

TEST(SwapMessages, WhatSaysThatItIsInAFileAndHasNoneIsMalformed) {
  auto ends = Channel::pair();
  ASSERT_TRUE(ends);
  const std::string text = "in a file";
  ASSERT_TRUE(ends->first.send(std::as_bytes(std::span(text))));
  auto message = ends->second.receive(0);
  ASSERT_TRUE(message && *message);
  EXPECT_FALSE(parse_side_event(**message));
}

}  // namespace
}  // namespace stasis::job
