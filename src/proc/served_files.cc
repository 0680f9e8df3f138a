#include "proc/served_files.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include "proc/process_file.h"

namespace stasis::proc {
namespace {

constexpr std::uint64_t kPage = 4096;
// Documentation/admin-guide/mm/pagemap.rst of the kernel
constexpr std::uint64_t kPresentOrSwapped = std::uint64_t{3} << 62;
constexpr std::uint64_t kKeptFromWrites = std::uint64_t{1} << 57;  // by a userfaultfd
constexpr std::size_t kEntries = 512;

}  // namespace

// Where it keeps others out the kernel tells their kind and nothing else (fuse_statfs() of
// fs/fuse/inode.c); a file system on top of one takes that over.
bool is_kept_from_us(const std::string& path) {
  struct statfs info {};
  return ::statfs(path.c_str(), &info) == 0 && info.f_bsize == 0 &&
         (info.f_type == FUSE_SUPER_MAGIC || info.f_type == OVERLAYFS_SUPER_MAGIC);
}

ServedPages::ServedPages(Pid pid) : pid_(pid) {
  auto pages = open_file(AT_FDCWD, fmt::format("/proc/{}/pagemap", pid.value), O_RDONLY);
  if (pages) pages_ = std::move(*pages);
}

bool ServedPages::is_there(std::uint64_t address) const {
  std::uint64_t entry = 0;
  return !pages_.valid() ||
         ::pread(pages_.get(), &entry, sizeof entry,
                 static_cast<off_t>(address / kPage * sizeof entry)) !=
             static_cast<ssize_t>(sizeof entry) ||
         (entry & kPresentOrSwapped) != 0;
}

ServedPages::Waits ServedPages::waits_in(std::uint64_t address, std::size_t size, Access access,
                                         const UniqueFd* memory) {
  if (size == 0) return Waits::kNever;
  if (!pages_.valid()) return Waits::kByNumber;
  const std::uint64_t last = std::max(address, address + (size - 1)) / kPage;
  std::array<std::uint64_t, kEntries> entries{};
  std::uint64_t tried_to = 0;
  Waits waits = Waits::kNever;
  for (std::uint64_t page = address / kPage; page <= last;) {
    const std::size_t wanted = std::min<std::uint64_t>(kEntries, last - page + 1);
    const ssize_t got = ::pread(pages_.get(), entries.data(), wanted * sizeof entries[0],
                                static_cast<off_t>(page * sizeof entries[0]));
    const std::size_t count = got <= 0 ? 0 : static_cast<std::size_t>(got) / sizeof entries[0];
    for (std::size_t i = 0; i < count; ++i) {
      if (access == Access::kWrite && (entries[i] & kKeptFromWrites) != 0) waits = Waits::kByNumber;
      if ((entries[i] & kPresentOrSwapped) != 0) continue;
      const std::uint64_t at = (page + i) * kPage;
      const Absent absent = look_at(at);
      if (absent.is_served) return Waits::kAlways;
      if (memory == nullptr || at < tried_to) continue;
      // One of a mapping tells of all: who provides a part of one makes two of it.
      tried_to = absent.end;
      char byte = 0;
      if (::pread(memory->get(), &byte, 1, static_cast<off_t>(at)) != 1) waits = Waits::kByNumber;
    }
    // Beyond all addresses, or of a process that has gone.
    if (count == 0) break;
    page += count;
  }
  return waits;
}

ServedPages::Absent ServedPages::look_at(std::uint64_t address) {
  const std::scoped_lock lock(mutex_);
  if (address >= fine_from_ && address < fine_to_) return {false, fine_to_};
  const auto at = mapping_of(address);
  if (!at) return {};
  if (at->inode != 0 && is_device_kept(*at)) return {true, at->end};
  fine_from_ = at->start;
  fine_to_ = at->end;
  return {false, at->end};
}

std::optional<Mapping> ServedPages::mapping_of(std::uint64_t address) {
  if (!maps_.valid()) {
    auto maps = open_file(AT_FDCWD, fmt::format("/proc/{}/maps", pid_.value), O_RDONLY);
    if (!maps) return std::nullopt;
    maps_ = std::move(*maps);
  }
  if (auto one = mapping_at(maps_, address)) return *one;
  if (!all_) {
    all_.emplace();
    (void)ProcFs().for_each_mapping(pid_, [&](const Mapping& mapping) {
      all_->push_back(mapping);
      all_->back().path.clear();
      return true;
    });
  }
  const auto after = std::upper_bound(
      all_->begin(), all_->end(), address,
      [](std::uint64_t wanted, const Mapping& mapping) { return wanted < mapping.start; });
  if (after == all_->begin() || address >= std::prev(after)->end) return std::nullopt;
  return *std::prev(after);
}

bool ServedPages::is_device_kept(const Mapping& mapping) {
  const auto [known, is_new] = devices_.try_emplace(mapping.device, false);
  if (is_new) {
    known->second = is_kept_from_us(MappedFile(pid_, mapping).link());
  }
  return known->second;
}

}  // namespace stasis::proc
