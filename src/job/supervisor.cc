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
#include "checkpoint/journal.h"
#include "job/choose_image.h"
#include "job/images.h"
#include "job/registry.h"
#include "job/signals.h"
#include "job/streams.h"

namespace stasis::job {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr std::size_t kMostArguments = 4096;  // docs/image-format.md
constexpr std::size_t kLongestArgument = 65536;
constexpr milliseconds kRetry{200};
// A save that is not over by the end of --grace has as much time again to bring the job back, and
// at least this.
constexpr std::chrono::seconds kOverdue{10};
// A restored job that dies of a signal within this time was not restored as it was.
constexpr std::chrono::seconds kEarlyEnd{5};

std::string not_begun(int signal_number) {
  return fmt::format("{}: the job has not been started, and has lost nothing",
                     signal_name(signal_number));
}

int exit_status_of(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

class Supervisor {
 public:
  Supervisor(const RunOptions& options, Images images, const Notice& notice,
             const std::function<void(const std::string&)>& tell)
      : options_(options), images_(std::move(images)), notice_(notice), tell_(tell) {}

  Result<Outcome> run(std::optional<int> image, Work work);

 private:
  // kNotBegun: the job has neither been started nor restored.
  enum class Doing { kNotBegun, kNothing, kStarting, kRestoring, kSaving, kRecovering };

  Result<void> enter_name(std::vector<std::string> streams);
  Result<void> begin(std::optional<int> image);
  Result<void> restore(int image);
  Result<void> save(bool end);
  Result<void> work(Doing doing, json request);

  // Each of these may set outcome_, which ends the run.
  Result<void> turn();
  milliseconds patience() const;
  Result<void> on_clock();
  Result<void> read_signals();
  Result<void> on_signal(const signalfd_siginfo& info);
  Result<void> on_event(const json& event);
  Result<void> on_restored(const json& result);
  Result<void> on_saved(const json& result);
  Result<void> on_recovered(const json& result);
  Result<void> make_room(int signal_number);
  Result<void> give_up(const std::string& why);
  Result<void> pass_on(int number, bool group);
  Result<void> tell_size();
  Result<void> runs();
  Result<void> go_on();
  bool held_up() const;
  bool hangs() const;
  Clock::time_point overdue() const {
    return room_deadline_ + std::max<milliseconds>(options_.grace, kOverdue);
  }
  bool is_due() const;
  bool is_saved_to_its_end() const;
  Result<void> end_saved();
  void note_end();
  void tell_early_end(int status);
  void tell_notes(const json& result);
  void finish(int status) { outcome_ = Outcome{status, {}, {}}; }

  const RunOptions& options_;
  Images images_;
  const Notice& notice_;
  const std::function<void(const std::string&)>& tell_;
  std::optional<Registration> registration_;
  std::optional<Streams> streams_;
  std::optional<Init> init_;
  UniqueFd signals_;
  std::optional<Outcome> outcome_;

  Doing doing_ = Doing::kNotBegun;
  int number_ = 0;    // of the image that is read or written
  bool end_ = false;  // the save under way ends the job
  std::optional<Clock::time_point> tick_;
  std::vector<std::pair<int, bool>> waiting_;  // signals for a job that does not run now
  // Told to make room, by this signal and until then.
  int room_signal_ = 0;
  Clock::time_point room_deadline_;
  bool stopping_ = false;  // the save that was under way then
  bool killed_ = false;    // the process that saves, because it did not end
  bool early_ = false;     // the job did not run yet then
  // When the save before its end, which another operation was in the way of, is tried again.
  std::optional<Clock::time_point> again_;
  bool gave_up_ = false;
  std::optional<Clock::time_point> restored_at_;
  bool passed_on_ = false;  // a signal that came for the job, which may have ended it
  bool told_suspended_ = false;
  std::set<std::string> told_;
};

Result<Outcome> Supervisor::run(std::optional<int> image, Work work) {
  STASIS_TRY_ASSIGN(auto made, Streams::make());
  streams_.emplace(std::move(made));
  auto ends = streams_->take_ends();
  std::vector<std::string> names;
  for (const UniqueFd& end : ends) {
    STASIS_TRY_ASSIGN(auto name, pipe_name(end));
    names.push_back(std::move(name));
  }
  std::vector<std::string> keep = options_.visible_dirs;
  keep.push_back(images_.path());
  JobSpec spec;
  spec.command = options_.command;
  spec.preload = options_.preload;
  spec.without_io_uring = options_.without_io_uring;
  spec.terminal = our_terminals();
  spec.size = our_size();
  spec.keep = std::move(keep);
  spec.work = std::move(work);
  sigset_t taken = taken_signals();
  ::sigaddset(&taken, SIGWINCH);
  ::sigprocmask(SIG_BLOCK, &taken, nullptr);
  spec.mask = notice_.before();
  signals_ = UniqueFd(::signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) return fail(errno_error("cannot wait for signals", errno));
  auto init = Init::start(std::move(spec), std::move(ends));
  if (!init) {
    notice_.end();
    if (image) return fail(std::move(init.error()));
    return Outcome{0, {}, std::move(init.error())};
  }
  init_.emplace(std::move(*init));
  auto done = images_.note_init(init_->pid());
  if (done) done = enter_name(std::move(names));
  if (done) done = streams_->start();
  if (done) done = read_signals();
  if (done && !outcome_) done = begin(image);
  while (done && !outcome_)
    done = turn();
  init_->end();
  // After any end: what the job has written is in the pipes.
  for (const std::string& trouble : streams_->finish())
    tell_("the job's output was lost: " + trouble);
  if (!done) return fail(std::move(done.error()));
  return std::move(*outcome_);
}

Result<void> Supervisor::enter_name(std::vector<std::string> streams) {
  STASIS_TRY_ASSIGN(auto state, journal_directory());
  const std::string name =
      options_.name.empty() ? fmt::format("job-{}", ::getpid()) : options_.name;
  auto entered = Registration::enter({name,
                                      Pid{static_cast<int>(::getpid())},
                                      0,
                                      init_->pid(),
                                      {},
                                      state,
                                      images_.path(),
                                      as_written(options_.command),
                                      std::move(streams)});
  if (!entered) return fail(std::move(entered.error()));
  registration_.emplace(std::move(*entered));
  return {};
}

Result<void> Supervisor::begin(std::optional<int> image) {
  if (image) return restore(*image);
  doing_ = Doing::kStarting;
  return init_->send({{"do", "start"}});
}

Result<void> Supervisor::restore(int image) {
  number_ = image;
  return work(Doing::kRestoring, {{"op", "restore"}, {"images_dir", images_.path_of(image)}});
}

Result<void> Supervisor::save(bool end) {
  STASIS_TRY_ASSIGN(auto number, images_.next());
  number_ = number;
  end_ = end;
  const auto limit = std::chrono::duration_cast<milliseconds>(room_deadline_ - Clock::now());
  json request = {{"op", "dump"},
                  {"images_dir", images_.path_of(number_)},
                  {"command", as_written(options_.command)},
                  {"end", end},
                  {"limit_ms", end ? std::max<long>(limit.count(), 1) : 0}};
  const auto before = images_.complete();
  if (before && !before->empty() && !options_.whole)
    request["base"] = images_.path_of(before->front());
  return work(Doing::kSaving, std::move(request));
}

Result<void> Supervisor::work(Doing doing, json request) {
  doing_ = doing;
  return init_->send({{"do", "work"}, {"request", std::move(request)}});
}

milliseconds Supervisor::patience() const {
  std::optional<Clock::time_point> next = tick_;
  if ((held_up() || is_due()) && (!next || room_deadline_ < *next)) next = room_deadline_;
  if (hangs() && !held_up() && (!next || overdue() < *next)) next = overdue();
  if (again_ && (!next || *again_ < *next)) next = again_;
  if (!next) return milliseconds(-1);
  const auto left = std::chrono::ceil<milliseconds>(*next - Clock::now());
  return std::clamp(left, milliseconds(0), milliseconds(INT_MAX));
}

// By a save that lets it go on, while it is to make room.
bool Supervisor::held_up() const {
  return doing_ == Doing::kSaving && !end_ && room_signal_ != 0 && !gave_up_ && !stopping_;
}

// A save that knows of --grace or was told to stop, and may not come to an end.
bool Supervisor::hangs() const {
  return doing_ == Doing::kSaving && room_signal_ != 0 && !gave_up_ && !killed_;
}

// A restore that was told to stop, and has all of --grace for it.
bool Supervisor::is_due() const { return doing_ == Doing::kRestoring && room_signal_ != 0; }

Result<void> Supervisor::turn() {
  std::array<pollfd, 2> wait{{{signals_.get(), POLLIN, 0}, {init_->fd(), POLLIN, 0}}};
  if (::poll(wait.data(), wait.size(), static_cast<int>(patience().count())) < 0) return {};
  STASIS_TRY(read_signals());
  if (!outcome_ && wait[1].revents != 0) {
    auto event = init_->receive();
    if (!event) {
      return fail(ErrorCode::kProcessGone,
                  "the first process of the job's namespace was killed, and the job with it",
                  "start again with the same command line: it goes on from the last image");
    }
    if (auto done = on_event(*event); !done) return done;
  }
  return outcome_ ? Result<void>() : on_clock();
}

Result<void> Supervisor::read_signals() {
  signalfd_siginfo info{};
  while (!outcome_ && ::read(signals_.get(), &info, sizeof info) == sizeof info) {
    if (auto done = on_signal(info); !done) return done;
  }
  return {};
}

Result<void> Supervisor::on_clock() {
  const auto now = Clock::now();
  if (is_due() && now >= room_deadline_) {
    tell_("the restore does not stop, and is ended; the image stays");
    finish(options_.exit_code);
    return {};
  }
  if (held_up() && now >= room_deadline_) {
    stopping_ = true;
    return init_->send({{"do", "stop"}});
  }
  if (hangs() && now >= overdue()) {
    tell_("the save does not come to an end: its process is killed");
    killed_ = true;
    return init_->send({{"do", "kill"}});
  }
  if (again_ && now >= *again_) {
    again_.reset();
    if (doing_ == Doing::kNothing && !gave_up_) return save(true);
  }
  if (!tick_ || now < *tick_) return {};
  while (*tick_ <= now)
    *tick_ += options_.every;
  if (doing_ != Doing::kNothing) {
    tell_(fmt::format("the save to {} takes longer than --every ({}): the next one is left out",
                      images_.path_of(number_), format_seconds(options_.every)));
    return {};
  }
  return room_signal_ == 0 ? save(false) : Result<void>();
}

Result<void> Supervisor::on_signal(const signalfd_siginfo& info) {
  const int number = static_cast<int>(info.ssi_signo);
  if (number == SIGTTIN || number == SIGTTOU || number == SIGPIPE) return {};
  if (number == SIGWINCH) return tell_size();
  if (options_.signals.contains(number) && !gave_up_) {
    if (!lets_go_on(number)) return make_room(number);
    if (doing_ == Doing::kNothing) return save(false);
    tell_(fmt::format("{}: not saved, because {} is under way", signal_name(number),
                      doing_ == Doing::kSaving ? "a save" : "its start or its recovery"));
    return {};
  }
  // What is typed at a terminal goes to all in the foreground.
  return pass_on(number, info.ssi_code == SI_KERNEL);
}

Result<void> Supervisor::tell_size() {
  const winsize size = our_size();
  if (size.ws_row == 0 && size.ws_col == 0) return {};
  return init_->send({{"do", "size"}, {"rows", size.ws_row}, {"columns", size.ws_col}});
}

Result<void> Supervisor::pass_on(int number, bool group) {
  // Nor while the job is saved: the image would have the signal, and each restore of it would obey
  // it.
  if (doing_ != Doing::kNothing) {
    waiting_.emplace_back(number, group);
    return {};
  }
  passed_on_ = true;
  return init_->send({{"do", "signal"}, {"number", number}, {"group", group}});
}

Result<void> Supervisor::make_room(int signal_number) {
  // A scheduler that preempts a job and then requeues it gives notice twice, and so does systemd
  // with a process group. The time that there is ends by --grace.
  if (room_signal_ != 0) {
    const auto left = std::chrono::ceil<std::chrono::seconds>(room_deadline_ - Clock::now());
    tell_(fmt::format("{} once more: the save has {} s left; `kill -KILL {}` ends all without it",
                      signal_name(signal_number), std::max<std::int64_t>(left.count(), 0),
                      ::getpid()));
    return {};
  }
  room_signal_ = signal_number;
  room_deadline_ = Clock::now() + options_.grace;
  switch (doing_) {
    case Doing::kNothing:
      return save(true);
    case Doing::kNotBegun:
      tell_(not_begun(signal_number));
      finish(options_.exit_code);
      return {};
    case Doing::kRestoring:
      // It may stand already, and run at any moment: then what it does is not to be done twice.
      early_ = true;
      return init_->send({{"do", "stop"}});
    case Doing::kStarting:
      early_ = true;
      return {};  // when that is done
    case Doing::kSaving:
    case Doing::kRecovering:
      return {};  // when that is done
  }
  return {};
}

Result<void> Supervisor::give_up(const std::string& why) {
  if (early_) {
    tell_(fmt::format("the job is not saved: {}; it is ended, and has lost what it did since {}",
                      why, signal_name(room_signal_)));
    finish(options_.exit_code);
    return {};
  }
  gave_up_ = true;
  tell_(fmt::format("the job is not saved: {}; it gets {} itself", why, signal_name(room_signal_)));
  return pass_on(room_signal_, false);
}

// The job runs, and nothing is being done to it.
Result<void> Supervisor::runs() {
  doing_ = Doing::kNothing;
  if (!tick_ && options_.every.count() > 0) tick_ = Clock::now() + options_.every;
  for (const auto& [number, group] : std::exchange(waiting_, {})) {
    if (auto sent = pass_on(number, group); !sent) return sent;
  }
  return {};
}

// It runs again, and may have been told to make room meanwhile.
Result<void> Supervisor::go_on() {
  STASIS_TRY(runs());
  if (room_signal_ == 0 || gave_up_) return {};
  if (stopping_) return give_up("the save that was under way has taken too long");
  return save(true);
}

// Also if the save has failed after that: the job has stood still since.
bool Supervisor::is_saved_to_its_end() const {
  const auto numbers = images_.complete();
  return end_ && doing_ == Doing::kRecovering && numbers &&
         std::find(numbers->begin(), numbers->end(), number_) != numbers->end();
}

Result<void> Supervisor::end_saved() {
  tell_(fmt::format("the image {} is complete; the job has ended, to go on from there",
                    images_.path_of(number_)));
  finish(options_.exit_code);
  return {};
}

// It has ended by itself, and not because we have told it to.
void Supervisor::note_end() {
  if (options_.once.empty() || outcome_->status != 0 || gave_up_) return;
  if (auto noted = images_.note_done(options_.once, as_written(options_.command)); !noted)
    tell_("started again, the job will run again: " + noted.error().to_string());
}

// A program that dies as soon as it is restored would do so again: that is not an end by itself.
void Supervisor::tell_early_end(int status) {
  if (!restored_at_ || !WIFSIGNALED(status) || passed_on_) return;
  const auto after = Clock::now() - *restored_at_;
  if (after > kEarlyEnd) return;
  tell_(
      fmt::format("the job was ended by {} within {} of its restore, and not by its own end: "
                  "something that it had when it was saved may not be here; its images stay",
                  signal_name(WTERMSIG(status)), format_seconds(after)));
}

void Supervisor::tell_notes(const json& result) {
  if (!result.contains("notes")) return;
  for (const json& note : result["notes"]) {
    if (!note.is_string()) continue;
    // Each worker has the same to say about the same job.
    const auto text = note.get<std::string>();
    if (told_.insert(text).second) tell_(text);
  }
}

Result<void> Supervisor::on_event(const json& event) {
  const std::string what = event.value("event", "");
  if (what == "failed") return fail(error_from_json(event.at("error")));
  if (what == "not-started") {
    const int number = event.value("errno", 0);
    outcome_ =
        Outcome{number == ENOENT ? 127 : 126,
                errno_error(fmt::format("cannot start {}", options_.command.front()), number),
                {}};
    return {};
  }
  if (what == "ended") {
    if (is_saved_to_its_end()) return end_saved();
    const int status = event.value("status", 0);
    tell_early_end(status);
    finish(exit_status_of(status));
    note_end();
    return {};
  }
  if (what == "worked") {
    const json& result = event.at("result");
    tell_notes(result);
    if (doing_ == Doing::kRestoring) return on_restored(result);
    if (doing_ == Doing::kSaving) return on_saved(result);
    return on_recovered(result);
  }
  if (what != "started") return {};
  if (auto named = registration_->set_root(Pid{event.value("root", 0)}); !named) {
    tell_("the job will not be found by its name: " + named.error().to_string());
  }
  // The job's terminal obeys the keys, not the terminal of `stasis run`.
  if ((event.value("terminal", 0U) & 1U) != 0) streams_->make_raw();
  STASIS_TRY(tell_size());
  return go_on();
}

Result<void> Supervisor::on_restored(const json& result) {
  const bool failed = result.contains("died") || result.contains("error");
  if (failed && room_signal_ != 0) {
    tell_(fmt::format("{}: the restore is given up; the image stays", signal_name(room_signal_)));
    finish(options_.exit_code);
    return {};
  }
  if (result.contains("died")) {
    return fail(ErrorCode::kInternal,
                fmt::format("the process that restored {} {}", images_.path_of(number_),
                            result.value("died", "")),
                "the image is intact: start again");
  }
  if (result.contains("error")) {
    Error error = error_from_json(result["error"]);
    if (!is_damage(error.code)) return fail(std::move(error));
    images_.damaged(number_);
    tell_(fmt::format("the image {} is damaged ({}); the one before is taken",
                      images_.path_of(number_), error.message));
    STASIS_TRY_ASSIGN(auto next, choose_image(images_, options_.command, tell_));
    return begin(next);
  }
  restored_at_ = Clock::now();
  tell_(fmt::format("the job goes on from {} (restored in {})", images_.path_of(number_),
                    format_seconds(Seconds(result.value("seconds", 0.0)))));
  return on_event({{"event", "started"},
                   {"root", result.value("root", 0)},
                   {"terminal", result.value("terminal", 0U)}});
}

Result<void> Supervisor::on_saved(const json& result) {
  if (result.contains("died")) {
    tell_(fmt::format("the process that saved the job {}: the job is brought back",
                      result.value("died", "")));
    return work(Doing::kRecovering, {{"op", "recover"}});
  }
  if (result.contains("error")) {
    const Error error = error_from_json(result["error"]);
    if (error.code == ErrorCode::kNotRolledBack) {
      tell_("the job is brought back: " + error.message);
      return work(Doing::kRecovering, {{"op", "recover"}});
    }
    if (room_signal_ == 0 || gave_up_) {
      tell_(fmt::format("not saved: {}{}{}", error.message,
                        error.remedy.empty() ? "" : "; what to do: ", error.remedy));
    }
    if (!end_) return go_on();
    if (auto sent = runs(); !sent || gave_up_) return sent;
    if (error.code != ErrorCode::kBusy || Clock::now() >= room_deadline_)
      return give_up(error.message);
    // A verb is at work on it, by its name, or it starts a process.
    if (told_.insert(error.message).second) tell_("not saved yet: " + error.message);
    again_ = Clock::now() + kRetry;
    return {};
  }
  if (result.contains("suspended")) {
    if (!std::exchange(told_suspended_, true))
      tell_("not saved, because the job is suspended: what it is has not changed since");
    return go_on();
  }
  told_suspended_ = false;
  std::string text =
      fmt::format("saved to {} ({}) in {}", images_.path_of(number_), result.value("size", ""),
                  format_seconds(Seconds(result.value("seconds", 0.0))));
  if (result.contains("standstill")) {
    text += fmt::format(", standing still for {}",
                        format_seconds(Seconds(result.value("standstill", 0.0))));
  }
  auto removed = images_.remove_old(options_.keep);
  if (removed && !removed->empty()) {
    text += "; removed";
    for (const int number : *removed)
      text += fmt::format(" {:06}", number);
  }
  if (end_) text += "; the job has ended, to go on from there";
  tell_(text);
  if (!removed) tell_("an old image cannot be removed: " + removed.error().to_string());
  if (end_) {
    finish(options_.exit_code);
    return {};
  }
  return go_on();
}

Result<void> Supervisor::on_recovered(const json& result) {
  if (result.contains("error") || result.contains("died")) {
    if (is_saved_to_its_end()) return end_saved();
    const Error error = result.contains("error")
                            ? error_from_json(result["error"])
                            : Error{ErrorCode::kInternal, result.value("died", ""), {}};
    return fail(ErrorCode::kNotRolledBack,
                "the job could not be brought back after a save that failed, and is ended: " +
                    error.message,
                "start again with the same command line: it goes on from the last image");
  }
  tell_("the job runs on");
  if (!end_) return go_on();
  if (auto sent = runs(); !sent || gave_up_) return sent;
  return give_up("the save has failed");
}

}  // namespace

Result<Outcome> run(const RunOptions& options, Work work,
                    const std::function<void(const std::string&)>& tell) {
  const std::vector<std::string> words = as_written(options.command);
  const bool too_long = std::any_of(words.begin(), words.end(),
                                    [](const auto& w) { return w.size() > kLongestArgument; });
  if (too_long || words.size() > kMostArguments) {
    return fail(ErrorCode::kUsage,
                fmt::format("the command line has {} words, or one of more than {} bytes, which an "
                            "image cannot hold",
                            words.size(), kLongestArgument),
                "put it into a script, and run that");
  }
  const Notice notice(options.signals);
  const auto told_to_end = [&] {
    tell(not_begun(notice.to_end()));
    return Outcome{options.exit_code, {}, {}};
  };
  auto images = Images::open(options.images_dir, [&] { return notice.to_end() != 0; });
  if (!images && images.error().code == ErrorCode::kInterrupted) return told_to_end();
  if (!images) return fail(std::move(images.error()));
  STASIS_TRY_ASSIGN(auto cleared, images->clear());
  for (const std::string& path : cleared.removed)
    tell("removed what a killed `stasis run` had left: " + path);
  for (const Error& error : cleared.failed)
    tell("what a killed `stasis run` had left stays: " + error.to_string());
  if (!options.once.empty() && images->is_done(options.once, words)) {
    tell(fmt::format("the job has ended with 0 before ({}/done-{}), and is not run again",
                     images->path(), options.once));
    return Outcome{0, {}, {}};
  }
  STASIS_TRY_ASSIGN(auto image, choose_image(*images, options.command, tell));
  if (notice.to_end() != 0) return told_to_end();
  if (!image && options.can_be_saved) {
    if (auto possible = options.can_be_saved(); !possible) {
      notice.end();
      return Outcome{0, {}, std::move(possible.error())};
    }
  }
  return Supervisor(options, std::move(*images), notice, tell).run(image, std::move(work));
}

}  // namespace stasis::job
