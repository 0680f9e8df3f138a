#include "proc/shared_host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <functional>
#include <iterator>
#include <span>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/threads.h"
#include "proc/pagemap.h"
#include "proc/process_file.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

// The kernel's name for it, and those of what CRIU makes in its place: 4.2.1, and 3.16.
constexpr std::array<std::string_view, 3> kNames{"/dev/zero (deleted)",
                                                 "/memfd:/dev/zero (deleted)", "/memfd: (deleted)"};

bool has_such_name(std::string_view path) {
  return std::find(kNames.begin(), kNames.end(), path) != kNames.end();
}

// The word at the beginning of `text`, which is taken from it, with the blanks behind it.
std::string_view take_word(std::string_view& text) {
  const std::string_view word = text.substr(0, std::min(text.find(' '), text.size()));
  text.remove_prefix(word.size());
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  return word;
}

std::optional<std::uint64_t> number_of(std::string_view word, int base) {
  std::uint64_t value = 0;
  const auto read = std::from_chars(word.data(), word.data() + word.size(), value, base);
  if (read.ec != std::errc() || read.ptr != word.data() + word.size()) return std::nullopt;
  return value;
}

// Of a process's addresses so much is looked at: 0.4 s.
constexpr std::uint64_t kMostLookedAt = std::uint64_t{256} << 30;

// Has the process a page of the mapping in its page tables? Also if that cannot be told, or there
// is more of it than `left`, from which it is taken.
bool is_touched(const UniqueFd& pagemap, const proc::Mapping& mapping, std::uint64_t& left) {
  constexpr std::uint64_t kPageOfTable = 4096;
  if (mapping.end - mapping.start > left) return true;
  left -= mapping.end - mapping.start;
  std::vector<proc::PageEntry> pages(32U << 10);
  for (std::uint64_t at = mapping.start; at < mapping.end;) {
    const std::uint64_t count =
        std::min<std::uint64_t>(pages.size(), (mapping.end - at) / kPageOfTable);
    const auto entries = std::span(pages).first(count);
    if (count == 0 || proc::read_pagemap(pagemap.get(), at, entries) != count) return true;
    if (std::any_of(entries.begin(), entries.end(), std::mem_fn(&proc::PageEntry::is_touched)))
      return true;
    at += count * kPageOfTable;
  }
  return false;
}

using Objects = std::map<std::uint64_t, bool>;  // by inode: whether it was touched

// The objects that the process maps, whatever part of them and however, or has a descriptor of;
// nothing if it cannot be told.
std::optional<Objects> objects_of(Pid pid) {
  Objects out;
  const auto files = proc::ProcFs().open_files(pid);
  if (!files)
    return files.error().code == ErrorCode::kProcessGone ? std::optional(out) : std::nullopt;
  for (const proc::OpenFile& file : *files) {
    if (!has_such_name(file.path)) continue;
    const auto info = known_status(fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor));
    if (!info) return std::nullopt;
    out[info->st_ino] = true;
  }
  std::vector<proc::Mapping> mappings;
  const auto done = proc::ProcFs().for_each_mapping(
      pid,
      [&](const proc::Mapping& mapping) {
        if (has_such_name(mapping.path)) mappings.push_back(mapping);
        return true;
      },
      proc::ProcFs::Which::kOfFiles);
  if (!done && done.error().code != ErrorCode::kProcessGone) return std::nullopt;
  if (mappings.empty()) return out;
  const auto pagemap = proc::open_after_look(pid, fmt::format("/proc/{}/pagemap", pid.value));
  std::uint64_t left = kMostLookedAt;
  for (const proc::Mapping& mapping : mappings) {
    bool& touched = out[mapping.inode];
    touched = touched || !pagemap || is_touched(*pagemap, mapping, left);
  }
  return out;
}

// To look at each page of what was never written takes longer than CRIU does with what was.
// `mapped`: how much of the object is mapped in all.
bool is_nearly_empty(const SharedMapping& mapping, std::uint64_t mapped) {
  constexpr std::uint64_t kOneIn = 16;
  struct stat info {};
  if (::fstat(mapping.object.get(), &info) != 0) return true;
  const auto there = static_cast<std::uint64_t>(info.st_blocks) * 512;
  return there < mapped / kOneIn;
}

bool open_object(Pid pid, SharedMapping& mapping, std::uint64_t all) {
  proc::Mapping place;
  place.start = mapping.at.start;
  place.end = mapping.at.end;
  const proc::MappedFile mapped(pid, place);
  if (mapped.link().empty()) return false;
  auto opened = open_checked(AT_FDCWD, mapped.link(), O_RDONLY, [&](const struct stat& info) {
    return is_memory_file(info) && info.st_ino == mapping.inode && info.st_size >= 0 &&
           static_cast<std::uint64_t>(info.st_size) >= mapping.offset_of(mapping.at.end);
  });
  if (!opened) return false;
  mapping.object = std::move(*opened);
  return !is_nearly_empty(mapping, all);
}

// Parts of objects, of which none lies over another.
class Parts {
 public:
  // False if one of them lies over it.
  bool add(const SharedMapping& mapping) {
    const auto next = ends_.upper_bound({mapping.inode, mapping.offset});
    const std::uint64_t end = mapping.offset_of(mapping.at.end);
    if (next != ends_.end() && next->first.first == mapping.inode && next->first.second < end)
      return false;
    if (next != ends_.begin()) {
      const auto before = std::prev(next);
      if (before->first.first == mapping.inode && before->second > mapping.offset) return false;
    }
    ends_[{mapping.inode, mapping.offset}] = end;
    return true;
  }

