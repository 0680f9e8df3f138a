// Keeps pages from criu that the tool saves itself (docs/adr/0047-host-memory.md).
//
// CRIU asks the kernel which pages a process has, by reading /proc/PID/pagemap or by its ioctl
// PAGEMAP_SCAN, and which pages an object of shared memory has, by lseek(2); it saves those. These
// functions stand in front of the C library's and leave the pages of the tool's table out of the
// answer. A criu that asks in another way saves them as well, which costs time and disk space and
// nothing else.
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "inside_criu/table.h"

namespace {

using stasis::inside_criu::Range;
using stasis::inside_criu::table;
using stasis::inside_criu::tool;

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

// A part of a process's addresses of which all pages are hidden, or none.
struct Part {
  std::uint64_t end;
  bool is_hidden;
};

// The part that begins at `at`, up to `end` at most.
Part part_at(std::uint64_t pid, std::uint64_t at, std::uint64_t end, std::uint64_t count) {
  const Range* const range = first_above(pid, at, count);
  if (range == table->ranges + count || range->owner != pid || range->start >= end)
    return {end, false};
  if (range->start > at) return {range->start, false};
  return {range->end < end ? range->end : end, true};
}

void note_hidden(std::uint64_t bytes) {
  table->hidden.fetch_add(bytes / kPage, std::memory_order_relaxed);
}

// Entries of a pagemap, 8 bytes a page: of hidden pages zeros, for which the kernel is not asked,
// as it would go through the tables of gigabytes while the program stands still.
ssize_t read_entries(int fd, std::uint64_t pid, unsigned char* buffer, std::size_t bytes,
                     off_t offset, std::uint64_t count) {
  constexpr std::size_t kEntry = 8;
  const std::uint64_t first = static_cast<std::uint64_t>(offset) / kEntry * kPage;
  const std::uint64_t end = first + bytes / kEntry * kPage;
  for (std::uint64_t at = first; at < end;) {
    const Part part = part_at(pid, at, end, count);
    const std::size_t done = (at - first) / kPage * kEntry;
    const std::size_t size = (part.end - at) / kPage * kEntry;
    if (part.is_hidden) {
      std::memset(buffer + done, 0, size);
      note_hidden(part.end - at);
    } else {
      const long got =
          ::syscall(SYS_pread64, fd, buffer + done, size, offset + static_cast<off_t>(done));
      if (got < 0 && done == 0) return got;
      if (got != static_cast<long>(size)) return static_cast<ssize_t>(done) + (got < 0 ? 0 : got);
    }
    at = part.end;
  }
  return static_cast<ssize_t>((end - first) / kPage * kEntry);
}

// A scan, of the parts that are not hidden. Where there is no room for what is found, it ends
// there, as the kernel's does.
long scan_parts(int fd, std::uint64_t pid, ScanArgument& scan, std::uint64_t count) {
  std::uint64_t found = 0;
  for (std::uint64_t at = scan.start; at < scan.end;) {
    const Part part = part_at(pid, at, scan.end, count);
    if (part.is_hidden) {
      note_hidden(part.end - at);
      at = part.end;
      continue;
    }
    ScanArgument of_part = scan;
    of_part.start = at;
    of_part.end = part.end;
    of_part.vec = scan.vec + found * sizeof(PageRegion);
    of_part.vec_len = scan.vec_len - found;
    scan.walk_end = at;
    if (of_part.vec_len == 0) return static_cast<long>(found);
    const long more = ::syscall(SYS_ioctl, fd, kPagemapScan, &of_part);
    if (more < 0) return found == 0 ? more : static_cast<long>(found);
    found += static_cast<std::uint64_t>(more);
    if (of_part.walk_end < part.end) {
      scan.walk_end = of_part.walk_end;
      return static_cast<long>(found);
    }
    at = part.end;
  }
  scan.walk_end = scan.end;
  return static_cast<long>(found);
}

std::uint64_t ranges() {
  return table == nullptr ? 0 : table->count.load(std::memory_order_acquire);
}

bool is_awaited() {
  return table != nullptr && table->is_awaited.load(std::memory_order_acquire) != 0;
}

// Whether anything is hidden, or will be.
bool may_hide() { return is_awaited() || ranges() != 0; }

// While the tool looks for what it hides, which criu's work until here need not wait for. False if
// the tool has ended: the image is of no use then, and criu is to let the program go on at once,
// and not when it has written all memory.
bool wait_for_ranges() {
  constexpr timespec kLook{0, 200000};
  while (is_awaited()) {
    if (::getppid() != tool) {
      errno = EIO;
      return false;
    }
    (void)::nanosleep(&kLook, nullptr);
  }
  return true;
}

// criu looks at pages only once it has stopped all processes that it dumps. False, with errno: it
// cannot.
bool may_look_at(std::uint64_t pid) {
  if (pid == static_cast<std::uint64_t>(::getpid())) return true;
  table->is_asked.store(1, std::memory_order_release);
  return wait_for_ranges();
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
  if ((how != SEEK_DATA && how != SEEK_HOLE) || !may_hide()) return seek(fd, offset, how);
  const std::uint64_t owner = object_of(fd);
  if (owner == 0) return seek(fd, offset, how);
  if (!wait_for_ranges()) return -1;
  const std::uint64_t count = ranges();
  return how == SEEK_DATA ? seek_data(fd, offset, owner, count)
                          : seek_hole(fd, offset, owner, count);
}

// The process whose pages the descriptor tells of, if some of them may be hidden; 0: of none.
std::uint64_t hides_of(int fd) { return may_hide() ? process_of(fd) : 0; }

ssize_t read_hiding(int fd, void* buffer, std::size_t bytes, off_t offset) {
  const bool is_whole = offset % 8 == 0 && bytes % 8 == 0;  // never seen otherwise
  const std::uint64_t pid = is_whole ? hides_of(fd) : 0;
  if (pid == 0) return ::syscall(SYS_pread64, fd, buffer, bytes, offset);
  if (!may_look_at(pid)) return -1;
  return read_entries(fd, pid, static_cast<unsigned char*>(buffer), bytes, offset, ranges());
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
  const std::uint64_t pid = request == kPagemapScan ? hides_of(fd) : 0;
  if (pid != 0 && !may_look_at(pid)) return -1;
  auto* const scan = static_cast<ScanArgument*>(argument);
  // Criu sets no other limit than the room that it has.
  if (pid == 0 || scan->max_pages != 0 || scan->vec_len == 0)
    return static_cast<int>(::syscall(SYS_ioctl, fd, request, argument));
  return static_cast<int>(scan_parts(fd, pid, *scan, ranges()));
}

}  // extern "C"
