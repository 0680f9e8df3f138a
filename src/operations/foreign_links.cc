#include "operations/foreign_links.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/file_systems.h"
#include "base/path_walk.h"
#include "base/printable.h"
#include "criu/criu_files.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

std::string text_of_link(int folder, const char* name) {
  std::string target(PATH_MAX, '\0');
  const ssize_t size = ::readlinkat(folder, name, target.data(), target.size());
  target.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  return target;
}

// Goes the way of a path by itself, over no link of another user.
class Walk {
 public:
  explicit Walk(std::string_view path) { push_names(path, rest_); }

  // False at such a link; see foreign().
  bool run() {
    UniqueFd at = root();
    while (!rest_.empty()) {
      const std::string name = std::move(rest_.back());
      rest_.pop_back();
      if (name.empty() || name == ".") continue;
      UniqueFd next(::openat(at.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
      struct stat info {};
      const bool is_there = next.valid() && ::fstat(next.get(), &info) == 0;
      if (!is_there || !S_ISLNK(info.st_mode)) {
        enter(name);
        at = std::move(next);
        continue;
      }
      if (!is_believed(next, info)) {
        foreign_ = fmt::format("{}/{}", end_, name);
        owner_ = info.st_uid;
        return false;
      }
      if (++links_ > kMostLinks) return true;  // CRIU cannot follow them either
      const std::string target = text_of_link(next.get(), "");
      push_names(target, rest_);
      if (!target.starts_with('/')) continue;
      at = root();
      end_.clear();
    }
    return true;
  }

  // Where the path leads, without a link; what is not there is as it was named.
  const std::string& end() const { return end_; }
  // The link, and whose it is.
  const std::string& foreign() const { return foreign_; }
  uid_t owner() const { return owner_; }

 private:
  static UniqueFd root() { return UniqueFd(::open("/", O_PATH | O_DIRECTORY | O_CLOEXEC)); }

  void enter(const std::string& name) {
    if (name != "..")
      end_ += "/" + name;
    else if (!end_.empty())
      end_.erase(end_.rfind('/'));
  }

  // A file system that a program serves says of its files' owners what it likes.
  bool is_believed(const UniqueFd& link, const struct stat& info) const {
    struct statfs system {};
    return (info.st_uid == 0 || info.st_uid == ::geteuid() || info.st_uid == unknown_) &&
           ::fstatfs(link.get(), &system) == 0 &&
           static_cast<std::uint32_t>(system.f_type) != kFuseMagic;
  }

  // In a namespace of one user root's links look like those of any other, and the program gets no
  // rights but those of who restores.
  std::optional<uid_t> unknown_ = proc::knows_one_user() ? proc::unknown_owner() : std::nullopt;
  std::vector<std::string> rest_;
  std::string end_;
  std::string foreign_;
  uid_t owner_ = 0;
  int links_ = 0;
};

constexpr const char* kRemedy =
    "put the file back in its place, without a link; or give the link to root (`chown -h root "
    "LINK`) if its target is right; or restore as the user who owns the link";

Error leads_elsewhere(const std::string& name, const Walk& walk) {
  return {ErrorCode::kNotPermitted,
          fmt::format("the path of the job's file {} goes through {}, a link that belongs to user "
                      "{}, who can point it at any file of the user who restores",
                      printable(name), printable(walk.foreign()), walk.owner()),
          kRemedy};
}

class Check {
 public:
  Check(Pid pid, std::span<const InheritedFd> inherited) : pid_(pid), inherited_(inherited) {}

  Result<void> verify(const OpenedFile& file) {
    if (is_inherited(file.name)) return {};
    const auto place = place_of(file);
    if (!place) return {};
    const std::string name = text_of_link(AT_FDCWD, place->c_str());
    // The link cannot be read by a tool without the rights that could do harm.
    if (name.empty() || is_at(name, file.name, file)) return {};
    Walk walk(file.name);
    if (!walk.run()) return fail(leads_elsewhere(file.name, walk));
    if (is_at(name, walk.end(), file)) return {};
    return fail(ErrorCode::kNotPermitted,
                fmt::format("what the job had as {} is {} now, to which the name does not lead: a "
                            "program has changed it during the restore",
                            printable(file.name), printable(name)),
                "keep programs from the job's files meanwhile, and restore it again");
  }

 private:
  static bool is_at(const std::string& name, const std::string& wanted, const OpenedFile& file) {
    // Where another file has the name by now, CRIU makes the lost one beside it, as NAME.cr_link,
    // and takes that away again (its files-reg.c).
    return name == wanted || (file.loses_name && (name == wanted + " (deleted)" ||
                                                  name == wanted + ".cr_link (deleted)"));
  }

  bool is_inherited(const std::string& name) const {
    return std::any_of(inherited_.begin(), inherited_.end(), [&](const InheritedFd& one) {
      return name == one.key || name == "/" + one.key;
    });
  }

  // Mappings may have been joined.
  std::optional<std::string> place_of(const OpenedFile& file) {
    if (file.place != "map_files") return fmt::format("/proc/{}/{}", pid_.value, file.place);
    if (!mappings_) {
      auto mappings = proc::ProcFs().mappings(pid_);
      mappings_ = mappings ? std::move(*mappings) : std::vector<proc::Mapping>();
    }
    auto it = std::upper_bound(
        mappings_->begin(), mappings_->end(), file.start,
        [](std::uint64_t start, const proc::Mapping& mapping) { return start < mapping.start; });
    if (it == mappings_->begin()) return std::nullopt;
    --it;
    return fmt::format("/proc/{}/map_files/{:x}-{:x}", pid_.value, it->start, it->end);
  }

  Pid pid_;
  std::span<const InheritedFd> inherited_;
  std::optional<std::vector<proc::Mapping>> mappings_;
};

}  // namespace

Result<void> refuse_foreign_links(const UniqueFd& criu_dir) {
  STASIS_TRY_ASSIGN(const auto files, OpenedFiles::read(criu_dir));
  const std::set<std::string> names(files.names().begin(), files.names().end());
  for (const std::string& name : names) {
    Walk walk(name);
    if (!walk.run()) return fail(leads_elsewhere(name, walk));
  }
  return {};
}

Result<void> refuse_foreign_files(const UniqueFd& criu_dir,
                                  const std::vector<std::optional<Process>>& processes,
                                  std::span<const InheritedFd> inherited) {
  STASIS_TRY_ASSIGN(const auto files, OpenedFiles::read(criu_dir));
  for (const auto& process : processes) {
    if (!process) continue;
    STASIS_TRY_ASSIGN(const auto opened, files.of(criu_dir, process->pid().value));
    Check check(process->pid(), inherited);
    for (const OpenedFile& file : opened)
      STASIS_TRY(check.verify(file));
  }
  return {};
}

}  // namespace stasis
