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
#include "criu/criu_external.h"
#include "criu/criu_session.h"
#include "criu/inside_criu.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

// The kernel may take a while to free the memory of a large process.
constexpr int kKillTimeoutMs = 10000;

// 0 if there is no such process.
int parent_of(Pid pid) {
  auto info = proc::ProcFs().process(pid);
  return info ? info->parent.value : 0;
}

// The numbers of the image that a process has, a thread's included: /proc/N is there for both.
std::vector<int> taken_numbers(const std::vector<Pid>& pids, const std::vector<Tid>& threads) {
  std::vector<int> taken;
  const auto look = [&](int number) {
    struct stat info = {};
    if (::stat(fmt::format("/proc/{}", number).c_str(), &info) == 0) taken.push_back(number);
  };
  for (const Pid pid : pids)
    look(pid.value);
  for (const Tid thread : threads)
    look(thread.value);
  return taken;
}

// Who has a number, for people: "python3", "python3, a zombie that process 1 does not reap".
std::string holder_of(int number) {
  auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/stat", number), 4096);
  const std::size_t begin = text ? text->find('(') : std::string::npos;
  const std::size_t end = text ? text->rfind(')') : std::string::npos;
  if (begin == std::string::npos || end == std::string::npos || end < begin) return "?";
  std::string name = text->substr(begin + 1, end - begin - 1);
  for (char& c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  if (end + 2 < text->size() && (*text)[end + 2] == 'Z') {
    name += fmt::format(", a zombie that process {} does not reap", parent_of(Pid{number}));
  }
  return name;
}

Error numbers_taken(const std::vector<int>& taken) {
  std::string list;
  for (std::size_t i = 0; i < taken.size() && i < 5; ++i) {
    list += fmt::format("{}{} ({})", i == 0 ? "" : ", ", taken[i], holder_of(taken[i]));
  }
  if (taken.size() > 5) list += ", ...";
  return Error{ErrorCode::kPidInUse,
               fmt::format("{} of the process or thread numbers that the image needs {} taken: {}",
                           taken.size(), taken.size() == 1 ? "is" : "are", list),
               "end these processes, or restore in a new PID namespace "
               "(unshare --pid --fork --mount-proc)"};
}

// What a restore has made so far. Ends it on every path out, exceptions included, unless the
// restore is dismissed as a success: no other tool knows of these processes yet.
class HalfRestored {
 public:
  HalfRestored(Pid root, std::vector<Pid> pids) : pids_(std::move(pids)) { add(root); }
  HalfRestored(const HalfRestored&) = delete;
  HalfRestored& operator=(const HalfRestored&) = delete;
  ~HalfRestored() {
    if (armed_) (void)end();
  }
  void dismiss() { armed_ = false; }

  void add(Pid pid) {
    if (std::find(pids_.begin(), pids_.end(), pid) == pids_.end()) pids_.push_back(pid);
  }
  const std::vector<Pid>& pids() const { return pids_; }

  // Kills all there is, and does not wait.
  void kill() {
    // Each that is found stands still first, so that it forks no other after the look.
    while (look()) {
    }
    for (const auto& [pid, pidfd] : held_)
      (void)pidfd.signal(SIGKILL);
  }

  // Once criu has ended: kills, waits, reaps. Returns what still lives.
  std::vector<Pid> end() {
    armed_ = false;
    kill();
    std::vector<Pid> alive;
    for (const auto& [pid, pidfd] : held_) {
      if (!pidfd.wait_exit(kKillTimeoutMs)) alive.push_back(pid);
    }
    // The root is our child, and if we are a subreaper the others have become it: their numbers are
    // free only once we have reaped them. Processes of others are not touched by this.
    for (const auto& [pid, pidfd] : held_)
      add(pid);
    for (const Pid pid : pids_) {
      siginfo_t info = {};
      while (::waitid(P_PID, static_cast<id_t>(pid.value), &info, WEXITED | WNOHANG) != 0 &&
             errno == EINTR) {
      }
    }
    return alive;
  }

 private:
  // Takes hold of our own children with the image's numbers, and of what descends from them.
  // Processes that merely have one of the numbers belong to others. False if none is new.
  bool look() {
    const std::size_t before = held_.size();
    for (const Pid pid : pids_) {
      if (parent_of(pid) != ::getpid()) continue;
      auto tree = proc::ProcFs().tree(pid);
      if (!tree) continue;
      for (const proc::ProcessInfo& info : *tree) {
        const bool known = std::any_of(held_.begin(), held_.end(),
                                       [&](const auto& one) { return one.first == info.pid; });
        // One whose first thread has ended counts as a zombie while others of its threads live.
        if (known || info.state == 'X') continue;
        auto pidfd = Pidfd::open(info.pid);
        if (!pidfd) continue;
        (void)pidfd->signal(SIGSTOP);
        held_.emplace_back(info.pid, std::move(*pidfd));
      }
    }
    return held_.size() != before;
  }

  std::vector<Pid> pids_;
  std::vector<std::pair<Pid, Pidfd>> held_;
  bool armed_ = true;
};

Error other_tree(Pid expected, Pid found) {
  return {ErrorCode::kImageCorrupt,
          fmt::format("the files of the image hold process {}, and its manifest says {}",
                      found.value, expected.value),
          "the manifest is not the one of this image: restore from another one, or copy it again "
          "from where it came from"};
}

CriuProcess::StartOptions start_options(const RestoreRequest& request) {
  CriuProcess::StartOptions start;
  start.plugin_dir = fmt::format("/proc/{}/fd/{}", ::getpid(), request.work_dir.get());
  // A shell job is restored into criu's own group and onto criu's own terminal: ours. What the
  // terminal sends to our group is not for a job that goes on without us.
  start.own_process_group = !request.options.shell_job || request.in_background;
  start.keep_stdin = request.options.shell_job;
  for (const InheritedFd& inherited : request.inherit)
    start.inherit.push_back(inherited.fd);
  // Without it criu says that it cannot bind them.
  if (auto library = InsideCriu::find_library(); request.binds_anywhere && library)
    start.binding_library = std::move(*library);
  return start;
}

criu_rpc::Request restore_message(const RestoreRequest& request) {
  criu_rpc::Request message;
  message.type = criu_rpc::Type::kRestore;
  criu_rpc::Options& options = message.opts.emplace();
  int number = CriuProcess::kFirstInherited;  // as start_options() has them
  for (const InheritedFd& inherited : request.inherit) {
    criu_rpc::InheritFd& entry = options.inherit_fd.emplace_back();
    entry.key = inherited.key;
    entry.fd = number++;
  }
  options.images_dir_fd = request.images_dir.get();
  options.work_dir_fd = request.work_dir.get();
  options.log_file = request.log_name;
  options.log_level = request.log_level;
  options.rst_sibling = true;
  options.notify_scripts = true;
  CriuOptions words = request.options;
  words.external = externals_for_restore(words.external, request.external);
  set_options(options, words);
  return message;
}

CriuLimits restore_limits(const RestoreRequest& request, HalfRestored& half,
                          const Interrupt& interrupt) {
  CriuLimits limits;
  limits.deadline = request.deadline;
  limits.stop = [&] {
    auto stopped = interrupt.check();
    return stopped && request.check ? request.check() : stopped;
  };
  // Criu watches the tasks: when they die it cleans up in order, ghost files included, which it
  // cannot when it is killed.
  limits.give_up = [&] {
    if (request.on_give_up) request.on_give_up();
    half.kill();
  };
  limits.on_wait = request.on_wait;
  return limits;
}

// Of a restore that has failed for `error`, and left these.
Error left_alive(const std::vector<Pid>& alive, Error error) {
  std::string list;
  for (const Pid pid : alive)
    list += fmt::format(" {}", pid.value);
  return {ErrorCode::kNotRolledBack,
          fmt::format("a failed restore left processes that do not end:{} ({})", list,
                      error.to_string()),
          "kill -9" + list};
}

}  // namespace

