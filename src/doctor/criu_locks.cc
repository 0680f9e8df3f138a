// Locks and leases of open files that no descriptor leads to any more, only a mapping: the kernel
// keeps them as long as that, and CRIU 4.2.1 finds locks by descriptors alone.
#include <fcntl.h>
#include <sys/sysmacros.h>

#include <charconv>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"

namespace stasis::doctor {
namespace {

constexpr Kind kMappedLock{
    "mapped-lock", Severity::kYellow,
    "has locks (flock, F_OFD_SETLK) or leases of files that it has mapped and whose descriptors "
    "are closed; a restore loses them",
    "keep the descriptor open as long as the lock is to hold"};

constexpr std::size_t kMostLocks = 100'000;
// For the descriptors of a locked file, each among those of all processes.
constexpr std::size_t kMostSearches = 256;

// A line of /proc/locks, or behind "lock:" of /proc/PID/fdinfo/N, which are alike:
// "1: FLOCK  ADVISORY  WRITE 12 fe:00:34 0 EOF". One that waits has "->" behind its number.
struct HeldLock {
  std::string text;  // without its number, which counts the lines
  std::string kind;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
};

// By device and inode.
using LocksByFile = std::map<std::pair<std::uint64_t, std::uint64_t>, std::vector<HeldLock>>;

std::optional<HeldLock> parse_lock(const std::string& line) {
  std::istringstream words(line);
  HeldLock out;
  std::string number;
  std::string way;
  std::string access;
  std::string owner;
  std::string place;
  if (!(words >> number >> out.kind >> way >> access >> owner >> place)) return std::nullopt;
  out.text = line.substr(line.find(out.kind));
  unsigned major = 0;
  unsigned minor = 0;
  const char* const end = place.data() + place.size();
  const auto first = std::from_chars(place.data(), end, major, 16);
  if (first.ec != std::errc() || first.ptr == end) return std::nullopt;
  const auto second = std::from_chars(first.ptr + 1, end, minor, 16);
  if (second.ec != std::errc() || second.ptr == end) return std::nullopt;
  const auto third = std::from_chars(second.ptr + 1, end, out.inode);
  if (third.ec != std::errc() || third.ptr != end) return std::nullopt;
  out.device = makedev(major, minor);
  return out;
}

// Those that stay with an open file; others are a process's, and end with any of its descriptors.
LocksByFile locks_of_open_files() {
  LocksByFile out;
  std::size_t count = 0;
  std::istringstream lines(read_file(AT_FDCWD, "/proc/locks").value_or(""));
  for (std::string line; count < kMostLocks && std::getline(lines, line); ++count) {
    auto lock = parse_lock(line);
    if (lock && (lock->kind == "FLOCK" || lock->kind == "OFDLCK" || lock->kind == "LEASE"))
      out[{lock->device, lock->inode}].push_back(std::move(*lock));
  }
  return out;
}

bool shows_lock(Pid pid, const std::vector<proc::OpenFile>& files, std::string_view path,
                const HeldLock& lock) {
  for (const proc::OpenFile& file : files) {
    if (file.path != path) continue;
    const auto text =
        read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, file.descriptor));
    std::istringstream lines(text.value_or(""));
    for (std::string line; std::getline(lines, line);) {
      constexpr std::string_view kLine = "lock:\t";
      if (!line.starts_with(kLine)) continue;
      const auto shown = parse_lock(line.substr(kLine.size()));
      if (shown && shown->text == lock.text) return true;
    }
  }
  return false;
}

// Has any process a descriptor of it? Those of the tree first; others are asked seldom.
bool has_descriptor(Facts& facts, const Processes& processes, std::string_view path,
                    const HeldLock& lock) {
  std::set<int> tree;
  for (const proc::ProcessInfo& info : processes) {
    tree.insert(info.pid.value);
    const auto files = facts.open_files(info.pid);
    if (files && shows_lock(info.pid, *files, path, lock)) return true;
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
  auto locks = locks_of_open_files();
  std::size_t searches = 0;
  for (const proc::ProcessInfo& info : processes) {
    const auto mappings = locks.empty() ? nullptr : facts.mappings(info.pid);
    if (!mappings) continue;
    for (const proc::Mapping& mapping : *mappings) {
      if (mapping.inode == 0 || !mapping.path.starts_with('/')) continue;
      const auto own = locks.find({mapping.device, mapping.inode});
      if (own == locks.end()) continue;
      for (const HeldLock& lock : own->second) {
        if (facts.is_over() || ++searches > kMostSearches) return;
        if (!has_descriptor(facts, processes, mapping.path, lock))
          out.add(info.pid, kMappedLock, fmt::format("{} ({})", mapping.path, lock.kind));
      }
      locks.erase(own);  // a file may be mapped thousands of times
    }
  }
}

}  // namespace stasis::doctor
