#include "proc/thread_state.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>

#include <fmt/format.h>

#include "base/fd.h"
#include "proc/cgroup.h"
#include "proc/process_file.h"
#include "proc/procfs.h"

namespace stasis::proc {
namespace {

constexpr std::size_t kWordBits = 64;
constexpr std::size_t kMostCpus = 8192;  // NR_CPUS of x86 at most
constexpr std::size_t kMostNodes = 1024;
// linux/ioprio.h, which Debian 12 does not install.
constexpr int kIoPriorityOfThread = 1;

using Words = std::vector<std::uint64_t>;

// struct sched_attr of linux/sched/types.h as it is since Linux 5.3; <sched.h> of newer C libraries
// has it as well, and clashes.
struct SchedulingAttributes {
  std::uint32_t size = sizeof(SchedulingAttributes);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime = 0;
  std::uint64_t deadline = 0;
  std::uint64_t period = 0;
  std::uint32_t least = 0;
  std::uint32_t most = 0;
};
constexpr std::uint64_t kKeepAll = 0x18;  // SCHED_FLAG_KEEP_ALL
constexpr std::uint64_t kClamps = 0x60;   // SCHED_FLAG_UTIL_CLAMP

bool get_attributes(Tid thread, SchedulingAttributes& out) {
  return ::syscall(SYS_sched_getattr, thread.value, &out, sizeof out, 0) == 0;
}

bool is_set(const Words& words, std::size_t bit) {
  return (words[bit / kWordBits] >> (bit % kWordBits) & 1) != 0;
}

std::string as_list(const Words& words) {
  std::string text;
  const std::size_t bits = words.size() * kWordBits;
  for (std::size_t first = 0; first < bits; ++first) {
    if (!is_set(words, first)) continue;
    std::size_t last = first;
    while (last + 1 < bits && is_set(words, last + 1))
      ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", first);
    if (last > first) text += fmt::format("-{}", last);
    first = last;
  }
  return text;
}

// The whole text of a small file of /proc without its line feed; nothing if it cannot be read.
std::optional<std::string> text_of(const std::string& path) {
  constexpr std::size_t kMost = 65536;
  auto text = read_file(AT_FDCWD, path, kMost);
  if (!text) return std::nullopt;
  while (!text->empty() && (text->back() == '\n' || text->back() == ' '))
    text->pop_back();
  return std::move(*text);
}

template <class Number>
std::optional<Number> number_of(const std::string& path, int base) {
  const auto text = text_of(path);
  Number value = 0;
  if (!text) return std::nullopt;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value, base);
  if (error != std::errc() || end != text->data() + text->size()) return std::nullopt;
  return value;
}

Result<void> write_text(const std::string& path, const std::string& text) {
  STASIS_TRY_ASSIGN(auto file, open_file(AT_FDCWD, path, O_WRONLY));
  return write_all(file.get(), text.data(), text.size(), path);
}

}  // namespace

std::optional<Words> parse_list(std::string_view text, std::size_t most) {
  Words words((most + kWordBits - 1) / kWordBits);
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    std::size_t first = 0;
    auto [next, error] = std::from_chars(at, end, first);
    if (error != std::errc()) return std::nullopt;
    std::size_t last = first;
    if (next != end && *next == '-') {
      const auto upper = std::from_chars(next + 1, end, last);
      if (upper.ec != std::errc()) return std::nullopt;
      next = upper.ptr;
    }
    if (first > last || last >= most) return std::nullopt;
    for (std::size_t bit = first; bit <= last; ++bit)
      words[bit / kWordBits] |= std::uint64_t{1} << (bit % kWordBits);
    if (next != end && (*next != ',' || next + 1 == end)) return std::nullopt;
    at = next == end ? end : next + 1;
  }
  return words;
}

// By the system call itself: the C library's set has 1024 bits.
Result<std::string> affinity(Tid thread) {
  Words words(kMostCpus / kWordBits);
  const long size =
      ::syscall(SYS_sched_getaffinity, thread.value, words.size() * sizeof words[0], words.data());
  if (size < 0)
    return fail(
        errno_error(fmt::format("cannot read the processors of thread {}", thread.value), errno));
  return as_list(words);
}

Result<void> set_affinity(Tid thread, std::string_view cpus) {
  const auto words = parse_list(cpus, kMostCpus);
  if (!words)
    return fail(ErrorCode::kUsage, fmt::format("'{}' is no list of processors", cpus), {});
  if (::syscall(SYS_sched_setaffinity, thread.value, words->size() * sizeof(std::uint64_t),
                words->data()) == 0) {
    return {};
  }
  return fail(errno_error(fmt::format("cannot bind thread {} to processors {}", thread.value, cpus),
                          errno));
}

