#include "job/job_state.h"

#include <algorithm>
#include <array>

namespace stasis::job {
namespace {

using State = JobState;
using Event = JobEvent;
using Step = JobStep;

struct Rule {
  State state;
  Event event;
  State to;
  Step step;
};

constexpr std::array kRules = std::to_array<Rule>({
    {State::kNotBegun, Event::kEndSignal, State::kNotBegun, Step::kLeave},
    {State::kStarting, Event::kRuns, State::kRunning, Step::kNothing},
    {State::kStarting, Event::kEndSignal, State::kStartingToEnd, Step::kNothing},
    {State::kRestoring, Event::kRuns, State::kRunning, Step::kNothing},
    {State::kRestoring, Event::kEndSignal, State::kEndingRestore, Step::kStopWorker},
    {State::kRunning, Event::kSaveSignal, State::kSaving, Step::kSave},
    {State::kRunning, Event::kTick, State::kSaving, Step::kSave},
    {State::kRunning, Event::kEndSignal, State::kSavingToEnd, Step::kSave},
    {State::kSaving, Event::kRuns, State::kRunning, Step::kNothing},
    {State::kSaving, Event::kSaveLost, State::kRecovering, Step::kRecover},
    {State::kSaving, Event::kEndSignal, State::kSavingFirst, Step::kNothing},
    {State::kRecovering, Event::kRuns, State::kRunning, Step::kNothing},
    {State::kRecovering, Event::kEndSignal, State::kRecoveringFirst, Step::kNothing},

    {State::kStartingToEnd, Event::kRuns, State::kSavingToEnd, Step::kSave},
    {State::kEndingRestore, Event::kRuns, State::kSavingToEnd, Step::kSave},
    {State::kEndingRestore, Event::kTimeout, State::kEndingRestore, Step::kLeaveRestore},
    {State::kSavingFirst, Event::kRuns, State::kSavingToEnd, Step::kSave},
    {State::kSavingFirst, Event::kSaveLost, State::kRecoveringFirst, Step::kRecover},
    {State::kSavingFirst, Event::kTimeout, State::kStoppingSave, Step::kStopWorker},
    {State::kRecoveringFirst, Event::kRuns, State::kSavingToEnd, Step::kSave},
    {State::kStoppingSave, Event::kRuns, State::kGaveUp, Step::kGiveUpSlow},
    {State::kStoppingSave, Event::kSaveLost, State::kRecoveringLast, Step::kRecover},
    {State::kStoppingSave, Event::kTimeout, State::kKillingSave, Step::kKillWorker},
    {State::kKillingSave, Event::kRuns, State::kGaveUp, Step::kGiveUpSlow},
    {State::kKillingSave, Event::kSaveLost, State::kRecoveringLast, Step::kRecover},
    {State::kRecoveringLast, Event::kRuns, State::kGaveUp, Step::kGiveUpSlow},
    {State::kSavingToEnd, Event::kSaveRefused, State::kRetrying, Step::kRetryLater},
    {State::kSavingToEnd, Event::kSaveFailed, State::kGaveUp, Step::kGiveUpFailed},
    {State::kSavingToEnd, Event::kSaveLost, State::kRecoveringToEnd, Step::kRecover},
    {State::kSavingToEnd, Event::kTimeout, State::kKillingSaveToEnd, Step::kKillWorker},
    {State::kKillingSaveToEnd, Event::kSaveFailed, State::kGaveUp, Step::kGiveUpFailed},
    {State::kKillingSaveToEnd, Event::kSaveLost, State::kRecoveringToEnd, Step::kRecover},
    {State::kRecoveringToEnd, Event::kRuns, State::kGaveUp, Step::kGiveUpLost},
    {State::kRetrying, Event::kTimeout, State::kSavingToEnd, Step::kSave},
    {State::kRetrying, Event::kSaveSignal, State::kSavingFirst, Step::kSave},
    {State::kRetrying, Event::kTick, State::kRetrying, Step::kNothing},
    {State::kGaveUp, Event::kSaveSignal, State::kGaveUp, Step::kPassOn},
    {State::kGaveUp, Event::kEndSignal, State::kGaveUp, Step::kPassOn},
    {State::kGaveUp, Event::kTick, State::kGaveUp, Step::kNothing},
});

// Where no rule says otherwise, the state stays.
constexpr Step otherwise(Event event) {
  switch (event) {
    case Event::kSaveSignal:
      return Step::kTellBusy;
    case Event::kEndSignal:
      return Step::kTellOnceMore;
    case Event::kTick:
      return Step::kTellLeftOut;
    default:
      return Step::kNothing;
  }
}

}  // namespace

JobTransition on(JobState state, JobEvent event) {
  const auto* const rule = std::find_if(kRules.begin(), kRules.end(), [&](const Rule& one) {
    return one.state == state && one.event == event;
  });
  if (rule == kRules.end()) return {state, otherwise(event)};
  return {rule->to, rule->step};
}

bool runs_alone(JobState state) {
  return state == State::kRunning || state == State::kRetrying || state == State::kGaveUp;
}

bool is_saving_to_end(JobState state) {
  return state == State::kSavingToEnd || state == State::kKillingSaveToEnd;
}

bool is_saving(JobState state) {
  return is_saving_to_end(state) || state == State::kSaving || state == State::kSavingFirst ||
         state == State::kStoppingSave || state == State::kKillingSave;
}

bool is_restoring(JobState state) {
  return state == State::kRestoring || state == State::kEndingRestore;
}

}  // namespace stasis::job
