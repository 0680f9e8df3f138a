#include "checkpoint/state_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/units.h"

namespace stasis {
namespace {

constexpr const char* kLockEnd = ".lock";
constexpr const char* kNewEnd = ".new";

constexpr int kLockTries = 50;
constexpr std::chrono::milliseconds kLockPause{4};

// In one write; what is left of the old text becomes blank.
Result<void> overwrite(const std::string& path, std::string text) {
  STASIS_TRY_ASSIGN(auto fd, open_file(AT_FDCWD, path, O_WRONLY | O_NOFOLLOW));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return fail(errno_error("cannot stat " + path, errno));
  text.resize(std::max(text.size(), static_cast<std::size_t>(info.st_size)), ' ');
  STASIS_TRY(write_all(fd.get(), text.data(), text.size(), path));
  return fd.close(path);
}

}  // namespace

Error unwritable(Error error, const std::string& path) {
  constexpr const char* kAnother =
      "or name another state directory by STASIS_STATE_DIR, in each command about the same "
      "programs";
  struct statvfs system {};
  const std::string directory = std::filesystem::path(path).parent_path().string();
  const bool is_read_only =
      ::statvfs(directory.c_str(), &system) == 0 && (system.f_flag & ST_RDONLY) != 0;
  if (is_read_only)
    error.remedy = fmt::format("make it writable, {}", kAnother);
  else if (error.code == ErrorCode::kNoSpace)
    error.remedy = fmt::format("free some space in {}, {}", directory, kAnother);
  if (is_read_only) error.code = ErrorCode::kNoSpace;
  return error;
}

Result<void> check_writable(const std::string& directory) {
  constexpr std::uint64_t kRoom = 64 << 10;  // of a file's last block, and some records
  const std::string path = directory + "/record";
  if (::access(directory.c_str(), W_OK | X_OK) != 0)
    return fail(
        unwritable(errno_error("cannot write to the state directory " + directory, errno), path));
  struct statvfs system {};
  // Some file systems tell no sizes.
  if (::statvfs(directory.c_str(), &system) != 0 || system.f_blocks == 0) return {};
  const bool is_root = ::geteuid() == 0;
  const std::uint64_t room =
      std::uint64_t{is_root ? system.f_bfree : system.f_bavail} * system.f_frsize;
  const std::uint64_t files = is_root ? system.f_ffree : system.f_favail;
  if (room >= kRoom && (files > 0 || system.f_files == 0)) return {};
  return fail(unwritable({ErrorCode::kNoSpace,
                          fmt::format("the state directory {} has no room: {} and {} files more",
                                      directory, format_bytes(room), files),
                          {}},
                         path));
}

Result<std::optional<UniqueFd>> lock_state_file(const std::string& of) {
  const std::string path = of + kLockEnd;
  for (int tries = 0; tries < kLockTries; ++tries) {
    auto fd = open_file(AT_FDCWD, path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
    if (!fd) return fail(unwritable(std::move(fd.error()), path));
    if (::flock(fd->get(), LOCK_EX | LOCK_NB) == 0) {
      // A lock on a file that its last holder has deleted protects nothing.
      struct stat info {};
      if (::fstat(fd->get(), &info) == 0 && info.st_nlink > 0) {
        return std::optional<UniqueFd>(std::move(*fd));
      }
      continue;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return fail(errno_error("cannot lock " + path, errno));
    }
    std::this_thread::sleep_for(kLockPause);
  }
  return std::optional<UniqueFd>();
}

Result<void> write_state_file(const std::string& path, const std::string& text,
                              const std::function<Result<void>()>& allowed) {
  const std::string temporary = path + kNewEnd;
  Result<void> done;
  if (auto fd = open_file(AT_FDCWD, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600)) {
    if (allowed) done = allowed();
    if (done) done = write_all(fd->get(), text.data(), text.size(), temporary);
    if (done) done = fd->close(temporary);
  } else {
    done = fail(unwritable(std::move(fd.error()), temporary));
  }
  if (done && ::rename(temporary.c_str(), path.c_str()) != 0) {
    done = fail(errno_error("cannot write " + path, errno));
  }
  if (!done) (void)::unlink(temporary.c_str());
  if (!done && done.error().code == ErrorCode::kNoSpace) {
    done = ::access(path.c_str(), F_OK) == 0 ? overwrite(path, text)
                                             : fail(unwritable(std::move(done.error()), temporary));
  }
  return done;
}

Result<std::optional<StateFile>> read_state_file(const std::string& path) {
  const std::string lock_path = path + kLockEnd;
  StateFile out;
  auto lock = open_file(AT_FDCWD, lock_path, O_RDWR | O_NOFOLLOW);
  if (lock) {
    while (::flock(lock->get(), LOCK_SH | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) return fail(errno_error("cannot lock " + lock_path, errno));
      out.under_way = true;
      break;
    }
  } else if (lock.error().code == ErrorCode::kNotPermitted) {
    return fail(std::move(lock.error()));
  }
  auto text = read_file(AT_FDCWD, path);
  if (!text) return std::optional<StateFile>();
  out.text = std::move(*text);
  return std::optional<StateFile>(std::move(out));
}

void remove_state_file(const std::string& path) {
  (void)::unlink(path.c_str());
  (void)::unlink((path + kLockEnd).c_str());
}

void sweep_state_files(const std::string& directory,
                       const std::function<bool(std::string_view)>& is_ours) {
  const DirectoryStream dir = list_open(directory);
  std::vector<std::string> files;
  while (const dirent* item = dir ? ::readdir(dir.get()) : nullptr) {
    std::string name = item->d_name;
    for (const std::string_view end : {kLockEnd, kNewEnd}) {
      if (!name.ends_with(end)) continue;
      name.resize(name.size() - end.size());
      if (is_ours(name)) files.push_back(directory + "/" + name);
      break;
    }
  }
  for (const std::string& path : files) {
    auto lock = lock_state_file(path);
    if (!lock || !*lock) continue;  // an operation is at it
    (void)::unlink((path + kNewEnd).c_str());
    // While it is held: lock_state_file() notices a lock file that has lost its name.
    if (::access(path.c_str(), F_OK) != 0) (void)::unlink((path + kLockEnd).c_str());
  }
}

}  // namespace stasis
