#include "base/fd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <new>
#include <optional>
#include <system_error>

#include <fmt/format.h>

namespace stasis {

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Result<void> UniqueFd::close(const std::string& path_for_message) {
  if (fd_ < 0) return {};
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) {
    return fail(errno_error("cannot close " + path_for_message, errno));
  }
  return {};
}

Error errno_error(const std::string& what, int error_number) {
  ErrorCode code = ErrorCode::kIo;
  std::string remedy;
  switch (error_number) {
    case EPERM:
    case EACCES:
      code = ErrorCode::kNotPermitted;
      remedy = "run as root, or as the user who owns it";
      break;
    case ENOSPC:
    case EDQUOT:
      code = ErrorCode::kNoSpace;
      remedy = "free some space, or choose a directory on another file system";
      break;
    case ESRCH:
      code = ErrorCode::kNoSuchProcess;
      break;
    case ENOMEM:
      code = ErrorCode::kOutOfHostMemory;
      break;
    case EMFILE:
      remedy = "raise the limit of open files (ulimit -n)";
      break;
    case EFBIG:
      remedy = "raise the limit on the size of a file (ulimit -f)";
      break;
    default:
      break;
  }
  return Error{code, fmt::format("{}: {}", what, std::strerror(error_number)), remedy};
}

bool give_up_reserve() {
  const auto make_room = std::get_new_handler();
  if (make_room == nullptr) return false;
  try {
    make_room();
  } catch (const std::bad_alloc&) {
    errno = ENOMEM;
    return false;
  }
  return true;
}

DirectoryStream list_open(const std::string& path) {
  for (;;) {
    DIR* directory = ::opendir(path.c_str());
    if (directory != nullptr || errno != ENOMEM || !give_up_reserve())
      return {directory, &::closedir};
  }
}

Result<UniqueFd> open_file(int directory, const std::string& path, int flags, unsigned mode) {
  UniqueFd fd(static_cast<int>(
      TEMP_FAILURE_RETRY(::openat(directory, path.c_str(), flags | O_CLOEXEC | O_NOCTTY, mode))));
  if (!fd.valid()) return fail(errno_error("cannot open " + path, errno));
  return fd;
}

namespace {

std::optional<struct stat> ask_kernel(int folder, const char* path, int how) {
  struct statx info {};
  if (::statx(folder, path, how | AT_STATX_DONT_SYNC, STATX_BASIC_STATS, &info) != 0)
    return std::nullopt;
  struct stat out {};
  out.st_dev = makedev(info.stx_dev_major, info.stx_dev_minor);
  out.st_ino = info.stx_ino;
  out.st_mode = info.stx_mode;
  out.st_nlink = info.stx_nlink;
  out.st_uid = info.stx_uid;
  out.st_gid = info.stx_gid;
  out.st_rdev = makedev(info.stx_rdev_major, info.stx_rdev_minor);
  out.st_size = static_cast<off_t>(info.stx_size);
  out.st_blksize = info.stx_blksize;
  out.st_blocks = static_cast<blkcnt_t>(info.stx_blocks);
  return out;
}

}  // namespace

std::optional<struct stat> known_status(const std::string& link) {
  return ask_kernel(AT_FDCWD, link.c_str(), 0);
}

std::optional<struct stat> known_status(const UniqueFd& file) {
  return ask_kernel(file.get(), "", AT_EMPTY_PATH);
}

bool is_regular_file(const struct stat& info) { return S_ISREG(info.st_mode); }

bool is_memory_file(const struct stat& info) {
  // The kernel keeps all of them on one file system of its own, which cannot be mounted anywhere.
  static const std::optional<dev_t> theirs = [] {
    const UniqueFd one(::memfd_create("stasis", MFD_CLOEXEC));
    struct stat own {};
    return ::fstat(one.get(), &own) == 0 ? std::optional(own.st_dev) : std::nullopt;
  }();
  return is_regular_file(info) && theirs == info.st_dev;
}

