#include "checkpoint/process.h"

#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "driver/fake_driver.h"
#include "proc/parking.h"
#include "tests/fakes/child.h"
#include "tests/fakes/parked_threads.h"

namespace stasis {
namespace {

using fakes::Child;
using fakes::count_parked_threads;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::array kActions = {Action::kLock, Action::kCheckpoint, Action::kRestore,
                                 Action::kUnlock};
constexpr std::array kStates = {CudaState::kRunning, CudaState::kLocked, CudaState::kCheckpointed};

Result<void> perform(Process& process, Action action) {
  switch (action) {
    case Action::kLock:
      return process.lock(milliseconds(100));
    case Action::kCheckpoint:
      return process.checkpoint();
    case Action::kRestore:
      return process.restore();
    default:
      return process.unlock();
  }
}

// The state machine as the driver's manual draws it.
std::optional<CudaState> next(CudaState state, Action action) {
  if (state == CudaState::kRunning && action == Action::kLock) return CudaState::kLocked;
  if (state == CudaState::kLocked && action == Action::kCheckpoint) return CudaState::kCheckpointed;
  if (state == CudaState::kLocked && action == Action::kUnlock) return CudaState::kRunning;
  if (state == CudaState::kCheckpointed && action == Action::kRestore) return CudaState::kLocked;
  return std::nullopt;
}

class ProcessTest : public testing::Test {
 protected:
  Process open(CudaState state = CudaState::kRunning) {
    driver_.add(child_.pid(), state);
    auto process = Process::open(driver_, child_.pid());
    EXPECT_TRUE(process) << (process ? "" : process.error().message);
    return std::move(*process);
  }

  Child child_;
  FakeDriver driver_;
};

TEST_F(ProcessTest, OpensWithoutAskingTheDriver) {
  const Process process = open();
  EXPECT_EQ(process.pid(), child_.pid());
  EXPECT_TRUE(process.alive());
  EXPECT_TRUE(driver_.calls().empty());
}

TEST_F(ProcessTest, RefusesWhatIsNoLivingProcess) {
  EXPECT_EQ(Process::open(driver_, Pid{0}).error().code, ErrorCode::kUsage);
  EXPECT_EQ(Process::open(driver_, Pid{-5}).error().code, ErrorCode::kUsage);
  EXPECT_EQ(Process::open(driver_, Pid{0x7ffffffe}).error().code, ErrorCode::kNoSuchProcess);
  child_.become_zombie();
  auto zombie = Process::open(driver_, child_.pid());
  ASSERT_FALSE(zombie);
  EXPECT_EQ(zombie.error().code, ErrorCode::kZombie);
}

TEST_F(ProcessTest, WithoutCudaIsAvalueAndNotAnError) {
  auto process = Process::open(driver_, child_.pid());
  ASSERT_TRUE(process);
  auto state = process->cuda_state();
  ASSERT_TRUE(state);
  EXPECT_FALSE(state->has_value());
  // Where CUDA is needed, it is an error.
  EXPECT_EQ(process->state().error().code, ErrorCode::kNotCuda);
  for (Action action : kActions)
    EXPECT_EQ(perform(*process, action).error().code, ErrorCode::kNotCuda);
  EXPECT_THAT(driver_.actions(), ElementsAre());
}

TEST_F(ProcessTest, CouldNotAskIsNeverWithoutCuda) {
  const Process process = open();
  driver_.fail_always(Action::kGetState, 304);
  auto state = process.cuda_state();
  ASSERT_FALSE(state);
  EXPECT_EQ(state.error().code, ErrorCode::kDriverError);
  ASSERT_TRUE(state.error().driver);
  EXPECT_EQ(state.error().driver->number, 304);
}

TEST_F(ProcessTest, EveryIllegalStepIsRefusedBeforeTheDriverIsAsked) {
  for (CudaState state : kStates) {
    for (Action action : kActions) {
      if (next(state, action)) continue;
      Process process = open(state);
      auto done = perform(process, action);
      ASSERT_FALSE(done);
      EXPECT_EQ(done.error().code, ErrorCode::kWrongState);
      EXPECT_THAT(done.error().message, HasSubstr(std::string(cuda_state_name(state))));
      ASSERT_TRUE(done.error().driver);
      EXPECT_EQ(done.error().driver->text,
                "the operation cannot be performed in the present state");
      EXPECT_EQ(driver_.state_of(child_.pid()), state);
    }
  }
  EXPECT_THAT(driver_.actions(), ElementsAre());
}

TEST_F(ProcessTest, AfailedProcessIsRefusedWithItsOwnCode) {
  Process process = open(CudaState::kFailed);
  for (Action action : kActions)
    EXPECT_EQ(perform(process, action).error().code, ErrorCode::kFailedState);
  EXPECT_EQ(process.bring_to(CudaState::kRunning).error().code, ErrorCode::kFailedState);
  EXPECT_THAT(driver_.actions(), ElementsAre());
}

TEST_F(ProcessTest, AlockThatTimesOutLeavesItRunning) {
  Process process = open();
  driver_.fail_always(Action::kLock, 600);
  auto done = process.lock(milliseconds(7));
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kTimeout);
  EXPECT_EQ(driver_.calls().back().timeout, milliseconds(7));
}

TEST_F(ProcessTest, AlockWithoutAlimitIsTriedEverLonger) {
  Process process = open();
  const Interrupt interrupt;
  driver_.fail_nth(2, 600);  // the first is the question for the state
  driver_.fail_nth(3, 600);
  ASSERT_TRUE(process.lock_unless(milliseconds(0), interrupt));
  std::vector<milliseconds> tries;
  for (const auto& call : driver_.calls())
    if (call.action == Action::kLock) tries.push_back(call.timeout);
  EXPECT_THAT(tries, ElementsAre(milliseconds(500), milliseconds(1000), milliseconds(2000)));
  EXPECT_EQ(driver_.state_of(child_.pid()), CudaState::kLocked);
}

TEST_F(ProcessTest, AlockIsGivenUpBetweenTwoTries) {
  Process process = open();
  Interrupt interrupt;
  driver_.fail_always(Action::kLock, 600);
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action == Action::kLock && call.timeout == milliseconds(1000)) interrupt.request(2);
  };
  EXPECT_EQ(process.lock_unless(milliseconds(0), interrupt).error().code, ErrorCode::kInterrupted);
  EXPECT_EQ(driver_.state_of(child_.pid()), CudaState::kRunning);
  driver_.forget_calls();
  EXPECT_EQ(process.lock_unless(milliseconds(0), interrupt).error().code, ErrorCode::kInterrupted);
  EXPECT_TRUE(driver_.calls().empty()) << "it was asked to stop before";
}

