// The verbs on a driver in memory: every failure at every step, and what they leave.
#include "operations/operations.h"

#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/journal.h"
#include "checkpoint/process.h"
#include "driver/fake_driver.h"
#include "operations/operations.h"
#include "operations/restore_checks.h"
#include "tests/fakes/child.h"

namespace stasis {
namespace {

using fakes::Child;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

GpuUuid gpu(int number) {
  return *GpuUuid::parse(fmt::format("GPU-00000000-0000-0000-0000-{:012}", number));
}

class OperationsTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-operations-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
    ::setenv("STASIS_STATE_DIR", dir_.c_str(), 1);
    driver_.all_gpus = {{gpu(0), "A", "0000:01:00.0", 1000, 0},
                        {gpu(1), "A", "0000:02:00.0", 1000, 0}};
    driver_.add(child_.pid());
    driver_.use[child_.pid()] = {{gpu(0), 600}};
  }
  void TearDown() override {
    ::unsetenv("STASIS_STATE_DIR");
    std::filesystem::remove_all(dir_);
  }
  Environment env() { return {driver_, *interrupt_, progress_, {}}; }
  Pid pid() const { return child_.pid(); }
  std::size_t records() const {
    auto entries = read_journal();
    return entries ? entries->size() : 99;
  }
  JournalTarget target(CudaState initial = CudaState::kRunning) {
    auto process = Process::open(driver_, pid());
    EXPECT_TRUE(process);
    return {pid(), process->info().start_ticks, initial};
  }
  // An operation that was killed with the process in the driver's present state.
  void leave_behind(Operation operation, const JournalTarget& what) {
    auto journal = Journal::begin({operation, pid(), {}, {}, {what}});
    ASSERT_TRUE(journal);
  }

  const Child child_;
  FakeDriver driver_;
  std::unique_ptr<Interrupt> interrupt_ = std::make_unique<Interrupt>();
  NoProgress progress_;
  std::filesystem::path dir_;
};

TEST_F(OperationsTest, SuspendAndResume) {
  auto suspended = suspend(env(), pid(), {});
  ASSERT_TRUE(suspended) << suspended.error().message;
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kCheckpointed);
  EXPECT_EQ(suspended->processes.at(0).gpu_bytes, 600U);
  EXPECT_EQ(records(), 0U);
  ASSERT_TRUE(resume(env(), pid(), {}));
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kRunning);
  EXPECT_EQ(records(), 0U);
  EXPECT_EQ(driver_.illegal_calls(), 0);
}

// Whichever call the driver refuses, and however: done, or as before, or named and recoverable.
TEST_F(OperationsTest, EveryFailureAtEveryCallIsRolledBackOrNamed) {
  for (const bool suspending : {true, false}) {
    const CudaState before = suspending ? CudaState::kRunning : CudaState::kCheckpointed;
    const CudaState after = suspending ? CudaState::kCheckpointed : CudaState::kRunning;
    for (const int code : {1, 2, 304, 401, 801, 999}) {
      for (std::size_t nth = 1; nth < 30; ++nth) {
        driver_.add(pid(), before);
        driver_.forget_calls();
        driver_.fail_nth(nth, code);
        auto done = suspending ? suspend(env(), pid(), {}) : resume(env(), pid(), {});
        driver_.forgive();
        const bool failed = driver_.calls().size() >= nth;
        const auto where = fmt::format("code {} at call {}: {}", code, nth,
                                       done ? "done" : done.error().to_string());
        EXPECT_EQ(driver_.illegal_calls(), 0) << where;
        if (done) {
          EXPECT_EQ(driver_.state_of(pid()), after) << where;
        } else if (done.error().code == ErrorCode::kNotRolledBack) {
          EXPECT_THAT(done.error().message, HasSubstr(std::to_string(pid().value)));
          EXPECT_EQ(records(), 1U) << where;
          auto recovered = recover_all(env());
          ASSERT_TRUE(recovered);
          EXPECT_EQ(driver_.state_of(pid()), before) << where;
        } else {
          EXPECT_EQ(driver_.state_of(pid()), before) << where;
        }
        EXPECT_EQ(records(), 0U) << where;
        if (!failed) break;  // there are not so many calls
        EXPECT_LT(nth, 29U);
      }
    }
  }
}

