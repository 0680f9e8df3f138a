#include "proc/fifo_readers.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "base/fd.h"
#include "proc/descriptors.h"
#include "proc/procfs.h"
#include "proc/served_files.h"

namespace stasis::proc {
namespace {

constexpr int kUsualPipeSize = 65536;  // of a new one, where pages have 4 KiB

using FifoKey = std::pair<dev_t, ino_t>;

struct ReaderGroup {
  std::vector<std::pair<Pid, int>> descriptors;
  bool has_writer = false;
  bool has_hung_up = false;
  bool is_as_opened = true;
};

struct FifoEnd {
  FifoKey key;
  bool writes = false;
};

std::optional<FifoEnd> fifo_end(Pid pid, const OpenFile& file) {
  if (!file.path.starts_with('/')) return std::nullopt;
  const std::string link = fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor);
  const auto target = known_status(link);
  struct stat how {};
  if (!target || !S_ISFIFO(target->st_mode) || ::lstat(link.c_str(), &how) != 0)
    return std::nullopt;
  // The link's permissions are those that the file was opened with.
  return FifoEnd{{target->st_dev, target->st_ino}, (how.st_mode & S_IWUSR) != 0};
}

void look_at(const UniqueFd& reader, const std::string& path, ReaderGroup& group) {
  pollfd state{reader.get(), POLLIN, 0};
  if (::poll(&state, 1, 0) != 0) group.has_hung_up = true;
  const int flags = ::fcntl(reader.get(), F_GETFL);
  if (flags < 0 || (flags & O_NONBLOCK) == 0 || path.ends_with(" (deleted)") ||
      ::fcntl(reader.get(), F_GETPIPE_SZ) != kUsualPipeSize)
    group.is_as_opened = false;
}

std::map<FifoKey, ReaderGroup> groups_of(std::span<const Pid> tree) {
  std::map<FifoKey, ReaderGroup> out;
  const ProcFs procfs;
  for (const Pid pid : tree) {
    const auto files = procfs.open_files(pid);
    const auto process = Pidfd::open(pid);
    if (!files || !process) continue;
    for (const OpenFile& file : *files) {
      const auto end = fifo_end(pid, file);
      if (!end) continue;
      ReaderGroup& group = out[end->key];
      group.has_writer |= end->writes;
      if (group.has_writer) continue;
      const auto copy =
          take_descriptor(pid, *process, file.descriptor,
                          [](const struct stat& info) { return S_ISFIFO(info.st_mode); });
      if (!copy) {
        group.has_hung_up = true;
        continue;
      }
      look_at(*copy, file.path, group);
      group.descriptors.emplace_back(pid, file.descriptor);
    }
  }
  return out;
}

// Also outside of the tree. Every process of the machine is looked at, which takes milliseconds,
// unless another user has made it long: what is not known in time counts as written.
void note_writers(std::map<FifoKey, ReaderGroup>& groups) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  const ProcFs procfs;
  const auto all = procfs.all();
  if (!all) return;
  for (const ProcessInfo& info : *all) {
    const auto files = procfs.open_files(info.pid);
    if (!files) continue;
    for (const OpenFile& file : *files) {
      if (std::chrono::steady_clock::now() >= deadline) {
        for (auto& [key, group] : groups)
          group.has_writer = true;
        return;
      }
      const auto end = fifo_end(info.pid, file);
      const auto found = end && end->writes ? groups.find(end->key) : groups.end();
      if (found != groups.end()) found->second.has_writer = true;
    }
  }
}

}  // namespace

FifoReaders unwritten_fifos(std::span<const Pid> tree) {
  FifoReaders out;
  auto groups = groups_of(tree);
  std::erase_if(groups, [](const auto& group) {
    return group.second.has_writer || group.second.has_hung_up || group.second.descriptors.empty();
  });
  if (groups.empty()) return out;
  note_writers(groups);
  for (const auto& [key, group] : groups) {
    if (group.has_writer) continue;
    auto& list = group.is_as_opened ? out.as_opened : out.others;
    list.insert(list.end(), group.descriptors.begin(), group.descriptors.end());
  }
  return out;
}

}  // namespace stasis::proc
