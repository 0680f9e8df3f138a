// Files that CRIU 4.2.1 does not find again, because their mount is not where it looks, or because
// another one hides them.
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/call_within.h"
#include "checkpoint/inherited_files.h"
#include "doctor/criu_checks.h"
#include "proc/mounts.h"
#include "proc/process_file.h"
#include "proc/served_files.h"

namespace stasis::doctor {
namespace {

constexpr Kind kLost{"mount", Severity::kRed,
                     "uses files on a mount that is not in its mount namespace any more, or never "
                     "was",
                     "close at its start what it only inherits (`5>&-` for descriptor 5); redirect "
                     "its streams after `unshare --mount` (</dev/null, output to files), not "
                     "before; unmount nothing that it uses"};
constexpr Kind kCovered{"covered-file", Severity::kRed, "has files open that another mount hides",
                        "unmount what lies above them"};

constexpr Kind kQueue{"message-queue", Severity::kRed,
                      "has POSIX message queues open, which CRIU cannot dump",
                      "close them before the dump (mq_close), or use a unix datagram socket or a "
                      "pipe instead, whose messages are saved"};

constexpr Kind kSilent{"silent-files", Severity::kRed,
                       "has files open or mapped on a file system that does not answer (a network "
                       "that is down, or a program that serves it and hangs), for which CRIU would "
                       "wait for ever",
                       "see what holds it up, or end what waits for it: `umount --force`, or the "
                       "end of the program that serves it"};

constexpr unsigned kTtyFirst = 136;  // the slaves of pseudo terminals, which CRIU dumps otherwise
constexpr unsigned kTtyLast = 143;

constexpr Kind kDeletedTwice{"deleted-place", Severity::kRed,
                             "has a deleted file open through two mounts, which CRIU makes again "
                             "below one of them and does not find through the other",
                             "open such a file by one path only, or close it before the dump"};

constexpr Kind kUnchangeable{
    "immutable-file", Severity::kYellow,
    "has deleted files or directories whose directory is immutable or "
    "append-only (chattr), or on a mount that is read-only by now, where a "
    "restore cannot make them again",
    "chattr -i or -a, or mount it writable, before the restore"};

struct Place {
  std::uint64_t mount = 0;
  unsigned mode = 0;
  bool terminal = false;
  dev_t device = 0;
  std::uint64_t inode = 0;
  unsigned names = 0;
  std::uint64_t attributes = 0;  // STATX_ATTR_*
};

constexpr std::string_view kDeleted = " (deleted)";

// Of what a link of /proc leads to.
std::optional<Place> place_of(const std::string& link) {
  struct statx info {};
  if (::statx(AT_FDCWD, link.c_str(), AT_STATX_DONT_SYNC, STATX_BASIC_STATS | STATX_MNT_ID,
              &info) != 0 ||
      (info.stx_mask & STATX_MNT_ID) == 0) {
    return std::nullopt;
  }
  const bool terminal = S_ISCHR(info.stx_mode) &&
                        ((info.stx_rdev_major >= kTtyFirst && info.stx_rdev_major <= kTtyLast) ||
                         info.stx_rdev_major == 4 || info.stx_rdev_major == 5);
  const auto device = makedev(info.stx_dev_major, info.stx_dev_minor);
  return Place{info.stx_mnt_id, info.stx_mode,  terminal,           device,
               info.stx_ino,    info.stx_nlink, info.stx_attributes};
}

constexpr long kQueueMagic = 0x19800202;  // MQUEUE_MAGIC of the kernel's ipc/mqueue.c

// Of what a name leads to, or of the directory above it that is there.
std::optional<Place> nearest_place(std::string path) {
  for (;;) {
    auto place = place_of(path);
    if (place || path.empty()) return place;
    path.erase(path.rfind('/'));
  }
}

class MountSearch {
 public:
  MountSearch(Facts& facts, const Processes& processes, bool simulated, Signs& out)
      : facts_(facts), simulated_(simulated), out_(out) {
    // CRIU reads our own mounts if the root lives among them, and those of each other namespace.
    if (facts.has_our_namespace(processes.front().pid, "mnt")) learn("self");
    for (const proc::ProcessInfo& info : processes)
      learn(fmt::format("{}", info.pid.value));
  }

  void probe(Pid pid) {
    if (known_.empty()) return;
    for (const char* name : {"cwd", "root"}) {
      const std::string link = fmt::format("/proc/{}/{}", pid.value, name);
      const auto place = place_of(link);
      if (!place) continue;
      const std::string shown = std::string_view(name) == "cwd" ? "its directory" : "its root";
      if (!known_.contains(place->mount)) out_.add(pid, kLost, shown);
      if (is_silent(pid, link, *place)) out_.add(pid, kSilent, shown);
      std::array<char, PATH_MAX> path{};
      if (place->names == 0 && ::readlink(link.c_str(), path.data(), path.size() - 1) > 0)
        probe_deleted(pid, link, path.data(), *place, shown);
    }
    if (const auto files = facts_.open_files(pid)) {
      for (const proc::OpenFile& file : *files)
        if (!facts_.is_over()) probe_file(pid, file);
    }
    if (const auto mappings = facts_.mappings(pid)) probe_mappings(pid, *mappings);
  }