TEST_F(OperationsTest, AnInterruptAtEveryCallIsRolledBack) {
  for (std::size_t nth = 1; nth < 20; ++nth) {
    driver_.add(pid());
    interrupt_ = std::make_unique<Interrupt>();
    std::size_t calls = 0;
    driver_.on_call = [&](const FakeDriver::Call&) {
      if (++calls == nth) interrupt_->request(SIGINT);
    };
    auto done = suspend(env(), pid(), {});
    driver_.on_call = nullptr;
    if (done) {
      EXPECT_EQ(driver_.state_of(pid()), CudaState::kCheckpointed) << nth;
    } else {
      EXPECT_EQ(done.error().code, ErrorCode::kInterrupted) << done.error().message;
      EXPECT_THAT(done.error().to_string(), HasSubstr("rolled back"));
      EXPECT_EQ(driver_.state_of(pid()), CudaState::kRunning) << nth;
    }
    EXPECT_EQ(records(), 0U);
  }
}

TEST_F(OperationsTest, AprocessThatTheDriverGaveUpIsRefusedAtOnce) {
  driver_.add(pid(), CudaState::kFailed);
  EXPECT_EQ(suspend(env(), pid(), {}).error().code, ErrorCode::kFailedState);
  EXPECT_EQ(resume(env(), pid(), {}).error().code, ErrorCode::kFailedState);
  EXPECT_THAT(driver_.actions(), IsEmpty());
  EXPECT_EQ(records(), 0U);
}

TEST_F(OperationsTest, AfailureAfterAkilledSuspendLeadsBackToRunning) {
  driver_.add(pid(), CudaState::kLocked);
  leave_behind(Operation::kSuspend, target());
  driver_.fail_always(Action::kCheckpoint, 999);
  auto done = suspend(env(), pid(), {});
  ASSERT_FALSE(done);
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kRunning);
  EXPECT_EQ(records(), 0U);
}

TEST_F(OperationsTest, AsuspendAfterAkilledOneIsDone) {
  for (const CudaState left : {CudaState::kRunning, CudaState::kLocked, CudaState::kCheckpointed}) {
    driver_.add(pid(), left);
    leave_behind(Operation::kDump, target());
    ASSERT_TRUE(suspend(env(), pid(), {}));
    EXPECT_EQ(driver_.state_of(pid()), CudaState::kCheckpointed);
    EXPECT_EQ(records(), 0U);
    ASSERT_TRUE(resume(env(), pid(), {}));
  }
}

// Between our first look and our entry in the journal another operation came to its end.
TEST_F(OperationsTest, TheStateIsAskedForOnceTheTreeIsOurs) {
  driver_.add(pid(), CudaState::kLocked);
  std::size_t calls = 0;
  driver_.on_call = [&](const FakeDriver::Call&) {
    if (++calls == 2) driver_.add(pid(), CudaState::kRunning);
  };
  driver_.fail_always(Action::kCheckpoint, 999);
  ASSERT_FALSE(suspend(env(), pid(), {}));
  driver_.on_call = nullptr;
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kRunning) << "not the other's middle";
}

TEST_F(OperationsTest, BusyWhileAnotherHasIt) {
  auto held = Journal::begin({Operation::kDump, pid(), {}, {}, {target()}});
  ASSERT_TRUE(held);
  EXPECT_EQ(suspend(env(), pid(), {}).error().code, ErrorCode::kBusy);
  EXPECT_EQ(resume(env(), pid(), {}).error().code, ErrorCode::kBusy);
  EXPECT_EQ(recover(env(), pid()).error().code, ErrorCode::kBusy);
  auto all = recover_all(env());
  ASSERT_TRUE(all);
  EXPECT_THAT(*all, IsEmpty());
  EXPECT_THAT(driver_.actions(), IsEmpty());
}

TEST_F(OperationsTest, RecoverAllBringsBackWhatWasBefore) {
  for (const CudaState before :
       {CudaState::kRunning, CudaState::kLocked, CudaState::kCheckpointed}) {
    driver_.add(pid(), CudaState::kCheckpointed);
    leave_behind(Operation::kDump, target(before));
    auto all = recover_all(env());
    ASSERT_TRUE(all);
    ASSERT_THAT(*all, SizeIs(1));
    EXPECT_FALSE(all->at(0).error);
    EXPECT_EQ(driver_.state_of(pid()), before);
    EXPECT_EQ(records(), 0U);
  }
}

// Of a newer version: it is rolled back, and what may be its half image stays.
TEST_F(OperationsTest, AnOperationThatThisVersionDoesNotKnowIsRolledBack) {
  ASSERT_TRUE(journal_directory());
  const auto half = dir_ / "image.partial-0123456789abcdef";
  for (const std::string name : {"hibernate", "dump"}) {
    driver_.add(pid(), CudaState::kCheckpointed);
    std::filesystem::create_directory(half);
    std::ofstream(dir_ / fmt::format("{}{}.json", pid().value, pid_namespace_mark()))
        << fmt::format(
               R"({{"operation":"{0}","root":{1},"owner":1,"image":"{2}/image",
                    "targets":[{{"pid":{1},"start_ticks":{3},"initial":"running"}}]}})",
               name, pid().value, dir_.string(), target().start_ticks);
    const auto all = recover_all(env());
    ASSERT_TRUE(all);
    ASSERT_THAT(*all, SizeIs(1));
    EXPECT_FALSE(all->at(0).error);
    EXPECT_EQ(all->at(0).operation.name(), name);
    EXPECT_EQ(driver_.state_of(pid()), CudaState::kRunning);
    EXPECT_EQ(records(), 0U);
    EXPECT_EQ(std::filesystem::exists(half), name != "dump");
  }
}

