// Kept files, at the dump.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <tuple>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/units.h"
#include "image/checksum.h"
#include "image/directory.h"
#include "operations/kept_files.h"
#include "operations/kept_files_format.h"
#include "proc/file_locks.h"

namespace stasis {
namespace {

using nlohmann::json;
namespace format = kept_files_format;

bool is_utf8(const std::string& text) {
  try {
    (void)json(text).dump();
    return true;
  } catch (const json::exception&) {
    return false;
  }
}

bool is_below_shared_memory(const std::string& path) { return path.starts_with("/dev/shm/"); }

bool would_break_lease(const UniqueFd& folder, const std::string& name,
                       const proc::LocksByFile& locks) {
  struct stat info {};
  return !locks.empty() && ::fstatat(folder.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
         proc::breaks_lease(locks, info.st_dev, info.st_ino);
}

// No link is followed, and the file is what CRIU has noted. Not one that a program has a lease of:
// it would get a signal.
std::optional<UniqueFd> open_as_noted(const NeededFile& file, struct stat& info,
                                      const proc::LocksByFile& locks = {}) {
  const auto folder = open_folder_of(file.path);
  if (!folder || would_break_lease(*folder, name_of_path(file.path), locks)) return std::nullopt;
  auto opened =
      open_checked(folder->get(), name_of_path(file.path), O_RDONLY | O_NOFOLLOW, is_regular_file);
  if (!opened || ::fstat(opened->get(), &info) != 0) return std::nullopt;
  if (file.mode && *file.mode != info.st_mode) return std::nullopt;
  if (file.size && *file.size != static_cast<std::uint64_t>(info.st_size)) return std::nullopt;
  return std::move(*opened);
}

void note_stat(KeptFile& kept, const UniqueFd& file, const struct stat& info) {
  kept.size = static_cast<std::uint64_t>(info.st_size);
  kept.mode = info.st_mode;
  kept.uid = info.st_uid;
  kept.gid = info.st_gid;
  kept.inode = info.st_ino;
  kept.born_ns = born_ns(file);
  kept.modified_ns = modified_ns(info);
  kept.mount = mount_above(kept.path);
}

// A file that is no more than its bytes: not the kernel's, nor of huge pages, which cannot be
// written to.
bool has_plain_content(const UniqueFd& file, const std::string& path) {
  struct statfs info {};
  return !path.starts_with("/sys/") &&
         (::fstatfs(file.get(), &info) != 0 || info.f_type != HUGETLBFS_MAGIC);
}

// The names beside it that lead to the same file, CRIU's among them.
std::vector<std::string> names_beside(const std::string& path, const struct stat& info) {
  std::vector<std::string> out;
  const auto folder = open_folder_of(path);
  if (!folder) return out;
  const auto listed = open_file(folder->get(), ".", O_RDONLY | O_DIRECTORY);
  const auto names = listed ? list_directory(*listed, path) : Result<std::vector<std::string>>();
  if (!names) return out;
  const std::string beginning = path.substr(0, path.rfind('/') + 1);
  for (const std::string& name : *names) {
    struct stat other {};
    if (::fstatat(folder->get(), name.c_str(), &other, AT_SYMLINK_NOFOLLOW) == 0 &&
        other.st_ino == info.st_ino && other.st_dev == info.st_dev)
      out.push_back(beginning + name);
  }
  return out;
}

Result<std::string> name_of_its_own(const std::string& path) {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != static_cast<ssize_t>(sizeof number))
    return fail(errno_error("cannot draw a random number", errno));
  return fmt::format("{}link_remap.stasis-{:016x}", path.substr(0, path.rfind('/') + 1), number);
}

class Keeper {
 public:
  Keeper(const UniqueFd& criu_dir, bool own_memory) : dir_(criu_dir), own_memory_(own_memory) {}
  ~Keeper() { remove_links(report_.links); }
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  Result<KeepReport> run(bool goes_back) {
    const std::vector<NeededFile> files = needed_files(dir_);
    STASIS_TRY(take_links(files));
    if (goes_back) take_written(files);
    STASIS_TRY(save());
    return std::exchange(report_, {});
  }