 private:
  void learn(const std::string& who) {
    if (const auto found = proc::mounts(who)) {
      for (const proc::Mount& mount : *found)
        known_.try_emplace(static_cast<std::uint64_t>(mount.id), mount.type);
    }
  }

  bool is_queue(Pid pid, const std::string& link, const Place& place) const {
    const auto mount = known_.find(place.mount);
    if (mount != known_.end()) return mount->second == "mqueue";
    const auto system = proc::file_system_of(pid, link);
    return system && system->f_type == kQueueMagic;
  }

  // Each is asked once.
  bool is_silent(Pid pid, const std::string& link, const Place& place) {
    const auto mount = known_.find(place.mount);
    if (mount == known_.end() || !proc::may_be_far(mount->second)) return false;
    const auto [at, is_new] = silent_.try_emplace(place.mount, false);
    if (is_new) at->second = !proc::answers(pid, link);
    return at->second;
  }

  void probe_file(Pid pid, const proc::OpenFile& file) {
    if (!file.path.starts_with('/') || is_of_no_file(file.path) ||
        is_drivers_file(file.path, simulated_)) {
      return;
    }
    const std::string link = fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor);
    const auto place = place_of(link);
    if (!place || place->terminal || S_ISBLK(place->mode)) return;
    const std::string shown = fmt::format("{} (descriptor {})", file.path, file.descriptor);
    if (is_silent(pid, link, *place)) {
      out_.add(pid, kSilent, shown);
      return;
    }
    if (S_ISREG(place->mode) && is_queue(pid, link, *place)) {
      out_.add(pid, kQueue, shown);
      return;
    }
    if (!known_.contains(place->mount)) {
      out_.add(pid, kLost, shown);
      return;
    }
    if ((S_ISREG(place->mode) || S_ISDIR(place->mode)) && place->names == 0)
      probe_deleted(pid, link, file.path, *place, shown);
    if (!(S_ISREG(place->mode) || S_ISDIR(place->mode)) || file.path.ends_with(kDeleted) ||
        !facts_.has_our_namespace(pid, "mnt")) {
      return;
    }
    if (proc::leads_over_served(Pid{::getpid()}, file.path)) return;
    const auto by_name = nearest_place(file.path);
    if (by_name && by_name->device != place->device && by_name->mount != place->mount)
      out_.add(pid, kCovered, shown);
  }

  // CRIU makes it again in its directory, and all who have it open find it there.
  void probe_deleted(Pid pid, const std::string& link, const std::string& path, const Place& place,
                     const std::string& shown) {
    const auto [first, is_new] =
        deleted_.try_emplace(std::pair(place.device, place.inode), place.mount);
    if (!is_new && first->second != place.mount && S_ISREG(place.mode))
      out_.add(pid, kDeletedTwice, shown);
    if (!facts_.has_our_namespace(pid, "mnt") || proc::leads_over_served(Pid{::getpid()}, path))
      return;
    const auto folder = nearest_place(path.substr(0, path.rfind('/')));
    const auto system = proc::file_system_of(pid, link);
    if ((folder && (folder->attributes & (STATX_ATTR_IMMUTABLE | STATX_ATTR_APPEND)) != 0) ||
        (system && (system->f_flags & ST_RDONLY) != 0))
      out_.add(pid, kUnchangeable, shown);
  }

  // One of each file.
  void probe_mappings(Pid pid, const std::vector<proc::Mapping>& mappings) {
    std::set<std::string_view> seen;
    std::vector<std::string_view> paths;
    std::vector<std::string> links;
    for (const proc::Mapping& mapping : mappings) {
      if (!mapping.path.starts_with('/') || is_of_no_file(mapping.path) ||
          is_drivers_file(mapping.path, simulated_) || !seen.insert(mapping.path).second)
        continue;
      paths.push_back(mapping.path);
      links.push_back(proc::link_of_mapping(pid, mapping));
    }
    // The links are in the process's memory, which it may keep; none is opened.
    const std::vector<std::string> all = links;
    const auto places = call_within(pid, [links = std::move(links)] {
                          std::vector<std::optional<Place>> out;
                          out.reserve(links.size());
                          for (const std::string& link : links)
                            out.push_back(place_of(link));
                          return out;
                        }).value_or(std::vector<std::optional<Place>>());
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (!places[i] || !S_ISREG(places[i]->mode)) continue;
      const std::string shown = std::string(paths[i]) + " (mapped)";
      if (!known_.contains(places[i]->mount)) out_.add(pid, kLost, shown);
      if (is_silent(pid, all[i], *places[i])) out_.add(pid, kSilent, shown);
    }
  }

  Facts& facts_;
  bool simulated_;
  Signs& out_;
  std::map<std::uint64_t, std::string> known_;  // the types, by the mounts' numbers
  std::map<std::uint64_t, bool> silent_;
  std::map<std::pair<dev_t, std::uint64_t>, std::uint64_t> deleted_;  // the mount of each
};

}  // namespace

void probe_mounts(Facts& facts, const Processes& processes, const CriuOptions& options,
                  bool simulated, Signs& out) {
  const bool some_are_external =
      std::any_of(options.external.begin(), options.external.end(),
                  [](const std::string& one) { return one.starts_with("file["); });
  if (some_are_external) return;
  MountSearch search(facts, processes, simulated, out);
  for (const proc::ProcessInfo& info : processes)
    search.probe(info.pid);
}

}  // namespace stasis::doctor
