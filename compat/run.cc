#include "run.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/printable.h"
#include "checkpoint/journal.h"
#include "checkpoint/process.h"
#include "checkpoint/ranks.h"
#include "checkpoint/suspend_record.h"
#include "direct/agent_probe.h"
#include "direct/bring_back_alone.h"
#include "direct/driver_room.h"
#include "direct/left_to_driver.h"
#include "direct/unknown_sharing.h"
#include "help.h"

namespace stasis::compat {
namespace {

using std::chrono::milliseconds;

// CUresults whose text stands for a refusal that we make before the driver is asked.
constexpr int kCuOutOfMemory = 2;
constexpr int kCuNotInitialized = 3;
constexpr int kCuNotSupported = 801;
constexpr int kCuOperatingSystem = 304;
constexpr int kCuIllegalState = 401;
constexpr int kCuNotReady = 600;

// The first try of a lock without a limit; each further one takes twice as long. The driver's lock
// cannot be interrupted, and a program that is killed while it waits leaves a locked process
// behind. So a signal is answered after at most as long again as the lock has waited already, and
// work that needs long to finish still gets the time it needs.
constexpr milliseconds kFirstLockTry{500};
constexpr milliseconds kLongestLockTry{1U << 30U};

void say(std::FILE* to, const std::string& text) { std::fwrite(text.data(), 1, text.size(), to); }

// What the driver would have said, where an error is our own.
int cu_result_for(ErrorCode code) {
  switch (code) {
    case ErrorCode::kNotCuda:
    case ErrorCode::kZombie:
      return kCuNotInitialized;
    case ErrorCode::kWrongState:
    case ErrorCode::kFailedState:
    case ErrorCode::kBusy:
      return kCuIllegalState;
    case ErrorCode::kTimeout:
      return kCuNotReady;
    case ErrorCode::kDeviceMapUnsupported:
      return kCuNotSupported;
    case ErrorCode::kOutOfGpuMemory:
      return kCuOutOfMemory;
    default:
      return kCuOperatingSystem;
  }
}

Error no_such_number(const std::string& text) {
  return Error{ErrorCode::kNoSuchProcess,
               fmt::format("there is no process {}: it is larger than any process number", text),
               "check the number"};
}

// One run of the program: the options, the driver, and where to write to.
class Tool {
 public:
  Tool(const Options& options, Driver& driver, const Interrupt& interrupt, Streams streams)
      : options_(options), driver_(driver), interrupt_(interrupt), streams_(streams) {}

  int run() {
    switch (options_.operation) {
      case Operation::kGetState:
        return get_state();
      case Operation::kGetRestoreTid:
        return get_restore_tid();
      case Operation::kAction:
        return act();
      case Operation::kToggle:
        return toggle();
      case Operation::kLaunchJob:
        return refuse_job();
      case Operation::kHelp:
        break;
    }
    return 1;
  }

 private:
  Result<Process> open() const {
    if (!options_.pid) return fail(no_such_number(options_.pid_text));
    return Process::open(driver_, *options_.pid);
  }

  // `what` and, in quotes, the driver's own words; then ours.
  int report(const std::string& what, const Error& error) const {
    const std::string text =
        error.driver ? error.driver->text : driver_.describe(cu_result_for(error.code)).text;
    say(streams_.err, fmt::format("{}: \"{}\"\n", what, text));
    return explain(error);
  }

  int explain(const Error& error) const {
    // They name processes and files, which are called as their owners like.
    say(streams_.err, fmt::format("reason: {}\n", printable(error.to_string())));
    if (!error.remedy.empty())
      say(streams_.err, fmt::format("hint: {}\n", printable(error.remedy)));
    return 1;
  }

  int answer(const std::string& line) const {
    say(streams_.out, line + "\n");
    if (std::fflush(streams_.out) == 0 && std::ferror(streams_.out) == 0) return 0;
    say(streams_.err, "Could not write to standard output\n");
    return 1;
  }

  int get_state() const {
    auto process = open();
    Result<CudaState> state;
    if (process) {
      state = process->state();
    } else {
      state = fail(std::move(process.error()));
    }
    if (state) return answer(std::string(cuda_state_name(*state)));
    return report(fmt::format("Error getting process state for process ID {}", options_.pid_text),
                  state.error());
  }

