// Breakpoints in code: a uprobe (perf, bpftrace, GPU monitors with eBPF) or a debugger has put an
// int3 there. CRIU 4.2.1 dumps such a page as memory of the program's own; after the restore the
// kernel knows of no probe, and the first call of the function ends the program by SIGTRAP.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <span>
#include <sstream>

#include <fmt/format.h>

#include "abi/attach_state.h"
#include "base/fd.h"
#include "doctor/breakpoints.h"
#include "doctor/criu_checks.h"

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

// kernel: Documentation/admin-guide/mm/pagemap.rst.
constexpr std::uint64_t kPresent = 1ULL << 63;
constexpr std::uint64_t kSwapped = 1ULL << 62;
constexpr std::uint64_t kOfFile = 1ULL << 61;

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
    auto pages = open_file(AT_FDCWD, fmt::format("/proc/{}/pagemap", pid.value), O_RDONLY);
    auto memory = open_file(AT_FDCWD, fmt::format("/proc/{}/mem", pid.value), O_RDONLY);
    if (pages) pages_ = std::move(*pages);
    if (memory) memory_ = std::move(*memory);
  }

  // "0x1234 in /usr/lib/libcuda.so.1"; nothing also for what cannot be read.
  std::optional<std::string> probe(const proc::Mapping& mapping) {
    if (!pages_.valid() || !memory_.valid()) return std::nullopt;
    UniqueFd file;
    std::optional<std::uint64_t> offset;
    constexpr std::size_t kAtOnce = 8192;
    std::vector<std::uint64_t> entries(kAtOnce);
    std::uint64_t at = mapping.start;
    while (at < mapping.end) {
      const std::uint64_t count = std::min<std::uint64_t>(kAtOnce, (mapping.end - at) / page_);
      const ssize_t got = ::pread(pages_.get(), entries.data(), count * sizeof entries[0],
                                  static_cast<off_t>(at / page_ * sizeof entries[0]));
      if (got < static_cast<ssize_t>(sizeof entries[0])) return std::nullopt;
      const auto known = static_cast<std::size_t>(got) / sizeof entries[0];
      for (std::size_t i = 0; i < known; ++i, at += page_) {
        const bool own = (entries[i] & kSwapped) != 0 ||
                         ((entries[i] & kPresent) != 0 && (entries[i] & kOfFile) == 0);
        if (!own || looked_at_++ >= kMostPages) continue;
        if (!file.valid()) file = open_mapped(mapping);
        if (!offset) offset = offset_of(mapping);
        if (!file.valid() || !offset) return std::nullopt;
        const auto place = compare(file, at, *offset + (at - mapping.start));
        if (place) return fmt::format("{:#x} in {}", *place, mapping.path);
      }
    }
    return std::nullopt;
  }

 private:
  // Where in the file the mapping begins. Asked for what has changed pages alone.
  std::optional<std::uint64_t> offset_of(const proc::Mapping& mapping) const {
    std::ifstream maps(fmt::format("/proc/{}/maps", pid_.value));
    const std::string start = fmt::format("{:08x}-{:08x} ", mapping.start, mapping.end);
    for (std::string line; std::getline(maps, line);) {
      if (!line.starts_with(start)) continue;
      std::istringstream words(line.substr(start.size()));
      std::string permissions;
      std::uint64_t offset = 0;
      if (words >> permissions >> std::hex >> offset) return offset;
    }
    return std::nullopt;
  }

  // The very file that is mapped: what it is is known before it is opened to be read.
  UniqueFd open_mapped(const proc::Mapping& mapping) const {
    const auto place = open_file(
        AT_FDCWD,
        fmt::format("/proc/{}/map_files/{:x}-{:x}", pid_.value, mapping.start, mapping.end),
        O_PATH);
    struct stat info {};
    if (!place || ::fstat(place->get(), &info) != 0 || !S_ISREG(info.st_mode)) return {};
    auto file = open_file(AT_FDCWD, fmt::format("/proc/self/fd/{}", place->get()),
                          O_RDONLY | O_NONBLOCK | O_NOCTTY);
    return file ? std::move(*file) : UniqueFd();
  }

  std::optional<std::uint64_t> compare(const UniqueFd& file, std::uint64_t address,
                                       std::uint64_t offset) const {
    std::vector<unsigned char> mapped(page_);
    std::vector<unsigned char> stored(page_);
    if (::pread(memory_.get(), mapped.data(), page_, static_cast<off_t>(address)) !=
        static_cast<ssize_t>(page_)) {
      return std::nullopt;
    }
    // What lies beyond the end of the file is zero.
    if (::pread(file.get(), stored.data(), page_, static_cast<off_t>(offset)) < 0)
      return std::nullopt;
    const auto found = find_breakpoint(mapped, stored);
    if (!found) return std::nullopt;
    return offset + *found;
  }

  Pid pid_;
  UniqueFd pages_;
  UniqueFd memory_;
  std::uint64_t page_ = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  int looked_at_ = 0;
};

}  // namespace

void probe_code(const proc::ProcFs& procfs, const Processes& processes, Signs& out) {
  for (const proc::ProcessInfo& info : processes) {
    const auto mappings = procfs.mappings(info.pid);
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
