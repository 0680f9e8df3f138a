#include "cli/run_job.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include <fmt/format.h>

#include "base/printable.h"
#include "base/trace.h"
#include "checkpoint/group.h"
#include "checkpoint/journal.h"
#include "criu/criu.h"
#include "image/image_reader.h"
#include "job/images.h"
#include "job/registry.h"
#include "job/shared_memory.h"
#include "proc/procfs.h"

namespace stasis::cli {
namespace {

using std::chrono::milliseconds;

constexpr const char* kAutomaticMap = "auto";

// "90", "90s", "10m", "2h", "500ms".
milliseconds parse_duration(const std::string& option, const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  constexpr std::uint64_t kMost = 1'000'000'000;
  std::uint64_t factor = 0;
  if (unit == "ms") factor = 1;
  if (unit == "s" || unit.empty()) factor = 1000;
  if (unit == "m") factor = 60'000;
  if (unit == "h") factor = 3'600'000;
  if (error != std::errc() || factor == 0 || value == 0 || value > kMost / factor) {
    throw CLI::ValidationError(
        option,
        fmt::format("'{}' is no duration; write e.g. 90s, 10m or 2h, 11 days at most", text));
  }
  return milliseconds(value * factor);
}

// "TERM", "SIGTERM", "15"; 0 if it is none that can be taken.
int parse_signal(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  if (text.starts_with("SIG")) text.erase(0, 3);
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM, SIGXCPU}) {
    if (text == ::sigabbrev_np(number) || text == std::to_string(number)) return number;
  }
  return 0;
}

// What a worker has done, with all that there is to say of it.
job::WorkResult result_of(const Context& context, decltype(job::WorkResult::what) what) {
  return {std::move(what), context.notes};
}

// Has the user suspended it by `stasis suspend NAME`?
Result<bool> is_suspended(Driver& driver, Pid root) {
  STASIS_TRY_ASSIGN(auto group, Group::open(driver, root));
  group.dismiss();
  return std::any_of(group.members().begin(), group.members().end(),
                     [](const auto& member) { return member.initial == CudaState::kCheckpointed; });
}

// An image has the tree below the root, and the namespace more: what forked itself away is init's.
void tell_of_strays(Context& context, Pid root) {
  const auto everybody = proc::ProcFs().all();
  if (!everybody) return;
  for (const proc::ProcessInfo& info : *everybody) {
    if (info.parent.value != 1 || info.pid == root || info.pid.value == ::getpid()) continue;
    if (info.state == 'Z') continue;
    context.notes.push_back(
        fmt::format("process {} ({}) has left the job's tree: no image has it, and a restored job "
                    "is without it",
                    info.pid.value, printable(info.comm)));
  }
}

job::WorkResult save(Context& context, Driver& driver, Pid root, const job::SaveOrder& order,
                     const job::StreamEnds& streams) {
  DumpOptions options;
  options.images_dir = order.images_dir;
  options.after = order.end ? AfterDump::kKill : AfterDump::kRunning;
  options.job.emplace();
  options.job->command = order.command;
  for (const UniqueFd& stream : streams) {
    auto name = job::pipe_name(stream);
    if (!name) return result_of(context, name.error());
    options.job->streams.push_back(std::move(*name));
  }
  options.base = order.base;
  options.base_may_be_empty = true;
  context.interrupt.set_time_limit(order.limit);
  options.on_complete = [](const UniqueFd& criu_dir) -> Result<void> {
    STASIS_TRY(job::save_shared_memory(job::kSharedMemory, criu_dir));
    return {};
  };
  if (options.after == AfterDump::kRunning) {
    const auto suspended = is_suspended(driver, root);
    if (suspended && *suspended) return result_of(context, job::WasSuspended{});
  }
  tell_of_strays(context, root);
  auto report = dump(context.environment(driver), root, options);
  if (!report) return result_of(context, report.error());
  job::Saved saved{size_text(*report), report->total.count(), {}};
  if (report->standstill) saved.standstill = report->standstill->count();
  return result_of(context, std::move(saved));
}

// What of the options holds for a restore.
struct Wishes {
  std::string map;
  std::vector<std::string> refreshed;
  // These for a save, too.
  std::uint64_t ring_bytes;
  std::string trace;
};