std::optional<std::string> cpuset_of(Pid pid) {
  for (const CgroupDirectory& directory : cgroup_directories(pid, "cpuset")) {
    const std::string name =
        directory.version1 ? "/cpuset.effective_cpus" : "/cpuset.cpus.effective";
    auto text = text_of(directory.path + name);
    if (text && !text->empty()) return text;
  }
  return std::nullopt;
}

Result<std::uint32_t> io_priority(Tid thread) {
  const long priority = ::syscall(SYS_ioprio_get, kIoPriorityOfThread, thread.value);
  if (priority >= 0) return static_cast<std::uint32_t>(priority);
  return fail(
      errno_error(fmt::format("cannot read the IO priority of thread {}", thread.value), errno));
}

Result<void> set_io_priority(Tid thread, std::uint32_t priority) {
  if (::syscall(SYS_ioprio_set, kIoPriorityOfThread, thread.value, priority) == 0) return {};
  return fail(
      errno_error(fmt::format("cannot set the IO priority of thread {}", thread.value), errno));
}

// The file is there for processes only, but it is that of the thread whose number is asked for.
std::optional<std::uint64_t> timer_slack(Tid thread) {
  return number_of<std::uint64_t>(fmt::format("/proc/{}/timerslack_ns", thread.value), 10);
}

Result<void> set_timer_slack(Tid thread, std::uint64_t nanoseconds) {
  return write_text(fmt::format("/proc/{}/timerslack_ns", thread.value),
                    std::to_string(nanoseconds));
}

// What the kernel takes real-time threads for that have chosen nothing.
constexpr const char* kRealTimeLoad = "/proc/sys/kernel/sched_util_clamp_min_rt_default";

std::optional<Scheduling> scheduling(Tid thread) {
  SchedulingAttributes now;
  if (!get_attributes(thread, now)) return std::nullopt;
  const bool shares = now.policy == SCHED_OTHER || now.policy == SCHED_BATCH;
  Scheduling out{now.policy, shares ? now.runtime : 0};
  // Not there without CONFIG_UCLAMP_TASK.
  const auto usual = number_of<std::uint32_t>(kRealTimeLoad, 10);
  if (!usual) return out;
  const bool is_real_time = now.policy == SCHED_FIFO || now.policy == SCHED_RR;
  if (!is_real_time || now.least != *usual) out.least_load = std::min(now.least, kMostLoad);
  out.most_load = std::min(now.most, kMostLoad);
  return out;
}

Result<void> set_slice(Tid thread, std::uint64_t nanoseconds) {
  SchedulingAttributes wanted;
  if (get_attributes(thread, wanted)) {
    wanted.runtime = nanoseconds;
    wanted.size = sizeof wanted;
    if (::syscall(SYS_sched_setattr, thread.value, &wanted, 0) == 0) return {};
  }
  return fail(
      errno_error(fmt::format("cannot set the time slice of thread {}", thread.value), errno));
}

Result<void> set_load(Tid thread, std::uint32_t least, std::uint32_t most) {
  SchedulingAttributes wanted;
  wanted.flags = kKeepAll | kClamps;
  wanted.least = least;
  wanted.most = most;
  if (::syscall(SYS_sched_setattr, thread.value, &wanted, 0) == 0) return {};
  return fail(errno_error(fmt::format("cannot set the load of thread {}", thread.value), errno));
}

// "/autogroup-93 nice 7"
int autogroup_nice(Pid pid) {
  const auto text = text_of(fmt::format("/proc/{}/autogroup", pid.value));
  if (!text) return 0;
  const std::size_t blank = text->find_last_of(' ');
  int nice = 0;
  if (blank != std::string::npos)
    std::from_chars(text->data() + blank + 1, text->data() + text->size(), nice);
  return nice;
}

Result<void> set_autogroup_nice(Pid pid, int nice) {
  return write_text(fmt::format("/proc/{}/autogroup", pid.value), std::to_string(nice));
}

std::optional<std::uint32_t> personality(Pid pid, Tid thread) {
  return number_of<std::uint32_t>(
      fmt::format("/proc/{}/task/{}/personality", pid.value, thread.value), 16);
}