  int get_restore_tid() const {
    auto process = open();
    Result<Tid> tid;
    if (process) {
      tid = process->restore_thread_id();
    } else {
      tid = fail(std::move(process.error()));
    }
    if (tid) return answer(fmt::format("{}", tid->value));
    // The one failure without the driver's words.
    say(streams_.err,
        fmt::format("Could not find restore thread for process ID {}\n", options_.pid_text));
    return explain(tid.error());
  }

  // Locks, in ever longer tries, and gives up between them when a signal asks us to.
  Result<void> lock(Process& process, milliseconds timeout) const {
    if (timeout.count() > 0) return process.lock(timeout);
    for (milliseconds limit = kFirstLockTry;; limit = std::min(limit * 2, kLongestLockTry)) {
      STASIS_TRY(interrupt_.check());
      auto done = process.lock(limit);
      if (done || done.error().code != ErrorCode::kTimeout) return done;
    }
  }

  // What it has on each GPU is known only as long as it has it.
  Result<void> checkpoint(Process& process) const {
    STASIS_TRY(refuse_loss_by_driver(process));
    direct::note_hold(process.pid(), process.pidfd());
    const auto use = driver_.memory_by_process();
    const auto before = recall_suspended(process);
    const std::string image = before ? before->image : std::string();
    auto done = process.checkpoint();
    if (!done || !use) return done;
    if (const auto own = use->find(process.pid()); own != use->end())
      (void)remember_suspended(process, {own->second, {}, image});
    return done;
  }

  // Where it is known what the process needs, the driver is asked if there is room for it.
  Result<void> restore(Process& process) const {
    const auto memory = recall_suspended(process);
    const Pid pid = process.pid();
    STASIS_TRY_ASSIGN(
        const auto room,
        direct::find_driver_room(
            driver_, std::span(&pid, 1), memory ? memory->uses : std::vector<GpuUse>(),
            options_.gpus ? *options_.gpus : std::vector<GpuPair>(), {interrupt_}));
    return options_.gpus ? process.restore(*options_.gpus) : process.restore();
  }

  // What `stasis suspend` has moved past the driver comes back too, so that the program goes on.
  Result<void> unlock(Process& process) const {
    STASIS_TRY(process.unlock());
    STASIS_TRY(bring_back_alone(
        process, [this] { return memory_of_all_gpus(driver_); }, &interrupt_));
    // What is in an image is found by that.
    const auto agent = direct::probe_agent(process.pid());
    const bool away = agent && *agent && direct::is_away((*agent)->state);
    if (!away) forget_suspended(process);
    return {};
  }

  int act() const {
    const std::string what = fmt::format("Could not {} on process ID {}",
                                         action_name(options_.action), options_.pid_text);
    auto process = open();
    if (!process) return report(what, process.error());
    Result<void> done;
    switch (options_.action) {
      case Action::kLock:
        return lock_only(*process, what);
      case Action::kCheckpoint:
        done = checkpoint(*process);
        break;
      case Action::kRestore:
        done = restore(*process);
        break;
      default:
        done = unlock(*process);
        break;
    }
    if (done) return 0;
    const int status = report(what, done.error());
    say_state(*process, options_.action == Action::kRestore ? &done.error() : nullptr);
    return status;
  }

  // While it runs, the driver in it can be asked what it has of other processes, which the driver
  // saves and cannot restore. NVIDIA's utility says nothing, and nothing is refused here either.
  void warn_of_sharing(const Process& process) const {
    auto own = Process::open(driver_, process.pid());
    if (!own || own->id() != process.id()) return;
    std::vector<TreeMember> alone;
    alone.push_back({std::move(*own), CudaState::kRunning});
    for (const Obstacle& one : find_unknown_sharing(alone, driver_.info().simulated, true)) {
      if (one.id != "sharing-unknown") continue;
      say(streams_.err, fmt::format("warning: process {} has {}; to be safe, {}\n",
                                    process.pid().value, printable(one.what), one.remedy));
    }
  }

