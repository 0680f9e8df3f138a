#include "proc/memory_cgroup.h"

#include <fcntl.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"
#include "proc/cgroup.h"

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

}  // namespace

std::vector<MemoryCgroup> memory_cgroups(Pid pid, const std::string& proc) {
  std::vector<MemoryCgroup> out;
  for (const CgroupDirectory& directory : cgroup_directories(pid, "memory", proc)) {
    if (auto group = read_group(directory.path, directory.version1 ? kVersion1 : kVersion2))
      out.push_back(std::move(*group));
  }
  return out;
}

}  // namespace stasis::proc
