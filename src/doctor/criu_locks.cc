// Locks and leases of open files that no descriptor leads to any more, only a mapping: the kernel
// keeps them as long as that, and CRIU 4.2.1 finds locks by descriptors alone.
#include <fcntl.h>

#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"
#include "proc/file_locks.h"

namespace stasis::doctor {
namespace {

constexpr Kind kMappedLock{
    "mapped-lock", Severity::kYellow,
    "has locks (flock, F_OFD_SETLK) or leases of files that it has mapped and whose descriptors "
    "are closed; a restore loses them",
    "keep the descriptor open as long as the lock is to hold"};

// For the descriptors of a locked file, each among those of all processes.
constexpr std::size_t kMostSearches = 256;

// `path`: of those alone whose link says so. The file may have other names, and /proc/PID/maps
// writes some characters as numbers.
bool shows_lock(Pid pid, const std::vector<proc::OpenFile>& files,
                std::optional<std::string_view> path, const proc::HeldLock& lock) {
  for (const proc::OpenFile& file : files) {
    if (path ? file.path != *path : !file.path.starts_with('/')) continue;
    const auto text =
        read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, file.descriptor));
    std::istringstream lines(text.value_or(""));
    for (std::string line; std::getline(lines, line);) {
      constexpr std::string_view kLine = "lock:\t";
      if (!line.starts_with(kLine)) continue;
      const auto shown = proc::parse_lock(line.substr(kLine.size()));
      if (shown && shown->text == lock.text) return true;
    }
  }
  return false;
}

// Has any process a descriptor of it? Those of the tree first; others are asked seldom.
bool has_descriptor(Facts& facts, const Processes& processes, std::string_view path,
                    const proc::HeldLock& lock) {
  std::set<int> tree;
  for (const proc::ProcessInfo& info : processes) {
    tree.insert(info.pid.value);
    const auto files = facts.open_files(info.pid);
    if (files && shows_lock(info.pid, *files, path, lock)) return true;
  }
  for (const proc::ProcessInfo& info : processes) {
    const auto files = facts.open_files(info.pid);
    if (files && shows_lock(info.pid, *files, std::nullopt, lock)) return true;
  }
  const auto all = facts.procfs().all();
  if (!all) return false;
  for (const proc::ProcessInfo& info : *all) {
    if (facts.is_over()) return true;
    if (tree.contains(info.pid.value)) continue;
    const auto files = facts.procfs().open_files(info.pid);
    if (files && shows_lock(info.pid, *files, path, lock)) return true;
  }
  return false;
}

}  // namespace

void probe_mapped_locks(Facts& facts, const Processes& processes, Signs& out) {
  auto locks = proc::locks_of_open_files();
  std::size_t searches = 0;
  for (const proc::ProcessInfo& info : processes) {
    const auto mappings = locks.empty() ? nullptr : facts.mappings(info.pid);
    if (!mappings) continue;
    for (const proc::Mapping& mapping : *mappings) {
      if (mapping.inode == 0 || !mapping.path.starts_with('/')) continue;
      const auto own = locks.find({mapping.device, mapping.inode});
      if (own == locks.end()) continue;
      for (const proc::HeldLock& lock : own->second) {
        if (facts.is_over() || ++searches > kMostSearches) return;
        if (!has_descriptor(facts, processes, mapping.path, lock))
          out.add(info.pid, kMappedLock, fmt::format("{} ({})", mapping.path, lock.kind));
      }
      locks.erase(own);  // a file may be mapped thousands of times
    }
  }
}

}  // namespace stasis::doctor
