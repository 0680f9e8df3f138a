// Breakpoints in code: a uprobe (perf, bpftrace, GPU monitors with eBPF) or a debugger has put an
// int3 there. CRIU 4.2.1 dumps such a page as memory of the program's own; after the restore the
// kernel knows of no probe, and the first call of the function ends the program by SIGTRAP.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <optional>
#include <span>

#include <fmt/format.h>

#include "abi/attach_state.h"
#include "base/fd.h"
#include "doctor/breakpoints.h"
#include "doctor/criu_checks.h"
#include "proc/pagemap.h"
#include "proc/process_file.h"
#include "proc/served_files.h"

namespace stasis::doctor {
namespace {

constexpr Kind kBreakpoint{
    "breakpoint", Severity::kRed,
    "has breakpoints in its code, of a probe (uprobe) or a debugger, of which it would die after "
    "a restore",
    "end what has set them (perf, bpftrace, an eBPF monitor of GPUs) before the dump"};
// The kernel keeps it after the last probe has gone, too.
constexpr Kind kProbed{"breakpoint", Severity::kRed,
                       "has memory of the kernel's for probes ([uprobes]), which CRIU cannot dump",
                       "start it again without the monitor that probes it (perf, bpftrace, eBPF)"};

// A program that changes its code on a grand scale has no breakpoints in the most of it.
constexpr int kMostPages = 4096;

constexpr unsigned char kInt3 = 0xcc;
// A probe on such a nop is a call to a trampoline since Linux 6.18.
constexpr std::array<unsigned char, 5> kNop5 = {0x0f, 0x1f, 0x44, 0x00, 0x00};
constexpr unsigned char kCall = 0xe8;

constexpr unsigned char kJump = 0xe9;
constexpr std::size_t kJumpBytes = 5;

// At the beginning of an entry point of the driver's, all of which begin alike.
bool is_hook(std::span<const unsigned char> memory, std::span<const unsigned char> file) {
  return memory.size() >= attach::kEntryBytes && memory[0] == kJump &&
         std::equal(std::begin(attach::kEntryBegin), std::end(attach::kEntryBegin), file.begin()) &&
         std::equal(memory.begin() + kJumpBytes, memory.begin() + attach::kEntryBytes,
                    file.begin() + kJumpBytes);
}

}  // namespace

std::optional<std::size_t> find_breakpoint(std::span<const unsigned char> memory,
                                           std::span<const unsigned char> file) {
  for (std::size_t i = 0; i < memory.size(); ++i) {
    if (memory[i] == file[i]) continue;
    if (is_hook(memory.subspan(i), file.subspan(i))) {
      i += kJumpBytes - 1;
      continue;
    }
    if (memory[i] == kInt3) return i;
    if (memory[i] == kCall && i + kNop5.size() <= file.size() &&
        std::memcmp(&file[i], kNop5.data(), kNop5.size()) == 0) {
      return i;
    }
  }
  return std::nullopt;
}

namespace {

class CodeSearch {
 public:
  // Each is of the one address space that the process has now.
  explicit CodeSearch(Pid pid) : pid_(pid) {
    auto pages = proc::ProcessFile::open(pid, "pagemap");
    auto memory = proc::ProcessFile::open(pid, "mem");
    if (pages) pages_ = std::move(*pages);
    if (memory) memory_ = std::move(*memory);
  }

  // "0x1234 in /usr/lib/libcuda.so.1"; nothing also for what cannot be read.
  std::optional<std::string> probe(const proc::Mapping& mapping) {
    if (!pages_ || !memory_) return std::nullopt;
    std::optional<proc::ProcessFile> file;
    constexpr std::size_t kAtOnce = 8192;
    std::vector<proc::PageEntry> entries;
    std::uint64_t at = mapping.start;
    while (at < mapping.end) {
      const std::uint64_t count = std::min<std::uint64_t>(kAtOnce, (mapping.end - at) / page_);
      const auto got = pages_->read_at(at / page_ * sizeof entries[0], count * sizeof entries[0]);
      if (!got || got->size() < sizeof entries[0]) return std::nullopt;
      const std::size_t known = got->size() / sizeof entries[0];
      entries.resize(known);
      std::memcpy(entries.data(), got->data(), known * sizeof entries[0]);
      for (std::size_t i = 0; i < known; ++i, at += page_) {
        const bool own =
            entries[i].is_swapped() || (entries[i].is_present() && !entries[i].is_of_file());
        if (!own || looked_at_++ >= kMostPages) continue;
        if (!file) file = open_mapped(mapping);
        if (!file) return std::nullopt;
        const auto place = compare(*file, at, mapping.offset + (at - mapping.start));
        if (place) return fmt::format("{:#x} in {}", *place, mapping.path);
      }
    }
    return std::nullopt;
  }

 private:
  // The very file that is mapped: what it is is known before it is opened to be read.
  std::optional<proc::ProcessFile> open_mapped(const proc::Mapping& mapping) const {
    const proc::MappedFile place(pid_, mapping);
    const auto info = proc::known_status(place.link());
    if (!info || !S_ISREG(info->st_mode)) return std::nullopt;
    auto file = proc::ProcessFile::open_path(pid_, place.link());
    return file ? std::optional(std::move(*file)) : std::nullopt;
  }

  std::optional<std::uint64_t> compare(const proc::ProcessFile& file, std::uint64_t address,
                                       std::uint64_t offset) const {
    const auto bytes = memory_->read_at(address, page_);
    if (!bytes || bytes->size() != page_) return std::nullopt;
    const std::vector<unsigned char> mapped(bytes->begin(), bytes->end());
    // What lies beyond the end of the file is zero.
    const auto content = file.read_at(offset, page_);
    if (!content) return std::nullopt;
    std::vector<unsigned char> stored(content->begin(), content->end());
    stored.resize(page_);
    const auto found = find_breakpoint(mapped, stored);
    if (!found) return std::nullopt;
    return offset + *found;
  }

  Pid pid_;
  std::optional<proc::ProcessFile> pages_;
  std::optional<proc::ProcessFile> memory_;
  std::uint64_t page_ = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  int looked_at_ = 0;
};

}  // namespace

void probe_code(Facts& facts, const Processes& processes, Signs& out) {
  for (const proc::ProcessInfo& info : processes) {
    const auto mappings = facts.mappings(info.pid);
    if (!mappings) continue;
    CodeSearch search(info.pid);
    for (const proc::Mapping& mapping : *mappings) {
      if (mapping.path.starts_with("[uprobes")) out.add(info.pid, kProbed, mapping.path);
      const bool code = mapping.permissions == "r-xp" && mapping.path.starts_with('/') &&
                        mapping.inode != 0 && !is_of_no_file(mapping.path);
      if (!code) continue;
      if (const auto found = search.probe(mapping)) out.add(info.pid, kBreakpoint, *found);
    }
  }
}

}  // namespace stasis::doctor
