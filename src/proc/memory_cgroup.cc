#include "proc/memory_cgroup.h"

#include <fcntl.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis::proc {
namespace {

// A version's files.
struct Layout {
  std::string_view limit;
  std::string_view usage;
  // Of memory.stat. Shared memory and tmpfs are not among them.
  std::string_view inactive_cache;
  std::string_view active_cache;
  std::string_view slab;
  // Of swap; in version 1 of memory and swap together.
  std::string_view swap_limit;
  std::string_view swap_usage;
};

constexpr Layout kVersion1{"memory.limit_in_bytes",
                           "memory.usage_in_bytes",
                           "total_inactive_file",
                           "total_active_file",
                           "-",
                           "memory.memsw.limit_in_bytes",
                           "memory.memsw.usage_in_bytes"};
constexpr Layout kVersion2{"memory.max",         "memory.current",   "inactive_file",
                           "active_file",        "slab_reclaimable", "memory.swap.max",
                           "memory.swap.current"};
// Version 1 says LONG_MAX rounded down to a page for "no limit"; no machine has as much as this.
constexpr std::uint64_t kNoLimit = 1ULL << 60;

// Where a hierarchy is mounted: `root` is the cgroup that is seen as `point`.
struct Mount {
  std::string root;
  std::string point;
};

bool has_word(const std::string& list, std::string_view word) {
  std::istringstream words(list);
  for (std::string one; std::getline(words, one, ',');)
    if (one == word) return true;
  return false;
}

// "ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAGS...] - TYPE SOURCE SUPER" (`man 5 proc`).
std::optional<Mount> find_mount(const std::string& proc, bool version1) {
  const auto text = read_file(AT_FDCWD, proc + "/self/mountinfo");
  if (!text) return std::nullopt;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line);
    std::istringstream after(line.substr(dash + 3));
    std::string skipped;
    std::string type;
    std::string options;
    Mount mount;
    before >> skipped >> skipped >> skipped >> mount.root >> mount.point;
    after >> type >> skipped >> options;
    if (version1 ? type == "cgroup" && has_word(options, "memory") : type == "cgroup2")
      return mount;
  }
  return std::nullopt;
}

std::optional<MemoryCgroup> read_group(const std::string& directory, const Layout& files) {
  const auto limit = read_number(fmt::format("{}/{}", directory, files.limit));  // or "max"
  const auto usage = read_number(fmt::format("{}/{}", directory, files.usage));
  if (!limit || *limit >= kNoLimit || !usage) return std::nullopt;
  std::uint64_t cache = 0;
  if (const auto stat = read_file(AT_FDCWD, directory + "/memory.stat")) {
    std::istringstream lines(*stat);
    std::string key;
    for (std::uint64_t value = 0; lines >> key >> value;)
      if (key == files.inactive_cache || key == files.active_cache || key == files.slab)
        cache += value;
  }
  MemoryCgroup out{directory, *limit, *usage > cache ? *usage - cache : 0, 0};
  // Without a number there is no limit ("max"); without the file, no swap for cgroups.
  const auto swapped = read_number(fmt::format("{}/{}", directory, files.swap_usage));
  const auto most = read_number(fmt::format("{}/{}", directory, files.swap_limit));
  if (swapped && !most) out.swap = kNoLimit;
  if (swapped && most && *most > *swapped) out.swap = *most - *swapped;
  if (&files == &kVersion1) out.swap -= std::min(out.swap, out.limit - std::min(out.limit, *usage));
  return out;
}

void add_groups(const std::string& proc, std::string path, bool version1,
                std::vector<MemoryCgroup>& out) {
  const auto mount = find_mount(proc, version1);
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
    if (auto group = read_group(mount->point + path, version1 ? kVersion1 : kVersion2))
      out.push_back(std::move(*group));
    if (path.empty()) return;
    path.erase(path.rfind('/') + 1);
  }
}

}  // namespace

std::vector<MemoryCgroup> memory_cgroups(Pid pid, const std::string& proc) {
  std::vector<MemoryCgroup> out;
  const auto text = read_file(AT_FDCWD, fmt::format("{}/{}/cgroup", proc, pid.value));
  if (!text) return out;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    // "ID:CONTROLLERS:PATH"; version 2 has ID 0 and no controllers. PATH may hold colons.
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version1 = has_word(controllers, "memory");
    if (version1 || line.compare(0, first, "0") == 0)
      add_groups(proc, line.substr(second + 1), version1, out);
  }
  return out;
}

}  // namespace stasis::proc
