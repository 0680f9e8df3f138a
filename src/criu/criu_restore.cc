#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "criu/criu.h"
#include "criu/criu_session.h"

namespace stasis {
namespace {

// The kernel may take a while to free the memory of a large process.
constexpr int kKillPatienceMs = 10000;

// The parent of a process from /proc/PID/stat; 0 if there is no such process.
int parent_of(Pid pid) {
  auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/stat", pid.value), 4096);
  if (!text) return 0;
  const std::size_t name_end = text->rfind(')');  // the name may hold anything, also parentheses
  if (name_end == std::string::npos || name_end + 4 >= text->size()) return 0;
  return std::atoi(text->c_str() + name_end + 4);  // ") S 123"
}

// The numbers of the image that belong to somebody, a thread's included: /proc/N is there for both.
std::vector<Pid> taken_numbers(const std::vector<Pid>& pids) {
  std::vector<Pid> taken;
  for (const Pid pid : pids) {
    struct stat info = {};
    if (::stat(fmt::format("/proc/{}", pid.value).c_str(), &info) == 0) taken.push_back(pid);
  }
  return taken;
}

// Who has a number, for people: "python3", "python3, a zombie that process 1 does not reap".
std::string holder_of(Pid pid) {
  auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/stat", pid.value), 4096);
  const std::size_t begin = text ? text->find('(') : std::string::npos;
  const std::size_t end = text ? text->rfind(')') : std::string::npos;
  if (begin == std::string::npos || end == std::string::npos || end < begin) return "?";
  std::string name = text->substr(begin + 1, end - begin - 1);
  for (char& c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  if (end + 2 < text->size() && (*text)[end + 2] == 'Z') {
    name += fmt::format(", a zombie that process {} does not reap", parent_of(pid));
  }
  return name;
}

Error numbers_taken(const std::vector<Pid>& taken) {
  std::string list;
  for (std::size_t i = 0; i < taken.size() && i < 5; ++i) {
    list += fmt::format("{}{} ({})", i == 0 ? "" : ", ", taken[i].value, holder_of(taken[i]));
  }
  if (taken.size() > 5) list += ", ...";
  return Error{ErrorCode::kPidInUse,
               fmt::format("{} of the process numbers that the image needs {} taken: {}",
                           taken.size(), taken.size() == 1 ? "is" : "are", list),
               "end these processes, or restore in a new PID namespace "
               "(unshare --pid --fork --mount-proc)",
               std::nullopt,
               {}};
}

// Ends what a failed restore left: our own child with the root's number, and what descends from it.
// Processes that merely have one of the numbers belong to somebody else. Returns what still lives.
std::vector<Pid> kill_leftovers(Pid root, const std::vector<Pid>& pids) {
  std::vector<Pid> left;
  if (parent_of(root) == ::getpid()) left.push_back(root);
  for (bool grown = true; grown;) {
    grown = false;
    for (const Pid pid : pids) {
      if (std::find(left.begin(), left.end(), pid) != left.end()) continue;
      const int parent = parent_of(pid);
      if (parent != 0 && std::find(left.begin(), left.end(), Pid{parent}) != left.end()) {
        left.push_back(pid);
        grown = true;
      }
    }
  }
  std::vector<std::pair<Pid, Pidfd>> held;
  for (const Pid pid : left) {
    auto pidfd = Pidfd::open(pid);
    if (pidfd) held.emplace_back(pid, std::move(*pidfd));
  }
  for (const auto& [pid, pidfd] : held)
    (void)pidfd.signal(SIGKILL);
  std::vector<Pid> alive;
  for (const auto& [pid, pidfd] : held) {
    if (!pidfd.wait_exit(kKillPatienceMs)) alive.push_back(pid);
  }
  // The root is our child, and if we are a subreaper the others have become it: their numbers are
  // free only once we have reaped them. Somebody else's processes are not touched by this.
  for (const Pid pid : pids) {
    siginfo_t info = {};
    while (::waitid(P_PID, static_cast<id_t>(pid.value), &info, WEXITED | WNOHANG) != 0 &&
           errno == EINTR) {
    }
  }
  return alive;
}

}  // namespace

Result<RestoredTree> Criu::restore(const RestoreRequest& request,
                                   const std::function<Result<void>()>& on_restored,
                                   const Interrupt& interrupt) const {
  std::vector<Pid> pids = request.pids;
  if (std::find(pids.begin(), pids.end(), request.root) == pids.end()) pids.push_back(request.root);
  if (auto taken = taken_numbers(pids); !taken.empty()) return fail(numbers_taken(taken));
  if (auto stopped = interrupt.check(); !stopped) return fail(std::move(stopped).error());

  CriuProcess::StartOptions start;
  start.plugin_dir = fmt::format("/proc/{}/fd/{}", ::getpid(), request.log_dir.get());
  // A shell job is restored into criu's own group and onto criu's own terminal: ours.
  start.own_process_group = !request.options.shell_job;
  start.keep_stdin = request.options.shell_job;
  criu_rpc::Request message;
  message.set_type(criu_rpc::RESTORE);
  criu_rpc::Options& options = *message.mutable_opts();
  for (const InheritedFd& inherited : request.inherit) {
    criu_rpc::InheritFd& entry = *options.add_inherit_fd();
    entry.set_key(inherited.key);
    entry.set_fd(CriuProcess::kFirstInherited + static_cast<int>(start.inherit.size()));
    start.inherit.push_back(inherited.fd);
  }
  options.set_images_dir_fd(request.images_dir.get());
  options.set_work_dir_fd(request.log_dir.get());
  options.set_log_file(request.log_name);
  options.set_log_level(request.log_level);
  options.set_rst_sibling(true);
  options.set_notify_scripts(true);
  set_options(options, request.options);

  auto process = CriuProcess::start(path_, start);
  if (!process) return fail(std::move(process).error());
  bool restored = false;
  // An interrupt waits for the next notification: criu then cleans up in order, ghost files
  // included, which it cannot when it is killed at the deadline.
  CriuLimits limits;
  limits.deadline = request.deadline;
  const CriuAnswer answer = converse(
      *process, message,
      [&](const criu_rpc::Notification& notification) -> Result<void> {
        if (!restored) {
          if (auto stopped = interrupt.check(); !stopped) return stopped;
        }
        // "post-restore" is the last chance: all is in place, nothing runs, the network is still
        // locked (cr-restore.c). Later answers are ignored by CRIU.
        if (notification.script() != "post-restore") return {};
        if (on_restored) {
          if (auto good = on_restored(); !good) return good;
        }
        restored = true;
        return {};
      },
      limits);

  if (answer.succeeded() && answer.response->has_restore()) {
    const Pid root{answer.response->restore().pid()};
    auto root_fd = Pidfd::open(root);
    if (root_fd) return RestoredTree{root, std::move(*root_fd)};
    return fail(std::move(root_fd).error().within("taking hold of the restored process"));
  }
  Error error = answer.refusal
                    ? *answer.refusal
                    : criu_error(fmt::format("restore process {}", request.root.value), answer,
                                 *process, {request.log_dir, request.log_name, request.log_path});
  const std::vector<Pid> alive = kill_leftovers(request.root, pids);
  if (!alive.empty()) {
    std::string list;
    for (const Pid pid : alive)
      list += fmt::format(" {}", pid.value);
    error.message = fmt::format("a failed restore left processes that do not end:{} ({})", list,
                                error.to_string());
    error.code = ErrorCode::kNotRolledBack;
    error.remedy = "kill -9" + list;
    error.context.clear();
  }
  return fail(std::move(error));
}

}  // namespace stasis