Result<UniqueFd> open_checked(int directory, const std::string& path, int access,
                              const FileCheck& accept) {
  STASIS_TRY_ASSIGN(auto place, open_file(directory, path, O_PATH | (access & O_NOFOLLOW)));
  const auto info = known_status(place);
  if (!info) return fail(errno_error("cannot stat " + path, errno));
  // An O_PATH descriptor of a link that is not followed is one of the link itself.
  if (S_ISLNK(info->st_mode)) return fail(errno_error("cannot open " + path, ELOOP));
  if (!accept(*info)) {
    return fail(ErrorCode::kNotSupported,
                fmt::format("{} is not the kind of file that belongs there (mode {:o}), and has "
                            "not been opened",
                            path, info->st_mode));
  }
  constexpr int kHarmless = O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
  const std::string same = fmt::format("/proc/self/fd/{}", place.get());
  UniqueFd file(static_cast<int>(
      TEMP_FAILURE_RETRY(::open(same.c_str(), (access & ~O_NOFOLLOW) | kHarmless))));
  if (!file.valid()) {
    const int why = errno;
    Error error = errno_error("cannot open " + path, why);
    if (why == EWOULDBLOCK)
      error.remedy =
          "another program has a lease on it (F_SETLEASE): try again when it has given it up";
    return fail(std::move(error));
  }
  return file;
}

Result<std::string> read_file(int directory, const std::string& path, std::size_t limit) {
  STASIS_TRY_ASSIGN(auto fd, open_checked(directory, path, O_RDONLY, &is_regular_file));
  return read_file(fd, path, limit);
}

Result<std::string> read_file(const UniqueFd& file, const std::string& path, std::size_t limit) {
  std::string out;
  char chunk[16384];
  for (;;) {
    const ssize_t got = TEMP_FAILURE_RETRY(::read(file.get(), chunk, sizeof chunk));
    if (got < 0) return fail(errno_error("cannot read " + path, errno));
    if (got == 0) return out;
    out.append(chunk, static_cast<std::size_t>(got));
    if (out.size() > limit) {
      return fail(ErrorCode::kIo, fmt::format("{} is larger than {} bytes", path, limit));
    }
  }
}

std::optional<std::uint64_t> read_number(const std::string& path) {
  const auto text = read_file(AT_FDCWD, path);
  if (!text) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

Result<void> allow_descriptors(std::uint64_t more) {
  std::error_code ignored;
  const auto open = static_cast<std::uint64_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd", ignored), {}));
  const std::uint64_t needed = open + more;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return {};
  const rlim_t seen = limit.rlim_cur;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, needed);
  if (limit.rlim_cur >= needed && ::setrlimit(RLIMIT_NOFILE, &limit) == 0) return {};
  return fail(
      ErrorCode::kIo, fmt::format("{} open files are allowed, and {} may be needed", seen, needed),
      fmt::format("raise the limit: `ulimit -n {}`", std::max<std::uint64_t>(needed, 1024)));
}

Result<void> write_all(int fd, const char* data, std::size_t size, const std::string& path) {
  while (size > 0) {
    const ssize_t done = TEMP_FAILURE_RETRY(::write(fd, data, size));
    if (done < 0) return fail(errno_error("cannot write " + path, errno));
    data += done;
    size -= static_cast<std::size_t>(done);
  }
  return {};
}

Result<Pidfd> Pidfd::open(Pid pid) {
  if (pid.value <= 0) {
    return fail(ErrorCode::kUsage, fmt::format("{} is not a process number", pid.value),
                "check the number; `stasis ps` lists the processes that use CUDA");
  }
  // The raw call: glibc has a wrapper only since 2.36.
  const long fd = ::syscall(SYS_pidfd_open, pid.value, 0U);
  if (fd >= 0) return Pidfd(UniqueFd(static_cast<int>(fd)));
  const int error_number = errno;
  if (error_number == ESRCH) {
    return fail(ErrorCode::kNoSuchProcess, fmt::format("there is no process {}", pid.value),
                "check the number; `stasis ps` lists the processes that use CUDA");
  }
  if (error_number == EINVAL || error_number == ENOENT) {
    return fail(ErrorCode::kThreadId,
                fmt::format("{} is the number of a thread, not of a process", pid.value),
                "give the number of the process that the thread belongs to");
  }
  return fail(errno_error(fmt::format("cannot get hold of process {}", pid.value), error_number));
}

bool Pidfd::alive() const { return !wait_exit(0); }

bool Pidfd::wait_exit(int timeout_ms) const {
  pollfd wait{fd_.get(), POLLIN, 0};
  const auto ready = TEMP_FAILURE_RETRY(::poll(&wait, 1, timeout_ms));
  return ready > 0;
}

Result<void> Pidfd::signal(int signal_number) const {
  if (::syscall(SYS_pidfd_send_signal, fd_.get(), signal_number, nullptr, 0U) == 0) return {};
  if (errno == ESRCH) return fail(ErrorCode::kProcessGone, "the process has gone");
  return fail(errno_error("cannot send a signal", errno));
}

}  // namespace stasis
