#include "attach/suitable.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <set>
#include <sstream>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "attach/libraries.h"
#include "base/fd.h"
#include "proc/cgroup.h"

namespace stasis::attach {
namespace {

constexpr std::size_t kLongestStatus = 16384;

// A line of /proc/PID/status behind its name; empty if there is none.
std::string line_of(const std::string& status, std::string_view name) {
  std::istringstream lines(status);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(name) && line.size() > name.size() && line[name.size()] == ':')
      return line.substr(name.size() + 1);
  return {};
}

// The real, effective, saved and file system's are one and the same.
bool all_alike(const std::string& numbers) {
  std::istringstream words(numbers);
  std::set<std::string> seen;
  for (std::string word; words >> word;)
    seen.insert(word);
  return seen.size() == 1;
}

tl::unexpected<Error> left_alone(Pid pid, std::string_view why, std::string remedy = {}) {
  return fail(ErrorCode::kNotSupported,
              fmt::format("the tool makes no calls inside process {}: {}", pid.value, why),
              std::move(remedy));
}

// A shadow stack is checked at every return, and our first thread would have none.
bool has_shadow_stack(const std::string& status) {
  return line_of(status, "x86_Thread_features").find("shstk") != std::string::npos;
}

Result<void> check_threads(Pid pid) {
  const proc::ProcFs procfs;
  for (const Tid thread : procfs.threads(pid)) {
    const auto status = procfs.thread_status(pid, thread);
    if (!status) continue;  // it has ended
    if (status->seccomp == 1)
      return left_alone(pid, "a thread of it may make no system call but read and write (seccomp)");
  }
  return {};
}

}  // namespace

Result<void> check_runs(const proc::ProcessInfo& info) {
  if (info.has_ended())
    return fail(ErrorCode::kZombie, fmt::format("process {} has ended", info.pid.value));
  if (info.state != 'T') return {};
  return fail(ErrorCode::kBusy, fmt::format("process {} is stopped by a signal", info.pid.value),
              fmt::format("let it go on with `kill -CONT {}`", info.pid.value));
}

Result<void> check_runs(Pid pid) {
  STASIS_TRY_ASSIGN(const auto info, proc::ProcFs().process(pid));
  return check_runs(info);
}

Result<void> check_process(Pid pid, const proc::ProcessInfo& info) {
  STASIS_TRY(check_runs(info));
  const proc::ProcFs procfs;
  if (const auto tracer = procfs.tracer(pid)) {
    return fail(ErrorCode::kBusy,
                fmt::format("process {} is being traced by process {}", pid.value, *tracer),
                "wait for it to end, or detach it");
  }
  if (const auto frozen = proc::frozen_cgroup(pid)) {
    return fail(ErrorCode::kBusy,
                fmt::format("process {} is frozen, by the cgroup {}", pid.value, frozen->directory),
                "let it go on first");
  }
  const std::string path = fmt::format("/proc/{}/status", pid.value);
  STASIS_TRY_ASSIGN(const auto status, read_file(AT_FDCWD, path, kLongestStatus));
  if (has_shadow_stack(status)) return left_alone(pid, "it has a shadow stack (CET)");
  struct stat owner {};  // root's, where others may not look into it
  std::istringstream users(line_of(status, "Uid"));
  unsigned real = 0;
  unsigned effective = 0;
  users >> real >> effective;
  if (!all_alike(line_of(status, "Uid")) || !all_alike(line_of(status, "Gid")) ||
      ::stat(fmt::format("/proc/{}/environ", pid.value).c_str(), &owner) != 0 ||
      owner.st_uid != effective) {
    return left_alone(pid,
                      "it has, or had, other rights than its user (setuid), or has forbidden "
                      "that others look into it (PR_SET_DUMPABLE)");
  }
  return check_threads(pid);
}

Result<void> check_mappings(const std::vector<proc::Mapping>& mappings) {
  constexpr std::array<std::string_view, 4> kSanitizers{"libasan.so", "libtsan.so", "liblsan.so",
                                                        "libmsan.so"};
  for (const proc::Mapping& mapping : mappings) {
    const std::string_view name = file_name(mapping);
    for (const std::string_view one : kSanitizers) {
      if (name.starts_with(one))
        return fail(
            ErrorCode::kNotSupported,
            fmt::format("a sanitizer is at work in it ({}), which knows its threads", name));
    }
  }
  return {};
}

int inner_number(Pid pid, Tid thread) {
  const auto status = read_file(
      AT_FDCWD, fmt::format("/proc/{}/task/{}/status", pid.value, thread.value), kLongestStatus);
  if (!status) return 0;
  std::istringstream numbers(line_of(*status, "NSpid"));
  int inner = 0;
  for (int number = 0; numbers >> number;)
    inner = number;
  return inner;
}

}  // namespace stasis::attach
