#include "checkpoint/process_tree.h"

#include <sys/prctl.h>

#include <barrier>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/own_helpers.h"
#include "driver/fake_driver.h"
#include "tests/fakes/child.h"

namespace stasis {
namespace {

using fakes::Child;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::UnorderedElementsAreArray;

// A process with three children that sleep. They end with it.
class Family {
 public:
  Family() : pipe_(make_pipe()), parent_([this] { live(); }) {
    for (Pid& pid : children_) {
      int number = 0;
      if (::read(pipe_.first, &number, sizeof number) != sizeof number) std::abort();
      pid = Pid{number};
    }
  }
  ~Family() {
    ::close(pipe_.first);
    ::close(pipe_.second);
  }
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;

  Pid root() const { return parent_.pid(); }
  const std::array<Pid, 3>& children() const { return children_; }

 private:
  static std::pair<int, int> make_pipe() {
    int ends[2];
    if (::pipe(ends) != 0) std::abort();
    return {ends[0], ends[1]};
  }
  void live() const {
    for (std::size_t i = 0; i < children_.size(); ++i) {
      if (::fork() != 0) continue;
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int number = ::getpid();
      (void)!::write(pipe_.second, &number, sizeof number);
      for (;;)
        ::pause();
    }
    for (;;)
      ::pause();
  }

  std::pair<int, int> pipe_;
  Child parent_;
  std::array<Pid, 3> children_;
};

// The root uses no CUDA, its children do.
class GroupTest : public testing::Test {
 protected:
  void SetUp() override {
    for (Pid pid : family_.children())
      driver_.add(pid);
  }
  ProcessTree open() {
    auto tree = ProcessTree::open(driver_, family_.root());
    EXPECT_TRUE(tree) << (tree ? "" : tree.error().message);
    return std::move(*tree);
  }
  std::vector<CudaState> states() const {
    std::vector<CudaState> out;
    for (Pid pid : family_.children())
      out.push_back(driver_.state_of(pid));
    return out;
  }
  Pid child(std::size_t i) const { return family_.children().at(i); }

