// Huge pages: those that the kernel makes by itself, and those that are set aside.
#include <dirent.h>
#include <fcntl.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fd.h"
#include "base/units.h"
#include "doctor/machine_parts.h"
#include "proc/procfs.h"

namespace stasis::doctor {
namespace {

// The word in brackets of "always [madvise] never".
std::string chosen_word(const std::string& path) {
  const auto text = read_file(AT_FDCWD, path);
  if (!text) return {};
  const std::size_t begin = text->find('[');
  const std::size_t end = text->find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return {};
  return text->substr(begin + 1, end - begin - 1);
}

// What the driver, on an H100, and the agent's ring gain by them; docs/adr/0013-doctor.md.
void probe_transparent(const KernelFolders& folders, Obstacles& out) {
  constexpr ObstacleId kId = "huge-pages";
  const std::string path = folders.sys + "/kernel/mm/transparent_hugepage";
  const std::string anonymous = chosen_word(path + "/enabled");
  if (anonymous.empty()) return;
  const std::string shared = chosen_word(path + "/shmem_enabled");
  const std::string what =
      fmt::format("transparent huge pages: {}{}", anonymous,
                  shared.empty() ? "" : fmt::format(", for shared memory {}", shared));
  if (anonymous == "never") {
    out.push_back(yellow(kId, what + ": a suspend by the driver takes half as long again",
                         fmt::format("echo always >{}/enabled", path)));
  } else if (anonymous == "always") {
    out.push_back(green(kId, what));
  } else {
    out.push_back(green(kId, what + " (with `always`, a suspend by the driver takes two thirds of "
                                    "the time)"));
  }
}

struct SetAside {
  std::uint64_t size = 0;  // bytes of a page
  std::uint64_t all = 0;
  std::uint64_t free = 0;  // not taken, and not promised
};

std::vector<SetAside> pages_set_aside(const KernelFolders& folders) {
  const std::string top = folders.sys + "/kernel/mm/hugepages";
  constexpr std::string_view kStem = "hugepages-";  // then "2048kB"
  std::vector<SetAside> out;
  const DirectoryStream dir = list_open(top);
  while (const dirent* entry = dir ? ::readdir(dir.get()) : nullptr) {
    const std::string_view name = static_cast<const char*>(entry->d_name);
    if (!name.starts_with(kStem)) continue;
    SetAside one;
    std::from_chars(name.data() + kStem.size(), name.data() + name.size(), one.size);
    one.size *= 1024;
    const std::string folder = fmt::format("{}/{}", top, name);
    one.all = read_number(folder + "/nr_hugepages").value_or(0);
    const std::uint64_t free = read_number(folder + "/free_hugepages").value_or(0);
    one.free = free - std::min(free, read_number(folder + "/resv_hugepages").value_or(0));
    if (one.size > 0 && one.all > 0) out.push_back(one);
  }
  std::sort(out.begin(), out.end(),
            [](const SetAside& a, const SetAside& b) { return a.size < b.size; });
  return out;
}

}  // namespace

void probe_huge_pages(const KernelFolders& folders, std::uint64_t gpu_bytes, Obstacles& out) {
  probe_transparent(folders, out);
  const auto pages = pages_set_aside(folders);
  if (pages.empty()) return;
  constexpr ObstacleId kId = "huge-pages-set-aside";
  std::vector<std::string> parts;
  std::uint64_t idle = 0;
  for (const SetAside& one : pages) {
    idle += one.free * one.size;
    parts.push_back(
        fmt::format("{} pages of {}, {} free", one.all, format_bytes(one.size), one.free));
  }
  std::string what = fmt::format("set aside as huge pages (hugetlb): {}", fmt::join(parts, "; "));
  const proc::ProcFs procfs(folders.proc);
  const auto available = procfs.memory_available();
  const std::uint64_t room = available ? *available + procfs.swap_free().value_or(0) : gpu_bytes;
  if (room >= gpu_bytes || room + idle < gpu_bytes) {
    out.push_back(green(kId, what));
    return;
  }
  out.push_back(
      yellow(kId,
             what + fmt::format(": {} that suspended GPU memory cannot use, and would fit into",
                                format_bytes(idle)),
             "sysctl vm.nr_hugepages=0 gives back those that are free"));
}

}  // namespace stasis::doctor
