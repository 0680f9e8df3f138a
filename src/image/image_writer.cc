// Long because a half image is made, named, synced and discarded by one state.
#include "image/image_writer.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/trace.h"
#include "base/units.h"
#include "image/checksum.h"
#include "image/content.h"
#include "image/directory.h"
#include "image/manifest_format.h"
#include "image/parallel.h"
#include "image/removal.h"

namespace stasis {
namespace {

using manifest_format::kLogFolder;
constexpr const char* kDumpLog = "dump.log";
constexpr std::string_view kPagesPrefix = "pages-";

// What stands under the final name when a dump begins.
enum class Before { kNothing, kEmptyDirectory, kImage };

std::string criu_name() { return std::string(manifest_format::kCriuFolder); }

Result<std::string> random_digits() {
  std::uint64_t value = 0;
  if (::getrandom(&value, sizeof value, 0) != static_cast<ssize_t>(sizeof value)) {
    return fail(errno_error("cannot get random bytes", errno));
  }
  return fmt::format("{:016x}", value);
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  ::gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", parts.tm_year + 1900, parts.tm_mon + 1,
                     parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec);
}

Result<UniqueFd> make_directory(const UniqueFd& parent, const std::string& name,
                                const std::string& path) {
  if (::mkdirat(parent.get(), name.c_str(), 0700) != 0) {
    return fail(errno_error("cannot create " + path, errno));
  }
  return open_file(parent.get(), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
}

// The names alone prove nothing: many a program has a manifest.json. A manifest of Stasis closes
// with its own checksum; one of a newer format does, too.
Result<void> is_image(const UniqueFd& dir) {
  struct stat info = {};
  auto file = open_regular(dir, manifest_format::kName, info);
  if (!file) {
    return fail(ErrorCode::kImageIncomplete, "it has no manifest.json that can be opened");
  }
  // The file that was checked: another may have its name by now.
  STASIS_TRY_ASSIGN(auto text, read_file(*file, manifest_format::kName, manifest_format::kMaxText));
  auto manifest = parse_manifest(text);
  if (manifest || manifest.error().code == ErrorCode::kImageVersion) return {};
  return fail(std::move(manifest).error());
}

// Names beside it are as long and more: ".replaced-" and 16 digits.
constexpr std::size_t kLongestSuffix = 26;
Result<void> check_name(const DirectoryEntry& final) {
  const long most = ::fpathconf(final.parent.get(), _PC_NAME_MAX);
  const std::size_t room = (most > 0 ? static_cast<std::size_t>(most) : NAME_MAX) - kLongestSuffix;
  if (final.name.size() <= room) return {};
  return fail(
      ErrorCode::kUsage,
      fmt::format("the name of the image has {} bytes: {}", final.name.size(), final.name),
      fmt::format("give one of at most {}: while it is written it has a longer name", room));
}

// Looks at what stands under the final name, and whether it may be replaced.
Result<Before> probe_before(const DirectoryEntry& final, bool overwrite) {
  STASIS_TRY(check_name(final));
  struct stat info = {};
  if (::fstatat(final.parent.get(), final.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return Before::kNothing;
    return fail(errno_error("cannot stat " + final.path(), errno));
  }
  if (!S_ISDIR(info.st_mode)) {
    return fail(ErrorCode::kImageExists, final.path() + " exists and is no directory",
                "give another name, or remove it yourself");
  }
  STASIS_TRY_ASSIGN(auto dir,
                    open_file(final.parent.get(), final.name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  STASIS_TRY_ASSIGN(auto names, list_directory(dir, final.path()));
  if (names.empty()) return Before::kEmptyDirectory;
  for (const std::string& name : names) {
    if (!is_part_of_image(name)) {
      return fail(ErrorCode::kImageExists,
                  fmt::format("{} exists and holds \"{}\", which is no part of an image",
                              final.path(), name),
                  "give another name: only an image or an empty directory is replaced");
    }
  }
  if (auto ours = is_image(dir); !ours) {
    return fail(ErrorCode::kImageExists,
                fmt::format("{} exists and is no image ({})", final.path(), ours.error().message),
                "give another name, or remove it yourself: only an image or an empty directory is "
                "replaced");
  }
  if (!overwrite) {
    return fail(ErrorCode::kImageExists, final.path() + " exists",
                "give another name, or --force to replace it");
  }
  return Before::kImage;
}

// As the user knows it, who may have given a link.
std::string folder_of(const std::string& path) {
  return std::filesystem::path(path).parent_path().string();
}

Result<void> sync_to_disk(const UniqueFd& file, const std::string& path) {
  if (::fsync(file.get()) != 0) return fail(errno_error("cannot sync " + path, errno));
  return {};
}

}  // namespace

struct ImageWriter::State {
  DirectoryEntry final;
  std::string final_path;
  std::string given;     // the final path as create() got it
  std::string only_in;   // the folder_id() of where it has to lie
  std::string partial;   // the temporary name
  std::string replaced;  // the name of what had the final name before, while it is kept aside
  std::string digits;
  bool overwrite = false;
  bool keep_partial = false;
  Before before = Before::kNothing;
  enum class Phase { kOpen, kSealed, kDone } phase = Phase::kOpen;
  UniqueFd dir;                                           // marked in use for as long as it is open
  std::map<std::string, std::vector<BlockDigest>> ahead;  // of the first blocks of a file
  UniqueFd old;  // what had the final name before, once that was taken; marked likewise
  UniqueFd criu;
  UniqueFd log;

  ~State() { (void)discard(); }

  std::string sibling(const std::string& name) const { return final.parent_path + "/" + name; }
  std::string hold_name() const { return final.name + ".swap-" + digits; }
  std::string failed_log_name() const { return final.name + ".failed-dump.log"; }

  // Adds figures to an error that says the disk is full.
  Error with_figures(Error error, std::uint64_t needed) const {
    if (error.code != ErrorCode::kNoSpace) return error;
    struct statvfs info = {};
    std::string figures;
    if (::fstatvfs(dir.get(), &info) == 0) {
      const std::uint64_t free_bytes = std::uint64_t{info.f_bavail} * info.f_frsize;
      figures = fmt::format(" ({} free in {}", format_bytes(free_bytes), final.parent_path);
      if (needed != 0) figures += fmt::format(", the image has {} so far", format_bytes(needed));
      figures += ")";
    }
    error.message += figures;
    error.remedy = "free space there, or dump to another disk";
    return error;
  }

  Result<UniqueFd> open_image_file(const std::string& path) const;
  Result<std::vector<FileRecord>> collect() const;
  Result<void> check_content(ContentKind kind, const std::optional<ContentRecord>& content) const;
  Result<void> sync_each(const std::vector<FileRecord>& files, Progress& progress,
                         const Interrupt& interrupt) const;
  void prefetch_digests(const std::stop_token& stop);
  Result<void> sync_all(Progress& progress, const Interrupt& interrupt) const;
  Result<void> complete(Manifest& manifest, SyncPolicy sync, Progress& progress,
                        const Interrupt& interrupt);
  // Returns the manifest as a reader will see it.
  Result<Manifest> write_manifest(const Manifest& manifest, SyncPolicy sync) const;
  bool is_named(const std::string& name) const;
  Error exchanged() const;
  Result<void> check_way() const;
  Result<void> take_name();
  Result<void> discard();
  void keep_log() const;
};

Result<UniqueFd> ImageWriter::State::open_image_file(const std::string& path) const {
  return open_beneath(dir, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
}

// Lists the files that CRIU wrote; makes them private to the user.
Result<std::vector<FileRecord>> ImageWriter::State::collect() const {
  STASIS_TRY_ASSIGN(auto names, list_directory(criu, sibling(partial) + "/criu"));
  if (names.empty()) return fail(ErrorCode::kInternal, "CRIU has written no image files");
  std::vector<FileRecord> records;
  for (const std::string& name : names) {
    const std::string path = criu_name() + "/" + name;
    struct stat info = {};
    STASIS_TRY_ASSIGN(auto file, open_image_file(path));
    if (::fstat(file.get(), &info) != 0) {
      return fail(errno_error("cannot stat " + path, errno));
    }
    if (!S_ISREG(info.st_mode) || !manifest_format::valid_file_path(path)) {
      return fail(ErrorCode::kInternal, path + " is no regular file with a plain name");
    }
    if (::fchmod(file.get(), 0600) != 0) {
      return fail(errno_error("cannot set the mode of " + path, errno));
    }
    records.push_back({path, static_cast<std::uint64_t>(info.st_size), {}});
  }
  return records;
}

// Content is there if the manifest says so, as it says, and nothing else is.
Result<void> ImageWriter::State::check_content(ContentKind kind,
                                               const std::optional<ContentRecord>& content) const {
  const char* name = content_folder(kind);
  const auto differs = [&](const std::string& what) {
    return fail(ErrorCode::kInternal,
                fmt::format("{}/ is not what the manifest says: {}", name, what));
  };
  struct stat info = {};
  const bool there = ::fstatat(dir.get(), name, &info, AT_SYMLINK_NOFOLLOW) == 0;
  if (!there && !content) return {};
  if (!content) return differs("the manifest does not know of it");
  if (!there) return differs("there is none");
  STASIS_TRY_ASSIGN(auto folder, open_beneath(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  STASIS_TRY_ASSIGN(auto names, list_directory(folder, sibling(partial) + "/" + name));
  if (names.size() != content->data_sizes.size() + 1) {
    return differs(fmt::format("there are {} files, expected {}", names.size(),
                               content->data_sizes.size() + 1));
  }
  const auto has = [&](const std::string& path, std::uint64_t size) {
    return ::fstatat(dir.get(), path.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
           S_ISREG(info.st_mode) && static_cast<std::uint64_t>(info.st_size) == size;
  };
  if (!has(content_index_path(kind), content->index_size)) return differs("its index differs");
  for (std::size_t i = 0; i < content->data_sizes.size(); ++i) {
    const std::string path = content_data_path(kind, i);
    if (!has(path, content->data_sizes[i])) return differs(path + " differs");
  }
  return {};
}

void ImageWriter::State::prefetch_digests(const std::stop_token& stop) {
  auto names = list_directory(criu, sibling(partial) + "/criu");
  if (!names) return;
  for (const std::string& name : *names) {
    if (name.compare(0, kPagesPrefix.size(), kPagesPrefix) != 0) continue;
    const std::string path = criu_name() + "/" + name;
    struct stat info = {};
    // Most of a large tree's files are small, and need not be opened.
    if (::fstatat(criu.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        static_cast<std::uint64_t>(info.st_size) < 2 * kChecksumBlock) {
      continue;
    }
    auto file = open_image_file(path);
    if (!file || ::fstat(file->get(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
    const auto size = static_cast<std::uint64_t>(info.st_size);
    auto& digests = ahead[path];
    // One whole block behind the end.
    while ((digests.size() + 2) * kChecksumBlock <= size) {
      if (stop.stop_requested()) return;
      auto digest = block_digest(*file, path, digests.size() * kChecksumBlock);
      if (!digest) return;
      digests.push_back(*digest);
    }
  }
}

// fsync of all files at once: the disk then sees one long queue. Opened one by one: a large tree
// has more files than a process may have open.
Result<void> ImageWriter::State::sync_each(const std::vector<FileRecord>& files, Progress& progress,
                                           const Interrupt& interrupt) const {
  std::uint64_t total = 0;
  for (const FileRecord& file : files)
    total += file.size;
  return run_parallel(files.size(), total, "sync", progress, interrupt,
                      [&](std::size_t i) -> Result<std::uint64_t> {
                        STASIS_TRY_ASSIGN(auto file, open_image_file(files[i].path));
                        STASIS_TRY(sync_to_disk(file, files[i].path));
                        return files[i].size;
                      });
}

Result<void> ImageWriter::State::sync_all(Progress& progress, const Interrupt& interrupt) const {
  std::vector<FileRecord> files{{manifest_format::kName, 0, {}}};
  for (const std::string& folder : {criu_name(), std::string(content_folder(ContentKind::kGpu)),
                                    std::string(content_folder(ContentKind::kHost))}) {
    auto opened = open_beneath(dir, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (!opened && folder != criu_name()) continue;
    if (!opened) return fail(std::move(opened.error()));
    STASIS_TRY_ASSIGN(auto names, list_directory(*opened, folder));
    for (const std::string& name : names) {
      struct stat info = {};
      if (::fstatat(opened->get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
        return fail(errno_error(fmt::format("cannot stat {}/{}", folder, name), errno));
      }
      files.push_back(
          {fmt::format("{}/{}", folder, name), static_cast<std::uint64_t>(info.st_size), {}});
    }
    STASIS_TRY(sync_to_disk(*opened, folder));
  }
  STASIS_TRY(sync_each(files, progress, interrupt));
  STASIS_TRY(sync_to_disk(dir, final_path));
  return sync_to_disk(final.parent, final.parent_path);
}

Result<Manifest> ImageWriter::State::write_manifest(const Manifest& manifest,
                                                    SyncPolicy sync) const {
  const std::string text = serialize_manifest(manifest);
  // The writer must not write a manifest that cannot be read back: a value out of range is found
  // here.
  auto readable = parse_manifest(text);
  if (!readable) {
    Error error = std::move(readable).error();
    error.code = ErrorCode::kInternal;
    error.remedy.clear();
    return fail(std::move(error).within("checking the manifest that was to be written"));
  }
  STASIS_TRY_ASSIGN(auto file, open_file(dir.get(), manifest_format::kName,
                                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  STASIS_TRY(fault(FaultPoint::kImageManifest));
  STASIS_TRY(write_all(file.get(), text.data(), text.size(), manifest_format::kName));
  if (sync == SyncPolicy::kDisk && ::fsync(file.get()) != 0) {
    return fail(errno_error("cannot sync manifest.json", errno));
  }
  STASIS_TRY(file.close(manifest_format::kName));
  return readable;
}

// In a directory in which another user may rename, that user can put something else there.
bool ImageWriter::State::is_named(const std::string& name) const {
  struct stat named {};
  struct stat own {};
  return ::fstatat(final.parent.get(), name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         ::fstat(dir.get(), &own) == 0 && named.st_dev == own.st_dev && named.st_ino == own.st_ino;
}

Error ImageWriter::State::exchanged() const {
  return {ErrorCode::kNotPermitted,
          fmt::format("another user has moved the image away while it was written, in {}",
                      final.parent_path),
          "dump to a directory in which only this user can rename"};
}

// All goes by the descriptor, so that the image lies in the right folder. But where the way to it
// leads elsewhere by now, nothing finds it there.
Result<void> ImageWriter::State::check_way() const {
  if (only_in.empty()) return {};
  STASIS_TRY_ASSIGN(const auto now, split_path(given));
  return check_folder(now.parent, only_in, folder_of(given));
}

Result<void> ImageWriter::State::take_name() {
  STASIS_TRY(check_way());
  // Looked at again: what was an empty directory may have been filled meanwhile.
  STASIS_TRY_ASSIGN(auto now, probe_before(final, overwrite));
  if (now != before) {
    return fail(ErrorCode::kImageExists,
                final_path + " was changed by another process during the dump",
                "give another name");
  }
  const int parent = final.parent.get();
  if (!is_named(partial)) return fail(exchanged());
  if (before == Before::kNothing) {
    // Cannot destroy anything: rename(2) replaces a directory only by an empty one.
    if (::renameat(parent, partial.c_str(), parent, final.name.c_str()) != 0) {
      return fail(errno_error("cannot give the image its name " + final_path, errno));
    }
    phase = is_named(final.name) ? Phase::kSealed : Phase::kDone;
    return phase == Phase::kSealed ? Result<void>() : fail(exchanged());
  }
  if (auto opened = open_file(parent, final.name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW)) {
    old = std::move(*opened);
    mark_in_use(old);
  }
  STASIS_TRY_ASSIGN(auto old_name, swap_entries(final, partial, replaced, hold_name()));
  replaced = std::move(old_name);
  phase = is_named(final.name) ? Phase::kSealed : Phase::kDone;
  if (phase == Phase::kSealed) return {};
  Error error = exchanged();
  error.message += fmt::format("; what was there before is {}", replaced);
  return fail(std::move(error));
}

Result<void> ImageWriter::State::complete(Manifest& manifest, SyncPolicy sync, Progress& progress,
                                          const Interrupt& interrupt) {
  STASIS_TRY_ASSIGN(auto records, collect());
  STASIS_TRY(fault(FaultPoint::kImageCollected));
  STASIS_TRY(check_content(ContentKind::kGpu, manifest.content));
  STASIS_TRY(check_content(ContentKind::kHost, manifest.host_content));
  manifest.files = std::move(records);
  manifest.total_bytes = 0;
  for (const auto& content : {manifest.content, manifest.host_content})
    if (content) manifest.total_bytes += content->total_bytes();
  std::vector<ChecksumJob> jobs;
  for (const FileRecord& file : manifest.files) {
    jobs.push_back({file.path, file.size, std::move(ahead[file.path])});
    manifest.total_bytes += file.size;
  }
  auto start = Clock::now();
  Span span(TraceKind::kPhase, "checksums", {}, manifest.total_bytes);
  auto checksums = checksum_files(
      jobs, [&](std::size_t i) { return open_image_file(jobs[i].path); }, "checksums", progress,
      interrupt);
  span.end();
  if (!checksums) return fail(std::move(checksums).error());
  for (std::size_t i = 0; i < jobs.size(); ++i)
    manifest.files[i].checksum = (*checksums)[i];
  manifest.phases.push_back({"checksums", since(start).count()});
  STASIS_TRY(fault(FaultPoint::kImageChecksummed));

  if (sync == SyncPolicy::kDisk) {
    start = Clock::now();
    const Span syncing(TraceKind::kPhase, "sync");
    STASIS_TRY(sync_each(manifest.files, progress, interrupt));
    STASIS_TRY(sync_to_disk(criu, sibling(partial) + "/criu"));
    manifest.phases.push_back({"sync", since(start).count()});
    STASIS_TRY(fault(FaultPoint::kImageSynced));
  }
  manifest.sync = sync == SyncPolicy::kNone ? SyncPolicy::kNone : SyncPolicy::kDisk;
  if (manifest.created.empty()) manifest.created = utc_now();
  Span writing(TraceKind::kImage, "manifest");
  auto wrote = write_manifest(manifest, sync);
  writing.end();
  if (!wrote) return fail(std::move(wrote).error());
  manifest = std::move(*wrote);
  if (sync == SyncPolicy::kDisk) {
    STASIS_TRY(sync_to_disk(dir, sibling(partial)));
  }
  STASIS_TRY(fault(FaultPoint::kImageManifestWritten));
  STASIS_TRY(interrupt.check());
  STASIS_TRY(between(FaultPoint::kImageName, FaultPoint::kImageNamed,
                     [this]() -> Result<void> { return take_name(); }));
  if (sync == SyncPolicy::kDisk) return sync_to_disk(final.parent, final.parent_path);
  return {};
}

// Moves a log that says something to where a person finds it after the directory is gone.
void ImageWriter::State::keep_log() const {
  struct stat info = {};
  if (!log.valid() || ::fstatat(log.get(), kDumpLog, &info, AT_SYMLINK_NOFOLLOW) != 0) return;
  if (!S_ISREG(info.st_mode) || info.st_size == 0) return;
  ::renameat(log.get(), kDumpLog, final.parent.get(), failed_log_name().c_str());
}

Result<void> ImageWriter::State::discard() {
  if (phase == Phase::kDone) return {};
  keep_log();
  const int parent = final.parent.get();
  if (phase == Phase::kSealed && before == Before::kNothing) {
    // Away first, so that no half-removed image ever bears the final name.
    if (::renameat(parent, final.name.c_str(), parent, partial.c_str()) != 0) partial = final.name;
  } else if (phase == Phase::kSealed) {
    STASIS_TRY_ASSIGN(auto new_name, swap_entries(final, replaced, partial, hold_name()));
    partial = std::move(new_name);
  }
  phase = Phase::kOpen;
  if (keep_partial) return {};
  phase = Phase::kDone;
  auto removed = remove_image(final.parent, partial, sibling(partial), &dir);
  if (!removed) return fail(std::move(removed).error().within("removing the unfinished image"));
  return {};
}

ImageWriter::ImageWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
ImageWriter::ImageWriter(ImageWriter&&) noexcept = default;
ImageWriter& ImageWriter::operator=(ImageWriter&&) noexcept = default;
ImageWriter::~ImageWriter() = default;

const UniqueFd& ImageWriter::dir() const { return state_->dir; }
const UniqueFd& ImageWriter::criu_dir() const { return state_->criu; }
const UniqueFd& ImageWriter::log_dir() const { return state_->log; }
const std::string& ImageWriter::final_path() const { return state_->final_path; }
std::string ImageWriter::path() const {
  return state_->phase == State::Phase::kOpen ? state_->sibling(state_->partial)
                                              : state_->final_path;
}
std::string ImageWriter::failed_log_path() const {
  return state_->sibling(state_->failed_log_name());
}

Result<std::string> ImageWriter::probe(const std::string& final_dir, bool overwrite,
                                       const std::string& folder) {
  STASIS_TRY_ASSIGN(auto final, split_path(final_dir));
  STASIS_TRY(check_folder(final.parent, folder, folder_of(final_dir)));
  STASIS_TRY(probe_before(final, overwrite));
  return final.path();
}

Result<ImageWriter> ImageWriter::create(const std::string& final_dir, bool overwrite,
                                        const std::string& folder) {
  auto state = std::make_unique<State>();
  state->phase = State::Phase::kDone;  // nothing to undo yet
  STASIS_TRY_ASSIGN(auto final, split_path(final_dir));
  state->final = std::move(final);
  state->final_path = state->final.path();
  STASIS_TRY(check_folder(state->final.parent, folder, folder_of(final_dir)));
  state->given = final_dir;
  state->only_in = folder;
  STASIS_TRY_ASSIGN(auto before, probe_before(state->final, overwrite));
  state->before = before;
  state->overwrite = overwrite;
  STASIS_TRY_ASSIGN(auto digits, random_digits());
  state->digits = std::move(digits);
  state->partial = state->final.name + ".partial-" + state->digits;
  state->replaced = state->final.name + ".replaced-" + state->digits;

  STASIS_TRY(fault(FaultPoint::kImageCreate));
  STASIS_TRY_ASSIGN(auto dir, make_directory(state->final.parent, state->partial,
                                             state->sibling(state->partial)));
  state->phase = State::Phase::kOpen;  // from here the destructor cleans up
  state->dir = std::move(dir);
  mark_in_use(state->dir);
  STASIS_TRY_ASSIGN(
      auto criu, make_directory(state->dir, criu_name(), state->sibling(state->partial) + "/criu"));
  state->criu = std::move(criu);
  STASIS_TRY_ASSIGN(
      auto log, make_directory(state->dir, kLogFolder, state->sibling(state->partial) + "/log"));
  state->log = std::move(log);
  STASIS_TRY(fault(FaultPoint::kImageCreated));
  return ImageWriter(std::move(state));
}

void ImageWriter::prefetch_digests(const std::stop_token& stop) { state_->prefetch_digests(stop); }

Result<Manifest> ImageWriter::seal(Manifest manifest, SyncPolicy sync, Progress& progress,
                                   const Interrupt& interrupt) {
  if (state_->phase != State::Phase::kOpen) {
    return fail(ErrorCode::kInternal, "an image can be sealed only once");
  }
  auto sealed = state_->complete(manifest, sync, progress, interrupt);
  if (!sealed) {
    Error error = state_->with_figures(std::move(sealed).error(), manifest.total_bytes);
    if (auto discarded = state_->discard(); !discarded) {
      error.context.push_back(discarded.error().to_string());
    }
    return fail(std::move(error).within("completing the image " + state_->final_path));
  }
  return manifest;
}

Result<void> ImageWriter::commit() {
  if (state_->phase != State::Phase::kSealed) {
    return fail(ErrorCode::kInternal, "only a sealed image can be committed");
  }
  state_->phase = State::Phase::kDone;
  fault_only(FaultPoint::kImageCommit);
  struct stat info = {};
  if (::fstatat(state_->final.parent.get(), state_->failed_log_name().c_str(), &info,
                AT_SYMLINK_NOFOLLOW) == 0 &&
      S_ISREG(info.st_mode)) {
    ::unlinkat(state_->final.parent.get(), state_->failed_log_name().c_str(), 0);
  }
  if (state_->before == Before::kNothing) return {};
  const std::string old = state_->sibling(state_->replaced);
  if (state_->before == Before::kEmptyDirectory) {  // only if it still is empty
    if (::unlinkat(state_->final.parent.get(), state_->replaced.c_str(), AT_REMOVEDIR) != 0) {
      return fail(errno_error("cannot remove " + old, errno));
    }
    return {};
  }
  // Where it could not be opened it is not known.
  auto removed = remove_image(state_->final.parent, state_->replaced, old,
                              state_->old.valid() ? &state_->old : nullptr);
  if (!removed) return fail(std::move(removed).error().within("removing the replaced image"));
  return {};
}

Result<void> ImageWriter::sync(Progress& progress, const Interrupt& interrupt) {
  if (state_->phase != State::Phase::kSealed) {
    return fail(ErrorCode::kInternal, "only a sealed image can be synced");
  }
  const Span span(TraceKind::kImage, "sync");
  auto synced = state_->sync_all(progress, interrupt);
  if (synced) return fault(FaultPoint::kImageSynced);
  return fail(std::move(synced.error())
                  .within("bringing the image " + state_->final_path + " to the disk"));
}

bool ImageWriter::replaces() const { return state_->before == Before::kImage; }

Result<void> ImageWriter::discard() { return state_->discard(); }

void ImageWriter::keep_partial(bool keep) { state_->keep_partial = keep; }

}  // namespace stasis
