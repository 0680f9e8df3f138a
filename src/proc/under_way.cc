#include "proc/under_way.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>
#include <sstream>
#include <string_view>

#include <fmt/format.h>

#include "proc/silent_child.h"

namespace stasis::proc {
namespace {

// What the process that looks tells; in memory that it shares.
struct WayAnswer {
  enum What : std::uint32_t {
    kNothing,
    kLock,
    kOwner,
    kSemaphore,
    kHighCount,
    kWatching,
    kUnusual,
    kTooMany
  };
  std::atomic<bool> is_whole;
  std::atomic<std::uint32_t> what;
  std::atomic<std::uint32_t> with_bytes;
  std::atomic<std::uint32_t> nameless_count;
  std::array<NamelessFile, 64> nameless;
};

// From here on in a process that has one thread of many: no lock of the C library's may be taken.

using InfoText = std::array<char, 4096>;

std::string_view own_fdinfo(int descriptor, InfoText& out) {
  std::array<char, 48> path{};
  *fmt::format_to(path.data(), "/proc/self/fdinfo/{}", descriptor) = '\0';
  const int file = ::open(path.data(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  const ssize_t got = ::read(file, out.data(), out.size());
  ::close(file);
  return {out.data(), got > 0 ? static_cast<std::size_t>(got) : 0};
}

// Are there digits before the last eight of the value? "eventfd-count:  100000005", in hexadecimal.
bool is_above_half(std::string_view text) {
  constexpr std::string_view kCount = "eventfd-count:";
  constexpr std::size_t kLowerDigits = 8;
  const std::size_t at = text.find(kCount);
  if (at == std::string_view::npos) return false;
  const std::size_t begin = text.find_first_not_of(' ', at + kCount.size());
  const std::size_t end = text.find('\n', at);
  return begin != std::string_view::npos && end != std::string_view::npos &&
         end > begin + kLowerDigits;
}

// Of what a process has open the doctor asks more; what is under way goes on as it is only if
// nothing of that kind can be wrong with it: pipes, files with a name on a disk or in memory,
// memfds, the memory devices, and what has no file (eventfd, signalfd and their like, of which the
// rest is told above).
bool is_plain(int descriptor) {
  constexpr unsigned kMemoryDevices = 1;  // linux/major.h, MEM_MAJOR: /dev/null and its like
  constexpr unsigned kKernelLog = 11;     // /dev/kmsg
  struct stat st {};
  struct statfs fs {};
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0 || ::fstat(descriptor, &st) != 0 || ::fstatfs(descriptor, &fs) != 0) return false;
  switch (st.st_mode & S_IFMT) {
    case S_IFCHR:
      return major(st.st_rdev) == kMemoryDevices && minor(st.st_rdev) != kKernelLog;
    case S_IFBLK:
    case S_IFLNK:
      return false;
    case S_IFREG:
    case S_IFDIR:
      break;
    default:
      return true;
  }
  const bool of_kernel = fs.f_type == PROC_SUPER_MAGIC || fs.f_type == SYSFS_MAGIC ||
                         fs.f_type == CGROUP_SUPER_MAGIC || fs.f_type == CGROUP2_SUPER_MAGIC ||
                         fs.f_type == DEBUGFS_MAGIC || fs.f_type == TRACEFS_MAGIC;
  constexpr int kTemporary = O_TMPFILE & ~O_DIRECTORY;
  if (of_kernel || (flags & kTemporary) != 0) return false;
  // Deleted ones and memfds lose those.
  return st.st_nlink != 0 || ::flistxattr(descriptor, nullptr, 0) <= 0;
}

WayAnswer::What what_is_lost(int descriptor, bool& is_seen) {
  InfoText text;
  const std::string_view info = own_fdinfo(descriptor, text);
  is_seen = !info.empty();
  // Leases, too. Those of POSIX are of a process, which has let them go when it closed the file.
  if (info.find("\nlock:") != std::string_view::npos) return WayAnswer::kLock;
  if (info.find("eventfd-semaphore: 1\n") != std::string_view::npos) return WayAnswer::kSemaphore;
  if (is_above_half(info)) return WayAnswer::kHighCount;
  // CRIU looks for what it watches among the descriptors of the process that it restores, by the
  // numbers of before.
  if (info.find("\ntfd:") != std::string_view::npos) return WayAnswer::kWatching;
  if (!is_plain(descriptor)) return WayAnswer::kUnusual;
  f_owner_ex owner{};
  if (::fcntl(descriptor, F_GETOWN_EX, &owner) == 0 && owner.pid != 0) return WayAnswer::kOwner;
  return ::fcntl(descriptor, F_GETSIG) > 0 ? WayAnswer::kOwner : WayAnswer::kNothing;
}

void note_nameless(int descriptor, WayAnswer& answer) {
  struct stat st {};
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0 || (flags & O_PATH) != 0 || ::fstat(descriptor, &st) != 0 || !S_ISREG(st.st_mode) ||
      st.st_nlink != 0 || answer.nameless_count == answer.nameless.size())
    return;
  answer.nameless[answer.nameless_count] = {st.st_dev, st.st_ino, (flags & O_ACCMODE) != O_RDONLY};
  ++answer.nameless_count;
}

// CRIU takes no more out of one message (CR_SCM_MAX_FD of its sk-queue.c); the kernel lets 253 in.
constexpr std::size_t kMostOfMessage = 252;

// Of one message; false if not all could be looked at.
bool look_at(msghdr& message, bool has_bytes, WayAnswer& answer) {
  bool all_seen = (message.msg_flags & MSG_CTRUNC) == 0;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr;
       head = CMSG_NXTHDR(&message, head)) {
    const std::size_t size = head->cmsg_len - CMSG_LEN(0);
    if (size > kMostOfMessage * sizeof(int) && answer.what == WayAnswer::kNothing)
      answer.what = WayAnswer::kTooMany;
    for (std::size_t at = 0; at + sizeof(int) <= size; at += sizeof(int)) {
      if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) break;
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(head) + at, sizeof descriptor);
      bool is_seen = false;
      const WayAnswer::What what = what_is_lost(descriptor, is_seen);
      if (what != WayAnswer::kNothing && answer.what == WayAnswer::kNothing) answer.what = what;
      note_nameless(descriptor, answer);
      all_seen = all_seen && is_seen;
      if (has_bytes) ++answer.with_bytes;
      ::close(descriptor);
    }
  }
  return all_seen;
}