// The changes that preload/environment.h reads: what is listed as it is in our own environment.
Result<void> write_environment(const std::vector<std::string>& listed) {
  // Whatever an image has by that name.
  std::error_code ignored;
  std::filesystem::remove_all(job::kEnvironmentFile, ignored);
  std::string changes;
  for (const std::string& name : listed) {
    const bool prefix = name.ends_with('*');
    if (prefix) changes += name + '\0';
    const std::string begin = prefix ? name.substr(0, name.size() - 1) : name + "=";
    bool found = false;
    for (char** at = environ; *at != nullptr; ++at) {
      if (!std::string_view(*at).starts_with(begin)) continue;
      changes += std::string(*at) + '\0';
      found = true;
    }
    if (!prefix && !found) changes += name + '\0';
  }
  return job::make_environment_file(changes);
}

job::WorkResult bring_back(Context& context, Driver& driver, const job::RestoreOrder& order,
                           const job::StreamEnds& streams, const Wishes& wishes) {
  RestoreOptions options;
  options.images_dir = order.images_dir;
  if (wishes.map == kAutomaticMap) {
    options.gpu_choice.emplace();
    if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"))
      options.gpu_choice->visible = visible;
  } else {
    auto entries = parse_gpu_map(wishes.map);
    if (!entries) return result_of(context, entries.error());
    options.gpu_map = std::move(*entries);
  }
  auto image = ImageReader::open(options.images_dir);
  if (!image) return result_of(context, image.error());
  const auto& job = image->manifest().job;
  for (std::size_t i = 0; job && i < job->streams.size() && i < streams.size(); ++i)
    options.inherit.push_back({job->streams[i], &streams.at(i)});
  options.on_checked = [&wishes](const UniqueFd& criu_dir) {
    auto done = job::restore_shared_memory(job::kSharedMemory, criu_dir);
    return done ? write_environment(wishes.refreshed) : done;
  };
  options.on_standing = job::number_from_first;
  options.caller_ends = true;  // this worker; the job's own parent is init, before and after
  auto report = restore(context.environment(driver), options);
  if (!report) return result_of(context, report.error());
  const job::Restored restored{report->root, report->total.count()};
  // Saved at its end while the user had it suspended: a user who starts it again wants it to run.
  const bool suspended =
      std::any_of(report->processes.begin(), report->processes.end(),
                  [](const auto& one) { return one.state == CudaState::kCheckpointed; });
  if (!suspended) return result_of(context, restored);
  auto resumed = resume(context.environment(driver), report->root, {});
  if (!resumed) return result_of(context, resumed.error());
  return result_of(context, restored);
}

// In the worker, which does one thing and ends.
Interrupt& worker_interrupt() {
  static Interrupt interrupt;
  return interrupt;
}

// Told to by init: a save is rolled back, and the job gets what it has no more time to wait for; a
// restore leaves nothing.
void obey_stop() {
  (void)worker_interrupt();  // made before the handler needs it
  struct sigaction action {};
  action.sa_handler = [](int number) { worker_interrupt().request(number); };
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
}

job::WorkResult bring_to_run(Context& context, Driver& driver, Pid root) {
  auto report = recover(context.environment(driver), root);
  if (!report) return result_of(context, report.error());
  if (report->error) return result_of(context, *report->error);
  return result_of(context, job::Recovered{});
}

// In a process of its own, in the job's namespaces.
job::WorkResult work(const job::WorkOrder& order, const job::StreamEnds& streams,
                     const Wishes& wishes) {
  Terminal silent;
  Context context{silent, worker_interrupt()};
  context.session.ring_bytes = wishes.ring_bytes;
  if (!std::holds_alternative<job::RecoverOrder>(order.what)) obey_stop();
  auto driver =
      context.load_moving_driver(false, std::holds_alternative<job::SaveOrder>(order.what));
  if (!driver) return result_of(context, driver.error());
  if ((*driver)->info().simulated) {
    context.notes.push_back("this is the simulated GPU (" + (*driver)->info().library + ")");
  }
  return std::visit(job::Cases{[&](const job::SaveOrder& wanted) {
                                 return save(context, **driver, order.root, wanted, streams);
                               },
                               [&](const job::RestoreOrder& wanted) {
                                 return bring_back(context, **driver, wanted, streams, wishes);
                               },
                               [&](const job::RecoverOrder&) {
                                 return bring_to_run(context, **driver, order.root);
                               }},
                    order.what);
}

