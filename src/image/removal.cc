#include "image/removal.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include <fmt/format.h>

#include "image/content.h"
#include "image/directory.h"
#include "image/manifest_format.h"

namespace stasis {
namespace {

constexpr int kMaxDepth = 16;  // images are two deep

// The folder itself, not what is mounted there. EXDEV if something is.
UniqueFd open_folder(const UniqueFd& parent, const std::string& name) {
  struct open_how how = {};
  how.flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV;
  const long fd = ::syscall(SYS_openat2, parent.get(), name.c_str(), &how, sizeof how);
  // EPERM: a container's seccomp filter that does not know the call.
  if (fd >= 0 || (errno != ENOSYS && errno != EPERM)) return UniqueFd(static_cast<int>(fd));
  UniqueFd folder(::openat(parent.get(), name.c_str(), static_cast<int>(how.flags)));
  struct stat inside {};
  struct stat outside {};
  if (!folder.valid()) return folder;
  if (::fstat(folder.get(), &inside) == 0 && ::fstat(parent.get(), &outside) == 0 &&
      inside.st_dev == outside.st_dev)
    return folder;
  errno = EXDEV;
  return {};
}

Error not_removed(const std::string& path, int number) {
  if (number != EXDEV) return errno_error("cannot remove " + path, number);
  return {ErrorCode::kNotPermitted, "cannot remove " + path + ": it is a mount point",
          "unmount it, or remove it yourself"};
}

tl::unexpected<Error> stays(const std::string& path, const std::string& why) {
  return fail(ErrorCode::kNotPermitted, fmt::format("cannot remove {}: it {}", path, why),
              "check it, and remove it yourself");
}

bool is_trusted(uid_t user) { return user == ::geteuid() || user == 0; }

// `owner`: the parent's.
Result<void> remove_below(const UniqueFd& parent, const std::string& name, const std::string& path,
                          uid_t owner, int depth);

Result<void> empty(const UniqueFd& folder, const std::string& path, int depth) {
  struct stat info {};
  if (depth == 0) return fail(ErrorCode::kIo, "cannot remove " + path + ": too deep");
  if (::fstat(folder.get(), &info) != 0) return fail(not_removed(path, errno));
  STASIS_TRY_ASSIGN(const auto names, list_directory(folder, path));
  Result<void> result;
  for (const std::string& inner : names) {
    auto removed = remove_below(folder, inner, std::string(path).append("/").append(inner),
                                info.st_uid, depth - 1);
    if (!removed && result) result = std::move(removed);
  }
  return result;
}

Result<void> remove_below(const UniqueFd& parent, const std::string& name, const std::string& path,
                          uid_t owner, int depth) {
  if (::unlinkat(parent.get(), name.c_str(), 0) == 0 || errno == ENOENT) return {};
  if (errno != EISDIR && errno != EPERM) return fail(not_removed(path, errno));
  const UniqueFd folder = open_folder(parent, name);
  struct stat info {};
  if (!folder.valid() || ::fstat(folder.get(), &info) != 0) return fail(not_removed(path, errno));
  // The owner of a folder can put another's there, and could not empty it.
  if (!is_trusted(owner) && info.st_uid != owner) return stays(path, "belongs to another user");
  STASIS_TRY(empty(folder, path, depth));
  if (::unlinkat(parent.get(), name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT)
    return fail(not_removed(path, errno));
  return {};
}

// Nothing in it can have got its name by another user, if it belongs to us.
bool is_ours_alone(const struct stat& folder) {
  return is_trusted(folder.st_uid) && (folder.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// What has come there under a name of ours.
Result<void> judge(const struct stat& parent, const struct stat& info, const UniqueFd& folder,
                   const std::string& path) {
  if (is_ours_alone(parent)) return {};
  const bool sticky = is_trusted(parent.st_uid) && (parent.st_mode & S_ISVTX) != 0;
  if (info.st_uid != ::geteuid() && (sticky || info.st_uid != parent.st_uid))
    return stays(path, "belongs to another user");
  if (sticky) return {};
  STASIS_TRY_ASSIGN(const auto names, list_directory(folder, path));
  const auto other = std::find_if(names.begin(), names.end(), [](const std::string& one) {
    return !is_part_of_image(one) && !one.starts_with(".nfs");
  });
  if (other == names.end()) return {};
  return stays(path, fmt::format("holds \"{}\", which is no part of an image", *other));
}

}  // namespace

bool is_part_of_image(std::string_view name) {
  return name == manifest_format::kName || name == manifest_format::kLogFolder ||
         name == manifest_format::kCriuFolder || name == content_folder(ContentKind::kGpu) ||
         name == content_folder(ContentKind::kHost);
}

Result<void> remove_tree(const UniqueFd& parent, const std::string& name, const std::string& path) {
  struct stat info {};
  if (::fstat(parent.get(), &info) != 0) return fail(not_removed(path, errno));
  return remove_below(parent, name, path, info.st_uid, kMaxDepth);
}

Result<void> remove_image(const UniqueFd& parent, const std::string& name, const std::string& path,
                          const UniqueFd* known) {
  // What is no folder is only a name.
  if (known == nullptr && ::unlinkat(parent.get(), name.c_str(), 0) == 0) return {};
  const UniqueFd folder = open_folder(parent, name);
  if (!folder.valid() && errno == ENOENT) return {};
  struct stat info {};
  struct stat beside {};
  if (!folder.valid() || ::fstat(folder.get(), &info) != 0 || ::fstat(parent.get(), &beside) != 0)
    return fail(not_removed(path, errno));
  if (known != nullptr) {
    struct stat wanted {};
    if (::fstat(known->get(), &wanted) != 0 || wanted.st_dev != info.st_dev ||
        wanted.st_ino != info.st_ino)
      return stays(path, "was put there by another process");
  } else {
    STASIS_TRY(judge(beside, info, folder, path));
  }
  STASIS_TRY(empty(folder, path, kMaxDepth));
  if (::unlinkat(parent.get(), name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT)
    return fail(not_removed(path, errno));
  return {};
}

}  // namespace stasis
