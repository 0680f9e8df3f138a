#include "proc/procfs.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/fd.h"
#include "proc/proc_mount.h"

namespace stasis::proc {
namespace {

constexpr std::string_view kRealProc = "/proc";

Error no_such_process(Pid pid) {
  return Error{ErrorCode::kNoSuchProcess, fmt::format("there is no process {}", pid.value),
               "check the number; `stasis ps` lists the processes that use CUDA"};
}

// Of a file that the kernel itself makes: no process can put another one in its place, so that it
// is opened at once.
Result<std::string> read_kernels(const std::string& path) {
  constexpr std::size_t kMost = 64U << 20;
  STASIS_TRY_ASSIGN(auto file, open_file(AT_FDCWD, path, O_RDONLY | O_NONBLOCK));
  return read_file(file, path, kMost);
}

Result<std::string> read_of(const std::string& root, Pid pid, const std::string& name) {
  const auto read = [path = fmt::format("{}/{}/{}", root, pid.value, name)] {
    return read_kernels(path);
  };
  // "stat" waits for an execve(2) of the process to come to its end (seen with Linux 6.18).
  auto text = name.ends_with("stat") ? call_within(pid, read) : std::optional(read());
  if (!text) return fail(keeps_its_memory(pid));
  if (!*text) return fail(why_unread(root, pid, std::move(text->error())));
  return std::move(*text);
}

// The value of "Key:\tvalue" in /proc/PID/status.
std::string field(const std::string& status, std::string_view key) {
  for (std::size_t at = 0; at < status.size();
       at = std::min(status.find('\n', at), status.size()) + 1) {
    std::string_view line = std::string_view(status).substr(at, status.find('\n', at) - at);
    if (!line.starts_with(key)) continue;
    line.remove_prefix(key.size());
    if (!line.starts_with(':')) continue;
    const std::size_t begin = line.find_first_not_of(" \t", 1);
    return begin == std::string_view::npos ? std::string() : std::string(line.substr(begin));
  }
  return {};
}

std::vector<std::string_view> words_of(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\n";
  std::vector<std::string_view> words;
  for (std::size_t at = text.find_first_not_of(kBlanks); at != std::string_view::npos;
       at = text.find_first_not_of(kBlanks, at)) {
    const std::size_t end = std::min(text.find_first_of(kBlanks, at), text.size());
    words.push_back(text.substr(at, end - at));
    at = end;
  }
  return words;
}

// The first number in a text, or 0.
template <class T>
T number(std::string_view text) {
  T value{};
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

}  // namespace

namespace {

// Of one that is ending the kernel shows neither files nor networks any more, and its number until
// its parent has seen the end. Its memory is gone before those, and its other threads are.
bool is_ending(const std::string& root, Pid pid) {
  if (root != kRealProc) return false;
  const auto status = read_kernels(fmt::format("{}/{}/status", root, pid.value));
  return status && field(*status, "VmSize").empty() && number<int>(field(*status, "Threads")) <= 1;
}

}  // namespace

Error why_unread(const std::string& root, Pid pid, Error why) {
  if (why.code == ErrorCode::kNotPermitted) {
    return refusal({"permissions", Severity::kRed, pid, std::move(why.message),
                    "run as root, or as the user who owns the process"},
                   why.code);
  }
  const bool vanished = why.code == ErrorCode::kNoSuchProcess ||
                        ::access(fmt::format("{}/{}", root, pid.value).c_str(), F_OK) != 0;
  if (!vanished && why.code == ErrorCode::kIo && is_ending(root, pid)) return no_such_process(pid);
  if (!vanished) return why;
  return root == kRealProc && is_hidden(pid) ? hidden(pid) : no_such_process(pid);
}

std::uint64_t boot_offset_ticks(const std::string& timens_offsets) {
  // "boottime  <seconds>  <nanoseconds>", seconds with a sign.
  std::istringstream lines(timens_offsets);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string clock;
    std::int64_t seconds = 0, nanoseconds = 0;
    if (!(words >> clock >> seconds >> nanoseconds) || clock != "boottime") continue;
    const std::int64_t ticks = ::sysconf(_SC_CLK_TCK);
    return static_cast<std::uint64_t>(seconds * ticks + nanoseconds * ticks / 1'000'000'000);
  }
  return 0;
}

namespace {

// The kernel adds to a start time what the clock of the READER's time namespace is off by
// (fs/proc/array.c), so the same process has another one in each. A process stays in its namespace.
std::uint64_t own_boot_offset_ticks() {
  static const std::uint64_t ticks = [] {
    const auto text = read_file(AT_FDCWD, "/proc/self/timens_offsets");
    return text ? boot_offset_ticks(*text) : 0;  // before Linux 5.6 there are none
  }();
  return ticks;
}

Result<ProcessInfo> parse_own_stat(const std::string& root, const std::string& line) {
  auto info = parse_stat(line);
  if (info && root == kRealProc) info->start_ticks -= own_boot_offset_ticks();
  return info;
}

}  // namespace

double age_of(const ProcessInfo& process) {
  timespec now{};
  (void)::clock_gettime(CLOCK_BOOTTIME, &now);
  const auto ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
  const auto offset = static_cast<double>(static_cast<std::int64_t>(own_boot_offset_ticks()));
  constexpr double kNano = 1e-9;
  return static_cast<double>(now.tv_sec) + kNano * static_cast<double>(now.tv_nsec) -
         (static_cast<double>(process.start_ticks) + offset) / ticks;
}

Result<ProcessInfo> parse_stat(const std::string& line) {
  // "12 (name with ) and blanks) S 1 ...": the name ends at the LAST bracket.
  const std::size_t open = line.find('(');
  const std::size_t close = line.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open) {
    return fail(ErrorCode::kInternal, "unreadable line in /proc/PID/stat: " + line.substr(0, 80));
  }
  ProcessInfo info;
  info.pid = Pid{number<int>(line)};
  info.comm = line.substr(open + 1, close - open - 1);
  const std::vector<std::string_view> words = words_of(std::string_view(line).substr(close + 1));
  // Fields are numbered from 3 (state) here; 4 parent, 6 session, 7 terminal, 22 start time
  // (`man 5 proc`).
  if (words.size() < 20) {
    return fail(ErrorCode::kInternal, "short line in /proc/PID/stat: " + line.substr(0, 80));
  }
  info.state = words[0][0];
  info.parent = Pid{number<int>(words[1])};
  info.session = number<int>(words[3]);
  info.tty = number<int>(words[4]);
  info.start_ticks = number<std::uint64_t>(words[19]);
  // 9 flags, 14 to 17 processor time, 38 signal at its end, 39 processor, 52 how it has ended.
  info.flags = number<unsigned long>(words[6]);
  for (std::size_t i = 11; i <= 14; ++i)
    info.cpu_ticks += number<std::uint64_t>(words[i]);
  if (words.size() > 35) info.exit_signal = number<int>(words[35]);
  if (words.size() > 36) info.processor = number<int>(words[36]);
  if (words.size() > 49) info.exit_code = number<int>(words[49]);
  return info;
}

Result<ProcessInfo> ProcFs::process(Pid pid) const {
  if (pid.value <= 0) {
    return fail(ErrorCode::kUsage, fmt::format("{} is not a process number", pid.value),
                "check the number; `stasis ps` lists the processes that use CUDA");
  }
  if (root_ == kRealProc) STASIS_TRY(check_proc_mount());
  STASIS_TRY_ASSIGN(auto status, read_of(root_, pid, "status"));
  const std::string group = field(status, "Tgid");
  const int process = number<int>(group);
  // The kernel takes its number from one that is just ending before the file is gone.
  if (group == "0") return fail(no_such_process(pid));
  if (process == 0) {
    return fail(ErrorCode::kInternal,
                fmt::format("{}/{}/status names no process (Tgid)", root_, pid.value));
  }
  if (process != pid.value) {
    return fail(ErrorCode::kThreadId,
                fmt::format("{} is a thread of process {}, not a process", pid.value, process),
                fmt::format("give the number of the process: {}", process));
  }
  STASIS_TRY_ASSIGN(auto stat, read_of(root_, pid, "stat"));
  return parse_own_stat(root_, stat);
}

Result<char> ProcFs::state(Pid pid) const {
  STASIS_TRY_ASSIGN(auto status, read_of(root_, pid, "status"));
  const std::string state = field(status, "State");
  if (!state.empty()) return state.front();
  return fail(ErrorCode::kInternal,
              fmt::format("{}/{}/status names no state (State)", root_, pid.value));
}

Result<ProcessDetails> ProcFs::details(Pid pid) const {
  STASIS_TRY_ASSIGN(auto status, read_of(root_, pid, "status"));
  ProcessDetails details;
  // "Uid: real effective saved file"
  std::istringstream uids(field(status, "Uid"));
  unsigned real = 0;
  uids >> real >> details.uid;
  details.tracer = number<int>(field(status, "TracerPid"));
  std::istringstream ns_pids(field(status, "NSpid"));
  details.ns_pid = pid.value;
  for (int ns_pid = 0; ns_pids >> ns_pid;)
    details.ns_pid = ns_pid;
  auto argv = words(pid, "cmdline");
  if (!argv && argv.error().code != ErrorCode::kBusy) return fail(std::move(argv.error()));
  if (argv) details.argv = std::move(*argv);
  return details;
}

Result<ProcFs::Listing> ProcFs::list() const {
  if (root_ == kRealProc) STASIS_TRY(check_proc_mount());
  const DirectoryStream dir = list_open(root_);
  if (!dir) return fail(errno_error("cannot list " + root_, errno));
  std::vector<Pid> pids;
  while (const dirent* entry = ::readdir(dir.get()))
    if (const Pid pid{number<int>(entry->d_name)}; pid.value > 0) pids.push_back(pid);
  const auto stats = std::make_shared<std::vector<Result<std::string>>>(pids.size());
  const auto came = run_within_each(pids, [root = root_, pids, stats](std::size_t i) {
    stats->at(i) = read_kernels(fmt::format("{}/{}/stat", root, pids[i].value));
  });
  Listing out;
  for (std::size_t i = 0; i < pids.size(); ++i) {
    if (!came[i]) {
      if (const auto status = read_of(root_, pids[i], "status")) {
        out.held.push_back(
            {pids[i], Pid{number<int>(field(*status, "PPid"))}, field(*status, "Name")});
      }
      continue;
    }
    if (!stats->at(i)) continue;  // it is gone meanwhile
    if (auto info = parse_own_stat(root_, *stats->at(i))) out.processes.push_back(std::move(*info));
  }
  return out;
}

Result<std::vector<ProcessInfo>> ProcFs::all() const {
  STASIS_TRY_ASSIGN(auto listing, list());
  return std::move(listing.processes);
}

Result<std::vector<ProcessInfo>> ProcFs::tree(Pid root) const {
  STASIS_TRY_ASSIGN(auto first, process(root));
  STASIS_TRY_ASSIGN(const auto listing, list());
  std::multimap<Pid, const ProcessInfo*> children;
  for (const ProcessInfo& info : listing.processes)
    children.emplace(info.parent, &info);
  std::vector<ProcessInfo> tree = {first};
  std::set<Pid> seen = {root};
  // Grows while we walk it; breadth first, so parents come before children.
  for (std::size_t i = 0; i < tree.size(); ++i) {
    const auto [begin, end] = children.equal_range(tree[i].pid);
    for (auto it = begin; it != end; ++it) {
      if (seen.insert(it->second->pid).second) tree.push_back(*it->second);
    }
    for (const HeldProcess& held : listing.held)
      if (held.parent == tree[i].pid) return fail(keeps_its_memory(held.pid));
  }
  if (root_ == kRealProc && proc_may_hide())
    for (const ProcessInfo& info : tree)
      STASIS_TRY(check_children(info.pid, seen));
  return tree;
}

// The kernel lists those, too, that it does not show.
Result<void> ProcFs::check_children(Pid parent, const std::set<Pid>& seen) const {
  for (const Tid thread : threads(parent)) {
    const auto text = read_file(
        AT_FDCWD, fmt::format("{}/{}/task/{}/children", root_, parent.value, thread.value));
    std::istringstream numbers(text ? *text : std::string());
    for (Pid child; numbers >> child.value;) {
      if (seen.contains(child) || !is_hidden(child)) continue;
      Obstacle why = hidden(child).obstacles.front();
      why.what += fmt::format("; it is a child of process {}", parent.value);
      return fail(refusal(std::move(why), ErrorCode::kNotPermitted));
    }
  }
  return {};
}

std::vector<Tid> ProcFs::threads(Pid pid) const {
  std::vector<Tid> out;
  const std::string path = fmt::format("{}/{}/task", root_, pid.value);
  const DirectoryStream dir = list_open(path);
  while (const dirent* entry = dir ? ::readdir(dir.get()) : nullptr) {
    const int tid = number<int>(entry->d_name);
    if (tid > 0) out.push_back(Tid{tid});
  }
  return out;
}

bool ProcFs::has_ended(Pid pid) const {
  const auto first = process(pid);
  if (!first || !first->has_ended())
    return !first && first.error().code == ErrorCode::kNoSuchProcess;
  const auto all = threads(pid);
  return std::all_of(all.begin(), all.end(), [&](const Tid& one) {
    const auto known = thread(pid, one);
    return !known || known->has_ended();
  });
}

Result<ProcessInfo> ProcFs::thread(Pid pid, Tid thread) const {
  STASIS_TRY_ASSIGN(auto stat, read_of(root_, pid, fmt::format("task/{}/stat", thread.value)));
  return parse_own_stat(root_, stat);
}

Result<ThreadStatus> ProcFs::thread_status(Pid pid, Tid thread) const {
  STASIS_TRY_ASSIGN(auto text, read_of(root_, pid, fmt::format("task/{}/status", thread.value)));
  const auto mask = [&text](std::string_view key) {
    const std::string word = field(text, key);
    std::uint64_t value = 0;
    std::from_chars(word.data(), word.data() + word.size(), value, 16);
    return value;
  };
  return ThreadStatus{mask("SigPnd") | mask("ShdPnd"),
                      mask("SigBlk"),
                      number<std::uint64_t>(field(text, "voluntary_ctxt_switches")) +
                          number<std::uint64_t>(field(text, "nonvoluntary_ctxt_switches")),
                      number<int>(field(text, "TracerPid")),
                      number<int>(field(text, "Seccomp")),
                      field(text, "NoNewPrivs") == "1"};
}

Result<std::vector<OpenFile>> ProcFs::open_files(Pid pid) const {
  const std::string path = fmt::format("{}/{}/fd", root_, pid.value);
  const DirectoryStream dir = list_open(path);
  if (!dir) {
    const int error = errno;
    if (error == ENOENT) return fail(no_such_process(pid));
    return fail(errno_error("cannot list " + path, error));
  }
  std::vector<OpenFile> out;
  while (const dirent* entry = ::readdir(dir.get())) {
    std::array<char, PATH_MAX> link{};
    const ssize_t size =
        ::readlinkat(::dirfd(dir.get()), entry->d_name, link.data(), link.size() - 1);
    if (size > 0) out.push_back({number<int>(entry->d_name), link.data()});
  }
  return out;
}

std::optional<int> ProcFs::tracer(Pid pid) const {
  for (const Tid thread : threads(pid)) {
    const auto status = thread_status(pid, thread);
    if (status && status->tracer != 0) return status->tracer;
  }
  return std::nullopt;
}

Result<std::int64_t> ProcFs::started(const ProcessInfo& info) const {
  STASIS_TRY_ASSIGN(auto text, read_file(AT_FDCWD, root_ + "/stat"));
  constexpr std::string_view kKey = "\nbtime ";
  const std::size_t at = text.find(kKey);
  if (at == std::string::npos)
    return fail(ErrorCode::kIo, root_ + "/stat does not tell when this machine was started");
  const auto boot =
      number<std::int64_t>(std::string_view(text)
                               .substr(at + kKey.size())
                               .substr(0, text.find('\n', at + 1) - at - kKey.size()));
  if (boot <= 0)
    return fail(ErrorCode::kIo, root_ + "/stat does not tell when this machine was started");
  const long ticks = ::sysconf(_SC_CLK_TCK);
  // The boot time is off by the same.
  const std::uint64_t start =
      info.start_ticks + (root_ == kRealProc ? own_boot_offset_ticks() : std::uint64_t{0});
  return boot + static_cast<std::int64_t>(start) / ticks;
}

Result<std::uint64_t> ProcFs::own_capabilities(const char* set) const {
  STASIS_TRY_ASSIGN(auto status, read_file(AT_FDCWD, root_ + "/self/status"));
  const std::string word = field(status, set);
  std::uint64_t bits = 0;
  if (std::from_chars(word.data(), word.data() + word.size(), bits, 16).ec != std::errc())
    return fail(ErrorCode::kIo, root_ + "/self/status does not tell this process's capabilities");
  return bits;
}

Result<std::uint64_t> ProcFs::effective_capabilities() const { return own_capabilities("CapEff"); }
Result<std::uint64_t> ProcFs::permitted_capabilities() const { return own_capabilities("CapPrm"); }

Result<std::uint64_t> ProcFs::resident_bytes(Pid pid) const {
  STASIS_TRY_ASSIGN(auto text, read_of(root_, pid, "statm"));
  const std::size_t blank = text.find(' ');
  if (blank == std::string::npos) return 0;
  static const auto kPage = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return number<std::uint64_t>(std::string_view(text).substr(blank + 1)) * kPage;
}

Result<std::uint64_t> ProcFs::anonymous_bytes(Pid pid) const {
  STASIS_TRY_ASSIGN(auto status, read_of(root_, pid, "status"));
  return (number<std::uint64_t>(field(status, "RssAnon")) +
          number<std::uint64_t>(field(status, "VmSwap"))) *
         1024;
}

Result<std::uint64_t> ProcFs::memory_available() const { return meminfo("MemAvailable"); }

Result<std::uint64_t> ProcFs::swap_free() const { return meminfo("SwapFree"); }

Result<std::uint64_t> ProcFs::meminfo(std::string_view key) const {
  STASIS_TRY_ASSIGN(auto text, read_file(AT_FDCWD, root_ + "/meminfo"));
  return number<std::uint64_t>(field(text, key)) * 1024;
}

std::string kernel_release() {
  utsname name{};
  return ::uname(&name) == 0 ? std::string(static_cast<const char*>(name.release)) : std::string();
}

bool may_trace(Pid pid) {
  char byte = 0;
  // Not even SIGKILL would end the wait of process_vm_readv(2).
  const auto looked = call_within(pid, [path = fmt::format("/proc/{}/mem", pid.value)] {
    char nothing = 0;
    const auto memory = open_file(AT_FDCWD, path, O_RDONLY);
    return memory && ::pread(memory->get(), &nothing, sizeof nothing, 0) > 0;
  });
  if (!looked) return true;
  const iovec local{&byte, 1};
  const iovec nowhere{nullptr, 1};
  // EFAULT (address 0 is not mapped) means that permission was not the problem, nor is it with
  // ESRCH (the process is just ending, or is a thread of the kernel).
  return ::process_vm_readv(pid.value, &local, 1, &nowhere, 1, 0) >= 0 || errno == EFAULT ||
         errno == ESRCH;
}

ino_t pid_namespace_of(Pid pid) {
  const auto seen = call_within(pid, [path = fmt::format("/proc/{}/ns/pid", pid.value)] {
    struct stat info {};
    return ::stat(path.c_str(), &info) == 0 ? info.st_ino : ino_t{0};
  });
  return seen.value_or(0);
}

bool is_shell_job(const std::vector<ProcessInfo>& tree) {
  if (tree.empty()) return false;
  const auto in_tree = [&](int session) {
    return std::any_of(tree.begin(), tree.end(),
                       [&](const ProcessInfo& info) { return info.pid.value == session; });
  };
  return std::any_of(tree.begin(), tree.end(), [&](const ProcessInfo& info) {
    return info.tty != 0 || !in_tree(info.session);
  });
}

}  // namespace stasis::proc