  int lock_only(Process& process, const std::string& what) const {
    auto before = process.state();
    if (!before) return report(what, before.error());
    if (*before == CudaState::kRunning) warn_of_sharing(process);
    StateGuard guard(process, *before);
    auto done = lock(process, options_.timeout);
    if (done) done = interrupt_.check();
    if (!done) return failed(process, what, done.error(), guard);
    guard.dismiss();
    return 0;
  }

  int toggle() const {
    const std::string what = fmt::format("Error toggling CUDA in process ID {}", options_.pid_text);
    auto process = open();
    if (!process) return report(what, process.error());
    // Not the driver first: it answers when what another operation does is over, and what was asked
    // for may be done by then.
    if (auto free = check_not_busy({{process->id(), {}}});
        !free && free.error().code == ErrorCode::kBusy) {
      return report(what, free.error());
    }
    auto before = process->state();
    if (!before) return report(what, before.error());
    auto journal = announce(*process, *before);
    if (!journal) return report(what, journal.error());
    StateGuard guard(*process, *before);
    auto done = *before == CudaState::kCheckpointed ? resume(*process) : suspend(*process);
    const int status = done ? 0 : failed(*process, what, done.error(), guard);
    if (done) guard.dismiss();
    // It stays for `stasis recover` if the process could not be brought back.
    if (*journal && (done || is_in(*process, *before))) (*journal)->finish();
    return status;
  }

  // Says in the journal what is under way, so that `stasis recover` finds the process if we are
  // killed halfway. kBusy if another operation has the process. Where there is no place for a
  // journal the toggle goes without.
  static Result<std::optional<Journal>> announce(const Process& process, CudaState before) {
    JournalRecord record;
    record.operation = before == CudaState::kCheckpointed ? stasis::Operation::kResume
                                                          : stasis::Operation::kSuspend;
    record.root = process.pid();
    auto journal = Journal::begin(std::move(record));
    Result<void> told;
    if (journal) {
      told = journal->update({{process.id(), before}});
      if (told) return std::move(*journal);
      journal->finish();
    } else {
      told = fail(std::move(journal.error()));
    }
    if (told.error().code == ErrorCode::kBusy) return fail(std::move(told.error()));
    return std::nullopt;
  }

  // A process that is not running is refused by the lock, with the reason.
  Result<void> suspend(Process& process) const {
    auto done = refuse_loss_by_driver(process);
    if (done) warn_of_sharing(process);
    if (done) done = lock(process, milliseconds(0));
    if (done) done = interrupt_.check();
    if (done) done = checkpoint(process);
    if (done) done = interrupt_.check();
    return done;
  }

  // Once its memory is back, nothing is gained by stopping halfway: it goes on to running.
  Result<void> resume(Process& process) const {
    auto done = interrupt_.check();
    if (done) done = restore(process);
    if (done) done = unlock(process);
    return done;
  }

  static bool is_in(const Process& process, CudaState wanted) {
    const auto now = process.cuda_state();
    return !process.alive() || (now && *now && **now == wanted);
  }

  // Brings the process back, and says what went wrong and where that leaves it.
  int failed(const Process& process, const std::string& what, const Error& error,
             StateGuard& guard) const {
    // Refused for its state: whatever that is now, it was not our doing.
    if (error.code == ErrorCode::kWrongState) guard.dismiss();
    // On its way to running, only its agent has not brought its memory back: no lock helps that.
    if (options_.operation == Operation::kToggle && is_in(process, CudaState::kRunning))
      guard.dismiss();
    auto undone = guard.undo();
    const int status =
        error.code == ErrorCode::kInterrupted ? interrupted(what) : report(what, error);
    const auto others = error.code == ErrorCode::kTimeout
                            ? find_other_ranks(proc::ProcFs(), process.pid())
                            : std::nullopt;
    if (others) {
      say(streams_.err, fmt::format("hint: {}: `stasis suspend {}`\n",
                                    describe_other_ranks(*others), others->above.pid.value));
    }
    if (undone) {
      say_state(process, options_.operation == Operation::kToggle ? &error : nullptr);
    } else {
      explain(undone.error());
    }
    return status;
  }

  int interrupted(const std::string& what) const {
    say(streams_.err, fmt::format("{}: stopped by signal {}\n", what, interrupt_.signal_number()));
    return 128 + interrupt_.signal_number();
  }