  Family family_;
  FakeDriver driver_;
  Interrupt interrupt_;
  NoProgress quiet_;
};

// For a lock that is to succeed, on a machine with much to do.
constexpr milliseconds kTimeout{60'000};

constexpr CudaState kRunning = CudaState::kRunning;
constexpr CudaState kLocked = CudaState::kLocked;
constexpr CudaState kCheckpointed = CudaState::kCheckpointed;

TEST_F(GroupTest, FindsTheTreeAndWhoUsesCuda) {
  const ProcessTree tree = open();
  ASSERT_THAT(tree.members(), SizeIs(4));
  EXPECT_EQ(tree.root(), family_.root());
  EXPECT_FALSE(tree.members()[0].initial);
  EXPECT_EQ(tree.members()[1].initial, kRunning);
  EXPECT_EQ(tree.cuda_count(), 3U);
  EXPECT_THAT(driver_.actions(), IsEmpty());
}

// As of a job that has a tool that it starts suspend it: the tool and its helpers call the driver.
TEST_F(GroupTest, LeavesOutWhoAsksAndItsHelpers) {
  driver_.add(Pid{::getpid()});
  const auto found = [&](Pid root) {
    auto tree = ProcessTree::open(driver_, root);
    EXPECT_TRUE(tree) << (tree ? "" : tree.error().message);
    std::vector<Pid> cuda;
    for (const TreeMember& member : tree->members())
      if (member.initial) cuda.push_back(member.process.pid());
    return cuda;
  };
  EXPECT_THAT(found(Pid{::getppid()}), UnorderedElementsAreArray(family_.children()));
  add_own_helper(family_.root());
  EXPECT_THAT(found(Pid{::getppid()}), IsEmpty());
  remove_own_helper(family_.root());
  EXPECT_THAT(driver_.actions(), IsEmpty());
}

// A supervisor of its own children may, if it does not use CUDA itself.
TEST_F(GroupTest, IsNotOpenedByARootThatUsesCuda) {
  auto without = ProcessTree::open(driver_, Pid{::getpid()});
  ASSERT_TRUE(without) << without.error().message;
  EXPECT_EQ(without->cuda_count(), 3U);
  driver_.add(Pid{::getpid()});
  auto with = ProcessTree::open(driver_, Pid{::getpid()});
  ASSERT_FALSE(with);
  EXPECT_EQ(with.error().code, ErrorCode::kUsage);
}

// It must not come to be taken for one without CUDA, and left out of the dump.
TEST_F(GroupTest, CouldNotAskAboutOneStopsAll) {
  driver_.fail_always(Action::kGetState, child(1), 304);
  auto tree = ProcessTree::open(driver_, family_.root());
  ASSERT_FALSE(tree);
  EXPECT_EQ(tree.error().code, ErrorCode::kDriverError);
}

TEST_F(GroupTest, ThereAndBack) {
  ProcessTree tree = open();
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  EXPECT_THAT(states(), ElementsAre(kLocked, kLocked, kLocked));
  ASSERT_TRUE(tree.checkpoint(quiet_, interrupt_));
  EXPECT_THAT(states(), ElementsAre(kCheckpointed, kCheckpointed, kCheckpointed));
  ASSERT_TRUE(tree.restore({}, quiet_));
  EXPECT_THAT(states(), ElementsAre(kLocked, kLocked, kLocked));
  ASSERT_TRUE(tree.unlock());
  EXPECT_THAT(states(), ElementsAre(kRunning, kRunning, kRunning));
  EXPECT_EQ(driver_.illegal_calls(), 0);
}

// Ranks in a collective: no lock succeeds before all have been asked for.
TEST_F(GroupTest, LocksAllAtTheSameTime) {
  ProcessTree tree = open();
  std::mutex mutex;
  std::condition_variable all_here;
  std::set<Pid> asked;  // on a busy machine, one of them more than once
  bool together = true;
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action != Action::kLock) return;
    std::unique_lock lock(mutex);
    asked.insert(call.pid);
    all_here.notify_all();
    if (!all_here.wait_for(lock, std::chrono::seconds(60), [&] { return asked.size() >= 3; })) {
      together = false;
    }
  };
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  EXPECT_TRUE(together) << "one after the other, they would wait for each other for ever";
  EXPECT_THAT(asked, UnorderedElementsAreArray(family_.children()));
}

TEST_F(GroupTest, CheckpointsNoneBeforeAllAreLocked) {
  ProcessTree tree = open();
  int refusals = 3;
  driver_.fail_always(Action::kLock, child(2), 600);
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action == Action::kLock && call.pid == child(2) && --refusals == 0) driver_.forgive();
  };
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  EXPECT_THAT(states(), ElementsAre(kLocked, kLocked, kLocked));
  EXPECT_EQ(driver_.illegal_calls(), 0);
}

TEST_F(GroupTest, AlockThatTimesOutLeavesAllRunning) {
  ProcessTree tree = open();
  driver_.fail_always(Action::kLock, child(1), 600);
  auto done = tree.lock(milliseconds(60), interrupt_);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(done.error().message, HasSubstr("60 ms"));
  EXPECT_THAT(states(), ElementsAre(kRunning, kRunning, kRunning));
}

TEST_F(GroupTest, AnInterruptedLockLeavesAllRunning) {
  ProcessTree tree = open();
  driver_.fail_always(Action::kLock, child(1), 600);
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action == Action::kLock) interrupt_.request(2);
  };
  auto done = tree.lock(milliseconds(0), interrupt_);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kInterrupted);
  EXPECT_TRUE(tree.roll_back());
  EXPECT_THAT(states(), ElementsAre(kRunning, kRunning, kRunning));
}

TEST_F(GroupTest, WhatOthersHadFrozenStaysAsItWas) {
  driver_.add(child(0), kLocked);
  driver_.add(child(1), kCheckpointed);
  {
    ProcessTree tree = open();
    ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
    EXPECT_THAT(states(), ElementsAre(kLocked, kCheckpointed, kLocked));
    ASSERT_TRUE(tree.checkpoint(quiet_, interrupt_));
    EXPECT_THAT(states(), ElementsAre(kCheckpointed, kCheckpointed, kCheckpointed));
    EXPECT_TRUE(tree.roll_back());
  }
  EXPECT_THAT(states(), ElementsAre(kLocked, kCheckpointed, kRunning));
}

