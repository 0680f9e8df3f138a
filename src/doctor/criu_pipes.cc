// Pipes, FIFOs and pseudo terminals whose other end a process outside of the tree holds. CRIU 4.2.1
// dumps them without a word, and makes them anew at the restore with no other end: the program
// reads the end of its input, and its next output ends it by SIGPIPE.
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"
#include "proc/served_files.h"
#include "proc/terminal_state.h"

namespace stasis::doctor {
namespace {

constexpr Kind kPipeName{
    "pipe", Severity::kRed,
    "has pipes whose other end is outside of the tree; a restore does not connect them again",
    "redirect its standard streams to files, and close descriptors that a terminal, an editor or a "
    "CI runner left open (`5>&-`); or use `stasis run --images-dir`, which connects the standard "
    "streams at every restore; or dump the process at the other end, too"};
constexpr Kind kUnderWay{
    "pipe-under-way", Severity::kRed,
    "has pipes whose other end no process that can be seen here has: it is under way in a unix "
    "socket (SCM_RIGHTS), or outside of the tree, and then a restore does not connect them again",
    "dump once more when the program has received it, or close the pipes"};
constexpr Kind kFifo{
    "fifo", Severity::kYellow,
    "has FIFOs that a process outside of the tree uses; that process sees the end of the file, and "
    "is connected again only if it keeps the FIFO open",
    "restart that process before the restore, or use files"};
constexpr Kind kTerminalUser{"terminal", Severity::kRed,
                             "is the master of a terminal that a process outside of the tree uses",
                             "end that process, or dump it too"};

struct PipeEnds {
  bool reads = false;
  bool writes = false;
};

using PipeKey = std::pair<dev_t, ino_t>;

struct Pipe {
  PipeEnds ends;  // that the tree has
  bool named = false;
  std::string path;
  // Who has it; each process of the tree with one of its descriptors.
  std::vector<std::pair<Pid, int>> holders;
};

struct OpenEnd {
  PipeKey key;
  PipeEnds ends;
  dev_t device = 0;  // of a character device
  bool is_fifo = false;
  bool is_device = false;
};

// The link's permissions are those that the file was opened with.
std::optional<OpenEnd> probe_end(Pid pid, int descriptor) {
  const std::string link = fmt::format("/proc/{}/fd/{}", pid.value, descriptor);
  const auto target = proc::known_status(link);
  struct stat how {};
  if (!target || ::lstat(link.c_str(), &how) != 0) return std::nullopt;
  return OpenEnd{{target->st_dev, target->st_ino},
                 {(how.st_mode & S_IRUSR) != 0, (how.st_mode & S_IWUSR) != 0},
                 target->st_rdev,
                 S_ISFIFO(target->st_mode),
                 S_ISCHR(target->st_mode)};
}

// Whether the end that the tree lacks is open anywhere; nothing if that cannot be told. The
// descriptor may be another file by now: O_PATH shows what it is before it is opened in earnest,
// which does not wait.
std::optional<bool> has_other_end(Pid pid, int descriptor, const PipeKey& key, bool we_write) {
  const auto place =
      open_file(AT_FDCWD, fmt::format("/proc/{}/fd/{}", pid.value, descriptor), O_PATH);
  const auto info = place ? proc::known_status(*place) : std::nullopt;
  if (!info || !S_ISFIFO(info->st_mode) || PipeKey{info->st_dev, info->st_ino} != key)
    return std::nullopt;
  const std::string link = fmt::format("/proc/self/fd/{}", place->get());
  const auto system = proc::file_system_of(pid, link);
  if (!system || system->f_type != PIPEFS_MAGIC) return std::nullopt;
  const auto same =
      open_file(AT_FDCWD, link, (we_write ? O_WRONLY : O_RDONLY) | O_NONBLOCK | O_NOCTTY);
  if (!same) return std::nullopt;
  pollfd look{same->get(), 0, 0};
  if (::poll(&look, 1, 0) < 0) return std::nullopt;
  return (look.revents & (we_write ? POLLERR : POLLHUP)) == 0;
}

// A process outside of the tree and what it does with the file.
struct Outsider {
  Pid pid;
  std::string comm;
};

class PipeSearch {
 public:
  PipeSearch(Facts& facts, const Processes& all_processes, std::span<const std::string> connected,
             Signs& out)
      : facts_(facts), connected_(connected), out_(out) {
    for (const proc::ProcessInfo& info : all_processes)
      ours_.insert(info.pid.value);
    for (const proc::ProcessInfo& info : all_processes)
      learn(info.pid);
  }

  void run() {
    for (const auto& [key, pipe] : pipes_)
      probe(key, pipe);
    for (const auto& [terminal, holder] : masters_) {
      const auto user = find_outsider([terminal = terminal](const OpenEnd& seen) {
        return seen.is_device && Terminal{seen.key.first, seen.device} == terminal;
      });
      if (user)
        out_.add(holder, kTerminalUser,
                 fmt::format("/dev/pts/{} (process {}, {})", index_of(terminal.second),
                             user->pid.value, user->comm));
    }
  }

 private:
  // The file system of the slaves and the device: each container has a /dev/pts/0.
  using Terminal = std::pair<dev_t, dev_t>;

  static unsigned index_of(dev_t slave) {
    return (major(slave) - proc::kSlaveFirst) * proc::kPerMajor + minor(slave);
  }

