#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <string>
#include <utility>

#include <fmt/format.h>

#include "criu/criu.h"
#include "criu/criu_session.h"

namespace stasis {
namespace {

constexpr const char* kLogName = "dump.log";

// CRIU's log stands on the same disk as a rule, so that on a full one it cannot say so.
void blame_full_disk(const UniqueFd& images_dir, Error& error) {
  constexpr std::uint64_t kAlmostNothing = 1U << 20;
  struct statvfs info = {};
  if (error.code != ErrorCode::kCriuFailed && error.code != ErrorCode::kNoSpace) return;
  if (::fstatvfs(images_dir.get(), &info) != 0) return;
  const std::uint64_t free_bytes = std::uint64_t{info.f_bavail} * info.f_frsize;
  if (error.code == ErrorCode::kCriuFailed && free_bytes >= kAlmostNothing) return;
  std::string figures = fmt::format(" ({} free of {})", format_bytes(free_bytes),
                                    format_bytes(std::uint64_t{info.f_blocks} * info.f_frsize));
  if (error.code == ErrorCode::kCriuFailed)
    error.message = fmt::format("the disk is full{}: {}", figures, error.message);
  else
    error.message += figures;
  error.code = ErrorCode::kNoSpace;
  error.remedy = "free space there, or dump to another disk";
}

criu_rpc::Request dump_message(const DumpRequest& request) {
  criu_rpc::Request message;
  message.type = criu_rpc::Type::kDump;
  criu_rpc::Options& options = message.opts.emplace();
  options.images_dir_fd = request.images_dir.get();
  options.work_dir_fd = request.log_dir.get();
  options.log_file = kLogName;
  options.log_level = request.log_level;
  options.pid = request.root.value;
  options.leave_running = request.leave_running;
  options.notify_scripts = true;
  set_options(options, request.options);
  return message;
}

Error dump_error(const DumpRequest& request, const CriuAnswer& answer, const CriuProcess& process) {
  Error error =
      answer.refusal
          ? *answer.refusal
          : criu_error(fmt::format("dump process {}", request.root.value), answer, process,
                       {request.log_dir, kLogName, [&] { return request.log_path; }});
  if (!answer.refusal) blame_full_disk(request.images_dir, error);
  tell_of_left_behind(process, error);
  return error;
}

}  // namespace

std::string criu_version_text(int version) {
  const int sublevel = version % 100;
  std::string text = fmt::format("{}.{}", version / 10000, version / 100 % 100);
  if (sublevel != 0) text += fmt::format(".{}", sublevel);
  return text;
}

std::string Criu::version_text() const { return criu_version_text(version_); }

Result<void> Criu::dump(const DumpRequest& request,
                        const std::function<Result<void>()>& on_images_complete,
                        const Interrupt& interrupt) const {
  STASIS_TRY_ASSIGN(auto root, Pidfd::open(request.root));

  CriuProcess::StartOptions start;
  start.plugin_dir = fmt::format("/proc/{}/fd/{}", ::getpid(), request.log_dir.get());
  start.hidden = request.hidden;
  STASIS_TRY_ASSIGN(auto process, start_told(path_, start, request.on_started));

  bool begun = false;  // criu had the word to touch the tree
  bool complete = false;
  CriuLimits limits;
  limits.give_up = [&] { process.starve(); };
  limits.deadline = request.deadline;
  limits.stop = [&]() -> Result<void> {
    if (complete) return {};
    STASIS_TRY(interrupt.check());
    return begun && request.check ? request.check() : Result<void>();
  };
  const CriuAnswer answer = converse(
      process, dump_message(request),
      [&](const criu_rpc::Notification& notification) -> Result<void> {
        STASIS_TRY(limits.stop());
        // "pre-dump" comes when criu knows its kernel (kerndat_init), and before it looks at any
        // task; the time limit that it sets itself for stopping them begins later, too
        // (cr_dump_tasks and setup_alarm_handler in cr-dump.c).
        if (notification.script == "pre-dump") {
          auto ready = request.on_ready ? request.on_ready() : Result<void>();
          begun = ready.has_value();
          return ready;
        }
        // "post-dump" comes when all image files are flushed and no task was ended or let go
        // (cr_dump_finish in CRIU's cr-dump.c).
        if (notification.script != "post-dump") return {};
        if (!begun) return fail(ErrorCode::kInternal, "CRIU began the dump without asking", {});
        STASIS_TRY(on_images_complete());
        complete = true;
        return {};
      },
      limits);

  if (answer.succeeded()) {
    if (!complete) {
      return fail(ErrorCode::kInternal, "CRIU ended the dump without saying that it was complete");
    }
    // Ended tasks are gone once their pidfd says so; criu does not wait for that.
    if (!request.leave_running) root.wait_exit(5000);
    return {};
  }
  Error error = dump_error(request, answer, process);
  // A criu that was killed while its code ran in a process takes that along.
  if (begun && !root.alive()) {
    error.message = fmt::format("process {} has ended, though its dump failed: {}",
                                request.root.value, error.message);
    error.remedy = complete ? "the image was complete: restore from it if it was kept"
                            : "start the program anew";
  }
  return fail(std::move(error));
}

}  // namespace stasis