TEST_F(ProcessTest, AlockThatWonAgainstTheRequestToStopIsUndone) {
  Process process = open();
  Interrupt interrupt;
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action == Action::kLock) interrupt.request(2);
  };
  EXPECT_EQ(process.lock_unless(milliseconds(100), interrupt).error().code,
            ErrorCode::kInterrupted);
  EXPECT_EQ(driver_.state_of(child_.pid()), CudaState::kRunning);
  EXPECT_THAT(driver_.actions(), ElementsAre(Action::kLock, Action::kUnlock));
}

TEST_F(ProcessTest, AlockThatTheDriverRefusesIsNotUndone) {
  Process process = open();
  const Interrupt interrupt;
  driver_.fail_always(Action::kLock, 401);  // another tool was quicker
  EXPECT_EQ(process.lock_unless(milliseconds(100), interrupt).error().code, ErrorCode::kWrongState);
  EXPECT_THAT(driver_.actions(), ElementsAre(Action::kLock));
  driver_.add(child_.pid(), CudaState::kLocked);
  EXPECT_EQ(process.lock_unless(milliseconds(100), interrupt).error().code, ErrorCode::kWrongState);
  EXPECT_EQ(driver_.state_of(child_.pid()), CudaState::kLocked);
}

TEST_F(ProcessTest, AmapNeedsAdriverThatTakesOne) {
  Process process = open(CudaState::kCheckpointed);
  driver_.driver_info.has_device_map = false;
  driver_.driver_info.cuda_version = 12080;
  const std::vector<GpuPair> pairs(1);
  auto done = process.restore(pairs);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kDeviceMapUnsupported);
  EXPECT_THAT(done.error().message, HasSubstr("CUDA 12.8"));
  EXPECT_THAT(driver_.actions(), ElementsAre());
  EXPECT_TRUE(process.restore());
}

TEST_F(ProcessTest, OneThatDiesMeanwhileHasGone) {
  Process process = open();
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action != Action::kLock) return;
    child_.become_zombie();
    driver_.remove(child_.pid());
  };
  auto done = process.lock(milliseconds(10));
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kProcessGone);
  EXPECT_THAT(done.error().message, HasSubstr("during lock"));
}

TEST_F(ProcessTest, OneWhoseFirstThreadEndsMeanwhileHasNotGone) {
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const Child child([&] {
    std::thread([] { ::pause(); }).detach();
    char told = 0;
    (void)!::read(pipe[0], &told, 1);
    ::syscall(SYS_exit, 0);
  });
  driver_.add(child.pid(), CudaState::kRunning);
  auto process = Process::open(driver_, child.pid());
  ASSERT_TRUE(process) << process.error().message;
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action != Action::kLock) return;
    EXPECT_EQ(::write(pipe[1], "x", 1), 1);
    while (!proc::ProcFs().process(child.pid())->has_ended())
      std::this_thread::yield();
    driver_.remove(child.pid());
  };
  const auto done = process->lock(milliseconds(10));
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kNotSupported) << done.error().message;
  EXPECT_THAT(done.error().message, HasSubstr("the first thread of process"));
  ::close(pipe[0]);
  ::close(pipe[1]);
}

