#include "proc/mounts.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>

#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis::proc {
namespace {

// The kernel writes blanks, tabs, line ends and backslashes as \040 and so on.
std::string without_escapes(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto digit = [&](std::size_t at) {
      return at < text.size() && text[at] >= '0' && text[at] <= '7';
    };
    if (text[i] == '\\' && digit(i + 1) && digit(i + 2) && digit(i + 3)) {
      out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 +
                               (text[i + 3] - '0'));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

std::vector<Mount> mounts_in(const std::string& text) {
  std::vector<Mount> out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    // "ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAGS...] - TYPE SOURCE SUPER" (`man 5 proc`)
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line);
    std::istringstream after(line.substr(dash + 3));
    Mount mount;
    std::string skipped;
    char colon = 0;
    before >> mount.id >> skipped >> mount.major >> colon >> mount.minor >> mount.root >>
        mount.point;
    if (!before || !(after >> mount.type)) continue;
    after >> skipped >> mount.options;
    mount.root = without_escapes(mount.root);
    mount.point = without_escapes(mount.point);
    out.push_back(std::move(mount));
  }
  return out;
}

// The last process's that was asked for. One alone: the text may have tens of megabytes.
struct LastMounts {
  Pid process;
  UniqueFd file;  // tells by poll(2) when a mount of its namespace changes
  ino_t space = 0;
  ino_t root = 0;  // the paths are as seen from there
  std::shared_ptr<const std::vector<Mount>> mounts;
};

constexpr std::size_t kMostText = std::size_t{64} << 20;

ino_t number_of(const std::string& link) {
  struct statx info {};
  const bool known = ::statx(AT_FDCWD, link.c_str(), AT_STATX_DONT_SYNC, STATX_INO, &info) == 0;
  return known ? info.stx_ino : 0;
}

bool has_changed(const UniqueFd& file) {
  pollfd look{file.get(), POLLPRI, 0};
  return ::poll(&look, 1, 0) != 0;
}

}  // namespace

Result<std::vector<Mount>> mounts(const std::string& process, const std::string& proc) {
  STASIS_TRY_ASSIGN(auto text, read_file(AT_FDCWD, fmt::format("{}/{}/mountinfo", proc, process)));
  return mounts_in(text);
}

namespace {

struct KeptMounts {
  std::mutex mutex;
  LastMounts last;
};
KeptMounts& kept_mounts() {
  static KeptMounts kept;
  return kept;
}

}  // namespace

void forget_mounts() {
  auto& [mutex, last] = kept_mounts();
  const std::lock_guard lock(mutex);
  last = {};
}

std::shared_ptr<const std::vector<Mount>> known_mounts(Pid process) {
  auto& [mutex, last] = kept_mounts();
  const std::string folder = fmt::format("/proc/{}", process.value);
  const ino_t space = number_of(folder + "/ns/mnt");
  const ino_t root = number_of(folder + "/root");
  const std::lock_guard lock(mutex);
  if (last.mounts && last.process == process && last.space == space && last.root == root &&
      !has_changed(last.file))
    return last.mounts;
  last = {};
  auto file = open_file(AT_FDCWD, folder + "/mountinfo", O_RDONLY);
  if (!file) return nullptr;
  const auto text = read_file(*file, folder + "/mountinfo", kMostText);
  if (!text) return nullptr;
  last = {process, std::move(*file), space, root,
          std::make_shared<const std::vector<Mount>>(mounts_in(*text))};
  return last.mounts;
}

}  // namespace stasis::proc