 private:
  // CRIU counts its names from a small number for each dump, so that those of two images are the
  // same.
  Result<void> take_links(const std::vector<NeededFile>& files) {
    std::map<std::string, std::string> names;
    std::map<std::pair<dev_t, ino_t>, std::size_t> known;
    std::vector<KeptFile> groups;
    for (const NeededFile& file : files) {
      if (!file.of_criu) continue;
      struct stat info {};
      const auto opened = open_as_noted(file, info);
      if (!opened) continue;  // a directory, or one that may not be read
      STASIS_TRY_ASSIGN(auto own, name_of_its_own(file.path));
      const auto folder = open_folder_of(file.path);
      if (!folder) continue;
      if (::renameat(folder->get(), name_of_path(file.path).c_str(), folder->get(),
                     name_of_path(own).c_str()) != 0)
        return fail(errno_error(fmt::format("cannot rename {}", file.path), errno));
      report_.links.push_back(own);
      names[file.path] = own;
      const auto [at, is_new] = known.try_emplace({info.st_dev, info.st_ino}, groups.size());
      if (!is_new) {
        groups[at->second].links.push_back(own);
        continue;
      }
      KeptFile& kept = groups.emplace_back();
      kept.link = true;
      kept.path = own;
      note_stat(kept, *opened, info);
    }
    STASIS_TRY(rename_link_remaps(dir_, names));
    for (KeptFile& kept : groups)
      note_names(std::move(kept));
    return {};
  }

  // Only with all its names can the file be made again: the program may have it by any of them.
  void note_names(KeptFile kept) {
    if ((own_memory_ && is_below_shared_memory(kept.path)) || !is_utf8(kept.path)) return;
    struct stat info {};
    if (::stat(kept.path.c_str(), &info) != 0) return;
    const std::vector<std::string> all = names_beside(kept.path, info);
    if (all.size() != info.st_nlink || all.size() > format::kMostNames ||
        !std::all_of(all.begin(), all.end(), is_utf8))
      return;
    for (const std::string& name : all) {
      if (name != kept.path &&
          std::find(kept.links.begin(), kept.links.end(), name) == kept.links.end())
        kept.names.push_back(name);
    }
    files_.push_back(std::move(kept));
  }

  void take_written(const std::vector<NeededFile>& files) {
    std::map<std::string, NeededFile> written;
    for (const NeededFile& file : files) {
      if (file.of_criu || (file.flags & O_ACCMODE) == O_RDONLY || (file.flags & O_PATH) != 0 ||
          (own_memory_ && is_below_shared_memory(file.path)))
        continue;
      if (file.mode && S_ISREG(*file.mode)) {
        // Of two, the one whose size CRIU compares.
        const auto [at, is_new] = written.try_emplace(file.path, file);
        if (!is_new && file.size) at->second = file;
      }
    }
    const auto locks = written.empty() ? proc::LocksByFile() : proc::locks_of_open_files();
    for (const auto& [path, file] : written) {
      struct stat info {};
      const auto opened = open_as_noted(file, info, locks);
      if (!opened || !is_utf8(path)) {
        report_.lost.push_back(fmt::format(
            "the content of {}, which is open for writing{}", path,
            opened ? ", and whose name is no UTF-8: a restore needs the file as it is now" : ""));
        continue;
      }
      if ((info.st_mode & (S_ISUID | S_ISGID)) != 0 || !has_plain_content(*opened, path)) continue;
      KeptFile kept;
      kept.path = path;
      note_stat(kept, *opened, info);
      kept.tail = tail_digest(*opened, kept.size).value_or("");
      if (file.size) compared_.push_back(path);
      files_.push_back(std::move(kept));
    }
  }