// A number that the driver still knows may belong to another process by now.
TEST_F(ProcessTest, AnswersAboutAnEndedProcessDoNotCount) {
  const Process process = open();
  child_.become_zombie();
  auto state = process.cuda_state();
  ASSERT_FALSE(state);
  EXPECT_EQ(state.error().code, ErrorCode::kProcessGone);
}

TEST_F(ProcessTest, IsBroughtFromAnyStateToAnyOther) {
  for (CudaState from : kStates) {
    for (CudaState to : kStates) {
      Process process = open(from);
      EXPECT_TRUE(process.bring_to(to));
      EXPECT_EQ(driver_.state_of(child_.pid()), to);
    }
  }
  EXPECT_EQ(driver_.illegal_calls(), 0);
}

TEST_F(ProcessTest, GivesUpWhereAnotherToolKeepsChangingIt) {
  Process process = open();
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action == Action::kGetState) driver_.add(child_.pid(), CudaState::kRunning);
  };
  auto done = process.bring_to(CudaState::kCheckpointed);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kBusy);
}

// Any sequence of actions, any of which the driver may refuse: the process is always in the state
// that the model says, and the driver is never asked for what cannot be.
RC_GTEST_FIXTURE_PROP(ProcessTest, AnySequenceOfActionsFollowsTheModel, ()) {
  CudaState model = *rc::gen::elementOf(std::vector(kStates.begin(), kStates.end()));
  driver_.forget_calls();
  driver_.forgive();
  Process process = open(model);
  const auto sequence = *rc::gen::container<std::vector<Action>>(
      rc::gen::elementOf(std::vector(kActions.begin(), kActions.end())));
  for (Action action : sequence) {
    const auto expected = next(model, action);
    const bool refused = *rc::gen::weightedElement<bool>({{4, false}, {1, true}});
    if (refused) driver_.fail_always(action, 801);
    const std::size_t before = driver_.actions().size();
    auto done = perform(process, action);
    driver_.forgive();
    RC_ASSERT(done.has_value() == (expected.has_value() && !refused));
    RC_ASSERT(driver_.actions().size() - before == (expected.has_value() ? 1U : 0U));
    if (done) model = *expected;
    if (!done && !expected) RC_ASSERT(done.error().code == ErrorCode::kWrongState);
    RC_ASSERT(driver_.state_of(child_.pid()) == model);
    RC_ASSERT(*process.state() == model);
  }
  RC_ASSERT(driver_.illegal_calls() == 0);
}

// --- StateGuard

TEST_F(ProcessTest, GuardBringsItBackUnlessDismissed) {
  for (CudaState initial : kStates) {
    for (CudaState changed_to : kStates) {
      Process process = open(initial);
      {
        const StateGuard guard(process, initial);
        ASSERT_TRUE(process.bring_to(changed_to));
      }
      EXPECT_EQ(driver_.state_of(child_.pid()), initial);
      {
        StateGuard guard(process, initial);
        ASSERT_TRUE(process.bring_to(changed_to));
        guard.dismiss();
      }
      EXPECT_EQ(driver_.state_of(child_.pid()), changed_to);
    }
  }
}

TEST_F(ProcessTest, GuardUndoesOnceAndMoves) {
  Process process = open();
  StateGuard guard(process, CudaState::kRunning);
  ASSERT_TRUE(process.lock(milliseconds(1)));
  StateGuard moved = std::move(guard);
  EXPECT_TRUE(guard.undo());  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(driver_.state_of(child_.pid()), CudaState::kLocked) << "the moved-from one is empty";
  EXPECT_TRUE(moved.undo());
  EXPECT_EQ(driver_.state_of(child_.pid()), CudaState::kRunning);
  ASSERT_TRUE(process.lock(milliseconds(1)));
  EXPECT_TRUE(moved.undo());
  EXPECT_EQ(driver_.state_of(child_.pid()), CudaState::kLocked) << "undone once is undone";
}

// By exec, as soon as its threads run: nothing of it is left to bring back.
TEST_F(ProcessTest, GuardHasNothingToDoWhereItBecameAnotherProgram) {
  Process process = open();
  StateGuard guard(process, CudaState::kRunning);
  ASSERT_TRUE(process.bring_to(CudaState::kCheckpointed));
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action == Action::kUnlock) driver_.remove(child_.pid());
  };
  EXPECT_TRUE(guard.undo());
}