TEST_F(GroupTest, FindsThoseThatBeginToUseCudaMeanwhile) {
  driver_.remove(child(2));
  ProcessTree tree = open();
  EXPECT_EQ(tree.cuda_count(), 2U);
  int told = 0;
  tree.on_members_changed = [&](const std::vector<TreeMember>&) -> Result<void> {
    ++told;
    return {};
  };
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action == Action::kLock && told == 0) driver_.add(child(2));
  };
  // Only at the first lock: afterwards the state is the driver's.
  const auto first_only = driver_.on_call;
  std::once_flag once;
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action == Action::kLock) std::call_once(once, first_only, call);
  };
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  EXPECT_THAT(states(), ElementsAre(kLocked, kLocked, kLocked));
  EXPECT_EQ(tree.cuda_count(), 3U);
  EXPECT_EQ(told, 1) << "the journal must know them before they are touched";
}

// One that comes during the checkpoint is locked alone, however long that takes.
TEST_F(GroupTest, WhatIsCheckpointedIsLeftAloneByASecondLock) {
  driver_.remove(child(2));
  ProcessTree tree = open();
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  ASSERT_TRUE(tree.checkpoint(quiet_, interrupt_));
  driver_.add(child(2));
  auto changed = tree.probe_again();
  ASSERT_TRUE(changed);
  ASSERT_TRUE(*changed);
  driver_.forget_calls();
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action == Action::kLock) std::this_thread::sleep_for(milliseconds(300));
  };
  auto done = tree.lock(kTimeout, interrupt_);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_THAT(driver_.actions(), ElementsAre(Action::kLock));
  EXPECT_THAT(states(), ElementsAre(kCheckpointed, kCheckpointed, kLocked));
}

TEST_F(GroupTest, NoProcessIsTouchedWhereTheJournalCannotBeWritten) {
  driver_.remove(child(2));
  ProcessTree tree = open();
  tree.on_members_changed = [&](const std::vector<TreeMember>&) -> Result<void> {
    return fail(ErrorCode::kNoSpace, "no space for the journal");
  };
  driver_.add(child(2));
  auto done = tree.lock(kTimeout, interrupt_);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kNoSpace);
  EXPECT_TRUE(tree.roll_back());
  EXPECT_THAT(states(), ElementsAre(kRunning, kRunning, kRunning));
}

TEST_F(GroupTest, RefusesBeforeTheCheckpointWhatDoesNotFitIntoTheHost) {
  ProcessTree tree = open();
  driver_.use[child(0)] = {{GpuUuid{}, std::uint64_t{1} << 60}};
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  auto done = tree.checkpoint(quiet_, interrupt_);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kOutOfHostMemory);
  EXPECT_THAT(done.error().message, HasSubstr("1024 PiB"));
  EXPECT_THAT(states(), ElementsAre(kLocked, kLocked, kLocked));
  EXPECT_TRUE(tree.roll_back());
  EXPECT_THAT(states(), ElementsAre(kRunning, kRunning, kRunning));
}

TEST_F(GroupTest, CountsTheGpuMemoryOfItsOwnProcessesOnly) {
  ProcessTree tree = open();
  driver_.use[child(0)] = {{GpuUuid{}, 1000}};
  driver_.use[child(1)] = {{GpuUuid{}, 200}};
  driver_.use[Pid{1}] = {{GpuUuid{}, 77}};
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  ASSERT_TRUE(tree.checkpoint(quiet_, interrupt_));
  EXPECT_EQ(tree.gpu_bytes(), 1200U);
}