  // Whether the driver has refused to restore it where it was. It may have room for it later.
  bool is_refused(const Error& error) const {
    return error.driver && !options_.gpus && error.code != ErrorCode::kOutOfGpuMemory &&
           error.code != ErrorCode::kWrongState;
  }

  // After a failure: the state that the process is in now, and the way out of it. `restoring`: why
  // a restore has failed.
  void say_state(const Process& process, const Error* restoring) const {
    const auto now = process.cuda_state();
    if (!now || !*now) return;
    std::string way_out;
    if (**now == CudaState::kLocked) {
      way_out = fmt::format("; `cuda-checkpoint --action unlock --pid {}` lets it run",
                            process.pid().value);
    }
    if (**now == CudaState::kCheckpointed) {
      way_out =
          fmt::format("; `cuda-checkpoint --toggle --pid {}` lets it run", process.pid().value);
      if (restoring != nullptr && is_refused(*restoring)) {
        way_out = fmt::format(
            "; as long as the driver refuses to restore it, nothing lets it run: end it with "
            "`kill -9 {}`, and start the job again or restore it from an image",
            process.pid().value);
      } else if (!options_.gpus) {
        way_out += ", unless the driver refuses to restore it";
      }
    }
    const auto agent = direct::probe_agent(process.pid());
    if (**now == CudaState::kRunning && agent && *agent && (*agent)->waits())
      way_out = "; it " + (*agent)->until_when(process.pid());
    say(streams_.err, fmt::format("hint: process {} is {} now{}\n", process.pid().value,
                                  cuda_state_name(**now), way_out));
  }

  int refuse_job() const {
    say(streams_.err, fmt::format("Could not launch {} as a job\n", options_.job.front()));
    say(streams_.err,
        "reason: a job is known to the driver by a file whose contents only NVIDIA's own utility "
        "can make (CUDA_CHECKPOINT_JOB_FILE); the driver's public interface has no call for it\n");
    say(streams_.err,
        "hint: launch it with the cuda-checkpoint that belongs to your driver; this one acts on "
        "its processes all the same. `stasis` suspends whole process trees without jobs\n");
    return 1;
  }

  const Options& options_;
  Driver& driver_;
  const Interrupt& interrupt_;
  Streams streams_;
};

Interrupt& signals() {
  static Interrupt interrupt;
  return interrupt;
}

void on_signal(int number) { signals().request(number); }

// A signal is noted and answered between two steps, so that none leaves a process halfway.
void hold_signals() {
  (void)signals();  // made before any handler can run
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  for (int number : {SIGHUP, SIGINT, SIGTERM}) {
    struct sigaction before = {};
    // nohup and shells' background jobs ignore signals on purpose.
    if (::sigaction(number, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) continue;
    ::sigaction(number, &action, nullptr);
  }
}

int usage_error(const Error& error, const DriverInfo* driver, Streams streams) {
  say(streams.err, error.message + "\n\n" + help_text(driver));
  return 1;
}

}  // namespace

int carry_out(const Options& options, Driver& driver, const Interrupt& interrupt, Streams streams) {
  return Tool(options, driver, interrupt, streams).run();
}

int run(int argc, char** argv) {
  const Streams streams{stdout, stderr};
  auto driver = load_driver();
  const DriverInfo* info = driver ? &(*driver)->info() : nullptr;
  Features features{.device_map = true, .jobs = false};
  if (info != nullptr) features = {.device_map = info->has_device_map, .jobs = info->has_jobs};
  auto options = parse_options(argc, argv, features);
  if (!options) return usage_error(options.error(), info, streams);
  if (options->operation == Operation::kHelp) {
    say(streams.out, help_text(info));
    return std::fflush(streams.out) == 0 ? 0 : 1;
  }
  if (!driver) {
    say(streams.err, driver.error().to_string() + "\n");
    if (!driver.error().remedy.empty()) say(streams.err, "hint: " + driver.error().remedy + "\n");
    return 1;
  }
  if (options->operation == Operation::kAction || options->operation == Operation::kToggle) {
    hold_signals();
  }
  return carry_out(*options, **driver, signals(), streams);
}

}  // namespace stasis::compat