TEST_F(OperationsTest, WhatCouldNotBeRecoveredStaysInTheJournal) {
  driver_.add(pid(), CudaState::kCheckpointed);
  leave_behind(Operation::kSuspend, target());
  driver_.fail_always(Action::kRestore, 2);
  auto all = recover_all(env());
  ASSERT_TRUE(all);
  ASSERT_TRUE(all->at(0).error);
  EXPECT_EQ(all->at(0).error->code, ErrorCode::kOutOfGpuMemory);
  EXPECT_EQ(records(), 1U);
  driver_.forgive();
  ASSERT_TRUE(recover(env(), pid()));
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kRunning);
  EXPECT_EQ(records(), 0U);
}

// Another process with the number of a target that has ended is not touched.
TEST_F(OperationsTest, AnumberThatMeansAnotherProcessIsLeftAlone) {
  driver_.add(pid(), CudaState::kCheckpointed);
  JournalTarget other = target();
  ++other.start_ticks;
  leave_behind(Operation::kSuspend, other);
  auto all = recover_all(env());
  ASSERT_TRUE(all);
  EXPECT_THAT(all->at(0).processes, IsEmpty());
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kCheckpointed);
  EXPECT_EQ(records(), 0U);
}

TEST_F(OperationsTest, ResumeLooksForRoomFirst) {
  ASSERT_TRUE(suspend(env(), pid(), {}));
  driver_.all_gpus[0].memory_used = 500;
  driver_.forget_calls();
  auto done = resume(env(), pid(), {});
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kOutOfGpuMemory);
  EXPECT_THAT(driver_.actions(), IsEmpty());
  EXPECT_EQ(records(), 0U);
  // The other GPU has room.
  ResumeOptions there;
  there.gpu_map = {{"0", "1"}};
  ASSERT_TRUE(resume(env(), pid(), there));
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kRunning);
}

TEST_F(OperationsTest, AmapIsCompletedForTheDriver) {
  ASSERT_TRUE(suspend(env(), pid(), {}));
  driver_.forget_calls();
  ResumeOptions there;
  there.gpu_map = {{"0", "1"}};
  ASSERT_TRUE(resume(env(), pid(), there));
  std::vector<GpuPair> pairs;
  for (const auto& call : driver_.calls()) {
    if (call.action == Action::kRestore) pairs = call.pairs;
  }
  EXPECT_THAT(pairs,
              testing::UnorderedElementsAre(GpuPair{gpu(0), gpu(1)}, GpuPair{gpu(1), gpu(0)}));
}

TEST_F(OperationsTest, NotCudaAndNotThere) {
  const Child plain;
  EXPECT_EQ(suspend(env(), plain.pid(), {}).error().code, ErrorCode::kNotCuda);
  EXPECT_EQ(recover(env(), plain.pid()).error().code, ErrorCode::kNotCuda);
  plain.become_zombie();
  EXPECT_EQ(suspend(env(), plain.pid(), {}).error().code, ErrorCode::kZombie);
  EXPECT_EQ(suspend(env(), Pid{2147483647}, {}).error().code, ErrorCode::kNoSuchProcess);
  EXPECT_EQ(suspend(env(), Pid{0}, {}).error().code, ErrorCode::kUsage);
  EXPECT_TRUE(std::filesystem::is_empty(dir_));
}

TEST(RestoreChecks, ContentThatGoesStraightToTheGpuNeedsNoHostMemory) {
  constexpr std::uint64_t kMuch = std::uint64_t{1} << 50;
  Manifest manifest;
  manifest.processes.push_back({Pid{7}, {}, {}, true, {}, {{"GPU-", kMuch}}});
  EXPECT_EQ(check_host_memory(manifest, 0, false).error().code, ErrorCode::kOutOfHostMemory);
  EXPECT_EQ(check_host_memory(manifest, kMuch / 2, false).error().code,
            ErrorCode::kOutOfHostMemory);
  EXPECT_TRUE(check_host_memory(manifest, kMuch, false));
  EXPECT_EQ(check_host_memory(manifest, kMuch, false, 0, kMuch).error().code,
            ErrorCode::kOutOfHostMemory);
}

}  // namespace
}  // namespace stasis