TEST_F(ProcessTest, GuardSaysWhatItCouldNotDo) {
  Process process = open();
  StateGuard guard(process, CudaState::kRunning);
  ASSERT_TRUE(process.bring_to(CudaState::kCheckpointed));
  driver_.fail_always(Action::kRestore, 2);
  auto undone = guard.undo();
  ASSERT_FALSE(undone);
  EXPECT_EQ(undone.error().code, ErrorCode::kNotRolledBack);
  const std::string pid = std::to_string(child_.pid().value);
  EXPECT_THAT(undone.error().message, HasSubstr("process " + pid + " is checkpointed"));
  EXPECT_THAT(undone.error().message, HasSubstr("running"));
  EXPECT_THAT(undone.error().message, HasSubstr("not enough GPU memory"));
  EXPECT_THAT(undone.error().remedy, HasSubstr("stasis recover " + pid));
}

// As one that becomes a setuid program by exec, under a tool that is not root's.
TEST_F(ProcessTest, GuardSaysWhereItHasOtherRightsThanBefore) {
  constexpr int kNotPermittedByDriver = 800;
  Process process = open();
  StateGuard guard(process, CudaState::kRunning);
  ASSERT_TRUE(process.lock(milliseconds(1)));
  driver_.fail_always(Action::kGetState, kNotPermittedByDriver);
  auto undone = guard.undo();
  ASSERT_FALSE(undone);
  EXPECT_EQ(undone.error().code, ErrorCode::kNotRolledBack);
  EXPECT_THAT(undone.error().message, HasSubstr("has other rights now"));
  EXPECT_THAT(undone.error().remedy, HasSubstr("nothing is left to bring back; if not, run `sudo"));
}

TEST_F(ProcessTest, GuardHasNothingToDoForOneThatHasGone) {
  Process process = open();
  StateGuard guard(process, CudaState::kRunning);
  ASSERT_TRUE(process.lock(milliseconds(1)));
  child_.become_zombie();
  EXPECT_TRUE(guard.undo());
}

// The driver may call a process running whose threads are still held.
TEST_F(ProcessTest, GuardSaysThatThreadsAreStillHeld) {
  Process process = open();
  ASSERT_TRUE(process.lock(milliseconds(1)));
  StateGuard guard(process, CudaState::kRunning);
  const auto parked = park_threads(child_.pid(), {Tid{0}});
  ASSERT_TRUE(parked) << parked.error().to_string();
  // On a busy machine it takes a while to get there.
  for (int i = 0; i < 30000 && count_parked_threads(child_.pid()) == 0; ++i)
    std::this_thread::sleep_for(milliseconds(1));
  // The thread sanitizer gives the child a second one.
  ASSERT_GE(count_parked_threads(child_.pid()), 1);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  {
    const Child tracer([&] {
      const bool done = ::ptrace(PTRACE_SEIZE, child_.pid().value, nullptr, nullptr) == 0;
      if (::write(ready[1], done ? "y" : "n", 1) != 1) ::_exit(1);
      for (;;)
        ::pause();
    });
    char answer = 0;
    ASSERT_EQ(::read(ready[0], &answer, 1), 1);
    ASSERT_EQ(answer, 'y');
    auto undone = guard.undo();
    ASSERT_FALSE(undone);
    EXPECT_EQ(undone.error().code, ErrorCode::kNotRolledBack);
    EXPECT_THAT(undone.error().remedy, HasSubstr("stasis recover"));
    EXPECT_GE(count_parked_threads(child_.pid()), 1);
  }
  ::close(ready[0]);
  ::close(ready[1]);
  EXPECT_TRUE(process.let_go_on());
  EXPECT_EQ(count_parked_threads(child_.pid()), 0);
}

// Whichever of the driver's calls fails, on the way there or on the way back: either the process is
// as it was, or the guard says that it is not.
TEST_F(ProcessTest, GuardNeverClaimsWhatIsNotSo) {
  int told = 0;
  for (CudaState initial : kStates) {
    for (CudaState goal : kStates) {
      for (std::size_t nth = 1; nth <= 16; ++nth) {
        driver_.forget_calls();
        driver_.forgive();
        Process process = open(initial);
        driver_.fail_nth(nth, 304);
        StateGuard guard(process, initial);
        (void)process.bring_to(goal);
        auto undone = guard.undo();
        EXPECT_EQ(undone.has_value(), driver_.state_of(child_.pid()) == initial)
            << cuda_state_name(initial) << " to " << cuda_state_name(goal) << ", call " << nth;
        if (!undone) ++told;
        EXPECT_EQ(driver_.illegal_calls(), 0);
      }
    }
  }
  EXPECT_GT(told, 0) << "some failures must hit the way back, or this proves nothing";
}

}  // namespace
}  // namespace stasis
