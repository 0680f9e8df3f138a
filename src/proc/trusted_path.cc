#include "proc/trusted_path.h"

#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/path_walk.h"
#include "proc/procfs.h"

namespace stasis::proc {
namespace {

// Where users have no folders of their own: what only root can write there is root's.
bool is_systems(std::string_view path) {
  const std::string_view first = path.substr(1, path.find('/', 1) - 1);
  return first.empty() || first == "usr" || first == "opt" || first == "bin" || first == "sbin";
}

// An access list's mask stands where the mode has the rights of the group.
bool has_access_list(const std::string& path) {
  return ::lgetxattr(path.c_str(), "system.posix_acl_access", nullptr, 0) > 0;
}

bool others_write(const struct stat& info, const std::string& path) {
  const bool by_group = (info.st_mode & S_IWGRP) != 0 &&
                        ((info.st_gid != 0 && info.st_gid != ::getegid()) || has_access_list(path));
  return by_group || (info.st_mode & S_IWOTH) != 0;
}

// Walks from the root folder down. The root folder cannot be exchanged, and a folder in which only
// root and the caller can write keeps its entries, so that each further name is what it was when it
// was judged.
class Walk {
 public:
  explicit Walk(const std::string& path) { push_names(path, rest_); }

  TrustedPath run() {
    if (auto why = enter("/", {}); !why.empty()) return {{}, std::move(why)};
    while (!rest_.empty()) {
      const std::string name = std::move(rest_.back());
      rest_.pop_back();
      if (name.empty() || name == ".") continue;
      if (name == "..") {
        if (!at_.empty()) at_.erase(at_.rfind('/'));
        continue;
      }
      if (auto why = enter(at_ + "/" + name, at_); !why.empty()) return {{}, std::move(why)};
    }
    return {at_, {}};
  }

 private:
  // Empty if the name may be believed, which is the place to go on from then, or was a link.
  std::string enter(const std::string& next, const std::string& folder) {
    struct stat info = {};
    if (::lstat(next.c_str(), &info) != 0)
      return fmt::format("{} cannot be looked at: {}", next, std::strerror(errno));
    if (info.st_uid != 0 && info.st_uid != ::geteuid() &&
        !(is_systems(next) && info.st_uid == unknown_))
      return fmt::format("{} belongs to user {}", next, info.st_uid);
    if (S_ISLNK(info.st_mode)) return follow(next, folder);
    // Where users may make entries they may mount a file system of their own, which says of its
    // files' owners what it likes.
    struct stat above = {};
    struct statfs system = {};
    if (next != "/" && (::lstat(folder.empty() ? "/" : folder.c_str(), &above) != 0 ||
                        ::statfs(next.c_str(), &system) != 0 ||
                        (info.st_dev != above.st_dev && others_write(above, folder) &&
                         static_cast<std::uint32_t>(system.f_type) == FUSE_SUPER_MAGIC)))
      return fmt::format("{} may be a mount of another user", next);
    const bool is_folder = S_ISDIR(info.st_mode);
    // In a folder like /tmp a user cannot replace another user's files.
    const bool sticky = is_folder && (info.st_mode & S_ISVTX) != 0;
    if (!sticky && others_write(info, next)) return fmt::format("others may write to {}", next);
    at_ = next == "/" ? std::string() : next;
    return {};
  }

  std::string follow(const std::string& link, const std::string& folder) {
    std::string target(4096, '\0');
    const ssize_t size = ::readlink(link.c_str(), target.data(), target.size());
    if (size <= 0) return fmt::format("{} cannot be read: {}", link, std::strerror(errno));
    target.resize(static_cast<std::size_t>(size));
    if (++links_ > kMostLinks) return fmt::format("{} is one of too many links", link);
    push_names(target, rest_);
    at_ = target.front() == '/' ? std::string() : folder;
    return {};
  }

  const std::optional<uid_t> unknown_ = unknown_owner();
  std::vector<std::string> rest_;
  std::string at_;  // without a slash at its end: empty for the root folder
  int links_ = 0;
};

}  // namespace

TrustedPath judge_path(const std::string& path) { return Walk(path).run(); }

}  // namespace stasis::proc
