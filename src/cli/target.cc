#include "cli/target.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>

namespace stasis::cli {
namespace {

std::optional<int> as_number(const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value <= 0) return std::nullopt;
  return value;
}

bool lives_here(const job::JobEntry& entry) {
  struct stat its {};
  struct stat ours {};
  const std::string path = fmt::format("/proc/{}/ns/pid", entry.init.value);
  return ::stat(path.c_str(), &its) == 0 && ::stat("/proc/self/ns/pid", &ours) == 0 &&
         its.st_ino == ours.st_ino;
}

Error cannot_enter(const job::JobEntry& entry, int why) {
  Error error = errno_error(fmt::format("cannot enter the namespaces of job {}", entry.name), why);
  if (error.remedy.empty()) error.remedy = "run it as the user who has started the job, root";
  return error;
}

}  // namespace

CLI::Option* add_target(CLI::App& command, Target& target, const std::string& word) {
  return command
      .add_option_function<std::string>(
          word,
          [&target, word](const std::string& text) {
            if (!as_number(text) && !job::check_job_name(text)) {
              throw CLI::ValidationError(
                  word,
                  fmt::format("'{}' is neither a process number nor the name of a job", text));
            }
            target.text = text;
          },
          "number of the process, or name of the job (`stasis run --name`); its whole tree is "
          "meant")
      ->required();
}

Result<void> Target::find() {
  if (const auto number = as_number(text)) {
    pid = Pid{*number};
    job = job::job_of(pid, job::all_jobs());
    if (job && lives_here(*job)) job.reset();
    if (!job) return {};
    STASIS_TRY_ASSIGN(auto inside, job::number_inside(pid));
    pid = inside;
    return {};
  }
  job = job::find_job(text);
  if (!job) {
    return fail(ErrorCode::kNoSuchProcess, fmt::format("no job has the name {}", text),
                "`stasis ps` shows the names; `stasis run --name` gives one");
  }
  if (job->root.value == 0) {
    return fail(ErrorCode::kBusy, fmt::format("job {} is being started or restored", text),
                "wait for it to run, then try again");
  }
  pid = job->root;
  return {};
}

Result<Elsewhere> Elsewhere::open(const Target& target) {
  Elsewhere out;
  if (!target.is_elsewhere()) return out;
  const job::JobEntry& entry = *target.job;
  const std::string spaces = fmt::format("/proc/{}/ns/", entry.init.value);
  STASIS_TRY_ASSIGN(auto ours, open_file(AT_FDCWD, "/proc/self/ns/pid", O_RDONLY));
  STASIS_TRY_ASSIGN(auto pids, open_file(AT_FDCWD, spaces + "pid", O_RDONLY));
  if (::setns(pids.get(), CLONE_NEWPID) != 0) return fail(cannot_enter(entry, errno));
  out.ours_ = std::move(ours);
  out.mounts_ = spaces + "mnt";
  out.state_dir_ = entry.state_dir;
  std::error_code none;
  out.directory_ = std::filesystem::current_path(none).string();
  return out;
}

Elsewhere::~Elsewhere() {
  if (ours_.valid()) (void)::setns(ours_.get(), CLONE_NEWPID);
}

Result<void> Elsewhere::enter() const {
  if (mounts_.empty()) return {};
  STASIS_TRY_ASSIGN(auto mounts, open_file(AT_FDCWD, mounts_, O_RDONLY));
  if (::setns(mounts.get(), CLONE_NEWNS) != 0) {
    return fail(errno_error("cannot enter the mount namespace of the job", errno));
  }
  if (!directory_.empty() && ::chdir(directory_.c_str()) != 0) {
    return fail(errno_error("the job does not see the directory " + directory_, errno));
  }
  ::setenv("STASIS_STATE_DIR", state_dir_.c_str(), 1);
  return {};
}

Result<void> reach(Context& context, Target& target) {
  if (target.text.empty()) return {};
  STASIS_TRY(target.find());
  if (!target.is_elsewhere()) return {};
  STASIS_TRY_ASSIGN(auto there, Elsewhere::open(target));
  const pid_t child = ::fork();
  if (child < 0) return fail(errno_error("cannot start a process", errno));
  if (child == 0) {
    STASIS_TRY(there.enter());
    if (!context.json) {
      context.terminal.note(
          fmt::format("process numbers are those in the namespace of job {}: it is {} there",
                      target.job->name, target.pid.value));
    }
    return {};
  }
  const auto status = attend(Pid{static_cast<int>(child)});
  ::_exit(status ? *status : exit_status(status.error().code));
}

}  // namespace stasis::cli