job::WorkResult traced_work(const job::WorkOrder& order, const job::StreamEnds& streams,
                            const Wishes& wishes) {
  if (wishes.trace.empty()) return work(order, streams, wishes);
  trace_begin();
  job::WorkResult result = work(order, streams, wishes);
  if (auto written = replace_trace(wishes.trace, "run: " + job::name_of(order)); !written)
    result.notes.push_back("no trace: " + written.error().to_string());
  return result;
}

// As the workers are to find it, wherever that is.
Result<std::string> place_of_trace(const std::string& path) {
  std::error_code failed;
  // Of a name that is not there yet it would leave out where we are.
  auto place = std::filesystem::absolute(path, failed);
  if (!failed) place = std::filesystem::weakly_canonical(place, failed);
  if (failed) return fail(errno_error("cannot find " + path, failed.value()));
  if (place.parent_path() != job::kSharedMemory) return place.string();
  return fail(ErrorCode::kUsage,
              fmt::format("{} cannot be written: the job has a {} of its own", place.string(),
                          job::kSharedMemory),
              "name a file in another directory for --trace");
}

Result<void> check_refreshed(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    std::string_view rest = name;
    if (rest.ends_with('*')) rest.remove_suffix(1);
    const bool good = !rest.empty() && std::isdigit(static_cast<unsigned char>(rest[0])) == 0 &&
                      std::all_of(rest.begin(), rest.end(),
                                  [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
    // By which a program gets the agent, and that its list.
    const auto ours = [&](std::string_view variable) {
      return rest == variable || (name.ends_with('*') && variable.starts_with(rest));
    };
    if (good && !ours("LD_PRELOAD") && !ours("STASIS_ENV_FILE")) continue;
    return fail(
        ErrorCode::kUsage,
        fmt::format("'{}' is no variable that can be refreshed for what the job starts", name),
        "--refresh-env takes names, and beginnings of names with a star: SLURM_*");
  }
  return {};
}

}  // namespace

void add_job_options(CLI::App& command, RunArguments& arguments) {
  constexpr const char* kGroup = "Options for jobs";
  job::RunOptions& job = arguments.job;
  command
      .add_option("--name", job.name,
                  "a name by which `stasis suspend`, `resume`, `swap` and others find it, also "
                  "without --images-dir [job-PID for jobs]")
      ->type_name("NAME")
      ->check(CLI::Validator(
          [](const std::string& text) {
            auto good = job::check_job_name(text);
            return good ? std::string() : good.error().message + ": " + good.error().remedy;
          },
          ""));
  command.add_flag("--no-io-uring", job.without_io_uring,
                   "let it find no io_uring, which CRIU cannot dump and libraries do without, as "
                   "torchrun's do; for a dump as root (by a seccomp filter)");
  auto* dir = command
                  .add_option("-D,--images-dir", job.images_dir,
                              "directory for the images of this one job; the newest there is "
                              "restored instead of starting COMMAND")
                  ->type_name("DIR")
                  ->group(kGroup);
  command
      .add_option_function<std::string>(
          "--every",
          [&job](const std::string& text) { job.every = parse_duration("--every", text); },
          "save it so often, and let it go on; e.g. 10m [never]")
      ->type_name("TIME")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_option("--on-signal", arguments.signals,
                  "signals that save it and are not passed on: USR1 and USR2 let it go on, others "
                  "end it [TERM,USR1]")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("SIGNAL,...")
      ->needs(dir)
      ->group(kGroup);
  command.add_option("--keep", job.keep, "so many complete images, the newest [2]")
      ->check(CLI::Range(1, 1000))
      ->type_name("N")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_option_function<std::string>(
          "--grace",
          [&job](const std::string& text) { job.grace = parse_duration("--grace", text); },
          "how long a save before its end may take; then it gets the signal itself [120s]")
      ->type_name("TIME")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_flag("--whole", job.whole,
                "write each image whole; otherwise GPU memory that the image before has already is "
                "not written again")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_flag("--best-effort", arguments.best_effort,
                "where no job can be saved (no CRIU, no right to make namespaces, no state "
                "directory), run COMMAND all the same, as without --images-dir; otherwise that is "
                "an error")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_option("--exit-code", job.exit_code,
                  "the exit status after a save that has ended it [75]")
      ->check(CLI::Range(0, 255))
      ->type_name("N")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_option("--once", job.once,
                  "a job that has ended by itself with 0 is not run again when it is started with "
                  "the same WORD: `stasis run` ends with 0 at once [it is]")
      ->check(CLI::Validator(
          [](const std::string& text) {
            auto good = job::Images::check_word(text);
            return good ? std::string() : good.error().message + ": " + good.error().remedy;
          },
          ""))
      ->type_name("WORD")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_option("--map", arguments.map,
                  "its GPUs after a restore: auto, or OLD=NEW,... as `stasis restore` takes it; "
                  "auto finds others of the same kind, among those of CUDA_VISIBLE_DEVICES [auto]")
      ->type_name("MAP")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_option("--refresh-env", arguments.refreshed,
                  "variables that programs which it starts after a restore see as they are then; "
                  "SLURM_* for all that begin so [none]")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,...")
      ->needs(dir)
      ->group(kGroup);
  add_ring(command, arguments.ring_bytes)->needs(dir)->group(kGroup);
  command
      .add_option("--trace", arguments.trace,
                  "write what was done when into this file at each save and restore, in place of "
                  "what was there, for Perfetto or chrome://tracing")
      ->type_name("FILE")
      ->needs(dir)
      ->group(kGroup);
}

