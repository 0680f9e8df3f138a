// Keeps pages from criu that the tool saves itself (docs/adr/0047-host-memory.md).
//
// CRIU asks the kernel which pages a process has, by reading /proc/PID/pagemap or by its ioctl
// PAGEMAP_SCAN, and which pages an object of shared memory has, by lseek(2); it saves those. These
// functions stand in front of the C library's and leave the pages of the tool's table out of the
// answer. A criu that asks in another way saves them as well, which costs time and disk space and
// nothing else.
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "inside_criu/table.h"

namespace {

using stasis::inside_criu::Range;
using stasis::inside_criu::table;

constexpr std::uint64_t kPage = 4096;

// linux/fs.h of Linux 6.7; older headers lack it.
constexpr unsigned long kPagemapScan = 0xc0606610;
struct PageRegion {
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t categories;
};
struct ScanArgument {
  std::uint64_t size;
  std::uint64_t flags;
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t walk_end;
  std::uint64_t vec;
  std::uint64_t vec_len;
  std::uint64_t max_pages;
  std::uint64_t category_inverted;
  std::uint64_t category_mask;
  std::uint64_t category_anyof_mask;
  std::uint64_t return_mask;
};
static_assert(sizeof(ScanArgument) == 96);

// The process whose pagemap the descriptor is of, by its link's text ".../1234/pagemap"; 0: of
// none.
std::uint64_t process_of(int fd) {
  char link[40] = "/proc/self/fd/";
  char digits[12];
  std::size_t count = 0;
  if (fd < 0) return 0;
  for (unsigned rest = static_cast<unsigned>(fd); rest != 0 || count == 0; rest /= 10)
    digits[count++] = static_cast<char>('0' + rest % 10);
  std::size_t end = std::strlen(link);
  while (count > 0)
    link[end++] = digits[--count];
  link[end] = '\0';
  char text[128];
  const ssize_t size = ::readlink(link, text, sizeof text);
  constexpr char kName[] = "/pagemap";
  constexpr ssize_t kNameSize = sizeof kName - 1;
  if (size <= kNameSize || size == static_cast<ssize_t>(sizeof text) ||
      std::memcmp(text + size - kNameSize, kName, kNameSize) != 0)
    return 0;
  std::uint64_t pid = 0;
  std::uint64_t factor = 1;
  ssize_t at = size - kNameSize;
  for (; at > 0 && text[at - 1] >= '0' && text[at - 1] <= '9' && factor < 10000000000; --at) {
    pid += factor * static_cast<std::uint64_t>(text[at - 1] - '0');
    factor *= 10;
  }
  return at > 0 && text[at - 1] == '/' ? pid : 0;
}

// The first range of the owner that ends above the place; another's, or the table's end, if there
// is none.
const Range* first_above(std::uint64_t owner, std::uint64_t place, std::uint64_t count) {
  std::uint64_t low = 0;
  std::uint64_t high = count;
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    const Range& range = table->ranges[middle];
    if (range.owner < owner || (range.owner == owner && range.end <= place))
      low = middle + 1;
    else
      high = middle;
  }
  return table->ranges + low;
}

// What was read of a pagemap, an entry of 8 bytes a page.
void hide_entries(std::uint64_t pid, unsigned char* entries, std::size_t bytes,
                  std::uint64_t offset, std::uint64_t count) {
  if (offset % 8 != 0) return;  // never seen
  const std::uint64_t first = offset / 8 * kPage;
  const std::uint64_t end = first + bytes / 8 * kPage;
  std::uint64_t hidden = 0;
  const Range* const last = table->ranges + count;
  for (const Range* range = first_above(pid, first, count);
       range != last && range->owner == pid && range->start < end; ++range) {
    const std::uint64_t from = range->start > first ? range->start : first;
    const std::uint64_t to = range->end < end ? range->end : end;
    if (from >= to) continue;
    std::memset(entries + (from - first) / kPage * 8, 0, (to - from) / kPage * 8);
    hidden += (to - from) / kPage;
  }
  table->hidden.fetch_add(hidden, std::memory_order_relaxed);
}

// What a scan has found, without the hidden pages: a region falls into several where some lie in
// its middle. Where there is no room for all, the scan ends there, as the kernel's does.
long hide_regions(std::uint64_t pid, ScanArgument& scan, long found, std::uint64_t count) {
  auto* const regions = reinterpret_cast<PageRegion*>(scan.vec);
  const std::size_t bytes = static_cast<std::size_t>(found) * sizeof(PageRegion);
  if (found <= 0) return found;
  void* const copy =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return found;
  std::memcpy(copy, regions, bytes);
  const auto* const all = static_cast<const PageRegion*>(copy);
  const Range* const last = table->ranges + count;
  std::uint64_t kept = 0;
  std::uint64_t hidden = 0;
  bool full = false;
  const auto keep = [&](std::uint64_t start, std::uint64_t end, std::uint64_t categories) {
    if (start >= end || full) return;
    full = kept == scan.vec_len;
    if (full)
      scan.walk_end = start;
    else
      regions[kept++] = {start, end, categories};
  };
  for (long i = 0; i < found && !full; ++i) {
    std::uint64_t at = all[i].start;
    for (const Range* range = first_above(pid, at, count);
         range != last && range->owner == pid && range->start < all[i].end && !full; ++range) {
      keep(at, range->start, all[i].categories);
      const std::uint64_t from = range->start > at ? range->start : at;
      const std::uint64_t to = range->end < all[i].end ? range->end : all[i].end;
      if (to > from) hidden += (to - from) / kPage;
      at = range->end;
    }
    keep(at, all[i].end, all[i].categories);
  }
  ::munmap(copy, bytes);
  table->hidden.fetch_add(hidden, std::memory_order_relaxed);
  return static_cast<long>(kept);
}

