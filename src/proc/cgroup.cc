#include "proc/cgroup.h"

#include <fcntl.h>

#include <chrono>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/units.h"
#include "proc/mounts.h"

namespace stasis::proc {
namespace {

bool has_word(const std::string& list, std::string_view word) {
  std::istringstream words(list);
  for (std::string one; std::getline(words, one, ',');)
    if (one == word) return true;
  return false;
}

// The hierarchies that are mounted where this process is. A tree of 200 processes is looked at some
// thousand times in a second, and reading all mounts each time took a quarter of a suspend's time.
std::vector<Mount> hierarchies(const std::string& proc) {
  constexpr std::chrono::seconds kFresh{1};
  static std::mutex mutex;
  static std::map<std::string, std::pair<Clock::time_point, std::vector<Mount>>> known;
  const std::lock_guard lock(mutex);
  auto& [read_at, found] = known[proc];
  const auto now = Clock::now();
  if (read_at != Clock::time_point() && now - read_at < kFresh) return found;
  found.clear();
  if (auto all = mounts("self", proc)) {
    read_at = now;
    for (Mount& mount : *all)
      if (mount.type == "cgroup" || mount.type == "cgroup2") found.push_back(std::move(mount));
  }
  return found;
}

// Where a hierarchy is mounted.
std::optional<Mount> find_hierarchy(const std::string& proc, std::string_view controller,
                                    bool version1) {
  for (Mount& mount : hierarchies(proc)) {
    if (version1 ? mount.type == "cgroup" && has_word(mount.options, controller)
                 : mount.type == "cgroup2")
      return std::move(mount);
  }
  return std::nullopt;
}

void add_directories(const std::string& proc, std::string path, std::string_view controller,
                     bool version1, std::vector<CgroupDirectory>& out) {
  const auto mount = find_hierarchy(proc, controller, version1);
  if (!mount) return;
  if (mount->root != "/") {
    if (path.compare(0, mount->root.size(), mount->root) != 0) return;
    path.erase(0, mount->root.size());
    if (!path.empty() && path.front() != '/') return;  // "/docker/12" holds no "/docker/123"
  }
  if (path.find("/..") != std::string::npos) return;  // outside of what this namespace shows
  for (;;) {
    while (!path.empty() && path.back() == '/')
      path.pop_back();
    out.push_back({mount->point + path, version1});
    if (path.empty()) return;
    path.erase(path.rfind('/') + 1);
  }
}

}  // namespace

std::vector<CgroupDirectory> cgroup_directories(Pid pid, std::string_view controller,
                                                const std::string& proc) {
  std::vector<CgroupDirectory> out;
  const auto text = read_file(AT_FDCWD, fmt::format("{}/{}/cgroup", proc, pid.value));
  if (!text) return out;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    // "ID:CONTROLLERS:PATH"; version 2 has ID 0 and no controllers. PATH may hold colons.
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const bool version1 = has_word(line.substr(first + 1, second - first - 1), controller);
    if (version1 || line.compare(0, first, "0") == 0)
      add_directories(proc, line.substr(second + 1), controller, version1, out);
  }
  return out;
}

std::optional<PidsCgroup> tightest_pids_cgroup(Pid pid, const std::string& proc) {
  std::optional<PidsCgroup> out;
  for (const CgroupDirectory& directory : cgroup_directories(pid, "pids", proc)) {
    const auto limit = read_number(directory.path + "/pids.max");  // or "max"
    const auto used = read_number(directory.path + "/pids.current");
    if (!limit || !used) continue;
    const PidsCgroup one{directory.path, *limit, *used};
    if (!out || one.room() < out->room()) out = one;
  }
  return out;
}

std::optional<FrozenCgroup> frozen_cgroup(Pid pid, const std::string& proc) {
  std::optional<FrozenCgroup> own;
  std::string above;
  for (const CgroupDirectory& directory : cgroup_directories(pid, "freezer", proc)) {
    const std::string& path = directory.path;
    // Each list begins with the cgroup of the process, which says it also of those around it.
    const bool first = above.empty() || !above.starts_with(path);
    above = path;
    if (directory.version1) {
      if (read_number(path + "/freezer.self_freezing").value_or(0) == 1)
        return FrozenCgroup{path, true};
      const auto state = first ? read_file(AT_FDCWD, path + "/freezer.state") : std::string();
      if (state && state->starts_with("FR")) own = {path, true};  // FROZEN, FREEZING
    } else {
      if (read_number(path + "/cgroup.freeze").value_or(0) == 1) return FrozenCgroup{path, false};
      const auto events = first ? read_file(AT_FDCWD, path + "/cgroup.events") : std::string();
      if (events && events->find("frozen 1") != std::string::npos) own = {path, false};
    }
  }
  return own;
}

std::optional<FrozenCgroup> FrozenCgroups::of(Pid pid) {
  const auto text = read_file(AT_FDCWD, fmt::format("{}/{}/cgroup", proc_, pid.value));
  if (!text) return std::nullopt;
  const auto [known, is_new] = known_.try_emplace(*text);
  if (is_new) known->second = frozen_cgroup(pid, proc_);
  return known->second;
}

}  // namespace stasis::proc
