#include "job/supervisor.h"

#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <utility>

#include <fmt/format.h>

#include "base/units.h"
#include "job/choose_image.h"
#include "job/exec_failure.h"
#include "job/json_message.h"
#include "job/supervisor_texts.h"

namespace stasis::job {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRetry{200};
// How often the directory of the group is looked at, while the job runs.
constexpr milliseconds kLookAtGroup{500};
// A save that is not over by the end of --grace has as much time again to bring the job back, and
// at least this.
constexpr std::chrono::seconds kOverdue{10};
// A restored job that dies of a signal within this time was not restored as it was.
constexpr std::chrono::seconds kEarlyEnd{5};

int exit_status_of(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Why the worker has not done what it was to do.
Error error_of(const WorkResult& result) {
  if (const auto* error = std::get_if<Error>(&result.what)) return *error;
  const auto* died = std::get_if<WorkerDied>(&result.what);
  return {ErrorCode::kInternal, died != nullptr ? died->how : "a malformed answer"};
}

}  // namespace

// --- From the start to the end

Result<Outcome> Supervisor::run(std::optional<int> image, Work work) {
  STASIS_TRY_ASSIGN(auto job, JobProcesses::prepare());
  job_.emplace(std::move(job));
  STASIS_TRY(take_signals());
  if (auto started = job_->start(spec_of(std::move(work))); !started) {
    notice_.end();
    if (image) return fail(std::move(started.error()));
    return Outcome{0, {}, std::move(started.error())};
  }
  auto done = look_after(image);
  // After any end: what the job has written is in the pipes.
  for (const std::string& trouble : job_->end())
    tell_("the job's output was lost: " + trouble);
  STASIS_TRY(std::move(done));
  return std::move(*outcome_);
}

Result<void> Supervisor::take_signals() {
  sigset_t taken = taken_signals();
  ::sigaddset(&taken, SIGWINCH);
  ::sigprocmask(SIG_BLOCK, &taken, nullptr);
  signals_ = UniqueFd(::signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) return fail(errno_error("cannot wait for signals", errno));
  return {};
}

JobSpec Supervisor::spec_of(Work work) const {
  JobSpec spec;
  spec.command = options_.command;
  spec.preload = options_.preload;
  spec.io_uring = options_.io_uring;
  spec.mask = notice_.before();
  spec.terminal = our_terminals();
  spec.size = our_size();
  spec.keep = options_.visible_dirs;
  spec.keep.push_back(images_.path());
  spec.work = std::move(work);
  return spec;
}

Result<void> Supervisor::look_after(std::optional<int> image) {
  STASIS_TRY(images_.note_init(job_->init()));
  STASIS_TRY(job_->enter_name(options_.name, images_.path(), as_written(options_.command)));
  STASIS_TRY(job_->start_streams());
  STASIS_TRY(read_signals());
  if (!outcome_) STASIS_TRY(begin(image));
  while (!outcome_)
    STASIS_TRY(turn());
  return {};
}

Result<void> Supervisor::begin(std::optional<int> image) {
  if (!image) {
    state_ = JobState::kStarting;
    if (group().has_others()) return job_->send(WorkOrder{MeetOrder{}});
    return job_->send(StartJob{});
  }
  state_ = JobState::kRestoring;
  number_ = *image;
  return job_->send(WorkOrder{RestoreOrder{images_.path_of(number_), images_.id()}});
}

Result<void> Supervisor::turn() {
  std::array<pollfd, 2> wait{{{signals_.get(), POLLIN, 0}, {job_->fd(), POLLIN, 0}}};
  if (::poll(wait.data(), wait.size(), static_cast<int>(time_to_next().count())) < 0) return {};
  STASIS_TRY(read_signals());
  if (!outcome_ && wait[1].revents != 0) {
    auto event = job_->receive();
    if (!event) {
      return fail(ErrorCode::kProcessGone,
                  "the first process of the job's namespace was killed, and the job with it",
                  "start again with the same command line: it goes on from the last image");
    }
    STASIS_TRY(on_event(*event));
  }
  return outcome_ ? Result<void>() : on_clock();
}

// --- What happens

Result<void> Supervisor::happens(JobEvent event) {
  const JobTransition next = on(state_, event);
  state_ = next.to;
  return act(next.step);
}

// The job runs, and nothing is being done to it.
Result<void> Supervisor::reaches_job() {
  if (!tick_ && options_.every.count() > 0) tick_ = Clock::now() + options_.every;
  for (const SendSignal& signal : std::exchange(waiting_, {}))
    STASIS_TRY(send_signal(signal));
  return {};
}

Result<void> Supervisor::runs() {
  STASIS_TRY(reaches_job());
  return happens(JobEvent::kRuns);
}

// When the state has lasted too long.
std::optional<Clock::time_point> Supervisor::timeout() const {
  switch (state_) {
    case JobState::kEndingRestore:
    case JobState::kSavingFirst:
      return end_order_->until;
    case JobState::kStoppingSave:
    case JobState::kSavingToEnd:
      return end_order_->until + std::max<milliseconds>(options_.grace, kOverdue);
    case JobState::kRetrying:
      return again_;
    default:
      return std::nullopt;
  }
}

// -1: only an event ends the wait.
milliseconds Supervisor::time_to_next() const {
  std::optional<Clock::time_point> next = tick_;
  if (const auto end = timeout(); end && (!next || *end < *next)) next = end;
  if (group().has_others() && (!next || Clock::now() + kLookAtGroup < *next)) return kLookAtGroup;
  if (!next) return milliseconds(-1);
  const auto left = std::chrono::ceil<milliseconds>(*next - Clock::now());
  return std::clamp(left, milliseconds(0), milliseconds(INT_MAX));
}

Result<void> Supervisor::on_clock() {
  const auto now = Clock::now();
  if (const auto end = timeout(); end && now >= *end) return happens(JobEvent::kTimeout);
  if (state_ == JobState::kRunning && group().has_others()) {
    STASIS_TRY(follow_group());
    if (state_ != JobState::kRunning) return {};
  }
  if (!tick_ || now < *tick_) return {};
  while (*tick_ <= now)
    *tick_ += options_.every;
  return happens(JobEvent::kTick);
}

Result<void> Supervisor::read_signals() {
  signalfd_siginfo info{};
  while (!outcome_ && ::read(signals_.get(), &info, sizeof info) == sizeof info)
    STASIS_TRY(on_signal(info));
  return {};
}

Result<void> Supervisor::on_signal(const signalfd_siginfo& info) {
  const int number = static_cast<int>(info.ssi_signo);
  if (number == SIGTTIN || number == SIGTTOU || number == SIGPIPE) return {};
  if (number == SIGWINCH) return job_->fit_terminal();
  // What is typed at a terminal goes to all in the foreground.
  came_ = {number, info.ssi_code == SI_KERNEL};
  if (!options_.signals.contains(number)) return pass_on(came_);
  if (lets_go_on(number)) return happens(JobEvent::kSaveSignal);
  return end_order(number);
}

Result<void> Supervisor::end_order(int signal_number) {
  if (!end_order_) {
    const bool before_it_ran = state_ == JobState::kStarting || state_ == JobState::kRestoring;
    end_order_ = EndOrder{signal_number, Clock::now() + options_.grace, before_it_ran};
  }
  // Before there is a job, the worker waits for other parts, which may never come.
  if (state_ == JobState::kStarting && group().has_others()) STASIS_TRY(job_->send(StopWorker{}));
  // Those that are in a save after which the job goes on wait for this part.
  if (state_ == JobState::kRunning && group().has_others() && is_begun(group(), Together::kSave))
    STASIS_TRY(happens(JobEvent::kSaveSignal));
  return happens(JobEvent::kEndSignal);
}

// What another part has begun this one does too.
Result<void> Supervisor::follow_group() {
  if (is_begun(group(), Together::kSave)) return happens(JobEvent::kSaveSignal);
  if (!is_begun(group(), Together::kSaveEnd)) return {};
  tell_("another part of the job saves it and ends it");
  return end_order(SIGTERM);
}

Result<void> Supervisor::on_event(const InitEvent& event) {
  return std::visit(
      Cases{[](const Ready&) { return Result<void>(); },
            [](const Failed& failed) -> Result<void> { return fail(failed.error); },
            [this](const NotStarted& not_started) { return on_not_started(not_started); },
            [this](const Started& started) { return on_started(started); },
            [this](const Ended& ended) { return on_ended(ended); },
            [this](const WorkResult& result) { return on_worked(result); }},
      event);
}

Result<void> Supervisor::on_not_started(const NotStarted& not_started) {
  const int number = not_started.error_number;
  outcome_ = Outcome{
      exit_status_of_exec_failure(number), exec_failure(options_.command.front(), number), {}};
  return {};
}

Result<void> Supervisor::on_started(const Started& started) {
  if (options_.on_begin) options_.on_begin();
  images_.keep();
  if (auto named = job_->name_root(started.root); !named)
    tell_("the job will not be found by its name: " + named.error().to_string());
  STASIS_TRY(job_->connect_terminal(started.terminal));
  return runs();
}

Result<void> Supervisor::on_ended(const Ended& ended) {
  if (is_saved_to_its_end()) return end_saved();
  // A program that dies as soon as it is restored would do so again: that is not an end by itself.
  if (restored_at_ && WIFSIGNALED(ended.status) && !passed_on_) {
    const Seconds after = Clock::now() - *restored_at_;
    if (after <= kEarlyEnd) tell_(early_end_text(WTERMSIG(ended.status), after));
  }
  finish(exit_status_of(ended.status));
  note_end();
  return {};
}

Result<void> Supervisor::on_worked(const WorkResult& result) {
  tell_notes(result);
  if (is_restoring(state_)) return on_restored(result);
  if (is_saving(state_)) return on_saved(result);
  if (state_ == JobState::kStarting || state_ == JobState::kStartingToEnd) return on_met(result);
  return on_recovered(result);
}

Result<void> Supervisor::on_restored(const WorkResult& result) {
  if (const auto* restored = std::get_if<Restored>(&result.what)) {
    restored_at_ = Clock::now();
    tell_(fmt::format("the job goes on from {} (restored in {})", images_.path_of(number_),
                      format_seconds(Seconds(restored->seconds))));
    return on_started({restored->root, restored->terminal});
  }
  if (state_ == JobState::kEndingRestore) {
    tell_(fmt::format("{}: the restore is given up; the image stays",
                      signal_name(end_order_->signal_number)));
    finish(options_.exit_code);
    return {};
  }
  if (const auto* died = std::get_if<WorkerDied>(&result.what)) {
    return fail(ErrorCode::kInternal,
                fmt::format("the process that restored {} {}", images_.path_of(number_), died->how),
                "the image is intact: start again");
  }
  const Error error = error_of(result);
  // The image before is of another moment than those of the other parts.
  if (!is_damage(error.code) || group().has_others()) return fail(error);
  images_.damaged(number_);
  tell_(fmt::format("the image {} is damaged ({}); the one before is taken",
                    images_.path_of(number_), error.message));
  STASIS_TRY_ASSIGN(auto next, choose_image(images_, options_.command, tell_));
  return begin(next);
}

// All parts begin anew.
Result<void> Supervisor::on_met(const WorkResult& result) {
  if (state_ == JobState::kStartingToEnd) {
    tell_(not_begun_text(end_order_->signal_number));
    finish(options_.exit_code);
    return {};
  }
  if (!std::holds_alternative<Met>(result.what)) return fail(error_of(result));
  return job_->send(StartJob{});
}

Result<void> Supervisor::on_saved(const WorkResult& result) {
  if (const auto* saved = std::get_if<Saved>(&result.what)) {
    told_suspended_ = false;
    tell_saved(*saved);
    if (!is_saving_to_end(state_)) return runs();
    finish(options_.exit_code);
    return {};
  }
  if (std::holds_alternative<WasSuspended>(result.what)) {
    if (!std::exchange(told_suspended_, true))
      tell_("not saved, because the job is suspended: what it is has not changed since");
    return runs();
  }
  if (const auto* died = std::get_if<WorkerDied>(&result.what)) {
    tell_(fmt::format("the process that saved the job {}: the job is brought back", died->how));
    return happens(JobEvent::kSaveLost);
  }
  return on_not_saved(error_of(result));
}

Result<void> Supervisor::on_not_saved(const Error& error) {
  if (error.code == ErrorCode::kNotRolledBack) {
    tell_("the job is brought back: " + error.message);
    return happens(JobEvent::kSaveLost);
  }
  if (state_ == JobState::kSaving) {
    tell_(fmt::format("not saved: {}{}{}", error.message,
                      error.remedy.empty() ? "" : "; what to do: ", error.remedy));
  }
  if (!is_saving_to_end(state_)) return runs();
  STASIS_TRY(reaches_job());
  why_not_saved_ = error.message;
  // A verb is at work on it, by its name, or it starts a process.
  const bool passes = error.code == ErrorCode::kBusy && Clock::now() < end_order_->until;
  return happens(passes ? JobEvent::kSaveRefused : JobEvent::kSaveFailed);
}

Result<void> Supervisor::on_recovered(const WorkResult& result) {
  if (std::holds_alternative<Recovered>(result.what)) {
    tell_("the job runs on");
    return runs();
  }
  if (is_saved_to_its_end()) return end_saved();
  return fail(ErrorCode::kNotRolledBack,
              "the job could not be brought back after a save that failed, and is ended: " +
                  error_of(result).message,
              "start again with the same command line: it goes on from the last image");
}

// --- What is done

Result<void> Supervisor::act(JobStep step) {
  switch (step) {
    case JobStep::kNothing:
      return {};
    case JobStep::kSave:
      return save();
    case JobStep::kRecover:
      return job_->send(WorkOrder{RecoverOrder{}});
    case JobStep::kRetryLater:
      if (told_.insert(why_not_saved_).second) tell_("not saved yet: " + why_not_saved_);
      again_ = Clock::now() + kRetry;
      return {};
    case JobStep::kStopWorker:
      return job_->send(StopWorker{});
    case JobStep::kKillWorker:
      tell_("the save does not come to an end: its process is killed");
      return job_->send(KillWorker{});
    case JobStep::kGiveUpSlow:
      return give_up("the save that was under way has taken too long");
    case JobStep::kGiveUpLost:
      return give_up("the save has failed");
    case JobStep::kGiveUpFailed:
      return give_up(why_not_saved_);
    case JobStep::kPassOn:
      return pass_on(came_);
    case JobStep::kLeave:
      tell_(not_begun_text(came_.number));
      finish(options_.exit_code);
      return {};
    case JobStep::kLeaveRestore:
      tell_("the restore does not stop, and is ended; the image stays");
      finish(options_.exit_code);
      return {};
    case JobStep::kTellBusy:
      tell_(fmt::format("{}: not saved, because {} is under way", signal_name(came_.number),
                        is_saving(state_) ? "a save" : "its start or its recovery"));
      return {};
    case JobStep::kTellOnceMore:
      tell_(once_more_text(came_.number, end_order_->until));
      return {};
    case JobStep::kTellLeftOut:
      tell_(fmt::format("the save to {} takes longer than --every ({}): the next one is left out",
                        images_.path_of(number_), format_seconds(options_.every)));
      return {};
  }
  return {};
}

Result<void> Supervisor::save() {
  STASIS_TRY_ASSIGN(number_, images_.next());
  // Each part has a clock, and the first to strike is that of all.
  if (group().has_others() && tick_) tick_ = Clock::now() + options_.every;
  SaveOrder order;
  order.images_dir = images_.path_of(number_);
  order.images_folder = images_.id();
  order.command = as_written(options_.command);
  order.end = is_saving_to_end(state_);
  if (order.end) {
    const auto left = std::chrono::duration_cast<milliseconds>(end_order_->until - Clock::now());
    order.limit = std::max(left, milliseconds(1));
  }
  const auto before = images_.complete();
  if (before && !before->empty() && !options_.whole) order.base = images_.path_of(before->front());
  return job_->send(WorkOrder{std::move(order)});
}

Result<void> Supervisor::give_up(const std::string& why) {
  const std::string name = signal_name(end_order_->signal_number);
  if (end_order_->before_it_ran) {
    tell_(fmt::format("the job is not saved: {}; it is ended, and has lost what it did since {}",
                      why, name));
    finish(options_.exit_code);
    return {};
  }
  tell_(fmt::format("the job is not saved: {}; it gets {} itself", why, name));
  return pass_on({end_order_->signal_number, false});
}

Result<void> Supervisor::pass_on(SendSignal signal) {
  // Nor while the job is saved: the image would have the signal, and each restore of it would obey
  // it.
  if (runs_alone(state_)) return send_signal(signal);
  waiting_.push_back(signal);
  return {};
}

Result<void> Supervisor::send_signal(SendSignal signal) {
  passed_on_ = true;
  return job_->send(signal);
}

void Supervisor::tell_saved(const Saved& saved) {
  auto removed = images_.remove_old(options_.keep);
  tell_(saved_text(images_.path_of(number_), saved, removed ? *removed : std::vector<int>(),
                   is_saving_to_end(state_)));
  if (!removed) tell_("an old image cannot be removed: " + removed.error().to_string());
  if (auto there = images_.check_place(); !there)
    tell_("the image is complete, but " + there.error().to_string());
}

// Also if the save has failed after that: the job has stood still since.
bool Supervisor::is_saved_to_its_end() const {
  const auto numbers = images_.complete();
  return state_ == JobState::kRecoveringToEnd && numbers &&
         std::find(numbers->begin(), numbers->end(), number_) != numbers->end();
}

Result<void> Supervisor::end_saved() {
  tell_(fmt::format("the image {} is complete; the job has ended, to go on from there",
                    images_.path_of(number_)));
  finish(options_.exit_code);
  return {};
}

// It has ended by itself, and not because the supervisor has told it to.
void Supervisor::note_end() {
  if (options_.once.empty() || outcome_->status != 0 || state_ == JobState::kGaveUp) return;
  if (auto noted = images_.note_done(options_.once, as_written(options_.command)); !noted)
    tell_("started again, the job will run again: " + noted.error().to_string());
}

void Supervisor::tell_notes(const WorkResult& result) {
  // Each worker has the same to say about the same job.
  for (const std::string& note : result.notes)
    if (told_.insert(note).second) tell_(note);
}

}  // namespace stasis::job
