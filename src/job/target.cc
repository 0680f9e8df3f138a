#include "job/target.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>

#include "base/suggest.h"

namespace stasis::job {
namespace {

std::optional<int> as_number(const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value <= 0) return std::nullopt;
  return value;
}

bool lives_here(const JobEntry& entry) {
  struct stat its {};
  struct stat ours {};
  const std::string path = fmt::format("/proc/{}/ns/pid", entry.init.value);
  return ::stat(path.c_str(), &its) == 0 && ::stat("/proc/self/ns/pid", &ours) == 0 &&
         its.st_ino == ours.st_ino;
}

Error cannot_enter(const JobEntry& entry, int why) {
  Error error = errno_error(fmt::format("cannot enter the namespaces of job {}", entry.name), why);
  if (error.remedy.empty()) error.remedy = "run it as the user who has started the job, root";
  return error;
}

Error no_such_job(const std::string& name) {
  std::vector<std::string> known;
  for (const JobEntry& entry : all_jobs())
    known.push_back(entry.name);
  const std::string meant = closest(name, known);
  return {
      ErrorCode::kNoSuchProcess,
      fmt::format("no job has the name {}{}", name,
                  meant.empty() ? "" : fmt::format("; did you mean {}?", meant)),
      "`stasis ps` shows the names; `stasis run --name` gives one; another user's is reached as "
      "root or as that user"};
}

}  // namespace

bool is_target(const std::string& text) { return as_number(text) || check_job_name(text); }

Result<void> Target::find() {
  if (const auto number = as_number(text)) {
    pid = Pid{*number};
    // Those of users are no jobs with numbers of their own.
    job = job_of(pid, own_jobs());
    if (job && lives_here(*job)) job.reset();
    if (!job) return {};
    STASIS_TRY_ASSIGN(auto inside, number_inside(pid));
    pid = inside;
    return {};
  }
  job = find_job(text);
  if (!job) {
    std::vector<JobEntry> of_users;
    for (JobEntry& entry : jobs_of_users())
      if (entry.name == text) of_users.push_back(std::move(entry));
    if (of_users.size() > 1) {
      return fail(ErrorCode::kUsage,
                  fmt::format("{} programs of users have the name {}: process {} and others",
                              of_users.size(), text, of_users[0].process.pid.value),
                  "say its number (`stasis ps`)");
    }
    if (!of_users.empty()) job = std::move(of_users[0]);
  }
  if (!job) return fail(no_such_job(text));
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
  const JobEntry& entry = *target.job;
  const std::string spaces = fmt::format("/proc/{}/ns/", entry.init.value);
  STASIS_TRY_ASSIGN(auto ours, open_file(AT_FDCWD, "/proc/self/ns/pid", O_RDONLY));
  STASIS_TRY_ASSIGN(auto pids, open_file(AT_FDCWD, spaces + "pid", O_RDONLY));
  if (::setns(pids.get(), CLONE_NEWPID) != 0) return fail(cannot_enter(entry, errno));
  out.ours_ = std::move(ours);
  std::error_code none;
  out.entry_ = {spaces + "mnt", std::filesystem::current_path(none).string(), entry.state_dir};
  return out;
}

Elsewhere::~Elsewhere() {
  if (ours_.valid()) (void)::setns(ours_.get(), CLONE_NEWPID);
}

Result<void> enter(const Entry& entry) {
  if (entry.mounts.empty()) return {};
  STASIS_TRY_ASSIGN(auto mounts, open_file(AT_FDCWD, entry.mounts, O_RDONLY));
  if (::setns(mounts.get(), CLONE_NEWNS) != 0) {
    return fail(errno_error("cannot enter the mount namespace of the job", errno));
  }
  if (!entry.directory.empty() && ::chdir(entry.directory.c_str()) != 0) {
    return fail(errno_error("the job does not see the directory " + entry.directory, errno));
  }
  ::setenv("STASIS_STATE_DIR", entry.state_dir.c_str(), 1);
  return {};
}

}  // namespace stasis::job