Result<job::Outcome> run_job(Context& context, RunArguments& arguments,
                             const std::string& preload) {
  job::RunOptions& options = arguments.job;
  for (const std::string& name : arguments.signals) {
    const int number = parse_signal(name);
    if (number == 0) {
      return fail(ErrorCode::kUsage, fmt::format("'{}' is no signal that can ask for a save", name),
                  "--on-signal takes HUP, INT, QUIT, USR1, USR2, ALRM, TERM and XCPU");
    }
    options.signals.insert(number);
  }
  if (arguments.map != kAutomaticMap) {
    STASIS_TRY(parse_gpu_map(arguments.map));
  }
  STASIS_TRY(check_refreshed(arguments.refreshed));
  if (options.without_io_uring && proc::ProcFs().in_own_user_namespace()) {
    return fail(
        ErrorCode::kNotSupported,
        "in a user namespace a job with --no-io-uring cannot be saved: CRIU may not read its "
        "filter of system calls",
        "leave out --no-io-uring, or run as root");
  }
  Wishes wishes{arguments.map, arguments.refreshed, arguments.ring_bytes, {}};
  if (!arguments.trace.empty()) {
    STASIS_TRY_ASSIGN(auto place, place_of_trace(arguments.trace));
    wishes.trace = std::move(place);
    options.visible_dirs.push_back(std::filesystem::path(wishes.trace).parent_path());
  }
  options.preload = preload;
  options.can_be_saved = []() -> Result<void> {
    STASIS_TRY(journal_directory());
    STASIS_TRY(Criu::find());
    return {};
  };
  // Where the simulated driver keeps what is on its GPUs.
  const char* simulated = std::getenv("STASIS_SIM_DIR");
  options.visible_dirs.push_back(
      simulated != nullptr ? simulated : fmt::format("/dev/shm/stasis-sim-{}", ::geteuid()));
  const auto tell = [&](const std::string& text) {
    context.terminal.note(text);
    // While the terminal is the job's, a line feed is no more than that.
    termios mode{};
    if (::tcgetattr(STDERR_FILENO, &mode) == 0 && (mode.c_oflag & OPOST) == 0)
      (void)!::write(STDERR_FILENO, "\r", 1);
  };
  return job::run(
      options,
      [wishes = std::move(wishes)](const job::WorkOrder& order, const job::StreamEnds& streams) {
        return traced_work(order, streams, wishes);
      },
      tell);
}

}  // namespace stasis::cli