TEST_F(GroupTest, WhatProcessesShareCountsOnceWhereTheGpuHasLess) {
  GpuUuid other;
  other.bytes[0] = 1;
  driver_.all_gpus = {{GpuUuid{}, "shared", "", 4000, 900}, {other, "alone", "", 4000, 50}};
  ProcessTree tree = open();
  driver_.use[child(0)] = {{GpuUuid{}, 1000}};
  driver_.use[child(1)] = {{GpuUuid{}, 200}, {other, 100}};
  driver_.use[Pid{1}] = {{GpuUuid{}, 77}};
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  ASSERT_TRUE(tree.checkpoint(quiet_, interrupt_));
  const auto bytes_of = [&](Pid pid) {
    std::vector<std::uint64_t> bytes;
    for (const GpuUse& use : tree.gpu_use().at(pid))
      bytes.push_back(use.bytes);
    return bytes;
  };
  EXPECT_THAT(bytes_of(child(0)), ElementsAre(750));
  // Of one process alone the driver is believed.
  EXPECT_THAT(bytes_of(child(1)), ElementsAre(150, 100));
}

TEST_F(GroupTest, OneThatRefusesTheCheckpointIsRolledBackWithAll) {
  ProcessTree tree = open();
  driver_.fail_always(Action::kCheckpoint, child(1), 801);
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  auto done = tree.checkpoint(quiet_, interrupt_);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kNotSupported);
  EXPECT_THAT(done.error().message, HasSubstr(std::to_string(child(1).value)));
  EXPECT_TRUE(tree.roll_back());
  EXPECT_THAT(states(), ElementsAre(kRunning, kRunning, kRunning));
}

TEST_F(GroupTest, RollBackMendsWhatItCanAndNamesTheRest) {
  ProcessTree tree = open();
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  ASSERT_TRUE(tree.checkpoint(quiet_, interrupt_));
  driver_.fail_always(Action::kRestore, child(1), 2);
  auto done = tree.roll_back();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kNotRolledBack);
  EXPECT_THAT(done.error().message, HasSubstr(fmt::format("process {} is", child(1).value)));
  EXPECT_THAT(done.error().remedy, HasSubstr("stasis recover"));
  EXPECT_THAT(states(), ElementsAre(kRunning, kCheckpointed, kRunning));
}

TEST_F(GroupTest, TheDestructorRollsBackUnlessDismissed) {
  {
    ProcessTree tree = open();
    ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  }
  EXPECT_THAT(states(), ElementsAre(kRunning, kRunning, kRunning));
  {
    ProcessTree tree = open();
    ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
    tree.dismiss();
  }
  EXPECT_THAT(states(), ElementsAre(kLocked, kLocked, kLocked));
}

TEST_F(GroupTest, AmovedOneIsNotRolledBackTwice) {
  ProcessTree tree = open();
  ASSERT_TRUE(tree.lock(kTimeout, interrupt_));
  {
    ProcessTree moved = std::move(tree);
    moved.dismiss();
  }
  EXPECT_THAT(states(), ElementsAre(kLocked, kLocked, kLocked));
}

// Whichever of the driver's calls fails: after the roll-back each process is as it was, or is
// named.
TEST_F(GroupTest, AnyFailureIsRolledBackOrNamed) {
  int failed = 0;
  for (std::size_t nth = 1; nth <= 40; ++nth) {
    for (Pid pid : family_.children())
      driver_.add(pid);
    driver_.forgive();
    driver_.forget_calls();
    auto tree = ProcessTree::open(driver_, family_.root());
    ASSERT_TRUE(tree);
    driver_.fail_nth(nth, 304);
    auto done = tree->lock(milliseconds(2000), interrupt_);
    if (done) done = tree->checkpoint(quiet_, interrupt_);
    auto undone = tree->roll_back();
    EXPECT_EQ(driver_.illegal_calls(), 0) << nth;
    if (!done || !undone) ++failed;
    for (Pid pid : family_.children()) {
      if (driver_.state_of(pid) == kRunning) continue;
      ASSERT_FALSE(undone) << nth;
      EXPECT_THAT(undone.error().message, HasSubstr(std::to_string(pid.value)));
    }
  }
  EXPECT_GT(failed, 10) << "the failures must hit, or this proves nothing";
}

}  // namespace
}  // namespace stasis
