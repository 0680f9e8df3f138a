#include "operations/restore_log.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "checkpoint/journal.h"
#include "image/removal.h"

namespace stasis {

namespace {

constexpr std::string_view kPrefix = "restore-work-";

// CRIU mounts the cgroups there (--manage-cgroups) until it has made them; a criu that was killed
// leaves that. Only we can write to the directory.
void remove_work(const UniqueFd& parent, const std::string& name, const std::string& path) {
  constexpr std::string_view kOfCriu = ".criu.cgyard.";
  const auto folder = open_file(parent.get(), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  const auto names = folder ? list_directory(*folder, path) : Result<std::vector<std::string>>();
  for (const std::string& inner : names ? *names : std::vector<std::string>()) {
    const std::string place = fmt::format("/proc/self/fd/{}/{}", folder->get(), inner);
    if (inner.starts_with(kOfCriu)) (void)::umount2(place.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW);
  }
  (void)remove_tree(parent, name, path);
}

// Every restore has marked its directory as in use.
void remove_abandoned(const DirectoryEntry& entry) {
  auto names = list_directory(entry.parent, entry.parent_path);
  if (!names) return;
  for (const std::string& name : *names) {
    if (!name.starts_with(kPrefix) || in_use(entry.parent, name) != InUse::kNo) continue;
    remove_work(entry.parent, name, entry.parent_path + "/" + name);
  }
}

}  // namespace

Result<RestoreLog> RestoreLog::create() {
  STASIS_TRY_ASSIGN(auto state, journal_directory());
  std::uint64_t digits = 0;
  if (::getrandom(&digits, sizeof digits, 0) != static_cast<ssize_t>(sizeof digits)) {
    return fail(errno_error("cannot get random bytes", errno));
  }
  STASIS_TRY_ASSIGN(auto entry, split_path(fmt::format("{}/{}{:016x}", state, kPrefix, digits)));
  remove_abandoned(entry);
  RestoreLog log;
  const std::string path = entry.path();
  if (::mkdirat(entry.parent.get(), entry.name.c_str(), 0700) != 0) {
    return fail(errno_error("cannot create " + path, errno));
  }
  log.entry_ = std::move(entry);
  STASIS_TRY_ASSIGN(auto opened, open_file(log.entry_.parent.get(), log.entry_.name,
                                           O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  log.directory_ = std::move(opened);
  mark_in_use(log.directory_);
  log.name_ = fmt::format("restore-{:%Y%m%dT%H%M%SZ}.log", fmt::gmtime(std::time(nullptr)));
  return log;
}

void RestoreLog::sweep() {
  auto state = journal_directory();
  if (!state) return;
  auto entry = split_path(*state + "/" + std::string(kPrefix));
  if (entry) remove_abandoned(*entry);
}

RestoreLog::~RestoreLog() {
  if (entry_.parent.valid()) remove_work(entry_.parent, entry_.name, entry_.path());
}

std::string RestoreLog::save(const ImageReader& image) const {
  struct stat info {};
  auto log = open_file(directory_.get(), name_, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (!log || ::fstat(log->get(), &info) != 0 || !S_ISREG(info.st_mode)) return {};
  if (auto saved = image.save_log(*log, name_)) return *saved;
  return {};
}

std::string RestoreLog::save_surely(const ImageReader& image) const {
  if (std::string saved = save(image); !saved.empty()) return saved;
  const std::string kept = fmt::format("{}-{}.log", name_.substr(0, name_.rfind('.')),
                                       entry_.name.substr(kPrefix.size()));
  if (::renameat2(directory_.get(), name_.c_str(), entry_.parent.get(), kept.c_str(),
                  RENAME_NOREPLACE) != 0) {
    return {};
  }
  return entry_.parent_path + "/" + kept;
}

}  // namespace stasis
