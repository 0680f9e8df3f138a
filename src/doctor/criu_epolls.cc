// Epolls that CRIU 4.2.1 dumps, and that no restore makes again.
#include <fcntl.h>
#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"
#include "proc/served_files.h"

namespace stasis::doctor {
namespace {

// What is registered by a descriptor that is closed by now, or is another file's, CRIU takes for
// another descriptor of the same open file. An epoll that has one such entry gets all of them by
// the first descriptor of their open file, so that two of one file are then the same
// (flush_eventpoll_dinfo_queue() of its eventpoll.c), and the second is refused.
constexpr Kind kSameFileTwice{
    "epoll", Severity::kRed,
    "has epolls with a descriptor in them that is closed by now, while its open file goes on under "
    "another one, and with an open file that is in them twice, which no restore makes again",
    "have the program take each descriptor out of the epoll (EPOLL_CTL_DEL) before it closes it"};

constexpr std::string_view kEpollName = "anon_inode:[eventpoll]";

using NumberedFiles = std::map<int, std::string_view>;  // paths by descriptor

// A line of proc_pid_fdinfo(5): what is registered by a descriptor.
struct Entry {
  int number = -1;
  std::uint64_t inode = 0;
  unsigned before = 0;  // of the entries by the same number, how many come first
};

template <class Number>
Number number_after(std::string_view line, std::string_view key, int base) {
  Number value = 0;
  std::size_t at = line.find(key);
  if (at == std::string_view::npos) return value;
  at = line.find_first_not_of(' ', at + key.size());
  if (at == std::string_view::npos) return value;
  std::from_chars(line.data() + at, line.data() + line.size(), value, base);
  return value;
}

std::vector<Entry> entries_of(Pid pid, int epoll) {
  constexpr std::size_t kMost = 256U << 20;
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, epoll), kMost);
  std::vector<Entry> out;
  if (!text) return out;
  std::map<int, unsigned> seen;
  std::string_view rest(*text);
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (!line.starts_with("tfd:")) continue;
    const int number = number_after<int>(line, "tfd:", 10);
    out.push_back({number, number_after<std::uint64_t>(line, " ino:", 16), seen[number]++});
  }
  return out;
}

// Of an open file as /proc/PID/fd names it.
std::uint64_t inode_of(Pid pid, int descriptor, std::string_view path) {
  for (const std::string_view kind : {"socket:[", "pipe:["}) {
    if (path.starts_with(kind)) return number_after<std::uint64_t>(path, kind, 10);
  }
  const auto status = proc::known_status(fmt::format("/proc/{}/fd/{}", pid.value, descriptor));
  return status ? status->st_ino : 0;
}

// kcmp(2): how a descriptor's open file stands to that of an entry. 0: it is the same.
long compare_files(Pid pid, int descriptor, int epoll, const Entry& entry) {
  kcmp_epoll_slot slot{static_cast<__u32>(epoll), static_cast<__u32>(entry.number), entry.before};
  return ::syscall(SYS_kcmp, pid.value, pid.value, KCMP_EPOLL_TFD, descriptor, &slot);
}
long compare_files(Pid pid, int descriptor, int other) {
  return ::syscall(SYS_kcmp, pid.value, pid.value, KCMP_FILE, descriptor, other);
}

bool is_live(Pid pid, int epoll, const Entry& entry, const NumberedFiles& files) {
  const auto file = files.find(entry.number);
  if (file == files.end()) return false;
  // A socket has one open file. The kernel looks through the whole epoll for each that it compares.
  if (file->second.starts_with("socket:["))
    return inode_of(pid, entry.number, file->second) == entry.inode;
  return compare_files(pid, entry.number, epoll, entry) == 0;
}

