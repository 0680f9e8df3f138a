#include "proc/nameless_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/fd.h"
#include "base/own_helpers.h"
#include "proc/served_files.h"

namespace stasis::proc {
namespace {

class HolderSearch {
 public:
  explicit HolderSearch(std::span<const NamelessFile> files) : files_(files) {}

  bool is_over() const { return std::chrono::steady_clock::now() >= deadline_; }

  bool has_one(Pid pid) const { return has_open(pid) || has_mapped(pid); }

 private:
  bool is_one(dev_t device, ino_t number, bool is_written) const {
    return std::any_of(files_.begin(), files_.end(), [&](const NamelessFile& one) {
      return one.device == device && one.number == number && (one.is_written || is_written);
    });
  }

  // Nothing where it is open by O_PATH, by which nothing is read.
  static std::optional<bool> is_open_for_writing(Pid pid, int descriptor) {
    constexpr std::string_view kKey = "flags:\t";
    const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, descriptor));
    const std::size_t at = text ? text->find(kKey) : std::string::npos;
    unsigned flags = O_PATH;
    if (at != std::string::npos)
      (void)std::from_chars(text->data() + at + kKey.size(), text->data() + text->size(), flags, 8);
    if ((flags & O_PATH) != 0) return std::nullopt;
    return (flags & O_ACCMODE) != O_RDONLY;
  }

  bool has_open(Pid pid) const {
    const auto open = procfs_.open_files(pid);
    return open && std::any_of(open->begin(), open->end(), [&](const OpenFile& file) {
             if (!file.path.ends_with(" (deleted)") || is_over()) return false;
             const auto status =
                 known_status(fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor));
             if (!status || !is_one(status->st_dev, status->st_ino, true)) return false;
             const auto is_written = is_open_for_writing(pid, file.descriptor);
             return is_written && is_one(status->st_dev, status->st_ino, *is_written);
           });
  }

  bool has_mapped(Pid pid) const {
    bool found = false;
    (void)procfs_.for_each_mapping(
        pid,
        [&](const Mapping& one) {
          found = one.permissions.ends_with('s') && one.inode != 0 &&
                  is_one(one.device, one.inode, one.permissions[1] == 'w');
          return !found && !is_over();
        },
        ProcFs::Which::kOfFiles);
    return found;
  }

  std::span<const NamelessFile> files_;
  ProcFs procfs_;
  std::chrono::steady_clock::time_point deadline_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(2);
};

}  // namespace

std::optional<ProcessInfo> holder_outside(std::span<const NamelessFile> files,
                                          const std::set<Pid>& tree) {
  if (files.empty()) return std::nullopt;
  const ProcFs procfs;
  const auto all = procfs.all();
  if (!all) return std::nullopt;
  const std::set<Pid> helpers = own_helpers();
  const HolderSearch search(files);
  const KeptCallThread calls;
  for (const ProcessInfo& info : *all) {
    if (search.is_over()) break;
    if (tree.contains(info.pid) || helpers.contains(info.pid) || info.pid.value == ::getpid() ||
        info.parent.value == ::getpid() || info.has_ended())
      continue;
    if (search.has_one(info.pid)) return info;
  }
  return std::nullopt;
}

}  // namespace stasis::proc
