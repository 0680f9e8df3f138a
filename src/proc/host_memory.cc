#include "proc/host_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstring>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/threads.h"
#include "proc/pagemap.h"
#include "proc/process_file.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

constexpr std::uint64_t kHostPage = 4096;
constexpr std::size_t kPagesOfBlock = kHostBlock / kHostPage;
constexpr std::uint64_t kLeastMapping = 16U << 20;

// Of /proc/PID/smaps (proc(5)): those of plain memory, and what was advised about it.
constexpr std::array<std::string_view, 14> kPlainFlags{"rd", "wr", "mr", "mw", "me", "ac", "sd",
                                                       "nh", "hg", "mg", "nr", "dc", "sr", "rr"};

// Of a shared mapping besides.
constexpr std::array<std::string_view, 2> kSharedFlags{"sh", "ms"};

bool is_plain(std::string_view flags, std::span<const std::string_view> more = {}) {
  while (!flags.empty()) {
    const std::size_t blank = std::min(flags.find(' '), flags.size());
    const std::string_view flag = flags.substr(0, blank);
    flags.remove_prefix(std::min(blank + 1, flags.size()));
    if (!flag.empty() &&
        std::find(kPlainFlags.begin(), kPlainFlags.end(), flag) == kPlainFlags.end() &&
        std::find(more.begin(), more.end(), flag) == more.end())
      return false;
  }
  return true;
}

std::optional<AddressRange> range_of(const std::string& line) {
  AddressRange range;
  const char* end = line.data() + line.size();
  const auto start = std::from_chars(line.data(), end, range.start, 16);
  if (start.ec != std::errc() || start.ptr == end || *start.ptr != '-') return std::nullopt;
  const auto stop = std::from_chars(start.ptr + 1, end, range.end, 16);
  if (stop.ec != std::errc() || stop.ptr == end || *stop.ptr != ' ') return std::nullopt;
  return range;
}

constexpr std::string_view kHeap = "[heap]";

// "7f..-7f.. rw-p 00000000 00:00 0 [anon:name]": private memory that may be written, of no file; or
// with "---p" what a program keeps free for it, as malloc() does behind each thread's arena.
bool is_of_no_file(const std::string& line, std::string_view wanted) {
  std::istringstream words(line);
  std::string range;
  std::string permissions;
  std::string offset;
  std::string device;
  std::string inode;
  std::string path;
  words >> range >> permissions >> offset >> device >> inode >> path;
  return permissions == wanted && inode == "0" &&
         (path.empty() || path.starts_with("[anon:") || path == kHeap);
}

// The stack pointers of all threads; nothing if one runs.
std::optional<std::vector<std::uint64_t>> stack_pointers_now(Pid pid) {
  std::vector<std::uint64_t> pointers;
  for (const Tid thread : proc::ProcFs().threads(pid)) {
    proc::ProcessText file(pid, fmt::format("task/{}/syscall", thread.value));
    std::vector<std::string> words;
    for (std::string word; file >> word;)
      words.push_back(std::move(word));
    if (words.size() < 3) return std::nullopt;
    pointers.push_back(std::strtoull(words[words.size() - 2].c_str(), nullptr, 16));
  }
  return pointers;
}

