// Files of an overlay that a process has mapped from the layer below and that were copied up, and
// changed, since: the mapping goes on to show what was there before, and a restore maps what is
// there now. The kernel says the same of both files; their pages are others.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/scope_guard.h"
#include "doctor/criu_checks.h"
#include "proc/pagemap.h"
#include "proc/process_file.h"
#include "proc/served_files.h"

namespace stasis::doctor {
namespace {

constexpr Kind kCopiedUp{
    "copied-up-file", Severity::kYellow,
    "has files of an overlay mapped as they were before they were changed; after a restore it sees "
    "what is in them now",
    "nothing, if it may see that; or have the program map them anew"};

constexpr std::uint64_t kPageBytes = 4096;

// Of a page of a file's.
std::uint64_t frame_of(proc::PageEntry entry) { return entry.is_of_file() ? entry.frame() : 0; }

struct SharedPage {
  std::uint64_t address = 0;
  std::uint64_t frame = 0;
};

// The first of the file's that a mapping has.
std::optional<SharedPage> first_page(Pid pid, const proc::Mapping& mapping) {
  const auto pages = open_file(AT_FDCWD, fmt::format("/proc/{}/pagemap", pid.value), O_RDONLY);
  if (!pages) return std::nullopt;
  std::array<proc::PageEntry, 512> entries{};
  constexpr std::size_t kMostReads = 64;
  std::uint64_t at = mapping.start;
  for (std::size_t reads = 0; reads < kMostReads && at < mapping.end; ++reads) {
    const std::size_t known = proc::read_pagemap(pages->get(), at, entries);
    if (known == 0) return std::nullopt;
    for (std::size_t i = 0; i < known; ++i) {
      if (at >= mapping.end) return std::nullopt;
      if (const std::uint64_t frame = frame_of(entries[i])) return SharedPage{at, frame};
      at += kPageBytes;
    }
  }
  return std::nullopt;
}

// Of the file as it is opened now.
std::uint64_t frame_now(const UniqueFd& file, std::uint64_t offset) {
  void* const page = ::mmap(nullptr, kPageBytes, PROT_READ, MAP_PRIVATE | MAP_POPULATE, file.get(),
                            static_cast<off_t>(offset));
  if (page == MAP_FAILED) return 0;
  const ScopeGuard unmap([&] { (void)::munmap(page, kPageBytes); });
  const auto pages = open_file(AT_FDCWD, "/proc/self/pagemap", O_RDONLY);
  proc::PageEntry entry;
  const auto at = reinterpret_cast<std::uintptr_t>(page);
  const bool known = pages && proc::read_pagemap(pages->get(), at, {&entry, 1}) == 1;
  return known ? frame_of(entry) : 0;
}

bool is_on_overlay(Pid pid, const proc::MappedFile& mapped) {
  const auto system = proc::file_system_of(pid, mapped.link());
  return system && system->f_type == OVERLAYFS_SUPER_MAGIC && !proc::is_served(pid, mapped.link());
}

bool is_of_lower_layer(Pid pid, const proc::Mapping& mapping, const proc::MappedFile& mapped) {
  const auto page = first_page(pid, mapping);
  const auto file = open_checked(AT_FDCWD, mapped.link(), O_RDONLY, is_regular_file);
  if (!page || !file) return false;
  const std::uint64_t now = frame_now(*file, mapping.offset + (page->address - mapping.start));
  return now != 0 && now != page->frame;
}

}  // namespace

void probe_copied_up(Facts& facts, const Processes& processes, Signs& out) {
  for (const proc::ProcessInfo& info : processes) {
    const auto mappings = facts.mappings(info.pid);
    const auto started = facts.procfs().started(info);
    if (!mappings || !started) continue;
    std::map<std::uint64_t, bool> overlays;  // by device
    for (const proc::Mapping& mapping : *mappings) {
      if (facts.is_over()) return;
      if (!mapping.path.starts_with('/') || mapping.path.ends_with(" (deleted)") ||
          is_of_no_file(mapping.path))
        continue;
      const auto known = overlays.find(mapping.device);
      if (known != overlays.end() && !known->second) continue;
      const proc::MappedFile mapped(info.pid, mapping);
      if (mapped.link().empty()) continue;
      const bool is_overlay =
          known != overlays.end() ? known->second : is_on_overlay(info.pid, mapped);
      overlays.emplace(mapping.device, is_overlay);
      struct stat status {};
      // One that was copied up for its mode alone has the same content.
      if (!is_overlay || ::stat(mapped.link().c_str(), &status) != 0 || !S_ISREG(status.st_mode) ||
          status.st_mtim.tv_sec + 1 < *started)
        continue;
      if (is_of_lower_layer(info.pid, mapping, mapped)) out.add(info.pid, kCopiedUp, mapping.path);
    }
  }
}

}  // namespace stasis::doctor