 private:
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t> ends_;  // by inode and offset
};

}  // namespace

std::optional<SharedMapping> shared_mapping_of(const std::string& line) {
  std::string_view rest = line;
  const std::string_view range = take_word(rest);
  const std::string_view permissions = take_word(rest);
  const auto offset = number_of(take_word(rest), 16);
  take_word(rest);  // the device: open_own_mappings() looks at the file itself
  const auto inode = number_of(take_word(rest), 10);
  if (permissions != "rw-s" || !has_such_name(rest) || !offset || !inode) return std::nullopt;
  const std::size_t dash = range.find('-');
  if (dash == std::string_view::npos) return std::nullopt;
  const auto start = number_of(range.substr(0, dash), 16);
  const auto end = number_of(range.substr(dash + 1), 16);
  if (!start || !end || *start >= *end || *offset > ~std::uint64_t{0} - (*end - *start))
    return std::nullopt;
  SharedMapping mapping;
  mapping.at = {*start, *end};
  mapping.offset = *offset;
  mapping.inode = *inode;
  return mapping;
}

bool SharedObjects::has_alone(Pid pid, std::uint64_t inode) {
  if (!std::exchange(is_looked_at_, true)) look();
  const auto owner = owners_.find(inode);
  return owner != owners_.end() && owner->second == pid;
}

void SharedObjects::look() {
  std::vector<std::optional<Objects>> found(processes_.size());
  share_out(found.size(), [&](std::size_t i) {
    found[i] = objects_of(processes_[i]);
    // One without CUDA runs: what it had open it may have closed before that was looked at.
    if (!found[i]) found[i] = objects_of(processes_[i]);
  });
  if (!std::all_of(found.begin(), found.end(), [](const auto& of) { return of.has_value(); }))
    return;
  for (const bool wanted : {true, false})
    for (std::size_t i = 0; i < found.size(); ++i)
      for (const auto& [inode, touched] : *found[i]) {
        if (touched != wanted) continue;
        const auto [owner, is_first] = owners_.emplace(inode, processes_[i]);
        if (!is_first && touched) owner->second.reset();
      }
}

std::vector<SharedMapping> open_own_mappings(Pid pid, std::vector<SharedMapping> mappings,
                                             SharedObjects& objects) {
  // For what else is opened: a dump that fails for want of descriptors would not have without this.
  constexpr std::uint64_t kSpare = 256;
  Parts parts;
  std::erase_if(mappings, [&](const SharedMapping& mapping) {
    return !objects.has_alone(pid, mapping.inode) || !parts.add(mapping);
  });
  if (mappings.empty() || !allow_descriptors(mappings.size() + kSpare)) return {};
  std::map<std::uint64_t, std::uint64_t> mapped;  // by inode
  for (const SharedMapping& mapping : mappings)
    mapped[mapping.inode] += mapping.at.end - mapping.at.start;
  std::vector<SharedMapping> out;
  for (SharedMapping& mapping : mappings)
    if (open_object(pid, mapping, mapped[mapping.inode])) out.push_back(std::move(mapping));
  return out;
}

std::vector<AddressRange> blocks_there(const SharedMapping& mapping, const AddressRange& part,
                                       std::uint64_t bytes) {
  constexpr std::uint64_t kObjectPage = 4096;
  const std::uint64_t first = (part.start + bytes - 1) / bytes * bytes;
  const std::uint64_t last = part.end / bytes * bytes;
  if (first >= last) return {};
  std::vector<unsigned char> pages((last - first) / kObjectPage);
  void* const mapped = ::mmap(nullptr, last - first, PROT_READ, MAP_SHARED | MAP_NORESERVE,
                              mapping.object.get(), static_cast<off_t>(mapping.offset_of(first)));
  if (mapped == MAP_FAILED) return {};
  const bool is_told = ::mincore(mapped, last - first, pages.data()) == 0;
  (void)::munmap(mapped, last - first);
  std::vector<AddressRange> out;
  if (!is_told) return out;
  const std::uint64_t of_block = bytes / kObjectPage;
  for (std::uint64_t at = first; at < last; at += bytes) {
    const auto begin = pages.begin() + static_cast<std::ptrdiff_t>((at - first) / kObjectPage);
    const auto there = static_cast<std::uint64_t>(
        std::count_if(begin, begin + static_cast<std::ptrdiff_t>(of_block),
                      [](unsigned char page) { return (page & 1U) != 0; }));
    if (there * 2 < of_block) continue;
    if (!out.empty() && out.back().end == at)
      out.back().end = at + bytes;
    else
      out.push_back({at, at + bytes});
  }
  return out;
}

Result<void> read_shared(const SharedMapping& mapping, std::uint64_t address,
                         std::span<std::byte> bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t got =
        TEMP_FAILURE_RETRY(::pread(mapping.object.get(), bytes.data() + done, bytes.size() - done,
                                   static_cast<off_t>(mapping.offset_of(address + done))));
    if (got < 0) return fail(errno_error("cannot read shared memory", errno));
    if (got == 0)
      return fail(ErrorCode::kIo, fmt::format("shared memory at {:#x} has become shorter", address),
                  "another process changes its size: try again, or with --host-memory criu");
    done += static_cast<std::size_t>(got);
  }
  return {};
}

}  // namespace stasis
