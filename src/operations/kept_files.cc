// The record of kept files, and what its writer and its reader share.
#include "operations/kept_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "image/checksum.h"
#include "image/directory.h"
#include "operations/kept_files_format.h"

namespace stasis {
namespace {

namespace format = kept_files_format;

tl::unexpected<Error> damaged_record() {
  return fail(ErrorCode::kImageCorrupt,
              "the image's record of files that were open for writing is damaged",
              "take another image");
}

}  // namespace

std::optional<UniqueFd> open_folder_of(const std::string& path) {
  if (!path.starts_with('/')) return std::nullopt;
  auto root = open_file(AT_FDCWD, "/", O_PATH | O_DIRECTORY);
  if (!root) return std::nullopt;
  const std::string folder = path.substr(1, path.rfind('/') == 0 ? 0 : path.rfind('/') - 1);
  if (folder.empty()) return std::move(*root);
  auto opened = open_beneath(*root, folder, O_PATH | O_DIRECTORY);
  if (!opened) return std::nullopt;
  return std::move(*opened);
}

std::string name_of_path(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::optional<std::string> tail_digest(const UniqueFd& file, std::uint64_t size,
                                       std::uint64_t most) {
  const std::uint64_t bytes = std::min(size, most);
  std::string text(bytes, '\0');
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t got =
        TEMP_FAILURE_RETRY(::pread(file.get(), text.data() + done, text.size() - done,
                                   static_cast<off_t>(size - bytes + done)));
    if (got <= 0) return std::nullopt;
    done += static_cast<std::size_t>(got);
  }
  return xxh3_hex(text);
}

std::uint64_t modified_ns(const struct stat& info) {
  return static_cast<std::uint64_t>(info.st_mtim.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(info.st_mtim.tv_nsec);
}

std::uint64_t born_ns(const UniqueFd& file) {
  struct statx info {};
  if (::statx(file.get(), "", AT_EMPTY_PATH, STATX_BTIME, &info) != 0 ||
      (info.stx_mask & STATX_BTIME) == 0)
    return 0;
  return static_cast<std::uint64_t>(info.stx_btime.tv_sec) * 1'000'000'000 + info.stx_btime.tv_nsec;
}

std::string mount_above(const std::string& path) {
  std::string mount = "/";
  struct stat above {};
  if (::stat("/", &above) != 0) return mount;
  for (std::size_t end = path.find('/', 1); end != std::string::npos;
       end = path.find('/', end + 1)) {
    const std::string folder = path.substr(0, end);
    struct stat info {};
    if (::lstat(folder.c_str(), &info) != 0) break;
    if (info.st_dev != above.st_dev) mount = folder;
    above = info;
  }
  return mount;
}

Result<std::vector<KeptFile>> read_kept_files(const UniqueFd& criu_dir) {
  if (::faccessat(criu_dir.get(), format::kIndex, F_OK, AT_SYMLINK_NOFOLLOW) != 0 &&
      errno == ENOENT)
    return std::vector<KeptFile>();
  auto file = open_checked(criu_dir.get(), format::kIndex, O_RDONLY | O_NOFOLLOW, is_regular_file);
  if (!file) return damaged_record();
  STASIS_TRY_ASSIGN(auto text, read_file(*file, format::kIndex, format::kMostIndex));
  auto index = record_from_text<format::Index>(text, format::kLimits);
  if (!index) return damaged_record();
  return std::move(index->files);
}

}  // namespace stasis