  Result<void> save() {
    if (files_.empty()) return {};
    std::sort(files_.begin(), files_.end(), [](const KeptFile& a, const KeptFile& b) {
      return std::tuple(!a.link, a.size) < std::tuple(!b.link, b.size);
    });
    for (KeptFile& kept : files_)
      STASIS_TRY(save_content(kept));
    if (content_.valid()) {
      STASIS_TRY(content_.close(format::kContent));
    }
    const std::string text = record_to_text(format::Index{format::kVersion, files_});
    if (text.size() > format::kMostIndex || !json_problem(text, format::kLimits).empty()) {
      return fail(refusal({"too-many-files",
                           Severity::kRed,
                           {},
                           "the job has too many files open for writing",
                           "close some of them before the dump"},
                          ErrorCode::kUndumpable));
    }
    STASIS_TRY_ASSIGN(auto index,
                      open_file(dir_.get(), format::kIndex, O_WRONLY | O_CREAT | O_EXCL, 0600));
    auto done = write_all(index.get(), text.data(), text.size(), format::kIndex);
    if (done) done = index.close(format::kIndex);
    return done;
  }

  Result<void> save_content(KeptFile& kept) {
    if (kept.size > kMostKept - written_) {
      // A log that is only appended to is needed by its name alone.
      if (kept.link ||
          std::find(compared_.begin(), compared_.end(), kept.path) != compared_.end()) {
        report_.lost.push_back(fmt::format(
            "the content of {} ({}), which is open for writing: a restore needs the file by this "
            "name, not shortened, and with what is in it now",
            kept.path, format_bytes(kept.size)));
      }
      return {};
    }
    const auto folder = open_folder_of(kept.path);
    if (!folder) return {};
    auto file = open_checked(folder->get(), name_of_path(kept.path), O_RDONLY | O_NOFOLLOW,
                             is_regular_file);
    struct stat info {};
    if (!file || ::fstat(file->get(), &info) != 0 || info.st_ino != kept.inode) return {};
    if (!content_.valid()) {
      STASIS_TRY_ASSIGN(auto made,
                        open_file(dir_.get(), format::kContent, O_WRONLY | O_CREAT | O_EXCL, 0600));
      content_ = std::move(made);
    }
    std::string bytes(kept.size, '\0');
    std::uint64_t done = 0;
    while (done < kept.size) {
      const ssize_t got = TEMP_FAILURE_RETRY(
          ::pread(file->get(), bytes.data() + done, kept.size - done, static_cast<off_t>(done)));
      if (got <= 0) break;  // another program has cut it meanwhile, or the disk has lost it
      done += static_cast<std::uint64_t>(got);
    }
    if (done != kept.size) {
      report_.lost.push_back(
          fmt::format("the content of {}, which is open for writing", kept.path));
      return {};
    }
    STASIS_TRY(write_all(content_.get(), bytes.data(), bytes.size(), format::kContent));
    kept.content = written_;
    kept.digest = xxh3_hex(bytes);
    written_ += kept.size;
    return {};
  }

  const UniqueFd& dir_;
  const bool own_memory_;
  KeepReport report_;
  std::vector<KeptFile> files_;
  std::vector<std::string> compared_;  // of those, whose size CRIU compares
  UniqueFd content_;
  std::uint64_t written_ = 0;
};

}  // namespace

Result<KeepReport> keep_files(const UniqueFd& criu_dir, bool goes_back, bool own_memory) {
  return Keeper(criu_dir, own_memory).run(goes_back);
}

void remove_links(const std::vector<std::string>& links) {
  for (const std::string& link : links)
    (void)::unlink(link.c_str());
}

void remove_links(const std::vector<NeededFile>& files) {
  for (const NeededFile& file : files) {
    struct stat info {};
    if (!file.of_criu || !open_as_noted(file, info)) continue;
    if (const auto folder = open_folder_of(file.path))
      (void)::unlinkat(folder->get(), name_of_path(file.path).c_str(), 0);
  }
}

}  // namespace stasis
