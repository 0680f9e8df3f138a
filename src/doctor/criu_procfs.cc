// Files of /proc and of the cgroups that CRIU 4.2.1 dumps without a word, and does not restore as
// they were: it opens them by name, before there are threads and while a process has the memory of
// a restore, and does not know what the program has written to them.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"
#include "proc/served_files.h"

namespace stasis::doctor {
namespace {

constexpr Kind kNotThere{
    "proc-file", Severity::kRed,
    "has files of /proc open that are of a thread or of a mapping, which are not there when CRIU "
    "opens them again: no restore would succeed",
    "close them before the dump, or use the file of the process (/proc/PID/stat)"};
constexpr Kind kDirectory{
    "proc-file", Severity::kRed,
    "has the directory of a process in /proc as its working directory, whose name CRIU saves with "
    "what happens to be behind it: no restore would succeed",
    "let it work in another directory (chdir), or in one below it (/proc/PID/fd)"};
constexpr Kind kOutside{
    "proc-file-outside", Severity::kYellow,
    "has files of /proc open that are of processes outside of the tree: no restore succeeds where "
    "these have ended",
    "close them before the dump, or keep those processes until the restore"};
constexpr Kind kPressure{
    "pressure-trigger", Severity::kYellow,
    "has a trigger on pressure stall information (/proc/pressure): a restore loses it, and each "
    "poll() of the file reports an error",
    "open them anew when poll() says POLLERR, or after the restore"};

bool is_on(Pid pid, const std::string& link, std::uint32_t magic) {
  const auto system = proc::file_system_of(pid, link);
  return system && static_cast<std::uint32_t>(system->f_type) == magic;
}

std::optional<int> number_of(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number <= 0) return std::nullopt;
  return number;
}

std::vector<std::string_view> parts_of(std::string_view path) {
  std::vector<std::string_view> parts;
  while (!path.empty()) {
    path.remove_prefix(1);
    const std::size_t end = std::min(path.find('/'), path.size());
    parts.push_back(path.substr(0, end));
    path.remove_prefix(end);
  }
  return parts;
}

bool is_writable(Pid pid, int descriptor) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, descriptor));
  const std::size_t at = text ? text->find("flags:\t") : std::string::npos;
  if (at == std::string::npos) return false;
  unsigned flags = 0;
  std::from_chars(text->data() + at + 7, text->data() + text->size(), flags, 8);
  return (flags & O_ACCMODE) != O_RDONLY;
}

class Search {
 public:
  Search(Facts& facts, const Processes& all, Signs& out) : facts_(facts), out_(out) {
    for (const proc::ProcessInfo& info : all)
      tree_.insert(info.pid.value);
  }

  void probe(Pid pid) {
    if (const auto files = facts_.open_files(pid)) {
      for (const proc::OpenFile& file : *files)
        if (!facts_.is_over()) probe_file(pid, file);
    }
    const std::string folder = fmt::format("/proc/{}/cwd", pid.value);
    std::string path(PATH_MAX, '\0');
    const ssize_t size = ::readlink(folder.c_str(), path.data(), path.size());
    path.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    const auto parts = parts_of(path);
    const bool likely = std::any_of(parts.begin(), parts.end(),
                                    [](std::string_view part) { return number_of(part); });
    if (path.starts_with('/') && likely && is_on(pid, folder, PROC_SUPER_MAGIC))
      judge_directory(pid, path, parts);
  }

 private:
  // CRIU 4.2.1 writes a '/' over the end of a path that is a process's directory and no more, when
  // it looks whether that lives (files-reg.c, check_path_remap()); what was behind it counts then.
  void judge_directory(Pid pid, const std::string& path,
                       const std::vector<std::string_view>& parts) {
    const std::string shown = path + " (its directory)";
    if (number_of(parts.back()) && (parts.size() < 2 || parts[parts.size() - 2] != "task"))
      out_.add(pid, kDirectory, shown);
    else
      judge(pid, path, shown);
  }

  // The file system is asked for few: one that a program serves would have to answer.
  void probe_file(Pid pid, const proc::OpenFile& file) {
    if (!file.path.starts_with('/')) return;
    const std::string link = fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor);
    const std::string shown = fmt::format("{} (descriptor {})", file.path, file.descriptor);
    const bool of_cgroup = file.path.ends_with(".pressure");
    const bool of_machine = file.path.find("/pressure/") != std::string::npos;
    if ((of_cgroup && is_on(pid, link, CGROUP2_SUPER_MAGIC)) ||
        (of_machine && is_on(pid, link, PROC_SUPER_MAGIC))) {
      if (is_writable(pid, file.descriptor)) out_.add(pid, kPressure, shown);
      return;
    }
    const std::string_view second = std::string_view(file.path).substr(1);
    const bool likely = second.starts_with("proc/") || second.find("/task/") != std::string::npos ||
                        second.find("/map_files/") != std::string::npos;
    if (likely && is_on(pid, link, PROC_SUPER_MAGIC)) judge(pid, file.path, shown);
  }

  // PATH/NUMBER/... of a /proc that may be mounted anywhere.
  void judge(Pid pid, const std::string& path, const std::string& shown) {
    const auto parts = parts_of(path);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto number = number_of(parts[i]);
      if (!number) continue;
      const std::string_view below = i + 1 < parts.size() ? parts[i + 1] : std::string_view();
      // " (deleted)" may stand behind the last.
      const std::string_view part = i + 2 < parts.size() ? parts[i + 2] : std::string_view();
      const auto thread = number_of(part.substr(0, part.find(' ')));
      const bool of_thread = below == "task" && thread && *thread != *number;
      if (of_thread || (below == "map_files" && !part.empty())) {
        out_.add(pid, kNotThere, shown);
        return;
      }
      if (!path.starts_with("/proc/") || !facts_.has_our_namespace(pid, "pid")) return;
      const auto info = facts_.procfs().process(Pid{*number});
      if (!info && info.error().code == ErrorCode::kThreadId)
        out_.add(pid, kNotThere, shown);
      else if (info && !tree_.contains(*number))
        out_.add(pid, kOutside, shown);
      return;
    }
  }

  Facts& facts_;
  Signs& out_;
  std::set<int> tree_;
};

}  // namespace

void probe_procfs(Facts& facts, const Processes& processes, const Processes& all, Signs& out) {
  Search search(facts, all, out);
  for (const proc::ProcessInfo& info : processes)
    search.probe(info.pid);
}

}  // namespace stasis::doctor