// criu looks at pages only once it has stopped all processes that it dumps.
void note_asked(std::uint64_t pid) {
  if (pid != static_cast<std::uint64_t>(::getpid()))
    table->is_asked.store(1, std::memory_order_release);
}

std::uint64_t ranges() {
  return table == nullptr ? 0 : table->count.load(std::memory_order_acquire);
}

// The owner of the pages of a file, if it is an object of shared memory; 0: it is none. All of them
// are on one file system of the kernel's own, and so is the table.
std::uint64_t object_of(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) ||
      info.st_dev != stasis::inside_criu::memory_device)
    return 0;
  return stasis::inside_criu::kObject | info.st_ino;
}

off_t seek(int fd, off_t offset, int how) {
  return static_cast<off_t>(::syscall(SYS_lseek, fd, offset, how));
}

// The next page that is there and not hidden.
off_t seek_data(int fd, off_t offset, std::uint64_t owner, std::uint64_t count) {
  const Range* const last = table->ranges + count;
  for (;;) {
    const off_t at = seek(fd, offset, SEEK_DATA);
    if (at < 0) return at;
    const auto place = static_cast<std::uint64_t>(at);
    const Range* const range = first_above(owner, place, count);
    if (range == last || range->owner != owner || range->start > place) return at;
    table->hidden.fetch_add((range->end - place) / kPage, std::memory_order_relaxed);
    offset = static_cast<off_t>(range->end);
  }
}

// The next page that is not there, or is hidden.
off_t seek_hole(int fd, off_t offset, std::uint64_t owner, std::uint64_t count) {
  const off_t at = seek(fd, offset, SEEK_HOLE);
  if (at < 0) return at;
  const Range* const range = first_above(owner, static_cast<std::uint64_t>(offset), count);
  if (range == table->ranges + count || range->owner != owner ||
      range->start >= static_cast<std::uint64_t>(at))
    return at;
  const auto hidden = static_cast<off_t>(range->start);
  return seek(fd, hidden > offset ? hidden : offset, SEEK_SET);
}

off_t seek_hiding(int fd, off_t offset, int how) {
  const std::uint64_t count = ranges();
  if ((how != SEEK_DATA && how != SEEK_HOLE) || count == 0) return seek(fd, offset, how);
  const std::uint64_t owner = object_of(fd);
  if (owner == 0) return seek(fd, offset, how);
  return how == SEEK_DATA ? seek_data(fd, offset, owner, count)
                          : seek_hole(fd, offset, owner, count);
}

ssize_t read_hiding(int fd, void* buffer, std::size_t bytes, off_t offset) {
  const long got = ::syscall(SYS_pread64, fd, buffer, bytes, offset);
  const std::uint64_t count = ranges();
  if (got <= 0 || count == 0) return got;
  const std::uint64_t pid = process_of(fd);
  if (pid == 0) return got;
  note_asked(pid);
  hide_entries(pid, static_cast<unsigned char*>(buffer), static_cast<std::size_t>(got),
               static_cast<std::uint64_t>(offset), count);
  return got;
}

}  // namespace

extern "C" {

ssize_t pread64(int fd, void* buffer, std::size_t bytes, off_t offset) {
  return read_hiding(fd, buffer, bytes, offset);
}

ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) {
  return read_hiding(fd, buffer, bytes, offset);
}

off_t lseek(int fd, off_t offset, int how) noexcept { return seek_hiding(fd, offset, how); }

off_t lseek64(int fd, off_t offset, int how) noexcept { return seek_hiding(fd, offset, how); }

int ioctl(int fd, unsigned long request, ...) noexcept {
  va_list list;
  va_start(list, request);
  void* const argument = va_arg(list, void*);
  va_end(list);
  const long result = ::syscall(SYS_ioctl, fd, request, argument);
  const std::uint64_t count = ranges();
  if (request != kPagemapScan || result < 0 || count == 0) return static_cast<int>(result);
  const std::uint64_t pid = process_of(fd);
  if (pid == 0) return static_cast<int>(result);
  note_asked(pid);
  return static_cast<int>(hide_regions(pid, *static_cast<ScanArgument*>(argument), result, count));
}

}  // extern "C"
