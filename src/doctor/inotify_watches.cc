#include "doctor/inotify_watches.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstring>
#include <optional>
#include <sstream>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"
#include "proc/served_files.h"

namespace stasis {
namespace {

// A line such as "inotify wd:1 ino:2 sdev:fe00000 mask:100 ignored_mask:0 fhandle-bytes:8
// fhandle-type:1 f_handle:0200000000000000"; all but the type in hexadecimal, too.
struct Mark {
  std::uint64_t inode = 0;
  unsigned major = 0;
  unsigned minor = 0;
  std::uint32_t mask = 0;  // inotify's
  int mount = -1;          // fanotify: of a whole mount
  bool whole_filesystem = false;
  std::string handle;  // as open_by_handle_at() takes it, but for the head
  int handle_type = 0;
};

template <class T>
T hexadecimal(std::string_view text) {
  T value{};
  std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return value;
}

std::optional<Mark> read_mark(const std::string& line) {
  if (!line.starts_with("inotify ") && !line.starts_with("fanotify ")) return std::nullopt;
  Mark mark;
  bool has_inode = false;
  bool has_device = false;
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    const std::size_t colon = word.find(':');
    if (colon == std::string::npos) continue;
    const std::string key = word.substr(0, colon);
    const std::string_view value = std::string_view(word).substr(colon + 1);
    if (key == "flags") return std::nullopt;  // fanotify's first line, of no mark
    if (key == "ino") {
      mark.inode = hexadecimal<std::uint64_t>(value);
      has_inode = true;
    } else if (key == "sdev") {
      // The kernel's own form of a device number: 12 and 20 bits.
      const auto device = hexadecimal<std::uint32_t>(value);
      mark.major = device >> 20;
      mark.minor = device & 0xfffff;
      has_device = true;
    } else if (key == "mask" && line.starts_with("inotify ")) {
      mark.mask = hexadecimal<std::uint32_t>(value);
    } else if (key == "mnt_id") {
      mark.mount = hexadecimal<int>(value);
    } else if (key == "fhandle-type") {
      mark.handle_type = hexadecimal<int>(value);
    } else if (key == "f_handle") {
      for (std::size_t i = 0; i + 1 < value.size(); i += 2)
        mark.handle += static_cast<char>(hexadecimal<unsigned>(value.substr(i, 2)));
    }
  }
  mark.whole_filesystem = has_device && !has_inode;
  return mark;
}

UniqueFd open_handle(const UniqueFd& mount, const Mark& mark) {
  constexpr std::size_t kLargest = 128;  // MAX_HANDLE_SZ
  alignas(file_handle) std::array<char, sizeof(file_handle) + kLargest> buffer{};
  const std::size_t size = std::min(mark.handle.size(), kLargest);
  auto* handle = reinterpret_cast<file_handle*>(buffer.data());
  handle->handle_bytes = static_cast<unsigned>(size);
  handle->handle_type = mark.handle_type;
  std::memcpy(handle->f_handle, mark.handle.data(), size);
  return UniqueFd(::open_by_handle_at(mount.get(), handle, O_PATH | O_CLOEXEC));
}

// Does a path lead there? Without one, CRIU gives up on file systems whose handles do not last.
bool has_path(const UniqueFd& file, std::uint64_t inode) {
  std::array<char, PATH_MAX> link{};
  if (::readlink(fmt::format("/proc/self/fd/{}", file.get()).c_str(), link.data(),
                 link.size() - 1) <= 0) {
    return false;
  }
  struct stat info {};
  return ::lstat(link.data(), &info) == 0 && info.st_ino == inode;
}

// CRIU 4.2.1 opens what is watched by what its path leads to, or not at all.
WatchLight light_of(const UniqueFd& file) {
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return WatchLight::kFine;
  if (info.st_nlink == 0) return WatchLight::kDeleted;
  return S_ISLNK(info.st_mode) ? WatchLight::kLink : WatchLight::kFine;
}

// CRIU 4.2.1 restores the events alone (fsnotify.c, dump_inotify_entry()).
std::string lost_flags(std::uint32_t mask) {
  if ((mask & IN_ONESHOT) != 0)
    return (mask & IN_EXCL_UNLINK) != 0 ? "IN_ONESHOT, IN_EXCL_UNLINK" : "IN_ONESHOT";
  return (mask & IN_EXCL_UNLINK) != 0 ? "IN_EXCL_UNLINK" : "";
}

bool is_in_memory(const UniqueFd& file) {
  struct statfs info {};
  return ::fstatfs(file.get(), &info) == 0 && info.f_type == TMPFS_MAGIC;
}

// Where CRIU looks for files that cannot be opened by handle (the hints of its irmap.c).
bool may_be_found_by_name(const Mark& mark) {
  constexpr std::array<const char*, 8> kPlaces = {"/",
                                                  "/etc",
                                                  "/var/spool",
                                                  "/var/log",
                                                  "/usr/share/dbus-1/system-services",
                                                  "/var/lib/polkit-1/localauthority",
                                                  "/usr/share/polkit-1/actions",
                                                  "/lib/udev"};
  return std::any_of(kPlaces.begin(), kPlaces.end(), [&](const char* place) {
    struct stat info {};
    return ::stat(place, &info) == 0 && major(info.st_dev) == mark.major &&
           minor(info.st_dev) == mark.minor;
  });
}

// As CRIU does (its fsnotify.c): by handle on any mount of the file system, else by name.
Watch probe_mark(Pid pid, const Mark& mark, const std::vector<proc::Mount>& mounts) {
  if (mark.mount >= 0) {
    const bool known = std::any_of(mounts.begin(), mounts.end(), [&](const proc::Mount& mount) {
      return mount.id == mark.mount;
    });
    return {known ? WatchLight::kFine : WatchLight::kLost, fmt::format("mount {}", mark.mount), {}};
  }
  if (mark.whole_filesystem)
    return {WatchLight::kWhole, fmt::format("device {}:{}", mark.major, mark.minor), {}};
  Watch out{WatchLight::kLost,
            fmt::format("inode {} of a file system that is not mounted here", mark.inode),
            lost_flags(mark.mask)};
  bool tried = true;
  for (const proc::Mount& mount : mounts) {
    if (mount.major != mark.major || mount.minor != mark.minor) continue;
    out.what = fmt::format("inode {} of {} ({})", mark.inode, mount.point, mount.type);
    if (proc::leads_over_served(pid, mount.point)) {
      tried = false;
      continue;
    }
    const UniqueFd place(::open(fmt::format("/proc/{}/root{}", pid.value, mount.point).c_str(),
                                O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!place.valid()) continue;  // of a single file
    const UniqueFd file = open_handle(place, mark);
    if (file.valid()) {
      if (is_in_memory(file) && !has_path(file, mark.inode)) break;
      out.light = light_of(file);
      return out;
    }
    // Without CAP_DAC_READ_SEARCH.
    if (errno == EPERM) tried = false;
  }
  if (!tried || may_be_found_by_name(mark)) out.light = WatchLight::kUnknown;
  return out;
}

}  // namespace

const std::vector<proc::Mount>& WatchSearch::mounts_of(Pid pid) {
  const auto [it, is_new] = mounts_.try_emplace(pid.value);
  if (is_new) {
    if (auto found = proc::mounts(fmt::format("{}", pid.value))) it->second = std::move(*found);
  }
  return it->second;
}

std::vector<Watch> WatchSearch::probe(Pid pid, const std::string& fdinfo) {
  std::vector<Watch> out;
  std::istringstream lines(fdinfo);
  for (std::string line; std::getline(lines, line);) {
    if (const auto mark = read_mark(line)) out.push_back(probe_mark(pid, *mark, mounts_of(pid)));
  }
  return out;
}

}  // namespace stasis
