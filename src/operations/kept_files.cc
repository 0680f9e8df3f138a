// The record of kept files, and what its writer and its reader share.
#include "operations/kept_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include <nlohmann/json.hpp>

#include "image/checksum.h"
#include "image/directory.h"
#include "operations/kept_files_format.h"

namespace stasis {
namespace {

using nlohmann::json;
namespace format = kept_files_format;

constexpr std::uint64_t kMostSize = INT64_MAX;
constexpr std::uint64_t kMostMode = 0177777;

bool is_path(const json& value) {
  if (!value.is_string()) return false;
  const auto& path = value.get_ref<const std::string&>();
  return path.starts_with('/') && path.size() < 4096 && !path.ends_with('/') &&
         path.find('\0') == std::string::npos;
}

// json's get() would take 1.5, true and -1, and cut off what is too large.
bool take_number(const json& item, const char* key, std::uint64_t most, std::uint64_t& out) {
  const auto found = item.find(key);
  if (found == item.end()) return false;
  const auto* number = found->get_ptr<const json::number_unsigned_t*>();
  if (number == nullptr || *number > most) return false;
  out = *number;
  return true;
}

bool take_paths(const json& item, const char* key, std::vector<std::string>& out) {
  const auto found = item.find(key);
  if (found == item.end()) return true;
  if (!found->is_array() || found->size() > format::kMostNames) return false;
  for (const json& one : *found) {
    if (!is_path(one)) return false;
    out.push_back(one.get<std::string>());
  }
  return true;
}

std::optional<KeptFile> parse_kept(const json& item) {
  KeptFile out;
  if (!item.is_object() || !item.contains("path") || !is_path(item["path"])) return std::nullopt;
  out.path = item["path"].get<std::string>();
  std::uint64_t mode = 0;
  std::uint64_t uid = 0;
  std::uint64_t gid = 0;
  if (!take_number(item, "size", kMostSize, out.size) ||
      !take_number(item, "mode", kMostMode, mode) || !take_number(item, "uid", UINT32_MAX, uid) ||
      !take_number(item, "gid", UINT32_MAX, gid) ||
      !take_number(item, "inode", UINT64_MAX, out.inode) ||
      !take_number(item, "born_ns", UINT64_MAX, out.born_ns) ||
      !take_paths(item, "links", out.links) || !take_paths(item, "names", out.names)) {
    return std::nullopt;
  }
  out.mode = static_cast<unsigned>(mode);
  out.uid = static_cast<unsigned>(uid);
  out.gid = static_cast<unsigned>(gid);
  if (!S_ISREG(out.mode)) return std::nullopt;
  const auto link = item.find("link");
  out.link = link != item.end() && link->is_boolean() && link->get<bool>();
  if (item.contains("content")) {
    std::uint64_t content = 0;
    if (!take_number(item, "content", kMostSize, content)) return std::nullopt;
    out.content = content;
  }
  if (item.contains("mount")) {
    if (!item["mount"].is_string()) return std::nullopt;
    out.mount = item["mount"].get<std::string>();
  }
  if (item.contains("tail")) {
    if (!item["tail"].is_string()) return std::nullopt;
    out.tail = item["tail"].get<std::string>();
  }
  return out;
}

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

std::optional<std::string> tail_digest(const UniqueFd& file, std::uint64_t size) {
  const std::uint64_t bytes = std::min(size, kKeptTail);
  std::string text(bytes, '\0');
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t got = ::pread(file.get(), text.data() + done, text.size() - done,
                                static_cast<off_t>(size - bytes + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    done += static_cast<std::size_t>(got);
  }
  return xxh3_hex(text);
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
  std::vector<KeptFile> out;
  if (::faccessat(criu_dir.get(), format::kIndex, F_OK, AT_SYMLINK_NOFOLLOW) != 0 &&
      errno == ENOENT)
    return out;
  auto file = open_checked(criu_dir.get(), format::kIndex, O_RDONLY | O_NOFOLLOW, is_regular_file);
  if (!file) return damaged_record();
  STASIS_TRY_ASSIGN(auto text, read_file(*file, format::kIndex, format::kMostIndex));
  // Each value but the first of its object or array has a comma before it.
  const auto values = std::count_if(text.begin(), text.end(),
                                    [](char c) { return c == ',' || c == '{' || c == '['; });
  if (static_cast<std::size_t>(values) > format::kMostValues) return damaged_record();
  const json index = json::parse(text, nullptr, false);
  std::uint64_t version = 0;
  if (!index.is_object() || !take_number(index, "version", format::kVersion, version) ||
      version == 0 || !index.contains("files") || !index["files"].is_array())
    return damaged_record();
  for (const json& item : index["files"]) {
    auto kept = parse_kept(item);
    if (!kept) return damaged_record();
    out.push_back(std::move(*kept));
  }
  return out;
}

}  // namespace stasis
