#include "job/run.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/journal.h"
#include "checkpoint/state_file.h"
#include "criu/criu.h"
#include "job/choose_image.h"
#include "job/images.h"
#include "job/init.h"
#include "job/io_uring.h"
#include "job/signals.h"
#include "job/supervisor.h"
#include "job/supervisor_texts.h"
#include "proc/procfs.h"

namespace stasis::job {
namespace {

constexpr std::size_t kMostArguments = 4096;  // docs/image-format.md
constexpr std::size_t kLongestArgument = 65536;

// Each save would be refused (doctor/criu_threads.cc).
Result<void> check_unfiltered() {
  const int self = ::getpid();
  const auto status = proc::ProcFs().thread_status(Pid{self}, Tid{self});
  if (!status || status->seccomp == 0) return {};
  return fail(refusal(
      {"seccomp",
       Severity::kRed,
       {},
       "this stasis runs under a seccomp filter, with which CRIU can dump nothing",
       "do not start it within another `stasis run` that keeps its program from io_uring, as one "
       "with --images-dir does (--io-uring there); or start it outside of the container, or that "
       "one without a filter (--security-opt seccomp=unconfined)"},
      ErrorCode::kUndumpable));
}

// Where there is no image, before anything is done.
Result<void> can_be_saved() {
  STASIS_TRY_ASSIGN(const auto state, journal_directory());
  STASIS_TRY(check_writable(state));
  STASIS_TRY(Criu::find());
  // Also where it could be saved: it would end, and could not go on.
  if (auto may = Criu::may_restore(); !may) {
    may.error().remedy += kOrAsAnotherUser;
    return may;
  }
  return check_unfiltered();
}

Result<void> complete(RunOptions& options) {
  STASIS_TRY(check_worker_options(options.worker));
  options.worker.name = options.name;
  if (options.worker.group.has_others()) {
    STASIS_TRY(open_group(options.worker.group));
    options.worker.group_timeout = options.grace;
    options.visible_dirs.push_back(options.worker.group.dir);
  }
  if (options.io_uring == IoUring::kAutomatic && can_do_without_io_uring_freely())
    options.io_uring = IoUring::kKeptOut;
  if (options.io_uring == IoUring::kKeptOut && proc::ProcFs().in_own_user_namespace()) {
    return fail(refusal(
        {"seccomp",
         Severity::kRed,
         {},
         "in a user namespace a job with --no-io-uring cannot be saved: CRIU may not read its "
         "filter of system calls",
         "leave out --no-io-uring, or run as root"}));
  }
  if (!options.worker.trace.empty())
    options.visible_dirs.push_back(std::filesystem::path(options.worker.trace).parent_path());
  if (!options.worker.metrics.empty()) options.visible_dirs.push_back(options.worker.metrics);
  // Where the simulated driver keeps what is on its GPUs.
  const char* simulated = std::getenv("STASIS_SIM_DIR");
  options.visible_dirs.push_back(
      simulated != nullptr ? simulated : fmt::format("/dev/shm/stasis-sim-{}", ::geteuid()));
  return {};
}

}  // namespace

Result<Outcome> run(RunOptions options, const std::function<void(const std::string&)>& tell) {
  STASIS_TRY(complete(options));
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
    tell(not_begun_text(notice.to_end()));
    return Outcome{options.exit_code, {}, {}};
  };
  auto images = Images::open(options.images_dir, [&] { return notice.to_end() != 0; });
  if (!images && images.error().code == ErrorCode::kInterrupted) return told_to_end();
  if (!images) return fail(std::move(images.error()));
  if (const auto places = images->who_may_rename(); !places.empty()) {
    tell(
        fmt::format("another user can rename or replace {}, or what leads to it, so that the job "
                    "goes on from an older image, or is not saved: {}",
                    images->path(), fmt::join(places, "; ")));
  }
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
  if (!image && options.goes_on_only) {
    return fail(ErrorCode::kImageIncomplete,
                fmt::format("{} has no image of the job any more", images->path()),
                "copy one there again, or start the job anew by `stasis run`");
  }
  if (!image) {
    if (auto possible = can_be_saved(); !possible) {
      notice.end();
      return Outcome{0, {}, std::move(possible.error())};
    }
  }
  // A restore, and a wait for other parts, may take long.
  if (options.on_begin && (image || options.worker.group.has_others()))
    std::exchange(options.on_begin, {})();
  const auto work = [&](const WorkOrder& order, const StreamEnds& streams) {
    return do_work(order, streams, options.worker);
  };
  auto outcome = Supervisor(options, std::move(*images), notice, tell).run(image, work);
  leave_group(options.worker.group);
  return outcome;
}

}  // namespace stasis::job
