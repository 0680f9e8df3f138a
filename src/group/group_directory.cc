#include "group/group_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include <fmt/format.h>

namespace stasis {
namespace {

// Of a file that is being written.
constexpr const char* kHalf = ".half-";

}  // namespace

Result<std::unique_ptr<GroupDirectory>> GroupDirectory::open(const std::string& path) {
  namespace fs = std::filesystem;
  std::unique_ptr<GroupDirectory> out(new GroupDirectory());
  std::error_code failed;
  const fs::path whole = fs::absolute(path, failed).lexically_normal();
  const fs::path clean = whole.has_filename() ? whole : whole.parent_path();
  out->path_ = clean.string();
  out->name_ = clean.filename().string();
  if (failed || path.empty() || out->name_.empty() || out->name_ == "..") {
    return fail(ErrorCode::kUsage, fmt::format("'{}' can be no directory of a group", path),
                "name a directory below one that all nodes see");
  }
  STASIS_TRY_ASSIGN(out->parent_,
                    open_file(AT_FDCWD, clean.parent_path().string(), O_PATH | O_DIRECTORY));
  STASIS_TRY(out->renew());
  return out;
}

std::string GroupDirectory::when_in_use() const {
  return fmt::format(
      "give each operation that is under way a directory of its own (--group), and each part a "
      "name (--part); if tools were killed, see to their programs by `stasis recover`, and remove "
      "{}",
      path_);
}

std::string GroupDirectory::when_silent() const {
  return "see whether its file system can be reached, then try again with all parts";
}

Result<void> GroupDirectory::renew() {
  if (::mkdirat(parent_.get(), name_.c_str(), 0700) != 0 && errno != EEXIST)
    return fail(errno_error("cannot make " + path_, errno));
  STASIS_TRY_ASSIGN(fd_, open_file(parent_.get(), name_, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  struct stat info {};
  if (::fstat(fd_.get(), &info) != 0) return fail(errno_error("cannot stat " + path_, errno));
  if ((info.st_uid == ::geteuid() || info.st_uid == 0) && (info.st_mode & 0022) == 0) return {};
  return fail(ErrorCode::kNotPermitted,
              fmt::format("the directory of the group {} belongs to user {}, mode {:04o}: others "
                          "could write to it",
                          path_, info.st_uid, info.st_mode & 07777),
              "let the first of the group make it, in a directory of your own; where root has no "
              "rights there (NFS with root_squash), use another file system, or run as its owner");
}

Result<std::optional<std::string>> GroupDirectory::read(const std::string& name,
                                                        std::size_t limit) {
  auto file = open_checked(fd_.get(), name, O_RDONLY | O_NOFOLLOW, &is_regular_file);
  if (!file) {
    struct stat info {};
    if (::fstatat(fd_.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT)
      return std::optional<std::string>();
    return fail(std::move(file.error()));
  }
  STASIS_TRY_ASSIGN(auto text, read_file(*file, path_ + "/" + name, limit));
  return std::optional<std::string>(std::move(text));
}

Result<void> GroupDirectory::put(const std::string& name, const std::string& text) const {
  (void)::unlinkat(fd_.get(), name.c_str(), 0);
  STASIS_TRY_ASSIGN(auto file,
                    open_file(fd_.get(), name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  STASIS_TRY(write_all(file.get(), text.data(), text.size(), path_ + "/" + name));
  return file.close(path_ + "/" + name);
}

Result<void> GroupDirectory::write(const std::string& name, const std::string& text) {
  const std::string half = kHalf + name;
  STASIS_TRY(put(half, text));
  if (::renameat(fd_.get(), half.c_str(), fd_.get(), name.c_str()) == 0) return {};
  return fail(errno_error(fmt::format("cannot write {}/{}", path_, name), errno));
}

Result<bool> GroupDirectory::claim(const std::string& name, const std::string& who,
                                   const std::string& text) {
  const std::string half = fmt::format("{}{}.{}", kHalf, name, who);
  STASIS_TRY(put(half, text));
  const bool linked = ::linkat(fd_.get(), half.c_str(), fd_.get(), name.c_str(), 0) == 0;
  const int why = errno;
  struct stat info {};
  // An answer of NFS may be lost, and the call repeated: the second one says that it is there.
  const bool ours =
      linked ||
      (::fstatat(fd_.get(), half.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 && info.st_nlink == 2);
  (void)::unlinkat(fd_.get(), half.c_str(), 0);
  if (ours) return true;
  if (why == EEXIST) return false;
  return fail(errno_error(fmt::format("cannot make {}/{}", path_, name), why));
}

Result<std::vector<std::string>> GroupDirectory::names() {
  UniqueFd again(::openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto closer = [](DIR* stream) { return ::closedir(stream); };
  DirectoryStream stream(again.valid() ? ::fdopendir(again.get()) : nullptr, closer);
  if (!stream) return fail(errno_error("cannot list " + path_, errno));
  (void)again.release();
  std::vector<std::string> out;
  while (const dirent* entry = ::readdir(stream.get())) {
    const std::string name(static_cast<const char*>(entry->d_name));
    if (name == "." || name == ".." || name.starts_with(kHalf)) continue;
    if (out.size() == kMostGroupNames)
      return fail(ErrorCode::kIo, fmt::format("{} has more than {} files", path_, kMostGroupNames),
                  "name a directory that holds nothing else");
    out.push_back(name);
  }
  return out;
}

void GroupDirectory::remove(const std::vector<std::string>& names) {
  for (const std::string& name : names)
    (void)::unlinkat(fd_.get(), name.c_str(), 0);
  (void)::unlinkat(parent_.get(), name_.c_str(), AT_REMOVEDIR);
}

}  // namespace stasis