Result<RestoredTree> Criu::restore(const RestoreRequest& request,
                                   const std::function<Result<void>()>& on_restored,
                                   const Interrupt& interrupt) const {
  HalfRestored half(request.root, request.pids);
  if (auto taken = taken_numbers(half.pids(), request.threads); !taken.empty()) {
    half.dismiss();
    return fail(numbers_taken(taken));
  }
  STASIS_TRY(interrupt.check());

  const CriuProcess::StartOptions start = start_options(request);
  const criu_rpc::Request message = restore_message(request);

  // After `half`: on every way out criu ends before what it has made.
  STASIS_TRY_ASSIGN(auto process, start_told(path_, start, request.on_started));
  const CriuAnswer answer = converse(
      process, message,
      [&](const criu_rpc::Notification& notification) -> Result<void> {
        if (notification.pid > 0 && notification.pid != request.root.value) {
          half.add(Pid{notification.pid});
          return fail(other_tree(request.root, Pid{notification.pid}));
        }
        STASIS_TRY(interrupt.check());
        // "pre-resume": every thread stands at the end of CRIU's code, and is about to be let go.
        if (notification.script == "pre-resume" && request.on_resume) request.on_resume();
        // "post-restore" is the last chance: all is in place, nothing runs, the network is still
        // locked (cr-restore.c). Later answers are ignored by CRIU.
        if (notification.script != "post-restore" || !on_restored) return {};
        return on_restored();
      },
      restore_limits(request, half, interrupt));

  Error error;
  if (answer.succeeded() && answer.response->restored_pid) {
    const Pid root{*answer.response->restored_pid};
    half.add(root);
    auto root_fd = Pidfd::open(root);
    if (root_fd) {
      half.dismiss();
      return RestoredTree{root, std::move(*root_fd)};
    }
    error = std::move(root_fd).error().within("taking hold of the restored process");
  } else if (answer.refusal) {
    error = *answer.refusal;
  } else {
    error = criu_error(fmt::format("restore process {}", request.root.value), answer, process,
                       {request.work_dir, request.log_name, request.log_path});
  }
  tell_of_left_behind(process, error);
  if (request.on_give_up) request.on_give_up();
  const std::vector<Pid> alive = half.end();
  if (!alive.empty()) return fail(left_alive(alive, std::move(error)));
  return fail(std::move(error));
}

}  // namespace stasis