// A descriptor for each open file of one inode, in the kernel's order. A program that goes on makes
// it wrong, and nothing worse.
class FilesOfInode {
 public:
  explicit FilesOfInode(Pid pid) : pid_(pid) {}
  // The place of the one to which `compare_to(descriptor)` is 0; else where it would be.
  template <class Compare>
  std::pair<std::size_t, bool> place_of(const Compare& compare_to) const {
    std::size_t low = 0;
    std::size_t high = numbers_.size();
    while (low < high) {
      const std::size_t middle = (low + high) / 2;
      const long order = compare_to(numbers_[middle]);
      if (order == 0) return {middle, true};
      if (order == 1)
        low = middle + 1;
      else
        high = middle;
    }
    return {low, false};
  }
  void add(int descriptor) {
    const auto [place, known] =
        place_of([&](int number) { return compare_files(pid_, number, descriptor); });
    if (!known) numbers_.insert(numbers_.begin() + static_cast<std::ptrdiff_t>(place), descriptor);
  }
  // The one of them that is the entry's; nothing if none is.
  std::optional<int> find(int epoll, const Entry& entry, bool live) const {
    const auto [place, known] = place_of([&](int number) {
      return live ? compare_files(pid_, number, entry.number)
                  : compare_files(pid_, number, epoll, entry);
    });
    return known ? std::optional(numbers_[place]) : std::nullopt;
  }

 private:
  Pid pid_;
  std::vector<int> numbers_;
};

// The first entry by which an open file is there for a second time, in an epoll that has some whose
// descriptor is closed: "descriptor 5 in epoll 4".
std::optional<std::string> file_that_is_twice(Facts& facts, Pid pid, int epoll,
                                              const NumberedFiles& files,
                                              Clock::time_point deadline) {
  const auto is_over = [&] { return facts.is_over() || Clock::now() >= deadline; };
  const std::vector<Entry> entries = entries_of(pid, epoll);
  std::vector<char> live(entries.size());
  std::map<std::uint64_t, FilesOfInode> by_inode;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (is_over()) return std::nullopt;
    live[i] = is_live(pid, epoll, entries[i], files) ? 1 : 0;
    by_inode.try_emplace(entries[i].inode, pid);
  }
  if (std::find(live.begin(), live.end(), 0) == live.end()) return std::nullopt;
  for (const auto& [number, path] : files) {
    if (is_over()) return std::nullopt;
    if (const auto found = by_inode.find(inode_of(pid, number, path)); found != by_inode.end())
      found->second.add(number);
  }
  std::set<int> seen;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (is_over()) return std::nullopt;
    const auto& of_inode = by_inode.find(entries[i].inode)->second;
    const auto number = of_inode.find(epoll, entries[i], live[i] != 0);
    if (number && !seen.insert(*number).second)
      return fmt::format("descriptor {} in epoll {}", *number, epoll);
  }
  return std::nullopt;
}

// CRIU looks at an epoll in the first process that has it.
bool has_before(Facts& facts, const Processes& processes, Pid pid, int epoll) {
  for (const proc::ProcessInfo& other : processes) {
    if (other.pid == pid) return false;
    const auto files = facts.open_files(other.pid);
    if (!files) continue;
    for (const proc::OpenFile& file : *files) {
      if (file.path == kEpollName &&
          ::syscall(SYS_kcmp, pid.value, other.pid.value, KCMP_FILE, epoll, file.descriptor) == 0)
        return true;
    }
  }
  return false;
}

}  // namespace

void probe_epolls(Facts& facts, const Processes& processes, Signs& out) {
  // The kernel goes through an epoll for each entry that is compared, and the program waits: of
  // some ten thousand files that are no sockets this finds nothing any more.
  constexpr std::chrono::seconds kBudget{2};
  const auto deadline = Clock::now() + kBudget;
  for (const proc::ProcessInfo& info : processes) {
    const auto files = facts.open_files(info.pid);
    if (!files) continue;
    NumberedFiles by_number;
    for (const proc::OpenFile& file : *files) {
      if (file.path != kEpollName) continue;
      if (by_number.empty()) {
        for (const proc::OpenFile& one : *files)
          by_number.emplace(one.descriptor, one.path);
      }
      const auto twice = file_that_is_twice(facts, info.pid, file.descriptor, by_number, deadline);
      if (twice && !has_before(facts, processes, info.pid, file.descriptor))
        out.add(info.pid, kSameFileTwice, *twice);
    }
  }
}

}  // namespace stasis::doctor
