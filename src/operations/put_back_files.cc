// Kept files, at a restore.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/call_within.h"
#include "base/scope_guard.h"
#include "base/units.h"
#include "operations/kept_files.h"
#include "operations/kept_files_format.h"
#include "proc/process_file.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

namespace format = kept_files_format;

constexpr const char* kAside = ".after-checkpoint";
constexpr int kMostAside = 1000;

std::optional<struct stat> stat_in(const UniqueFd& folder, const std::string& path) {
  struct stat info {};
  errno = 0;
  if (::fstatat(folder.get(), name_of_path(path).c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0)
    return info;
  return std::nullopt;
}

bool is_missing(const UniqueFd& folder, const std::string& path) {
  return !stat_in(folder, path) && errno == ENOENT;
}

Result<UniqueFd> folder_of(const std::string& path) {
  auto folder = open_folder_of(path);
  if (folder) return std::move(*folder);
  return fail(ErrorCode::kIo, fmt::format("cannot open the directory of {}", path),
              "make it again, as it was at the dump");
}

tl::unexpected<Error> put_back_error(const char* what, const std::string& path) {
  return fail(errno_error(fmt::format("cannot {} {}", what, path), errno));
}

Result<void> set_owner(const UniqueFd& file, const KeptFile& kept) {
  if (::fchown(file.get(), kept.uid, kept.gid) != 0 || ::fchmod(file.get(), kept.mode & 07777) != 0)
    return put_back_error("set the owner of", kept.path);
  return {};
}

// `begin` to the end of one file, at the end of another.
Result<void> append(const UniqueFd& from, std::uint64_t begin, std::uint64_t end,
                    const UniqueFd& to, const std::string& path, const Interrupt& interrupt = {}) {
  std::vector<char> buffer(std::min<std::uint64_t>(end - begin, 1 << 20));
  while (begin < end) {
    STASIS_TRY(interrupt.check());
    const auto wanted = std::min<std::uint64_t>(buffer.size(), end - begin);
    const ssize_t got =
        TEMP_FAILURE_RETRY(::pread(from.get(), buffer.data(), wanted, static_cast<off_t>(begin)));
    if (got < 0) return put_back_error("read", path);
    if (got == 0) break;
    STASIS_TRY(write_all(to.get(), buffer.data(), static_cast<std::size_t>(got), path));
    begin += static_cast<std::uint64_t>(got);
  }
  return {};
}

// The first name beside it for what is set aside that is free: FILE.after-checkpoint, .2, .3.
Result<std::string> free_name_aside(const UniqueFd& folder, const std::string& path) {
  for (int i = 1; i < kMostAside; ++i) {
    std::string name = path + kAside + (i == 1 ? std::string() : fmt::format(".{}", i));
    if (is_missing(folder, name)) return name;
    if (errno != 0 && errno != EEXIST)
      return fail(errno_error(fmt::format("cannot set {} aside as {}", path, name), errno));
  }
  return fail(
      ErrorCode::kIo,
      fmt::format("there is no name left to set {} aside: {}{} and the {} after it are taken", path,
                  path, kAside, kMostAside - 2),
      fmt::format("remove those that are not needed: {}{}*", path, kAside));
}

// Is what that link of another process leads to the file? It may be one that a program serves.
bool leads_to(const std::string& link, const struct stat& file) {
  const auto info = known_status(link);
  return info && info->st_ino == file.st_ino && info->st_dev == file.st_dev;
}

// Another program, as far as it can be seen, that has the file open for writing.
std::optional<Pid> writer_of(const struct stat& file) {
  const proc::ProcFs procfs;
  const auto all_processes = procfs.all();
  for (const proc::ProcessInfo& one :
       all_processes ? *all_processes : std::vector<proc::ProcessInfo>()) {
    if (one.pid.value == ::getpid()) continue;
    const auto open_files = procfs.open_files(one.pid);
    for (const proc::OpenFile& each : open_files ? *open_files : std::vector<proc::OpenFile>()) {
      const std::string place = fmt::format("/proc/{}/fd/{}", one.pid.value, each.descriptor);
      if (!leads_to(place, file)) continue;
      // How it was opened, its link shows as a right (fs/proc/fd.c).
      struct stat link {};
      if (::lstat(place.c_str(), &link) == 0 && (link.st_mode & S_IWUSR) != 0) return one.pid;
    }
  }
  return std::nullopt;
}

// Does another program, as far as it can be seen, have the file open or mapped?
bool is_in_use(const struct stat& file) {
  const proc::ProcFs procfs;
  const auto all_processes = procfs.all();
  if (!all_processes) return true;
  const KeptCallThread calls;
  for (const proc::ProcessInfo& one : *all_processes) {
    if (one.pid.value == ::getpid()) continue;
    bool found = false;
    (void)procfs.for_each_mapping(
        one.pid,
        [&](const proc::Mapping& mapping) {
          found = mapping.inode == file.st_ino &&
                  leads_to(proc::MappedFile(one.pid, mapping).link(), file);
          return !found;
        },
        proc::ProcFs::Which::kOfFiles);
    if (found) return true;
    const auto open_files = procfs.open_files(one.pid);
    if (!open_files) continue;
    for (const proc::OpenFile& open_one : *open_files)
      if (leads_to(fmt::format("/proc/{}/fd/{}", one.pid.value, open_one.descriptor), file))
        return true;
  }
  return false;
}

bool is_the_same(const KeptFile& kept, const UniqueFd& folder, const std::string& path) {
  const UniqueFd file(
      ::openat(folder.get(), name_of_path(path).c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  struct stat info {};
  return file.valid() && ::fstat(file.get(), &info) == 0 && S_ISREG(info.st_mode) &&
         info.st_ino == kept.inode && info.st_uid == kept.uid &&
         static_cast<std::uint64_t>(info.st_size) == kept.size && info.st_mode == kept.mode &&
         born_ns(file) == kept.born_ns;
}

// Not in the directory below a mount that is gone.
bool can_make(const KeptFile& kept) { return kept.content && mount_above(kept.path) == kept.mount; }

// All of them, if the image has them: a program may write anywhere in a file of its own, or in what
// it has mapped of it. Else those at its end.
bool has_its_bytes(const KeptFile& kept, const UniqueFd& file) {
  if (!kept.digest.empty() && kept.size <= kMostKept)
    return tail_digest(file, kept.size, kept.size) == kept.digest;
  return tail_digest(file, kept.size) == kept.tail;
}

// The first of CRIU's names that is there, and the program's names.
PutBack how_to_link(const KeptFile& kept, const UniqueFd& folder, const NeededFile& file) {
  if (!is_missing(folder, file.path)) return PutBack::kNothing;
  bool any = !is_missing(folder, kept.path);
  for (const std::string& name : kept.links)
    any = any || !is_missing(folder, name);
  if (any) return PutBack::kNothing;  // one of several: of no image that is whole
  bool none = true;
  for (const std::string& name : kept.names)
    none = none && is_missing(folder, name);
  if (none) return can_make(kept) ? PutBack::kMake : PutBack::kNothing;
  const bool all = std::all_of(kept.names.begin(), kept.names.end(), [&](const std::string& name) {
    return is_the_same(kept, folder, name);
  });
  return all && kept.content ? PutBack::kLink : PutBack::kNothing;
}

}  // namespace

bool has_changed_for_good(const KeptFile& kept, const NeededFile& file) {
  if (kept.link || kept.content || kept.modified_ns == 0 || !file.size) return false;
  const auto folder = open_folder_of(file.path);
  const auto info = folder ? stat_in(*folder, file.path) : std::nullopt;
  return info && static_cast<std::uint64_t>(info->st_size) == kept.size &&
         modified_ns(*info) != kept.modified_ns;
}

PutBack how_to_put_back(const KeptFile& kept, const NeededFile& file) {
  const auto folder = open_folder_of(file.path);
  if (!folder) return PutBack::kNothing;
  if (kept.link) return how_to_link(kept, *folder, file);
  const auto info = stat_in(*folder, file.path);
  if (!info) return errno == ENOENT && can_make(kept) ? PutBack::kMake : PutBack::kNothing;
  if (!S_ISREG(info->st_mode) || info->st_uid != kept.uid) return PutBack::kNothing;
  const auto size = static_cast<std::uint64_t>(info->st_size);
  if (info->st_mode == kept.mode) {
    // CRIU does not look at the size of one that is only appended to.
    if (!file.size) return PutBack::kNothing;
    const bool has_its_size = size == kept.size && *file.size == size;
    const auto opened = open_checked(folder->get(), name_of_path(file.path), O_RDONLY | O_NOFOLLOW,
                                     is_regular_file);
    const bool same = opened && has_its_bytes(kept, *opened);
    if (has_its_size && same) return PutBack::kNothing;
    if (size > kept.size && *file.size == kept.size && same) return PutBack::kShorten;
  }
  return kept.content ? PutBack::kExchange : PutBack::kNothing;
}

FilesPutBack::~FilesPutBack() {
  for (auto undo = undo_.rbegin(); undo != undo_.rend(); ++undo)
    (*undo)();
}

Result<void> FilesPutBack::put_back(const KeptFile& kept, PutBack how) {
  switch (how) {
    case PutBack::kNothing:
      return {};
    case PutBack::kMake:
      STASIS_TRY(make(kept));
      tell_(fmt::format("{} was gone, and is made again from the image",
                        kept.link ? fmt::format("{}", fmt::join(kept.names, ", ")) : kept.path));
      return {};
    case PutBack::kShorten:
      return shorten(kept);
    case PutBack::kExchange:
      return exchange(kept);
    case PutBack::kLink:
      return link(kept);
  }
  return {};
}

// The image's contents, of which that of the file is a part.
Result<UniqueFd> FilesPutBack::content_of(const KeptFile& kept) const {
  auto content =
      open_checked(criu_dir_.get(), format::kContent, O_RDONLY | O_NOFOLLOW, is_regular_file);
  struct stat info {};
  if (!content || ::fstat(content->get(), &info) != 0 ||
      static_cast<std::uint64_t>(info.st_size) < kept.size ||
      static_cast<std::uint64_t>(info.st_size) - kept.size < *kept.content) {
    return fail(ErrorCode::kImageCorrupt,
                fmt::format("the image does not hold the content of {}", kept.path),
                "take another image");
  }
  return std::move(*content);
}

Result<void> FilesPutBack::fill(const UniqueFd& file, const KeptFile& kept) {
  STASIS_TRY_ASSIGN(auto content, content_of(kept));
  return append(content, *kept.content, *kept.content + kept.size, file, kept.path, interrupt_);
}

// Whether the file has that content now.
Result<bool> FilesPutBack::holds(const UniqueFd& file, const KeptFile& kept) const {
  STASIS_TRY_ASSIGN(auto content, content_of(kept));
  constexpr std::uint64_t kPiece = 1 << 20;
  std::vector<char> ours(std::min(kPiece, kept.size));
  std::vector<char> theirs(ours.size());
  for (std::uint64_t at = 0; at < kept.size; at += kPiece) {
    STASIS_TRY(interrupt_.check());
    const std::size_t size = std::min(kPiece, kept.size - at);
    const auto read = [&](const UniqueFd& from, std::vector<char>& into, std::uint64_t begin) {
      return ::pread(from.get(), into.data(), size, static_cast<off_t>(begin)) ==
             static_cast<ssize_t>(size);
    };
    if (!read(content, ours, *kept.content + at) || !read(file, theirs, at) ||
        !std::equal(ours.begin(), ours.begin() + static_cast<std::ptrdiff_t>(size), theirs.begin()))
      return false;
  }
  return true;
}

Result<void> FilesPutBack::make(const KeptFile& kept) {
  STASIS_TRY_ASSIGN(auto folder, folder_of(kept.path));
  const std::string name = name_of_path(kept.path);
  auto file = open_file(folder.get(), name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
  if (!file) return fail(std::move(file.error()).within("what the job had open: " + kept.path));
  struct stat made {};
  (void)::fstat(file->get(), &made);
  // Its names are undone first.
  const auto undo_name = [this, inode = made.st_ino](const std::string& path) {
    undo_.emplace_back([path, inode] {
      const auto at = open_folder_of(path);
      const auto info = at ? stat_in(*at, path) : std::nullopt;
      if (info && info->st_ino == inode) (void)::unlinkat(at->get(), name_of_path(path).c_str(), 0);
    });
  };
  undo_name(kept.path);
  // Its owner first: what a killed restore leaves is set aside by the next.
  STASIS_TRY(set_owner(*file, kept));
  STASIS_TRY(fill(*file, kept));
  STASIS_TRY(file->close(kept.path));
  std::vector<std::string> more = kept.links;
  more.insert(more.end(), kept.names.begin(), kept.names.end());
  for (const std::string& other : more) {
    if (::linkat(folder.get(), name.c_str(), folder.get(), name_of_path(other).c_str(), 0) != 0)
      return put_back_error("make", other);
    undo_name(other);
  }
  return {};
}

Result<void> FilesPutBack::shorten(const KeptFile& kept) {
  STASIS_TRY_ASSIGN(auto folder, folder_of(kept.path));
  STASIS_TRY_ASSIGN(auto file, open_checked(folder.get(), name_of_path(kept.path),
                                            O_RDWR | O_NOFOLLOW, is_regular_file));
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return put_back_error("stat", kept.path);
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (info.st_uid != kept.uid || size <= kept.size) return {};
  const auto in_use = [&](const std::string& by) {
    return fail(
        ErrorCode::kBusy,
        fmt::format("{} has grown since the image was made, and is written by {}", kept.path, by),
        "end that program, or give it another file; then restore again");
  };
  if (const auto writer = writer_of(info)) return in_use(fmt::format("process {}", writer->value));
  STASIS_TRY_ASSIGN(const auto aside, free_name_aside(folder, kept.path));
  STASIS_TRY_ASSIGN(auto rest,
                    open_file(folder.get(), name_of_path(aside), O_RDWR | O_CREAT | O_EXCL, 0600));
  ScopeGuard remove_rest([&] { (void)::unlinkat(folder.get(), name_of_path(aside).c_str(), 0); });
  auto done = append(file, kept.size, size, rest, aside, interrupt_);
  if (done) done = set_owner(rest, kept);
  if (done && ::fsync(rest.get()) != 0) done = put_back_error("write", aside);
  struct stat now {};
  if (done && (::fstat(file.get(), &now) != 0 || now.st_size != info.st_size))
    done = in_use("another program at this moment");
  if (done && ::ftruncate(file.get(), static_cast<off_t>(kept.size)) != 0)
    done = put_back_error("shorten", kept.path);
  STASIS_TRY(std::move(done));
  remove_rest.dismiss();
  undo_.emplace_back([kept, aside, size] {
    const auto at = open_folder_of(kept.path);
    if (!at) return;
    auto shortened =
        open_checked(at->get(), name_of_path(kept.path), O_RDWR | O_NOFOLLOW, is_regular_file);
    auto tail =
        open_checked(at->get(), name_of_path(aside), O_RDONLY | O_NOFOLLOW, is_regular_file);
    const off_t end = shortened ? ::lseek(shortened->get(), 0, SEEK_END) : -1;
    if (!tail || end != static_cast<off_t>(kept.size)) return;
    if (append(*tail, 0, size - kept.size, *shortened, kept.path))
      (void)::unlinkat(at->get(), name_of_path(aside).c_str(), 0);
  });
  tell_(
      fmt::format("{} has grown since the image was made: it is {} long again, and the {} that "
                  "came after are in {}",
                  kept.path, format_bytes(kept.size), format_bytes(size - kept.size), aside));
  return {};
}

Result<void> FilesPutBack::exchange(const KeptFile& kept) {
  STASIS_TRY_ASSIGN(auto folder, folder_of(kept.path));
  const auto info = stat_in(folder, kept.path);
  STASIS_TRY_ASSIGN(const auto aside, free_name_aside(folder, kept.path));
  if (::renameat2(folder.get(), name_of_path(kept.path).c_str(), folder.get(),
                  name_of_path(aside).c_str(), RENAME_NOREPLACE) != 0)
    return put_back_error("rename", kept.path);
  undo_.emplace_back([path = kept.path, aside] {
    const auto at = open_folder_of(path);
    // Where the program has made the file again, that one stays.
    if (at) {
      (void)::renameat2(at->get(), name_of_path(aside).c_str(), at->get(),
                        name_of_path(path).c_str(), RENAME_NOREPLACE);
    }
  });
  STASIS_TRY(make(kept));
  // A program that writes its file anew makes it empty first: nothing is lost with it.
  if (info && S_ISREG(info->st_mode) && info->st_size == 0)
    empty_.push_back(aside);
  else
    tell_(fmt::format("{} was not as at the dump: what was there is {} now", kept.path, aside));
  return {};
}

void FilesPutBack::keep() {
  undo_.clear();
  for (const std::string& aside : empty_) {
    const auto at = open_folder_of(aside);
    const auto info = at ? stat_in(*at, aside) : std::nullopt;
    if (info && S_ISREG(info->st_mode) && info->st_size == 0)
      (void)::unlinkat(at->get(), name_of_path(aside).c_str(), 0);
  }
  empty_.clear();
}

// What is in the file now is set aside, and comes back if the restore fails.
Result<void> FilesPutBack::refill(const UniqueFd& folder, const UniqueFd& file, std::uint64_t size,
                                  const KeptFile& kept) {
  const std::string& name = kept.names.front();
  STASIS_TRY_ASSIGN(const auto aside, free_name_aside(folder, name));
  STASIS_TRY_ASSIGN(auto copy,
                    open_file(folder.get(), name_of_path(aside), O_RDWR | O_CREAT | O_EXCL, 0600));
  ScopeGuard remove_copy([&] { (void)::unlinkat(folder.get(), name_of_path(aside).c_str(), 0); });
  STASIS_TRY(set_owner(copy, kept));
  STASIS_TRY(append(file, 0, size, copy, aside, interrupt_));
  if (::fsync(copy.get()) != 0) return put_back_error("write", aside);
  remove_copy.dismiss();
  undo_.emplace_back([name, aside, inode = kept.inode] {
    const auto at = open_folder_of(name);
    if (!at) return;
    auto changed =
        open_checked(at->get(), name_of_path(name), O_RDWR | O_NOFOLLOW, is_regular_file);
    auto before =
        open_checked(at->get(), name_of_path(aside), O_RDONLY | O_NOFOLLOW, is_regular_file);
    struct stat one {};
    struct stat other {};
    if (!changed || !before || ::fstat(changed->get(), &one) != 0 ||
        ::fstat(before->get(), &other) != 0 || one.st_ino != inode)
      return;
    // What cannot be written back stays aside.
    if (::ftruncate(changed->get(), 0) == 0 && ::lseek(changed->get(), 0, SEEK_SET) == 0 &&
        append(*before, 0, static_cast<std::uint64_t>(other.st_size), *changed, name))
      (void)::unlinkat(at->get(), name_of_path(aside).c_str(), 0);
  });
  if (::ftruncate(file.get(), 0) != 0) return put_back_error("write", name);
  STASIS_TRY(fill(file, kept));
  tell_(fmt::format("{} has changed since the dump: it is as it was, and what it held is in {}",
                    name, aside));
  return {};
}

Result<void> FilesPutBack::link(const KeptFile& kept) {
  STASIS_TRY_ASSIGN(auto folder, folder_of(kept.path));
  STASIS_TRY_ASSIGN(auto file, open_checked(folder.get(), name_of_path(kept.names.front()),
                                            O_RDWR | O_NOFOLLOW, is_regular_file));
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return put_back_error("stat", kept.names.front());
  if (info.st_ino != kept.inode)
    return fail(ErrorCode::kBusy,
                fmt::format("{} was replaced by another file at this moment", kept.names.front()),
                "restore again when no other program makes it");
  // Where another program uses it, what it holds is as that program needs it.
  if (!is_in_use(info)) {
    STASIS_TRY_ASSIGN(const bool same, holds(file, kept));
    if (!same) STASIS_TRY(refill(folder, file, static_cast<std::uint64_t>(info.st_size), kept));
  }
  std::vector<std::string> criu_names = kept.links;
  criu_names.push_back(kept.path);
  for (const std::string& name : criu_names) {
    if (::linkat(folder.get(), name_of_path(kept.names.front()).c_str(), folder.get(),
                 name_of_path(name).c_str(), 0) != 0)
      return put_back_error("make", name);
    undo_.emplace_back([name] {
      const auto at = open_folder_of(name);
      if (at) (void)::unlinkat(at->get(), name_of_path(name).c_str(), 0);
    });
  }
  return {};
}

}  // namespace stasis