  void learn(Pid pid) {
    const auto files = facts_.open_files(pid);
    if (!files) return;
    for (const proc::OpenFile& file : *files) {
      if (facts_.is_over()) return;
      const bool may_be_fifo = file.path.starts_with("pipe:") || file.path.starts_with('/');
      if (!may_be_fifo) continue;
      const auto seen = probe_end(pid, file.descriptor);
      if (!seen) continue;
      if (seen->is_device && major(seen->device) == proc::kPtmxMajor &&
          minor(seen->device) == proc::kPtmxMinor) {
        const int index = index_of_master(pid, file.descriptor);
        const auto number = static_cast<unsigned>(index);
        const dev_t slave =
            makedev(proc::kSlaveFirst + number / proc::kPerMajor, number % proc::kPerMajor);
        if (index >= 0)
          masters_.insert({{proc::instance_of_master(pid, file.descriptor), slave}, pid});
      }
      if (!seen->is_fifo) continue;
      Pipe& pipe = pipes_[seen->key];
      pipe.ends.reads |= seen->ends.reads;
      pipe.ends.writes |= seen->ends.writes;
      pipe.path = file.path;
      pipe.named = file.path.starts_with('/') && !file.path.ends_with(" (deleted)");
      if (pipe.holders.empty() || pipe.holders.back().first != pid)
        pipe.holders.push_back({pid, file.descriptor});
    }
  }

  void probe(const PipeKey& key, const Pipe& pipe) {
    if (pipe.ends.reads == pipe.ends.writes) return;
    if (std::find(connected_.begin(), connected_.end(), pipe.path) != connected_.end()) return;
    const auto& [pid, descriptor] = pipe.holders.front();
    const auto open = has_other_end(pid, descriptor, key, pipe.ends.writes);
    if (open && !*open) return;
    const auto other = find_outsider([&](const OpenEnd& seen) {
      return seen.is_fifo && seen.key == key &&
             (pipe.ends.writes ? seen.ends.reads : seen.ends.writes);
    });
    // A child that was born since then has it.
    if (!other && (found_ours_ || !open)) return;
    const bool is_under_way = !other && !pipe.named && may_be_under_way();
    const std::string whose = other ? fmt::format("process {}, {}", other->pid.value, other->comm)
                                    : std::string("a process that cannot be seen from here");
    for (const auto& [holder, number] : pipe.holders)
      out_.add(holder, is_under_way ? kUnderWay : (pipe.named ? kFifo : kPipeName),
               fmt::format("{} (descriptor {}, {} {})", pipe.path, number,
                           pipe.ends.writes ? "read by" : "written by",
                           is_under_way ? "who receives it" : whose));
  }

  // Whether descriptors wait to be received at a unix socket of the tree (unix_show_fdinfo() of the
  // kernel). To see which ones, they would have to be taken, and to close one may wait for ever.
  bool may_be_under_way() {
    for (const int number : ours_) {
      const auto files = facts_.open_files(Pid{number});
      if (!files) continue;
      for (const proc::OpenFile& file : *files) {
        if (facts_.is_over()) return false;
        if (!file.path.starts_with("socket:[")) continue;
        const auto text =
            read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", number, file.descriptor));
        const std::size_t at = text ? text->find("scm_fds: ") : std::string::npos;
        if (at != std::string::npos && text->compare(at, 11, "scm_fds: 0\n") != 0) return true;
      }
    }
    return false;
  }

  // Every process of the machine is looked at, which takes milliseconds: only where something is
  // amiss.
  template <typename Wanted>
  std::optional<Outsider> find_outsider(const Wanted& wanted) {
    found_ours_ = false;
    if (!all_) {
      auto all = facts_.procfs().all();
      all_ = all ? std::move(*all) : std::vector<proc::ProcessInfo>();
    }
    for (const proc::ProcessInfo& info : *all_) {
      const auto files = facts_.procfs().open_files(info.pid);
      if (!files) continue;
      const bool has_it =
          std::any_of(files->begin(), files->end(), [&](const proc::OpenFile& file) {
            const auto seen = probe_end(info.pid, file.descriptor);
            return seen && wanted(*seen);
          });
      if (!has_it) continue;
      if (!descends_from(facts_.procfs(), ours_, info)) return Outsider{info.pid, info.comm};
      found_ours_ = true;
    }
    return std::nullopt;
  }

  Facts& facts_;
  std::span<const std::string> connected_;
  Signs& out_;
  std::set<int> ours_;
  std::map<PipeKey, Pipe> pipes_;
  std::map<Terminal, Pid> masters_;  // by their other ends, who has them
  std::optional<std::vector<proc::ProcessInfo>> all_;
  bool found_ours_ = false;
};

}  // namespace

bool descends_from(const proc::ProcFs& procfs, const std::set<int>& tree, proc::ProcessInfo info) {
  constexpr int kGenerations = 64;
  for (int i = 0; i < kGenerations; ++i) {
    if (tree.contains(info.pid.value)) return true;
    auto parent = procfs.process(info.parent);
    if (!parent) return false;
    info = std::move(*parent);
  }
  return false;
}

void probe_pipes(Facts& facts, const Processes& all_processes,
                 std::span<const std::string> connected, Signs& out) {
  PipeSearch(facts, all_processes, connected, out).run();
}

}  // namespace stasis::doctor
