#include "job/shared_memory.h"

#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/json_record.h"
#include "base/json_text.h"
#include "image/directory.h"
#include "image/manifest_format.h"

namespace stasis::job {
namespace {

constexpr const char* kIndex =
    manifest_format::kSharedMemoryIndex.substr(manifest_format::kCriuFolder.size() + 1).data();
constexpr const char* kContent = "stasis-shm-content.img";
constexpr int kVersion = 1;
constexpr std::size_t kMostIndex = 64 << 20;
constexpr std::size_t kPieceBytes = 1 << 20;
constexpr std::size_t kDeepest = 64;

// What is told of each name.
struct ShmEntry {
  std::string path;
  std::string type;  // "directory", "file", "pipe", "link", "same": of an entry before
  unsigned mode = 0;
  unsigned uid = 0;
  unsigned gid = 0;
  std::string target = {};  // of a link; the path of the same file
  std::uint64_t size = 0;
  // Of what is no hole: where it begins, its bytes, and where those begin in the content.
  std::vector<std::vector<std::uint64_t>> extents = {};
};

void fields(auto& io, Described<ShmEntry> auto& entry) {
  constexpr Within kOwner{0, UINT32_MAX - 1};  // one more stands for none
  io("path", entry.path);
  io("type", entry.type);
  io("mode", entry.mode, Within{0, 07777});
  io("uid", entry.uid, kOwner);
  io("gid", entry.gid, kOwner);
  if (entry.type == "link" || entry.type == "same") {
    io("target", entry.target);
  } else if (entry.type == "file") {
    io("size", entry.size);
    io("extents", entry.extents);
    io.check(std::all_of(entry.extents.begin(), entry.extents.end(),
                         [](const auto& extent) { return extent.size() == 3; }),
             "extents", "holds what is none");
  } else {
    io.check(entry.type == "directory" || entry.type == "pipe", "type", "is not known");
  }
}

struct ShmIndex {
  int version = kVersion;
  std::vector<ShmEntry> entries;
};
void fields(auto& io, Described<ShmIndex> auto& index) {
  io("version", index.version, Within{1, kVersion});
  io("entries", index.entries);
}

Error with_path(Error error, const std::string& path) {
  return std::move(error).within("the job's shared memory, " + path);
}

tl::unexpected<Error> io_error(const char* what, const std::string& path) {
  return fail(errno_error(fmt::format("cannot {} {}", what, path), errno));
}

// --- Saving

bool is_text(const std::string& name) {
  try {
    (void)nlohmann::json(name).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

Error cannot_save(ObstacleId id, std::string what, std::string remedy) {
  return refusal({id, Severity::kRed, {}, std::move(what), std::move(remedy)},
                 ErrorCode::kUndumpable);
}

class Saver {
 public:
  Saver(std::string directory, const UniqueFd& into)
      : directory_(std::move(directory)), into_(into) {}

  Result<std::uint64_t> run() {
    struct stat info {};
    auto top = open_file(AT_FDCWD, directory_, O_RDONLY | O_DIRECTORY);
    if (!top || ::fstat(top->get(), &info) != 0) return fail(std::move(top.error()));
    device_ = info.st_dev;
    STASIS_TRY(directory(std::move(*top), "", 0));
    if (index_.entries.empty()) return std::uint64_t{0};
    if (content_.valid()) {
      STASIS_TRY(content_.close(kContent));
    }
    const std::string text = record_to_text(index_);
    if (text.size() > kMostIndex || !json_problem(text).empty())
      return fail(cannot_save("too-many-files", "it has too many files for an image", {}));
    STASIS_TRY_ASSIGN(auto index,
                      open_file(into_.get(), kIndex, O_WRONLY | O_CREAT | O_EXCL, 0600));
    auto done = write_all(index.get(), text.data(), text.size(), kIndex);
    if (done) done = index.close(kIndex);
    STASIS_TRY(std::move(done));
    return written_ + text.size();
  }

 private:
  Result<void> directory(UniqueFd fd, const std::string& path, std::size_t depth) {
    if (depth > kDeepest) return fail(ErrorCode::kIo, "directories are too deep in " + path);
    STASIS_TRY_ASSIGN(auto names, list_directory(fd, directory_ + "/" + path));
    for (const std::string& name : names) {
      const std::string inner = path.empty() ? name : fmt::format("{}/{}", path, name);
      if (auto done = entry(fd, inner, name, depth); !done)
        return fail(with_path(std::move(done.error()), inner));
    }
    return {};
  }

  Result<void> entry(const UniqueFd& parent, const std::string& path, const std::string& name,
                     std::size_t depth) {
    struct stat info {};
    // What has left the job's tree runs on, and may put another file there at any moment: all that
    // follows is of the one that is held here.
    const UniqueFd held(::openat(parent.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    if (!held.valid()) return errno == ENOENT ? Result<void>() : io_error("stat", path);
    if (::fstat(held.get(), &info) != 0) return io_error("stat", path);
    if (info.st_dev != device_) return {};
    // It would be restored under another name, and CRIU would not find it.
    if (!is_text(path)) {
      return fail(cannot_save("file-name", "the name of a file is no UTF-8",
                              "let the program name its shared memory otherwise"));
    }
    ShmEntry item{path, {}, info.st_mode & 07777, info.st_uid, info.st_gid};
    if (S_ISDIR(info.st_mode)) {
      item.type = "directory";
      index_.entries.push_back(std::move(item));
      STASIS_TRY_ASSIGN(auto fd, open_file(held.get(), ".", O_RDONLY | O_DIRECTORY));
      return directory(std::move(fd), path, depth + 1);
    }
    if (S_ISLNK(info.st_mode)) {
      std::string target(4096, '\0');
      const ssize_t got = ::readlinkat(held.get(), "", target.data(), target.size());
      if (got < 0) return io_error("read the link", path);
      target.resize(static_cast<std::size_t>(got));
      if (!is_text(target)) {
        return fail(cannot_save("file-name", "what a link points to is no UTF-8",
                                "let the program name its shared memory otherwise"));
      }
      item.type = "link";
      item.target = std::move(target);
      index_.entries.push_back(std::move(item));
      return {};
    }
    // A socket that a process listens on is CRIU's.
    if (!S_ISREG(info.st_mode) && !S_ISFIFO(info.st_mode)) return {};
    const auto [known, is_new] = inodes_.try_emplace(info.st_ino, path);
    if (!is_new) {
      item.type = "same";
      item.target = known->second;
      index_.entries.push_back(std::move(item));
      return {};
    }
    if (S_ISFIFO(info.st_mode)) {  // CRIU has what is in it, and opens it by its name
      item.type = "pipe";
      index_.entries.push_back(std::move(item));
      return {};
    }
    item.type = "file";
    STASIS_TRY_ASSIGN(auto fd, open_file(AT_FDCWD, fmt::format("/proc/self/fd/{}", held.get()),
                                         O_RDONLY | O_NONBLOCK | O_NOCTTY));
    return file(fd, static_cast<std::uint64_t>(info.st_size), std::move(item), path);
  }

  Result<void> file(const UniqueFd& fd, std::uint64_t size, ShmEntry item,
                    const std::string& path) {
    item.size = size;
    for (off_t at = 0; at < static_cast<off_t>(size);) {
      const off_t begin = ::lseek(fd.get(), at, SEEK_DATA);
      if (begin < 0 && errno == ENXIO) break;  // a hole to the end
      if (begin < 0) return io_error("read", path);
      off_t end = ::lseek(fd.get(), begin, SEEK_HOLE);
      if (end < 0) return io_error("read", path);
      end = std::min(end, static_cast<off_t>(size));
      if (end <= begin) break;
      item.extents.push_back(
          {static_cast<std::uint64_t>(begin), static_cast<std::uint64_t>(end - begin), written_});
      STASIS_TRY(copy(fd, begin, end, path));
      at = end;
    }
    index_.entries.push_back(std::move(item));
    return {};
  }

  Result<void> copy(const UniqueFd& fd, off_t begin, off_t end, const std::string& path) {
    if (!content_.valid()) {
      STASIS_TRY_ASSIGN(auto opened,
                        open_file(into_.get(), kContent, O_WRONLY | O_CREAT | O_EXCL, 0600));
      content_ = std::move(opened);
    }
    buffer_.resize(kPieceBytes);
    while (begin < end) {
      const auto wanted = std::min<std::size_t>(kPieceBytes, static_cast<std::size_t>(end - begin));
      const ssize_t got = TEMP_FAILURE_RETRY(::pread(fd.get(), buffer_.data(), wanted, begin));
      if (got <= 0) return io_error("read", path);
      STASIS_TRY(
          write_all(content_.get(), buffer_.data(), static_cast<std::size_t>(got), kContent));
      begin += got;
      written_ += static_cast<std::uint64_t>(got);
    }
    return {};
  }

  std::string directory_;
  const UniqueFd& into_;
  dev_t device_ = 0;
  UniqueFd content_;
  std::uint64_t written_ = 0;
  std::vector<char> buffer_;
  ShmIndex index_;
  std::map<ino_t, std::string> inodes_;
};

// --- Putting back

// No component of it leads outside, whatever was made so far: links come last.
bool is_plain(const std::string& path) {
  if (path.empty() || path.size() > 4096) return false;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view part = std::string_view(path).substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = end + 1;
  }
  return path.find('\0') == std::string::npos;
}

class Restorer {
 public:
  Restorer(std::string directory, const UniqueFd& from)
      : directory_(std::move(directory)), from_(from) {}

  Result<void> run() {
    STASIS_TRY_ASSIGN(auto top, open_file(AT_FDCWD, directory_, O_RDONLY | O_DIRECTORY));
    top_ = std::move(top);
    if (::faccessat(from_.get(), kIndex, F_OK, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT)
      return clear();
    STASIS_TRY_ASSIGN(auto file, open_of_image(kIndex));
    STASIS_TRY_ASSIGN(auto text, read_file(file, kIndex, kMostIndex));
    JsonReader::Problem problem;
    const auto index = JsonReader::read<ShmIndex>(parse_json(text), problem);
    if (!problem.what.empty()) return corrupt(problem.what);
    STASIS_TRY(check_extents(index));
    STASIS_TRY(clear());
    // Links come when nothing else is made any more.
    std::vector<const ShmEntry*> directories;
    for (const char* type : {"directory", "file", "pipe", "same", "link"}) {
      for (const ShmEntry& item : index.entries) {
        if (item.type != type) continue;
        STASIS_TRY(make(item));
        if (item.type == "directory") directories.push_back(&item);
      }
    }
    // Last, and what is within before what it is in: it may be one that is not writable.
    for (auto item = directories.rbegin(); item != directories.rend(); ++item)
      STASIS_TRY(finish_directory(**item));
    return {};
  }

 private:
  // In the order in which they were written, each byte once: an index cannot have more copied than
  // there is.
  static Result<void> check_extents(const ShmIndex& index) {
    std::uint64_t content = 0;
    for (const ShmEntry& item : index.entries) {
      std::uint64_t end = 0;
      for (const auto& extent : item.extents) {
        const std::uint64_t begin = extent[0];
        const std::uint64_t bytes = extent[1];
        if (begin < end || begin > item.size || bytes > item.size - begin || extent[2] < content ||
            bytes > INT64_MAX - extent[2])
          return corrupt("extents of " + item.path);
        end = begin + bytes;
        content = extent[2] + bytes;
      }
    }
    return {};
  }

  static tl::unexpected<Error> corrupt(const std::string& what) {
    return fail(ErrorCode::kImageCorrupt,
                fmt::format("the index of the job's shared memory is damaged: {}", what),
                "take another image");
  }

  Result<UniqueFd> open_of_image(const char* name) const {
    auto file = open_checked(from_.get(), name, O_RDONLY | O_NOFOLLOW, is_regular_file);
    if (!file && file.error().code == ErrorCode::kNotSupported)
      return corrupt(fmt::format("{} is no regular file", name));
    return file;
  }

  Result<void> clear() {
    constexpr int kMostOpen = 32;
    // A directory that something is mounted below stays (EBUSY, ENOTEMPTY), and the rest of it
    // goes.
    const auto remove = [](const char* path, const struct stat*, int, struct FTW* where) {
      if (where->level == 0 || ::remove(path) == 0) return 0;
      return errno == EBUSY || errno == ENOTEMPTY || errno == ENOENT ? 0 : errno;
    };
    const int error =
        ::nftw(directory_.c_str(), remove, kMostOpen, FTW_DEPTH | FTW_MOUNT | FTW_PHYS);
    if (error == 0) return {};
    return fail(errno_error("cannot clear " + directory_, error > 0 ? error : errno));
  }

  // The directory that an entry is to lie in, and its name there.
  Result<std::pair<UniqueFd, std::string>> place_of(const std::string& path) {
    if (!is_plain(path)) return corrupt("path " + path);
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) {
      UniqueFd top(::fcntl(top_.get(), F_DUPFD_CLOEXEC, 0));
      return std::pair{std::move(top), path};
    }
    STASIS_TRY_ASSIGN(auto parent,
                      open_beneath(top_, path.substr(0, slash), O_RDONLY | O_DIRECTORY));
    return std::pair{std::move(parent), path.substr(slash + 1)};
  }

  Result<void> make(const ShmEntry& item) {
    const std::string& path = item.path;
    STASIS_TRY_ASSIGN(auto place, place_of(path));
    const int parent = place.first.get();
    const char* const name = place.second.c_str();
    if (item.type == "link") {
      if (::symlinkat(item.target.c_str(), parent, name) != 0)
        return io_error("make the link", path);
      [[maybe_unused]] const int given =
          ::fchownat(parent, name, item.uid, item.gid, AT_SYMLINK_NOFOLLOW);
      return {};
    }
    if (item.type == "same") {
      STASIS_TRY_ASSIGN(auto other, place_of(item.target));
      if (::linkat(other.first.get(), other.second.c_str(), parent, name, 0) != 0)
        return io_error("make the link", path);
      return {};
    }
    if (item.type == "directory") {
      if (::mkdirat(parent, name, 0700) != 0 && errno != EEXIST) return io_error("make", path);
      return {};
    }
    if (item.type == "pipe") {
      if (::mkfifoat(parent, name, 0600) != 0) return io_error("make", path);
      // Not by a descriptor: to open one is to take part in it.
      if (::fchownat(parent, name, item.uid, item.gid, AT_SYMLINK_NOFOLLOW) != 0 ||
          ::fchmodat(parent, name, item.mode, 0) != 0)
        return io_error("set the owner of", path);
      return {};
    }
    STASIS_TRY_ASSIGN(auto made,
                      open_file(parent, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
    STASIS_TRY(fill(made, item));
    return set_owner_and_mode(made, item);
  }

  Result<void> finish_directory(const ShmEntry& item) {
    STASIS_TRY_ASSIGN(auto place, place_of(item.path));
    STASIS_TRY_ASSIGN(
        auto made, open_file(place.first.get(), place.second, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    return set_owner_and_mode(made, item);
  }

  static Result<void> set_owner_and_mode(const UniqueFd& file, const ShmEntry& item) {
    if (::fchown(file.get(), item.uid, item.gid) != 0 || ::fchmod(file.get(), item.mode) != 0)
      return io_error("set the owner of", item.path);
    return {};
  }

  Result<void> fill(const UniqueFd& file, const ShmEntry& item) {
    if (::ftruncate(file.get(), static_cast<off_t>(item.size)) != 0)
      return io_error("make room for", item.path);
    for (const auto& extent : item.extents)
      STASIS_TRY(copy(file, extent[0], extent[1], extent[2], item.path));
    return {};
  }

  Result<void> copy(const UniqueFd& file, std::uint64_t to, std::uint64_t bytes, std::uint64_t from,
                    const std::string& path) {
    if (!content_.valid()) {
      STASIS_TRY_ASSIGN(auto opened, open_of_image(kContent));
      content_ = std::move(opened);
    }
    buffer_.resize(kPieceBytes);
    while (bytes > 0) {
      const auto wanted = std::min<std::uint64_t>(kPieceBytes, bytes);
      const ssize_t got = TEMP_FAILURE_RETRY(
          ::pread(content_.get(), buffer_.data(), wanted, static_cast<off_t>(from)));
      if (got < 0) return io_error("read", kContent);
      if (got == 0) return corrupt("content of " + path);
      const ssize_t put = TEMP_FAILURE_RETRY(::pwrite(
          file.get(), buffer_.data(), static_cast<std::size_t>(got), static_cast<off_t>(to)));
      if (put <= 0) return io_error("write", directory_ + "/" + path);
      to += static_cast<std::uint64_t>(put);
      from += static_cast<std::uint64_t>(put);
      bytes -= static_cast<std::uint64_t>(put);
    }
    return {};
  }

  std::string directory_;
  const UniqueFd& from_;
  UniqueFd top_;
  UniqueFd content_;
  std::vector<char> buffer_;
};

}  // namespace

Result<std::uint64_t> save_shared_memory(const std::string& directory, const UniqueFd& into) {
  return Saver(directory, into).run();
}

Result<void> restore_shared_memory(const std::string& directory, const UniqueFd& from) {
  return Restorer(directory, from).run();
}

}  // namespace stasis::job