// A thread that has just done what was asked of it may still be on its way to its rest, and a busy
// machine may let it wait there for a processor.
std::optional<std::vector<std::uint64_t>> stack_pointers(Pid pid) {
  constexpr std::chrono::seconds kOnItsWay{1};
  const auto deadline = std::chrono::steady_clock::now() + kOnItsWay;
  for (;;) {
    auto pointers = stack_pointers_now(pid);
    if (pointers || std::chrono::steady_clock::now() >= deadline) return pointers;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Something outside of the process may know pages of it, and would not know those that come
// instead: asynchronous I/O, io_uring, devices.
constexpr std::array<std::string_view, 4> kKnowPages{"/[aio]", "io_uring", "/dev/infiniband",
                                                     "/dev/vfio"};

bool knows_pages(const std::string& path) {
  return std::any_of(kKnowPages.begin(), kKnowPages.end(),
                     [&](std::string_view name) { return path.find(name) != std::string::npos; });
}

bool has_what_knows_pages(Pid pid) {
  const auto files = proc::ProcFs().open_files(pid);
  return !files || std::any_of(files->begin(), files->end(),
                               [](const proc::OpenFile& file) { return knows_pages(file.path); });
}

// The kernel joins a stack, or a library's variables that begin with zero, to plain memory that
// lies beside it. What of a mapping is neither, nor the beginning of the heap: threads that are not
// parked may use those.
void add_plain(AddressRange mapping, bool begins_in_use, std::vector<std::uint64_t> pointers,
               std::vector<AddressRange>& out) {
  // More than the driver's library has of such variables, and its threads of stack. The driver's
  // threads have what is theirs from where a heap begins, as they are there early.
  constexpr std::uint64_t kInUse = 16U << 20;
  const auto add = [&](std::uint64_t start, std::uint64_t end) {
    if (start < end && end - start >= kLeastMapping) out.push_back({start, end});
  };
  std::uint64_t start = mapping.start + (begins_in_use ? kInUse : 0);
  std::sort(pointers.begin(), pointers.end());
  for (const std::uint64_t pointer : pointers) {
    if (pointer < mapping.start || pointer >= mapping.end) continue;
    // A stack grows downwards, and a signal's frame may lie below the pointer.
    add(start, std::max(pointer, mapping.start + kHostBlock) - kHostBlock);
    start = std::max(start, pointer + kInUse);
  }
  add(start, mapping.end);
}

void add_shared(SharedMapping mapping, const std::vector<std::uint64_t>& pointers,
                std::vector<SharedMapping>& out) {
  const bool is_stack = std::any_of(pointers.begin(), pointers.end(),
                                    [&](std::uint64_t pointer) { return mapping.has(pointer); });
  if (!is_stack && mapping.at.end - mapping.at.start >= kLeastMapping)
    out.push_back(std::move(mapping));
}

struct PlainMappings {
  std::vector<AddressRange> own;
  std::vector<SharedMapping> shared;
};

PlainMappings plain_mappings(Pid pid, const std::vector<std::uint64_t>& pointers) {
  PlainMappings out;
  proc::ProcessText file(pid, "smaps");
  std::optional<AddressRange> current;
  std::optional<SharedMapping> shared;
  std::uint64_t file_ends = 0;
  bool is_heap = false;
  for (std::string line; std::getline(file, line);) {
    constexpr std::string_view kFlags = "VmFlags: ";
    if (line.starts_with(kFlags)) {
      const auto flags = std::string_view(line).substr(kFlags.size());
      if (current && is_plain(flags))
        add_plain(*current, is_heap || current->start == file_ends, pointers, out.own);
      if (shared && is_plain(flags, kSharedFlags))
        add_shared(std::move(*shared), pointers, out.shared);
      current.reset();
      shared.reset();
      continue;
    }
    const auto range = range_of(line);
    if (!range) continue;
    if (knows_pages(line)) return {};
    current.reset();
    shared = shared_mapping_of(line);
    is_heap = line.ends_with(kHeap);
    if (is_of_no_file(line, "rw-p"))
      current = range;
    else if (!is_of_no_file(line, "---p"))
      file_ends = range->end;
  }
  return out;
}

bool is_worth_it(std::span<const proc::PageEntry> pages) {
  std::size_t there = 0;
  for (const proc::PageEntry page : pages) {
    if (page.is_swapped()) return false;
    if (!page.is_present()) continue;
    if (!page.is_owned()) return false;
    ++there;
  }
  return there * 2 >= kPagesOfBlock;
}

void join(const AddressRange& next, std::vector<AddressRange>& out) {
  if (!out.empty() && out.back().end == next.start)
    out.back().end = next.end;
  else
    out.push_back(next);
}

void add_blocks(const AddressRange& mapping, int pagemap, std::vector<AddressRange>& out) {
  constexpr std::size_t kBlocksAtOnce = 512;
  std::vector<proc::PageEntry> pages(kBlocksAtOnce * kPagesOfBlock);
  const std::uint64_t last = mapping.end / kHostBlock * kHostBlock;
  for (std::uint64_t at = (mapping.start + kHostBlock - 1) / kHostBlock * kHostBlock; at < last;) {
    const std::size_t blocks = std::min<std::uint64_t>((last - at) / kHostBlock, kBlocksAtOnce);
    pages.resize(blocks * kPagesOfBlock);
    if (proc::read_pagemap(pagemap, at, pages) != pages.size()) return;
    for (std::size_t i = 0; i < blocks; ++i, at += kHostBlock) {
      if (!is_worth_it(std::span(pages).subspan(i * kPagesOfBlock, kPagesOfBlock))) continue;
      join({at, at + kHostBlock}, out);
    }
  }
}

// The pages of large mappings are looked at by all processors: the program stands still meanwhile.
void add_parts(const AddressRange& mapping, std::vector<AddressRange>& parts) {
  constexpr std::uint64_t kPart = std::uint64_t{512} << 20;  // whole blocks
  for (std::uint64_t at = mapping.start; at < mapping.end;) {
    const std::uint64_t end = std::min(mapping.end, at / kPart * kPart + kPart);
    parts.push_back({at, end});
    at = end;
  }
}

std::vector<AddressRange> blocks_of(const std::vector<AddressRange>& mappings, int pagemap) {
  std::vector<AddressRange> parts;
  for (const AddressRange& mapping : mappings)
    add_parts(mapping, parts);
  std::vector<std::vector<AddressRange>> found(parts.size());
  share_out(parts.size(), [&](std::size_t i) { add_blocks(parts[i], pagemap, found[i]); });
  std::vector<AddressRange> out;
  for (const auto& part : found)
    for (const AddressRange& range : part)
      join(range, out);
  return out;
}

HostRanges find(const proc::AddressSpace& space, const std::vector<std::uint64_t>& pointers,
                SharedObjects& objects) {
  auto pagemap = open_pagemap(space);
  if (!pagemap || has_what_knows_pages(space.pid())) return {};
  PlainMappings mappings = plain_mappings(space.pid(), pointers);
  HostRanges out;
  out.ranges = blocks_of(mappings.own, pagemap->get());
  out.shared = open_own_mappings(space.pid(), std::move(mappings.shared), objects);
  std::vector<AddressRange> parts;
  for (const SharedMapping& mapping : out.shared)
    add_parts(mapping.at, parts);
  std::vector<std::vector<AddressRange>> blocks(parts.size());
  share_out(parts.size(), [&](std::size_t i) {
    blocks[i] = blocks_there(*out.shared_at(parts[i].start), parts[i], kHostBlock);
  });
  for (const auto& of_one : blocks)
    out.ranges.insert(out.ranges.end(), of_one.begin(), of_one.end());
  std::sort(
      out.ranges.begin(), out.ranges.end(),
      [](const AddressRange& one, const AddressRange& other) { return one.start < other.start; });
  // What was read is this process's, and not another program's that has its number since.
  return space.check_current() ? std::move(out) : HostRanges();
}

}  // namespace

Result<UniqueFd> open_pagemap(const proc::AddressSpace& space) {
  STASIS_TRY_ASSIGN(
      auto pagemap,
      proc::open_after_look(space.pid(), fmt::format("/proc/{}/pagemap", space.pid().value)));
  // Opened by number; from here on it is bound to the address space.
  STASIS_TRY(space.check_current());
  return pagemap;
}

Result<void> read_pages(const proc::AddressSpace& space, const UniqueFd& pagemap,
                        std::uint64_t address, std::span<std::byte> bytes) {
  std::vector<proc::PageEntry> pages(bytes.size() / kHostPage);
  if (proc::read_pagemap(pagemap.get(), address, pages) != pages.size())
    return space.read(address, bytes.data(), bytes.size());
  const auto there = [&](std::size_t page) { return pages[page].is_touched(); };
  for (std::size_t first = 0; first < pages.size();) {
    std::size_t end = first + 1;
    while (end < pages.size() && there(end) == there(first))
      ++end;
    std::byte* const to = bytes.data() + first * kHostPage;
    const std::size_t length = (end - first) * kHostPage;
    if (there(first))
      STASIS_TRY(space.read(address + first * kHostPage, to, length));
    else
      std::memset(to, 0, length);
    first = end;
  }
  return {};
}

Result<void> read_host_memory(const proc::AddressSpace& space, const UniqueFd& pagemap,
                              const HostRanges& found, std::uint64_t address,
                              std::span<std::byte> bytes) {
  const SharedMapping* const mapping = found.shared_at(address);
  return mapping == nullptr ? read_pages(space, pagemap, address, bytes)
                            : read_shared(*mapping, address, bytes);
}

const SharedMapping* HostRanges::shared_at(std::uint64_t address) const {
  const auto next = std::upper_bound(
      shared.begin(), shared.end(), address,
      [](std::uint64_t place, const SharedMapping& mapping) { return place < mapping.at.start; });
  return next != shared.begin() && std::prev(next)->has(address) ? &*std::prev(next) : nullptr;
}

HostRanges find_host_memory(const proc::AddressSpace& space, SharedObjects& objects) {
  const auto pointers = stack_pointers(space.pid());
  return pointers ? find(space, *pointers, objects) : HostRanges();
}

HostRanges guess_host_memory(const proc::AddressSpace& space, SharedObjects& objects) {
  return find(space, {}, objects);
}

}  // namespace stasis
