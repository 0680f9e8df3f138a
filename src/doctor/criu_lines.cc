// What the kernel tells of a process in one line that is longer than CRIU 4.2.1 reads: a page, with
// the line's end (BUFSIZE of CRIU's criu/bfd.c).
#include <fcntl.h>

#include <algorithm>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"

namespace stasis::doctor {
namespace {

constexpr std::size_t kLongestLine = 4095;
// Where the path begins in a line of /proc/PID/smaps (show_vma_header_prefix() of the kernel's
// fs/proc/task_mmu.c).
constexpr std::size_t kBeforePath = 73;

constexpr Kind kLongPath{"long-line", Severity::kRed,
                         "has files mapped by a path that is too long for CRIU",
                         "move the file to a shorter path, and start the program again"};
constexpr Kind kManyGroups{"long-line", Severity::kRed, "belongs to more groups than CRIU can read",
                           "start it with fewer groups (`setpriv --groups`)"};

std::size_t length_of_groups(Pid pid) {
  const auto status = read_file(AT_FDCWD, fmt::format("/proc/{}/status", pid.value));
  const std::size_t at = status ? status->find("\nGroups:") : std::string::npos;
  if (at == std::string::npos) return 0;
  return std::min(status->find('\n', at + 1), status->size()) - at - 1;
}

// Where there are very many paths, long ones of the list are cut.
bool are_whole(const std::vector<proc::Mapping>& mappings) {
  std::size_t bytes = 0;
  for (const proc::Mapping& mapping : mappings)
    bytes += mapping.path.size();
  return bytes <= proc::kManyPaths;
}

}  // namespace

void probe_lines(Facts& facts, const Processes& processes, Signs& out) {
  constexpr std::size_t kShownOfPath = 60;
  for (const proc::ProcessInfo& info : processes) {
    if (const std::size_t length = length_of_groups(info.pid); length > kLongestLine)
      out.add(info.pid, kManyGroups, fmt::format("{} bytes", length));
    const auto is_fine = [&](const proc::Mapping& mapping) {
      if (kBeforePath + mapping.path.size() <= kLongestLine) return true;
      out.add(
          info.pid, kLongPath,
          fmt::format("...{} ({} bytes)", mapping.path.substr(mapping.path.size() - kShownOfPath),
                      mapping.path.size()));
      return false;
    };
    const auto mappings = facts.mappings(info.pid);
    if (mappings && are_whole(*mappings))
      (void)std::all_of(mappings->begin(), mappings->end(), is_fine);
    else
      (void)facts.procfs().for_each_mapping(info.pid, is_fine);
  }
}

}  // namespace stasis::doctor
