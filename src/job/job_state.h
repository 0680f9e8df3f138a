// The states of a job that a supervisor looks after, and what is done when something happens: one
// table. The supervisor does it.
//
// Values and functions; any thread.
#pragma once

namespace stasis::job {

enum class JobState {
  kNotBegun,  // neither started nor restored
  kStarting,
  kRestoring,
  kRunning,
  kSaving,      // the job goes on after the save
  kRecovering,  // the worker that saved has died or failed, and the job is brought back

  // The supervisor was told to end the job, and saves it before.
  kStartingToEnd,     // the save begins when the job runs
  kEndingRestore,     // the restore was told to stop; a job that runs all the same is saved
  kSavingFirst,       // a save after which the job goes on is under way, and has until --grace ends
  kStoppingSave,      // that save was told to stop
  kKillingSave,       // and did not
  kRecoveringFirst,   // from a save that failed by itself
  kRecoveringLast,    // from one that was told to stop: there is no time for another
  kSavingToEnd,       // the save that ends the job
  kKillingSaveToEnd,  // which did not come to an end
  kRecoveringToEnd,   // from that save
  kRetrying,          // the job runs; another verb was in the way of the save
  kGaveUp,            // the job runs, is saved no more, and gets the signals itself
};

enum class JobEvent {
  kSaveSignal,   // save it, and let it go on
  kEndSignal,    // save it, and end it
  kTick,         // the time for a save by the clock
  kTimeout,      // of the state
  kRuns,         // the job runs, and no worker is at work on it
  kSaveLost,     // the worker that saved has died, or left the job as it must not stay
  kSaveRefused,  // the job runs; another verb was in the way
  kSaveFailed,   // the job runs
};

// What the supervisor does.
enum class JobStep {
  kNothing,
  kSave,
  kRecover,
  kRetryLater,
  kStopWorker,
  kKillWorker,
  kGiveUpSlow,    // a save that was told to stop has used up the time
  kGiveUpLost,    // the save before the end was lost, and the job brought back
  kGiveUpFailed,  // the save before the end failed
  kPassOn,        // the signal, to the job
  kLeave,         // end; the job was not begun
  kLeaveRestore,  // end; the restore does not stop
  kTellBusy,      // not saved, because something is under way
  kTellOnceMore,  // the save before the end is under way
  kTellLeftOut,   // a save by the clock
};

struct JobTransition {
  JobState to;
  JobStep step;
};

JobTransition on(JobState state, JobEvent event);

// No worker is at work on the job, and a signal can reach it.
bool runs_alone(JobState state);
// A worker saves it; to its end.
bool is_saving(JobState state);
bool is_saving_to_end(JobState state);
bool is_restoring(JobState state);

}  // namespace stasis::job
