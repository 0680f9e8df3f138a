#include "image/directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>

#include <fmt/format.h>

namespace stasis {
namespace {

struct DirCloser {
  void operator()(DIR* dir) const { ::closedir(dir); }
};

// A bad sector; of ext4 and XFS also what does not match its checksum (EUCLEAN, EBADMSG).
bool is_loss(int number) { return number == EIO || number == EUCLEAN || number == EBADMSG; }

// An image's file that is not there or not what it should be is the image's fault.
Error beneath_error(const std::string& path, int number) {
  Error error = errno_error("cannot open " + path, number);
  // ENXIO, ENODEV: a socket, or a device of no driver.
  if (number == ENOENT || number == ELOOP || number == EXDEV || number == ENOTDIR ||
      number == ENXIO || number == ENODEV || is_loss(number)) {
    error.code = ErrorCode::kImageCorrupt;
  }
  return error;
}

Result<UniqueFd> open_step_by_step(const UniqueFd& directory, const std::string& path, int flags) {
  UniqueFd current;
  std::size_t begin = 0;
  while (true) {
    const std::size_t slash = path.find('/', begin);
    const std::string step = path.substr(begin, slash - begin);
    const bool last = slash == std::string::npos;
    if (step.empty() || step == "..") return fail(beneath_error(path, EXDEV));
    const int from = current.valid() ? current.get() : directory.get();
    const int how = last ? flags : O_PATH | O_DIRECTORY;
    const int fd = ::openat(from, step.c_str(), how | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return fail(beneath_error(path, errno));
    if (last) return UniqueFd(fd);
    current = UniqueFd(fd);
    begin = slash + 1;
  }
}

}  // namespace

Error of_image(Error error) {
  if (error.code == ErrorCode::kImageCorrupt)
    error.remedy =
        "the image is damaged: restore from another one, or copy it again from where it came from";
  return error;
}

tl::unexpected<Error> corrupt_image(std::string message) {
  return fail(of_image({ErrorCode::kImageCorrupt, std::move(message)}));
}

std::string DirectoryEntry::path() const {
  return parent_path == "/" ? "/" + name : parent_path + "/" + name;
}

Result<DirectoryEntry> split_path(const std::string& path) {
  std::string_view text = path;
  while (text.size() > 1 && text.ends_with('/'))
    text.remove_suffix(1);
  const std::size_t slash = text.rfind('/');
  DirectoryEntry entry;
  entry.name = std::string(slash == std::string_view::npos ? text : text.substr(slash + 1));
  if (entry.name.empty() || entry.name == "." || entry.name == "..") {
    return fail(ErrorCode::kUsage, "\"" + path + "\" does not name a directory for an image",
                "give a path that ends with the image's own name");
  }
  std::string parent = ".";
  if (slash != std::string_view::npos)
    parent = slash == 0 ? "/" : std::string(text.substr(0, slash));
  STASIS_TRY_ASSIGN(auto opened, open_file(AT_FDCWD, parent, O_RDONLY | O_DIRECTORY));
  entry.parent = std::move(opened);
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(parent.c_str(), nullptr), ::free);
  if (real == nullptr) return fail(errno_error("cannot resolve " + parent, errno));
  entry.parent_path = real.get();
  return entry;
}

Result<std::string> folder_id(const UniqueFd& folder) {
  struct stat info = {};
  if (::fstat(folder.get(), &info) != 0)
    return fail(errno_error("cannot stat the images' folder", errno));
  return fmt::format("{}:{}", info.st_dev, info.st_ino);
}

Result<void> check_folder(const UniqueFd& folder, const std::string& id, const std::string& path) {
  if (id.empty()) return {};
  STASIS_TRY_ASSIGN(const auto own, folder_id(folder));
  if (own == id) return {};
  return fail(ErrorCode::kNotPermitted,
              path +
                  " is not the folder any more that it was when the job began: another one has "
                  "been put in its place",
              "put the folder back, or start the job again with --images-dir where no other user "
              "can rename a folder");
}

Result<UniqueFd> open_beneath(const UniqueFd& directory, const std::string& path, int flags) {
  struct open_how how = {};
  how.flags = static_cast<__u64>(static_cast<unsigned>(flags | O_CLOEXEC));
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  const long fd = ::syscall(SYS_openat2, directory.get(), path.c_str(), &how, sizeof how);
  if (fd >= 0) return UniqueFd(static_cast<int>(fd));
  // EPERM: a container's seccomp filter that does not know the call.
  if (errno == ENOSYS || errno == EPERM) return open_step_by_step(directory, path, flags);
  return fail(beneath_error(path, errno));
}

Result<UniqueFd> open_regular(const UniqueFd& directory, const std::string& path,
                              struct stat& info) {
  auto place = open_beneath(directory, path, O_PATH | O_NOFOLLOW);
  if (!place) return fail(of_image(std::move(place.error())));
  if (::fstat(place->get(), &info) != 0) return fail(errno_error("cannot stat " + path, errno));
  if (!S_ISREG(info.st_mode)) return corrupt_image(path + " is no regular file");
  const std::string same = fmt::format("/proc/self/fd/{}", place->get());
  UniqueFd file(::open(same.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (!file.valid()) return fail(of_image(beneath_error(path, errno)));
  return file;
}

Error read_error(const std::string& what, int error_number) {
  Error error = errno_error(what, error_number);
  if (is_loss(error_number)) error.code = ErrorCode::kImageCorrupt;
  return error;
}

Result<std::vector<std::string>> list_directory(const UniqueFd& directory,
                                                const std::string& path) {
  // A descriptor of its own: fdopendir takes it over, and reading moves its position.
  STASIS_TRY_ASSIGN(auto own, open_file(directory.get(), ".", O_RDONLY | O_DIRECTORY));
  const std::unique_ptr<DIR, DirCloser> dir(::fdopendir(own.get()));
  if (dir == nullptr) return fail(errno_error("cannot read " + path, errno));
  own.release();
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(dir.get());
    if (entry == nullptr) {
      if (errno != 0) return fail(errno_error("cannot read " + path, errno));
      break;
    }
    const std::string_view name = static_cast<const char*>(entry->d_name);
    if (name != "." && name != "..") names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void mark_in_use(const UniqueFd& directory) {
  // Shared, because an exclusive lock needs a descriptor to write to on NFS (flock(2)).
  (void)::flock(directory.get(), LOCK_SH | LOCK_NB);
}

InUse in_use(const UniqueFd& parent, const std::string& name) {
  auto dir = open_file(parent.get(), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!dir) return InUse::kUnknown;
  if (::flock(dir->get(), LOCK_EX | LOCK_NB) == 0) return InUse::kNo;
  return errno == EWOULDBLOCK ? InUse::kYes : InUse::kUnknown;
}

Result<std::string> swap_entries(const DirectoryEntry& final, const std::string& from,
                                 const std::string& aside, const std::string& hold, bool exchange) {
  const int parent = final.parent.get();
  const std::string what =
      "cannot rename " + final.parent_path + "/" + from + " to " + final.path();
  const auto rename = [&](const std::string& old_name, const std::string& new_name) {
    return ::renameat(parent, old_name.c_str(), parent, new_name.c_str()) == 0;
  };
  if (exchange) {
    if (::renameat2(parent, from.c_str(), parent, final.name.c_str(), RENAME_EXCHANGE) == 0) {
      return from != aside && rename(from, aside) ? aside : from;
    }
    if (errno != EINVAL && errno != ENOSYS) {
      Error error = errno_error(what, errno);
      // An overlay whose lower layer has the directory: the layer of a container's image.
      if (errno == EXDEV) error.remedy = "give another name";
      return fail(std::move(error));
    }
  }
  if (!rename(final.name, hold)) return fail(errno_error(what, errno));
  if (!rename(from, final.name)) {
    const int number = errno;
    rename(hold, final.name);
    return fail(errno_error(what, number));
  }
  return rename(hold, aside) ? aside : hold;
}

}  // namespace stasis
