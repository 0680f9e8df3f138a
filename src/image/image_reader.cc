#include "image/image_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "base/trace.h"
#include "image/checksum.h"
#include "image/directory.h"
#include "image/manifest_format.h"
#include "image/removal.h"

namespace stasis {
namespace {

tl::unexpected<Error> incomplete(const std::string& dir, std::string message) {
  std::string remedy = "give the directory of a finished dump, or of a job that has an image";
  for (const Leftover& leftover : find_leftovers(dir)) {
    if (leftover.in_use == InUse::kYes) {
      remedy += fmt::format("; a dump into it is under way ({}): wait for its end", leftover.path);
    } else if (leftover.complete) {
      remedy += fmt::format(
          "; {} is a whole image that a killed dump left without its name: rename it to use it",
          leftover.path);
    } else if (leftover.in_use == InUse::kNo) {
      remedy += fmt::format(
          "; a killed dump left {}: `stasis recover --all` first, which removes it, then it may be "
          "deleted",
          leftover.path);
    } else {
      remedy +=
          fmt::format("; {} is of a dump that was killed, or is still at work", leftover.path);
    }
  }
  return fail(ErrorCode::kImageIncomplete, std::move(message), std::move(remedy));
}

// Not base's read_file: that one opens by name, and the name could have become a link.
Result<std::string> read_text(const UniqueFd& file, const std::string& path, std::size_t limit) {
  std::string text;
  std::vector<char> buffer(64U << 10);
  while (true) {
    const ssize_t got = TEMP_FAILURE_RETRY(::read(file.get(), buffer.data(), buffer.size()));
    if (got < 0) return fail(of_image(read_error("cannot read " + path, errno)));
    if (got == 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(got));
    if (text.size() > limit) {
      return corrupt_image(fmt::format("{} has more than {} bytes", path, limit));
    }
  }
}

Result<void> copy_content(const UniqueFd& from, const UniqueFd& to, const std::string& path) {
  std::vector<char> buffer(64U << 10);
  off_t at = 0;
  while (true) {
    const ssize_t got = TEMP_FAILURE_RETRY(::pread(from.get(), buffer.data(), buffer.size(), at));
    if (got < 0) return fail(errno_error("cannot read what is to become " + path, errno));
    if (got == 0) return {};
    at += got;
    STASIS_TRY(write_all(to.get(), buffer.data(), static_cast<std::size_t>(got), path));
  }
}

}  // namespace

std::vector<Leftover> find_leftovers(const std::string& dir) {
  auto entry = split_path(dir);
  if (!entry) return {};
  auto names = list_directory(entry->parent, entry->parent_path);
  if (!names) return {};
  std::vector<Leftover> found;
  for (const std::string& name : *names) {
    for (const char* kind : {".partial-", ".replaced-", ".swap-"}) {
      if (!name.starts_with(entry->name + kind)) continue;
      const std::string manifest = name + "/" + manifest_format::kName;
      const bool complete =
          ::faccessat(entry->parent.get(), manifest.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
      found.push_back({entry->parent_path + "/" + name, in_use(entry->parent, name), complete});
    }
  }
  return found;
}

Result<ClearedLeftovers> clear_leftovers(const std::string& dir, bool keep_complete,
                                         const std::function<bool(const std::string&)>& needed) {
  STASIS_TRY_ASSIGN(auto entry, split_path(dir));
  const int parent = entry.parent.get();
  struct stat info = {};
  const auto is_free = [&] {
    return ::fstatat(parent, entry.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 &&
           errno == ENOENT;
  };
  const auto is_whole = [&] { return ImageReader::open(entry.path()).has_value(); };
  ClearedLeftovers done;
  for (const Leftover& leftover : find_leftovers(dir)) {
    if (leftover.in_use != InUse::kNo || (needed && needed(leftover.path))) continue;
    const std::string name = leftover.path.substr(leftover.path.rfind('/') + 1);
    // A manifest may be there, and be half written.
    const bool complete = leftover.complete && ImageReader::open(leftover.path).has_value();
    const bool was_aside = !name.starts_with(entry.name + ".partial-");
    if (was_aside && complete && is_free()) {
      if (::renameat2(parent, name.c_str(), parent, entry.name.c_str(), RENAME_NOREPLACE) != 0) {
        return fail(errno_error("cannot give the image its name " + entry.path(), errno));
      }
      continue;
    }
    // All that there is of something: an old image, or a job that has ended.
    if (complete && !is_whole() && (was_aside || keep_complete)) continue;
    if (auto gone = remove_image(entry.parent, name, leftover.path))
      done.removed.push_back(leftover.path);
    else
      done.failed.push_back(std::move(gone.error()));
  }
  return done;
}

Result<ImageReader> ImageReader::open(const std::string& dir) {
  ImageReader reader;
  auto entry = split_path(dir);
  if (!entry && dir.empty()) return fail(std::move(entry.error()));
  // "." and ".." have a name as well: of a job's image it is a number.
  std::error_code error;
  reader.path_ = entry ? entry->path() : std::filesystem::canonical(dir, error).string();
  if (error) reader.path_ = dir;
  // The last component may be a link: the user named it.
  auto opened = open_file(AT_FDCWD, dir, O_RDONLY | O_DIRECTORY);
  if (!opened) {
    if (opened.error().code == ErrorCode::kNotPermitted) return fail(std::move(opened).error());
    return incomplete(dir, "there is no image: " + opened.error().message);
  }
  reader.dir_ = std::move(*opened);

  struct stat info = {};
  if (::fstatat(reader.dir_.get(), manifest_format::kName, &info, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return incomplete(dir, reader.path_ + " has no manifest.json");
    return fail(errno_error("cannot stat " + reader.path_ + "/manifest.json", errno));
  }
  const std::string context = "opening the image " + reader.path_;
  auto file = open_regular(reader.dir_, manifest_format::kName, info);
  if (!file) return fail(std::move(file).error().within(context));
  auto text = read_text(*file, manifest_format::kName, manifest_format::kMaxText);
  if (!text) return fail(std::move(text).error().within(context));
  auto manifest = parse_manifest(*text);
  if (!manifest) return fail(std::move(manifest).error().within(context));
  reader.manifest_ = std::move(*manifest);

  auto criu = open_beneath(reader.dir_, std::string(manifest_format::kCriuFolder),
                           O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!criu) return fail(of_image(std::move(criu).error()).within(context));
  reader.criu_dir_ = std::move(*criu);
  return reader;
}

Result<void> ImageReader::check_place(const std::string& folder) const {
  if (folder.empty()) return {};
  STASIS_TRY_ASSIGN(const auto above, open_file(dir_.get(), "..", O_PATH | O_DIRECTORY));
  return check_folder(above, folder, std::filesystem::path(path_).parent_path().string());
}

Result<ContentReader> ImageReader::open_content(const ContentReadOptions& options) const {
  const auto& record = record_of(options.kind);
  if (!record) {
    return fail(ErrorCode::kInternal,
                fmt::format("{} has no {}", path_, content_folder(options.kind)));
  }
  STASIS_TRY_ASSIGN(auto content, ContentReader::open(dir_, *record, options));
  for (const ContentStream& stream : content.streams()) {
    if (options.kind == ContentKind::kHost) {
      if (const std::string problem = problem_of_host(stream); !problem.empty())
        return corrupt_image(content_index_path(options.kind) + ": " + problem);
    }
    const auto is_its = [&](const ProcessRecord& process) { return process.pid == stream.pid; };
    const auto its = std::find_if(manifest_.processes.begin(), manifest_.processes.end(), is_its);
    if (its != manifest_.processes.end() && its->cuda) continue;
    return corrupt_image(fmt::format(
        "{} has content of process {}, which {}", content_index_path(options.kind),
        stream.pid.value,
        its == manifest_.processes.end() ? "is not in the image" : "does not use CUDA"));
  }
  return content;
}

Result<std::string> ImageReader::save_log(const UniqueFd& file, const std::string& name) const {
  if (::mkdirat(dir_.get(), "log", 0700) != 0 && errno != EEXIST) {
    return fail(errno_error("cannot create " + path_ + "/log", errno));
  }
  STASIS_TRY_ASSIGN(auto log, open_beneath(dir_, "log", O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  // Two restores can begin in the same second.
  constexpr int kNames = 100;
  for (int i = 1; i <= kNames; ++i) {
    const std::string own = i == 1 ? name : fmt::format("{}.{}", name, i);
    const std::string path = fmt::format("{}/log/{}", path_, own);
    UniqueFd copy(::openat(log.get(), own.c_str(),
                           O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!copy.valid()) {
      if (errno == EEXIST) continue;
      return fail(errno_error("cannot create " + path, errno));
    }
    auto copied = copy_content(file, copy, path);
    if (copied) copied = copy.close(path);
    if (copied) return path;
    ::unlinkat(log.get(), own.c_str(), 0);
    return fail(std::move(copied).error());
  }
  return fail(ErrorCode::kIo, fmt::format("{}/log has too many logs of the same second", path_));
}

Result<void> ImageReader::verify_sizes() const {
  STASIS_TRY_ASSIGN(auto names, list_directory(criu_dir_, path_ + "/criu"));
  for (const std::string& name : names) {
    const std::string path = std::string(manifest_format::kCriuFolder) + "/" + name;
    const auto found = std::lower_bound(
        manifest_.files.begin(), manifest_.files.end(), path,
        [](const FileRecord& file, const std::string& wanted) { return file.path < wanted; });
    if (found == manifest_.files.end() || found->path != path) {
      return corrupt_image(path + " is there but not in the manifest");
    }
  }
  for (const FileRecord& file : manifest_.files) {
    struct stat info = {};
    STASIS_TRY_ASSIGN(const auto opened, open_regular(dir_, file.path, info));
    if (static_cast<std::uint64_t>(info.st_size) != file.size) {
      return corrupt_image(
          fmt::format("{} has {} bytes, expected {}", file.path, info.st_size, file.size));
    }
  }
  STASIS_TRY(verify_content_sizes(ContentKind::kGpu));
  return verify_content_sizes(ContentKind::kHost);
}

Result<void> ImageReader::verify_content_sizes(ContentKind kind) const {
  if (!has_content(kind)) return {};
  STASIS_TRY_ASSIGN(auto content, open_content({false, kind}));
  const std::string name_of_folder = content_folder(kind);
  auto folder = open_beneath(dir_, name_of_folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!folder) return fail(of_image(std::move(folder).error()));
  STASIS_TRY_ASSIGN(auto names, list_directory(*folder, path_ + "/" + name_of_folder));
  std::set<std::string> known = {content_index_path(kind)};
  for (std::size_t i = 0; i < record_of(kind)->data_sizes.size(); ++i)
    known.insert(content_data_path(kind, i));
  for (const std::string& name : names) {
    const std::string path = name_of_folder + "/" + name;
    if (!known.contains(path)) return corrupt_image(path + " is there but not in the manifest");
  }
  return {};
}

Result<void> ImageReader::verify(Progress& progress, const Interrupt& interrupt, Part part) const {
  if (part != Part::kPages) {
    STASIS_TRY(verify_sizes());
  }
  const std::string pages = std::string(manifest_format::kCriuFolder) + "/pages-";
  std::vector<const FileRecord*> files;
  std::vector<ChecksumJob> jobs;
  std::uint64_t bytes = 0;
  for (const FileRecord& file : manifest_.files) {
    const bool is_pages = file.path.starts_with(pages);
    if (part != Part::kAll && is_pages != (part == Part::kPages)) continue;
    files.push_back(&file);
    jobs.push_back({file.path, file.size, {}});
    bytes += file.size;
  }
  const auto open_job = [&](std::size_t i) -> Result<UniqueFd> {
    struct stat info = {};
    return open_regular(dir_, jobs[i].path, info);
  };
  Span span(TraceKind::kImage, "verify files", {}, bytes);
  auto checksums = checksum_files(jobs, open_job, "verify", progress, interrupt);
  span.end();
  if (!checksums) return fail(std::move(checksums).error());
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const FileRecord& file = *files[i];
    if ((*checksums)[i] != file.checksum) {
      return corrupt_image(fmt::format("{} has the checksum {}, expected {}", file.path,
                                       (*checksums)[i], file.checksum));
    }
  }
  if (part != Part::kAll) return {};
  for (const ContentKind kind : {ContentKind::kGpu, ContentKind::kHost}) {
    if (!has_content(kind)) continue;
    STASIS_TRY_ASSIGN(auto content, open_content({false, kind}));
    const Span of_content(TraceKind::kImage, "verify content", {}, record_of(kind)->total_bytes());
    STASIS_TRY(content.verify_all(progress, interrupt));
  }
  return {};
}

}  // namespace stasis
