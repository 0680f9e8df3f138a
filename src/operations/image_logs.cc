#include "operations/image_logs.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <tuple>

#include "image/directory.h"
#include "image/image_reader.h"

namespace stasis {
namespace {

// The newest of more are shown.
constexpr std::size_t kMostLogs = 100;

// "dump.log", "restore-20261122T040000Z.log", and "….log.2" of the same second.
bool is_log(std::string_view name) {
  const std::size_t at = name.rfind(".log");
  if (at == std::string_view::npos) return false;
  name.remove_prefix(at + 4);
  return name.empty() || (name.size() > 1 && name.front() == '.' &&
                          name.find_first_not_of("0123456789", 1) == std::string_view::npos);
}

// A folder that is no image's may have logs of anything.
bool is_log_of_criu(std::string_view name) {
  constexpr std::array<std::string_view, 3> kWords = {"dump", "restore", "criu"};
  return is_log(name) && std::any_of(kWords.begin(), kWords.end(), [name](std::string_view word) {
           return name.find(word) != std::string_view::npos;
         });
}

// The logs in a folder; none if it is not there. kNotPermitted, kIo.
Result<void> collect_logs(const std::string& folder, bool (*is_one)(std::string_view),
                          std::vector<ImageLog>& out) {
  auto directory = open_file(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!directory) {
    if (directory.error().code == ErrorCode::kNotPermitted) return fail(directory.error());
    return {};
  }
  STASIS_TRY_ASSIGN(const auto names, list_directory(*directory, folder));
  for (const std::string& name : names) {
    struct stat info = {};
    if (!is_one(name) || ::fstatat(directory->get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0)
      continue;
    if (S_ISREG(info.st_mode))
      out.push_back({folder, name, info.st_mtim, static_cast<std::uint64_t>(info.st_size)});
  }
  return {};
}

Result<void> collect_logs_of(const std::string& images_dir, std::vector<ImageLog>& out) {
  std::error_code none;
  std::filesystem::path image = std::filesystem::canonical(images_dir, none);
  if (none) {
    auto entry = split_path(images_dir);
    if (!entry && entry.error().code == ErrorCode::kUsage) return fail(entry.error());
    if (!entry) return {};
    image = entry->path();
  }
  struct stat info = {};
  // Messages name logs by their paths.
  if (::lstat(image.c_str(), &info) == 0 && S_ISREG(info.st_mode)) {
    out.push_back({image.parent_path().string(), image.filename().string(), info.st_mtim,
                   static_cast<std::uint64_t>(info.st_size)});
    return {};
  }
  STASIS_TRY(collect_logs(image.string() + "/log", is_log, out));
  // Of those who call CRIU themselves, as runc and crun do, they lie beside CRIU's files; and the
  // work path that they can be given has nothing else.
  STASIS_TRY(collect_logs(image.string(), is_log_of_criu, out));
  for (const Leftover& leftover : find_leftovers(image.string()))
    STASIS_TRY(collect_logs(leftover.path + "/log", is_log, out));
  const std::string failed = image.filename().string() + ".failed-dump.log";
  if (::lstat((image.parent_path() / failed).c_str(), &info) == 0 && S_ISREG(info.st_mode)) {
    out.push_back({image.parent_path().string(), failed, info.st_mtim,
                   static_cast<std::uint64_t>(info.st_size)});
  }
  return {};
}

}  // namespace

Result<std::vector<ImageLog>> find_image_logs(const std::vector<std::string>& images_dirs) {
  std::vector<ImageLog> out;
  for (const std::string& images_dir : images_dirs)
    STASIS_TRY(collect_logs_of(images_dir, out));
  const auto key = [](const ImageLog& log) {
    return std::tuple(-log.changed.tv_sec, -log.changed.tv_nsec, log.path());
  };
  std::sort(out.begin(), out.end(),
            [&](const ImageLog& a, const ImageLog& b) { return key(a) < key(b); });
  out.erase(std::unique(out.begin(), out.end(),
                        [&](const ImageLog& a, const ImageLog& b) { return key(a) == key(b); }),
            out.end());
  if (out.size() > kMostLogs) out.resize(kMostLogs);
  return out;
}

Result<UniqueFd> open_image_log(const ImageLog& log) {
  auto file = open_checked(AT_FDCWD, log.path(), O_RDONLY | O_NOFOLLOW, is_regular_file);
  if (!file && file.error().code == ErrorCode::kNotSupported)
    return fail(ErrorCode::kIo, log.path() + " is no regular file", "see what has replaced it");
  return file;
}

Result<CriuLog> read_image_log(const ImageLog& log) {
  STASIS_TRY_ASSIGN(auto file, open_image_log(log));
  return CriuLog::read(file);
}

std::string utc_text(const timespec& moment) {
  std::tm parts{};
  std::array<char, 32> text{};
  if (::gmtime_r(&moment.tv_sec, &parts) == nullptr ||
      std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts) == 0)
    return "?";
  return text.data();
}

}  // namespace stasis
