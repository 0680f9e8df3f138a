// Looks after a job, from its start or its restore to its end: hears its signals, its clock and its
// init, and does what the table of job_state.h says.
//
// Takes all signals of the process, reaps, and copies its standard streams. One thread at a time.
#pragma once

#include <sys/signalfd.h>

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "base/units.h"
#include "job/images.h"
#include "job/job_processes.h"
#include "job/job_state.h"
#include "job/messages.h"
#include "job/run.h"
#include "job/signals.h"

namespace stasis::job {

// By which the supervisor was told to end the job.
struct EndOrder {
  int signal_number;
  Clock::time_point until;
  bool before_it_ran;  // the job has nothing to lose then, and gets no signal
};

class Supervisor {
 public:
  Supervisor(const RunOptions& options, Images images, const Notice& notice,
             const std::function<void(const std::string&)>& tell)
      : options_(options), images_(std::move(images)), notice_(notice), tell_(tell) {}

  Result<Outcome> run(std::optional<int> image, Work work);

 private:
  Result<void> take_signals();
  JobSpec spec_of(Work work) const;
  Result<void> look_after(std::optional<int> image);

  // Each of these may set outcome_, which ends the run.
  Result<void> begin(std::optional<int> image);
  Result<void> turn();
  Result<void> on_clock();
  Result<void> read_signals();
  Result<void> on_signal(const signalfd_siginfo& info);
  Result<void> on_event(const InitEvent& event);
  Result<void> on_not_started(const NotStarted& not_started);
  Result<void> on_started(const Started& started);
  Result<void> on_ended(const Ended& ended);
  Result<void> on_worked(const WorkResult& result);
  Result<void> on_restored(const WorkResult& result);
  Result<void> on_saved(const WorkResult& result);
  Result<void> on_not_saved(const Error& error);
  Result<void> on_recovered(const WorkResult& result);
  Result<void> on_met(const WorkResult& result);
  Result<void> end_order(int signal_number);
  Result<void> follow_group();
  Result<void> happens(JobEvent event);
  Result<void> reaches_job();
  Result<void> runs();
  Result<void> act(JobStep step);
  Result<void> save();
  Result<void> give_up(const std::string& why);
  Result<void> end_saved();
  void finish(int status) { outcome_ = Outcome{status, {}, {}}; }
  const JobGroup& group() const { return options_.worker.group; }

  Result<void> pass_on(SendSignal signal);
  Result<void> send_signal(SendSignal signal);
  std::optional<Clock::time_point> timeout() const;
  std::chrono::milliseconds time_to_next() const;
  bool is_saved_to_its_end() const;
  void note_end();
  void tell_saved(const Saved& saved);
  void tell_notes(const WorkResult& result);

  const RunOptions& options_;
  Images images_;
  const Notice& notice_;
  const std::function<void(const std::string&)>& tell_;
  std::optional<JobProcesses> job_;
  UniqueFd signals_;
  std::optional<Outcome> outcome_;

  JobState state_ = JobState::kNotBegun;
  int number_ = 0;                         // of the image that is read or written
  std::optional<Clock::time_point> tick_;  // the next save by the clock
  std::vector<SendSignal> waiting_;        // for a job that does not run now
  SendSignal came_;                        // the signal that has come last
  std::optional<EndOrder> end_order_;
  std::string why_not_saved_;  // of the last save before the end
  Clock::time_point again_;    // in kRetrying
  std::optional<Clock::time_point> restored_at_;
  bool passed_on_ = false;  // a signal that came for the job, which may have ended it
  bool told_suspended_ = false;
  std::set<std::string> told_;
};

}  // namespace stasis::job