std::string machine_check(Pid pid, Tid thread) {
  // PF_MCE_PROCESS and PF_MCE_EARLY of linux/sched.h
  constexpr unsigned long kOfItsOwn = 0x80;
  constexpr unsigned long kEarly = 0x08000000;
  const auto info = ProcFs().thread(pid, thread);
  if (!info || (info->flags & kOfItsOwn) == 0) return {};
  return (info->flags & kEarly) != 0 ? "early" : "late";
}

std::optional<std::uint32_t> audit_session(Pid pid) {
  constexpr std::uint32_t kNoSession = 0xffffffff;
  const auto session = number_of<std::uint32_t>(fmt::format("/proc/{}/sessionid", pid.value), 10);
  return session == kNoSession ? std::nullopt : session;
}

std::optional<std::uint32_t> core_dump_filter(Pid pid) {
  return number_of<std::uint32_t>(fmt::format("/proc/{}/coredump_filter", pid.value), 16);
}

Result<void> set_core_dump_filter(Pid pid, std::uint32_t filter) {
  return write_text(fmt::format("/proc/{}/coredump_filter", pid.value),
                    fmt::format("{:#x}", filter));
}

std::optional<std::string> memory_policy(Pid pid, Tid thread) {
  const auto file = ProcessFile::open(pid, fmt::format("task/{}/numa_maps", thread.value));
  if (!file) return std::nullopt;
  // "55d0c0a4e000 bind:0-1 file=/usr/bin/python3.11 mapped=10 ...". The kernel looks at as many
  // mappings, all their pages, as there is room for: so little room that it is one.
  constexpr std::size_t kRoom = 64;
  const auto text = file->read(kRoom);
  if (!text) return std::nullopt;
  const std::string_view line = *text;
  const std::size_t begin = line.find(' ');
  if (begin == std::string_view::npos) return std::nullopt;
  // The line ends there where the mapping has no page.
  constexpr std::string_view kEnds = " \n";
  std::size_t end = line.find_first_of(kEnds, begin + 1);
  // "prefer (many):0-1" and "weighted interleave:0"
  for (const std::string_view two : {"prefer (many)", "weighted interleave"}) {
    if (line.substr(begin + 1).starts_with(two))
      end = line.find_first_of(kEnds, begin + 1 + two.size());
  }
  if (end == std::string_view::npos) return std::nullopt;
  return std::string(line.substr(begin + 1, end - begin - 1));
}

// mpol_to_str() in the kernel's mm/mempolicy.c.
std::optional<MemoryPolicy> parse_memory_policy(std::string_view text) {
  struct Mode {
    std::string_view name;
    int mode;
    bool has_nodes;
  };
  // MPOL_PREFERRED_MANY and MPOL_WEIGHTED_INTERLEAVE are newer than Debian 12's headers.
  constexpr std::array<Mode, 7> kModes{{{"default", MPOL_DEFAULT, false},
                                        {"prefer", MPOL_PREFERRED, true},
                                        {"bind", MPOL_BIND, true},
                                        {"interleave", MPOL_INTERLEAVE, true},
                                        {"local", MPOL_LOCAL, false},
                                        {"prefer (many)", 5, true},
                                        {"weighted interleave", 6, true}}};
  constexpr int kStatic = 1 << 15;
  constexpr int kRelative = 1 << 14;
  constexpr int kBalancing = 1 << 13;
  const std::size_t colon = text.find(':');
  std::string_view name = text.substr(0, colon);
  const std::size_t equals = name.find('=');
  MemoryPolicy policy;
  if (equals != std::string_view::npos) {
    std::string_view flags = name.substr(equals + 1);
    while (!flags.empty()) {
      const std::size_t bar = flags.find('|');
      const std::string_view flag = flags.substr(0, bar);
      if (flag == "static") {
        policy.mode |= kStatic;
      } else if (flag == "relative") {
        policy.mode |= kRelative;
      } else if (flag == "balancing") {
        policy.mode |= kBalancing;
      } else {
        return std::nullopt;
      }
      flags = bar == std::string_view::npos ? std::string_view() : flags.substr(bar + 1);
    }
    name = name.substr(0, equals);
  }
  for (const Mode& mode : kModes) {
    if (mode.name != name) continue;
    policy.mode |= mode.mode;
    if (mode.has_nodes != (colon != std::string_view::npos)) return std::nullopt;
    if (!mode.has_nodes) return policy;
    auto nodes = parse_list(text.substr(colon + 1), kMostNodes);
    if (!nodes || text.size() == colon + 1) return std::nullopt;
    policy.nodes = std::move(*nodes);
    return policy;
  }
  return std::nullopt;
}

}  // namespace stasis::proc
