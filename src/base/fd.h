// Owners of kernel objects: file descriptors, pidfds and mappings.
//
// All move and never copy, convert to nothing, and are opened close-on-exec. Not thread-safe.
#pragma once

#include <dirent.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/ids.h"
#include "base/result.h"

namespace stasis {

// Owns one file descriptor. A data file is closed with close(), which can fail; the destructor's
// close is for everything else.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();
  int release() { return std::exchange(fd_, -1); }

  // Closes and reports what the kernel only says at close (EIO, ENOSPC on network file systems).
  Result<void> close(const std::string& path_for_message);

 private:
  int fd_ = -1;
};

// Error from errno: kNotPermitted, kNoSpace, kNoSuchProcess, kOutOfHostMemory or kIo, with the
// system's text: "cannot open X: text".
Error errno_error(const std::string& what, int error_number);

// open(2) with O_CLOEXEC and O_NOCTTY. `directory` is AT_FDCWD or a directory's descriptor.
Result<UniqueFd> open_file(int directory, const std::string& path, int flags, unsigned mode = 0);

// What the kernel knows of the file that a link of /proc, or a descriptor, leads to: no program
// that serves it is asked, and what changed on another machine since is not seen. Without times.
// Nothing, with the reason in errno, where there is none.
std::optional<struct stat> known_status(const std::string& link);
std::optional<struct stat> known_status(const UniqueFd& file);

// For a name that another user may have made, of another process or in an image. To open a FIFO or
// a device waits, or does something, so the file is looked at first (O_PATH), by known_status():
// kNotSupported for one that `accept` refuses, which has not been opened then. `access` is O_RDONLY
// or O_RDWR, with O_NOFOLLOW.
using FileCheck = std::function<bool(const struct stat&)>;
Result<UniqueFd> open_checked(int directory, const std::string& path, int access,
                              const FileCheck& accept);
bool is_regular_file(const struct stat& info);
// Of memfd_create(2), or memory that is shared without a name. Asks for the device of these.
bool is_memory_file(const struct stat& info);

// For what the C library or the kernel refuses with ENOMEM: gives up the memory that is set aside
// for that case (std::get_new_handler()), of which only operator new knows. True: worth trying
// again.
bool give_up_reserve();

// A directory to be listed, for which the C library allocates 32 KiB; null, with the reason in
// errno.
using DirectoryStream = std::unique_ptr<DIR, int (*)(DIR*)>;
DirectoryStream list_open(const std::string& path);

// Reads a whole small regular file (proc files, manifests), and opens nothing else: open_checked().
// kImageCorrupt never; kIo beyond `limit` bytes.
Result<std::string> read_file(int directory, const std::string& path, std::size_t limit = 64 << 20);
// The same of one that is open, from where it stands; `path` is for messages.
Result<std::string> read_file(const UniqueFd& file, const std::string& path, std::size_t limit);

// The number that is all a small file says, as those of /proc/sys do; nothing if it says another
// thing ("max") or cannot be read.
std::optional<std::uint64_t> read_number(const std::string& path);

// Raises this process's limit of open files where it does not allow `more` than there are now. kIo
// with the figures if that cannot be.
Result<void> allow_descriptors(std::uint64_t more);

// Writes all of `data`, resuming short writes.
Result<void> write_all(int fd, const char* data, std::size_t size, const std::string& path);

// A process held by pidfd: it cannot be mistaken for a later one with the same number.
class Pidfd {
 public:
  // kNoSuchProcess if there is none, kThreadId if the number is a thread's (pidfd_open's EINVAL on
  // kernels before 6.9 and its ENOENT after; `man 2 pidfd_open`).
  static Result<Pidfd> open(Pid pid);

  bool alive() const;  // false once it has exited, also while it is a zombie
  // Waits for the exit; true if it came within the time, negative = for ever.
  bool wait_exit(int timeout_ms) const;
  Result<void> signal(int signal_number) const;
  int fd() const { return fd_.get(); }

 private:
  explicit Pidfd(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

}  // namespace stasis
