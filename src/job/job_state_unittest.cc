#include "job/job_state.h"

#include <vector>

#include <gtest/gtest.h>

namespace stasis::job {
namespace {

using State = JobState;
using Event = JobEvent;
using Step = JobStep;

const std::vector<State> kAllStates = [] {
  std::vector<State> all;
  for (int i = 0; i <= static_cast<int>(State::kGaveUp); ++i)
    all.push_back(static_cast<State>(i));
  return all;
}();

State after(State state, const std::vector<Event>& events) {
  for (const Event event : events)
    state = on(state, event).to;
  return state;
}

TEST(JobStateTest, ASaveByTheClockLeavesTheJobRunning) {
  EXPECT_EQ(on(State::kRunning, Event::kTick).step, Step::kSave);
  EXPECT_EQ(after(State::kRunning, {Event::kTick, Event::kRuns}), State::kRunning);
  EXPECT_EQ(after(State::kRunning, {Event::kTick, Event::kSaveLost, Event::kRuns}),
            State::kRunning);
}

TEST(JobStateTest, NoSaveBeginsBesideAWorker) {
  for (const State state : kAllStates) {
    if (runs_alone(state)) continue;
    for (const Event event : {Event::kTick, Event::kSaveSignal, Event::kEndSignal})
      EXPECT_NE(on(state, event).step, Step::kSave) << static_cast<int>(state);
  }
}

TEST(JobStateTest, AJobThatIsToldToEndIsSavedOrGetsTheSignal) {
  for (const State state :
       {State::kStarting, State::kRestoring, State::kSaving, State::kRecovering}) {
    EXPECT_EQ(after(state, {Event::kEndSignal, Event::kRuns}), State::kSavingToEnd)
        << static_cast<int>(state);
  }
  EXPECT_EQ(after(State::kRunning, {Event::kEndSignal}), State::kSavingToEnd);
  EXPECT_EQ(after(State::kSavingToEnd, {Event::kSaveFailed}), State::kGaveUp);
  EXPECT_EQ(after(State::kSavingToEnd, {Event::kSaveRefused, Event::kTimeout}),
            State::kSavingToEnd);
  EXPECT_EQ(after(State::kSavingToEnd, {Event::kSaveLost, Event::kRuns}), State::kGaveUp);
}

TEST(JobStateTest, ASaveThatUsesUpTheTimeIsStoppedThenKilled) {
  auto next = on(State::kSavingFirst, Event::kTimeout);
  EXPECT_EQ(next.step, Step::kStopWorker);
  EXPECT_EQ(on(next.to, Event::kRuns).step, Step::kGiveUpSlow);
  next = on(next.to, Event::kTimeout);
  EXPECT_EQ(next.step, Step::kKillWorker);
  EXPECT_EQ(after(next.to, {Event::kSaveLost, Event::kRuns}), State::kGaveUp);
  EXPECT_EQ(on(State::kSavingToEnd, Event::kTimeout).step, Step::kKillWorker);
}

TEST(JobStateTest, AJobThatIsNotSavedAnyMoreGetsItsSignals) {
  EXPECT_EQ(on(State::kGaveUp, Event::kEndSignal).step, Step::kPassOn);
  EXPECT_EQ(on(State::kGaveUp, Event::kSaveSignal).step, Step::kPassOn);
  EXPECT_EQ(on(State::kGaveUp, Event::kTick).step, Step::kNothing);
}

// Otherwise a worker's answer would leave the supervisor where it is, for ever.
TEST(JobStateTest, EveryAnswerOfAWorkerLeadsOn) {
  for (const State state : kAllStates) {
    if (is_saving(state)) {
      EXPECT_NE(on(state, Event::kSaveLost).to, state) << static_cast<int>(state);
    }
    if (is_saving_to_end(state)) {
      EXPECT_NE(on(state, Event::kSaveFailed).to, state) << static_cast<int>(state);
    } else if (!runs_alone(state) && state != State::kNotBegun) {
      EXPECT_NE(on(state, Event::kRuns).to, state) << static_cast<int>(state);
    }
  }
}

}  // namespace
}  // namespace stasis::job
