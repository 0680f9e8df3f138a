#include "cli/run_job.h"

#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <csignal>

#include <fmt/format.h>

#include "cli/group.h"
#include "cli/help.h"
#include "job/images.h"
#include "job/registry.h"

namespace stasis::cli {
namespace {

using std::chrono::milliseconds;

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

constexpr const char* kGroup = "Options for jobs";

// When it is saved, and what of it is kept.
void add_save_options(CLI::App& command, RunArguments& arguments, CLI::Option* dir) {
  job::RunOptions& job = arguments.job;
  const auto add_positive = [&](const std::string& name, milliseconds& to,
                                const std::string& description) {
    const auto take = [name, &to](milliseconds value) {
      if (value.count() == 0) throw CLI::ValidationError(name + " needs more than 0");
      to = value;
    };
    add_duration(command, name, "s", take, description)->needs(dir)->group(kGroup);
  };
  add_positive("--every", job.every, "save it so often, and let it go on; e.g. 10m [never]");
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
      ->check(whole_number(1, 1000))
      ->type_name("N")
      ->needs(dir)
      ->group(kGroup);
  add_positive("--grace", job.grace,
               "how long a save before its end may take; then it gets the signal itself [120s]");
  command
      .add_flag("--whole", job.whole, "write all GPU memory each time, not only what has changed")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_flag("--tcp-close", job.worker.tcp_close,
                "save it also while it has TCP connections with processes outside of it (a "
                "database, a tracker); a restore closes all of its connections then, those of its "
                "own processes with each other, too [it is not saved]")
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
      ->check(whole_number(0, 255))
      ->type_name("N")
      ->needs(dir)
      ->group(kGroup);
}

// What holds when it is started again.
void add_restart_options(CLI::App& command, job::RunOptions& job, CLI::Option* dir) {
  command
      .add_option("--once", job.once,
                  "a job that has ended by itself with 0 is not run again when it is started with "
                  "the same WORD: `stasis run` ends with 0 at once [it is run again]")
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
      .add_option("--device-map,--map", job.worker.map,
                  "its GPUs after a restore: auto, or OLD=NEW,... as `stasis restore` takes it; "
                  "auto finds others of the same kind, among those of CUDA_VISIBLE_DEVICES [auto]")
      ->type_name("MAP")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_option("--refresh-env", job.worker.refreshed,
                  "variables that programs which it starts after a restore see as they are then; "
                  "SLURM_* for all that begin so [none]")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,...")
      ->needs(dir)
      ->group(kGroup);
}

void add_group_options(CLI::App& command, job::JobGroup& group, CLI::Option* dir) {
  auto* together =
      command
          .add_option("--group", group.dir,
                      "it is one part of a job of several nodes: all parts start, are restored, "
                      "and are saved together; a directory that all see, for this start alone")
          ->type_name("DIR")
          ->needs(dir)
          ->excludes(command.get_option("--tcp-close"))
          ->group(kGroup);
  auto* parts =
      command.add_option("--parts", group.parts, "with --group: how many parts there are")
          ->type_name("N")
          ->check(whole_number(1, kMostParts))
          ->needs(together)
          ->group(kGroup);
  auto* part = command
                   .add_option("--part", group.part,
                               "with --group: the name of this part, the same at each start")
                   ->type_name("NAME")
                   ->check(CLI::Validator(&why_no_part_name, ""))
                   ->needs(together)
                   ->group(kGroup);
  together->needs(parts)->needs(part);
}

}  // namespace

void add_job_options(CLI::App& command, RunArguments& arguments) {
  // What it may not be main() has said already.
  arguments.job.worker.ring_bytes = ring_of_environment().value_or(arguments.job.worker.ring_bytes);
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
  auto* without = command.add_flag_callback(
      "--no-io-uring", [&job] { job.io_uring = job::IoUring::kKeptOut; },
      "let it find no io_uring, which CRIU cannot dump and libraries do without, as torchrun's do; "
      "for a dump as root (by a seccomp filter) [on for a job or torchrun that root starts]");
  command
      .add_flag_callback(
          "--io-uring", [&job] { job.io_uring = job::IoUring::kAllowed; },
          "let a job, or torchrun, find io_uring; it cannot be saved while it has a ring open")
      ->excludes(without);
  auto* dir = command
                  .add_option("-D,--images-dir", job.images_dir,
                              "directory for the images of this one job; the newest there is "
                              "restored instead of starting COMMAND")
                  ->type_name("DIR")
                  ->check(CLI::Validator(
                      [](const std::string& dir) {
                        return dir.empty() ? "is empty: name a directory, or leave it out to run "
                                             "without images"
                                           : std::string();
                      },
                      ""))
                  ->group(kGroup);
  add_save_options(command, arguments, dir);
  add_restart_options(command, job, dir);
  add_ring(command, job.worker.ring_bytes)->needs(dir)->group(kGroup);
  add_group_options(command, job.worker.group, dir);
  command
      .add_option("--trace", job.worker.trace,
                  "write what was done when into this file at each save and restore, in place of "
                  "what was there, for Perfetto or chrome://tracing")
      ->type_name("FILE")
      ->needs(dir)
      ->group(kGroup);
  add_metrics_option(command, job.worker.metrics)->needs(dir)->group(kGroup);
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
  options.preload = preload;
  const auto tell = [&](const std::string& text) {
    context.terminal.note(text);
    // While the terminal is the job's, a line feed is no more than that.
    termios mode{};
    if (::tcgetattr(STDERR_FILENO, &mode) == 0 && (mode.c_oflag & OPOST) == 0)
      (void)!::write(STDERR_FILENO, "\r", 1);
  };
  return job::run(options, tell);
}

}  // namespace stasis::cli