// Closes all other descriptors.
bool leave_only(int descriptor) {
  const auto kept = static_cast<unsigned>(descriptor);
  return (kept == 0 || ::syscall(SYS_close_range, 0U, kept - 1, 0U) == 0) &&
         ::syscall(SYS_close_range, kept + 1, ~0U, 0U) == 0;
}

// The socket stands at the beginning of its queue (SO_PEEK_OFF).
void look_at_all(int socket, bool is_stream, WayAnswer& answer) {
  constexpr int kMostMessages = 100000;
  constexpr int kMostOffset = 1 << 30;
  static std::array<char, 65536> bytes;
  alignas(cmsghdr) static std::array<char, 4096> control;  // 253 descriptors at most
  int offset = 0;
  bool all_seen = true;
  for (int i = 0; i < kMostMessages && offset < kMostOffset; ++i) {
    iovec place{bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &place;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (::setsockopt(socket, SOL_SOCKET, SO_PEEK_OFF, &offset, sizeof offset) != 0) return;
    const ssize_t length =
        ::recvmsg(socket, &message, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (length < 0 && errno != EAGAIN) return;
    if (length < 0 || (length == 0 && is_stream)) break;
    offset += static_cast<int>(length);
    all_seen = look_at(message, length > 0, answer) && all_seen;
  }
  answer.is_whole = all_seen;
}

const char* lost_text(std::uint32_t what) {
  switch (what) {
    case WayAnswer::kLock:
      return "a lock (flock, F_OFD_SETLK) or a lease";
    case WayAnswer::kOwner:
      return "a process that it signals (F_SETOWN, F_SETSIG)";
    case WayAnswer::kSemaphore:
      return "EFD_SEMAPHORE";
    case WayAnswer::kHighCount:
      return "an eventfd's value above 32 bits";
    case WayAnswer::kWatching:
      return "files that it watches (epoll)";
    case WayAnswer::kUnusual:
      return "a file of the kernel (/proc, /sys, a cgroup), a device, one of O_TMPFILE, or "
             "extended "
             "attributes without a name";
    case WayAnswer::kTooMany:
      return "more than 251 others in its message";
    default:
      return "";
  }
}

}  // namespace

std::uint32_t descriptors_under_way(Pid pid, int descriptor) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, descriptor));
  constexpr std::string_view kKey = "\nscm_fds: ";
  const std::size_t at = text ? text->find(kKey) : std::string::npos;
  std::uint32_t out = 0;
  if (at == std::string::npos || !(std::istringstream(text->substr(at + kKey.size())) >> out))
    return 0;
  return out;
}

UnderWay look_at_under_way(const UniqueFd& socket, bool is_stream) {
  int before = -1;
  socklen_t size = sizeof before;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &before, &size) != 0) return {};
  void* const shared =
      ::mmap(nullptr, sizeof(WayAnswer), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return {};
  WayAnswer& answer = *new (shared) WayAnswer{};
  auto child = SilentChild::start([&] {
    // It may stay, and with it locks that are the tool's: an agent would go on to have a peer.
    if (leave_only(socket.get())) look_at_all(socket.get(), is_stream, answer);
  });
  UnderWay out;
  if (child.is_there()) {
    const bool has_ended = child.ends_within(std::chrono::seconds(5));
    child.end(std::chrono::milliseconds(0));
    out = {has_ended && answer.is_whole, !has_ended, lost_text(answer.what), answer.with_bytes, {}};
    if (has_ended)
      out.nameless.assign(answer.nameless.begin(), answer.nameless.begin() + answer.nameless_count);
  }
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &before, sizeof before);
  ::munmap(shared, sizeof(WayAnswer));
  return out;
}

}  // namespace stasis::proc
