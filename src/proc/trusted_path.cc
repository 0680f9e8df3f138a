#include "proc/trusted_path.h"

#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/file_systems.h"
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

// Walks from the root folder down. The root folder cannot be exchanged, and a folder in which only
// root and the caller can write keeps its entries, so that each further name is what it was when it
// was judged.
class Walk {
 public:
  explicit Walk(const std::string& path, TrustedUser caller = {}) : caller_(caller) {
    push_names(path, rest_);
  }

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

  // Goes on after each place that may not be believed, as far as the path leads.
  std::vector<std::string> all_doubts() {
    is_collecting_ = true;
    if (auto end = run(); !end.why_not.empty()) doubts_.push_back(std::move(end.why_not));
    return std::move(doubts_);
  }

 private:
  bool is_trusted(const struct stat& info, const std::string& path) const {
    if (info.st_uid == 0 || info.st_uid == ::geteuid() || caller_.uid == info.st_uid) return true;
    return info.st_uid == unknown_ && (is_collecting_ || is_systems(path));
  }
  bool others_write(const struct stat& info, const std::string& path) const {
    const bool by_group =
        (info.st_mode & S_IWGRP) != 0 && ((info.st_gid != 0 && info.st_gid != ::getegid() &&
                                           caller_.gid != std::optional<gid_t>(info.st_gid)) ||
                                          has_access_list(path));
    return by_group || (info.st_mode & S_IWOTH) != 0;
  }
  // What to return: nothing where the walk is to go on.
  std::string doubt(std::string why) {
    if (!is_collecting_) return why;
    if (std::find(doubts_.begin(), doubts_.end(), why) == doubts_.end())
      doubts_.push_back(std::move(why));
    return {};
  }

  // Empty if the name may be believed, which is the place to go on from then, or was a link.
  std::string enter(const std::string& next, const std::string& folder) {
    struct stat info = {};
    if (::lstat(next.c_str(), &info) != 0)
      return fmt::format("{} cannot be checked: {}", next, std::strerror(errno));
    const bool trusted = is_trusted(info, next);
    if (!trusted) {
      if (auto why = doubt(fmt::format("{} belongs to user {}", next, info.st_uid)); !why.empty())
        return why;
    }
    if (S_ISLNK(info.st_mode)) return follow(next, folder);
    // Where users may make entries they may mount a file system of their own, which says of its
    // files' owners what it likes.
    struct stat above = {};
    struct statfs system = {};
    if (next != "/" && (::lstat(folder.empty() ? "/" : folder.c_str(), &above) != 0 ||
                        ::statfs(next.c_str(), &system) != 0 ||
                        (info.st_dev != above.st_dev && others_write(above, folder) &&
                         static_cast<std::uint32_t>(system.f_type) == kFuseMagic)))
      if (auto why = doubt(fmt::format("{} may be a mount of another user", next)); !why.empty())
        return why;
    const bool is_folder = S_ISDIR(info.st_mode);
    // In a folder like /tmp a user cannot replace another user's files.
    const bool sticky = is_folder && (info.st_mode & S_ISVTX) != 0;
    if (trusted && !sticky && others_write(info, next)) {
      if (auto why = doubt(fmt::format("others may write to {}", next)); !why.empty()) return why;
    }
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
  const TrustedUser caller_;
  bool is_collecting_ = false;
  std::vector<std::string> doubts_;
  std::vector<std::string> rest_;
  std::string at_;  // without a slash at its end: empty for the root folder
  int links_ = 0;
};

}  // namespace

TrustedPath judge_path(const std::string& path, const TrustedUser& caller) {
  return Walk(path, caller).run();
}

TrustedUser sudo_caller() {
  const auto number = [](const char* text) -> std::optional<unsigned> {
    unsigned value = 0;
    const std::string_view all = text != nullptr ? text : "";
    const auto [end, error] = std::from_chars(all.data(), all.data() + all.size(), value);
    if (error != std::errc() || end != all.data() + all.size()) return std::nullopt;
    return value;
  };
  if (::geteuid() != 0) return {};
  return {number(::secure_getenv("SUDO_UID")), number(::secure_getenv("SUDO_GID"))};
}

std::vector<std::string> doubts_of_path(const std::string& path, const TrustedUser& caller) {
  return Walk(path, caller).all_doubts();
}

}  // namespace stasis::proc
