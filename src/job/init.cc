#include "job/init.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/helper_process.h"
#include "base/helper_start.h"
#include "checkpoint/journal.h"
#include "job/io_uring.h"
#include "job/json_message.h"
#include "job/shared_memory.h"
#include "proc/next_numbers.h"
#include "proc/procfs.h"

namespace stasis::job {
namespace {

constexpr int kWorkerEndMs = 5000;
constexpr std::string_view kVerbName = "stasis";
constexpr int kVerbPollMs = 20;  // the poll interval for the end of a verb

Result<void> mount_or_fail(const char* what, const std::string& where, const char* type,
                           unsigned long flags, const char* data) {
  if (::mount(what, where.c_str(), type, flags, data) == 0) return {};
  Error error = errno_error(fmt::format("cannot mount {} in the job's namespace", where), errno);
  error.remedy = "run stasis as root, outside of a container or in one that may mount";
  return fail(std::move(error));
}

// Directories below /dev/shm as they are outside, to be mounted where the job's own /dev/shm will
// be.
class KeptDirectories {
 public:
  explicit KeptDirectories(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
      // The name of what is open, and not the other way round: another user may exchange what lies
      // in /dev/shm.
      auto fd = open_file(AT_FDCWD, path, O_PATH | O_DIRECTORY);
      if (!fd) continue;
      std::error_code none;
      const std::string real =
          std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd->get()), none).string();
      if (none || !real.starts_with(std::string(kSharedMemory) + "/")) continue;
      kept_.emplace_back(real, std::move(*fd));
    }
  }
  Result<void> bring_back() const {
    for (const auto& [path, fd] : kept_) {
      std::error_code failed;
      std::filesystem::create_directories(path, failed);
      if (failed) return fail(errno_error("cannot make " + path, failed.value()));
      const std::string from = fmt::format("/proc/self/fd/{}", fd.get());
      if (auto done = mount_or_fail(from.c_str(), path, nullptr, MS_BIND | MS_REC, nullptr); !done)
        return done;
    }
    return {};
  }

 private:
  std::vector<std::pair<std::string, UniqueFd>> kept_;
};

// Mounts of outside that come later, as an automounter makes them, are seen; none goes back.
Result<void> set_up_mounts(const std::string& state, std::vector<std::string> keep) {
  std::error_code none;
  const std::string here = std::filesystem::current_path(none).string();
  keep.push_back(state);
  keep.push_back(here);
  const KeptDirectories kept(keep);
  constexpr unsigned long kPlain = MS_NOSUID | MS_NODEV | MS_NOEXEC;
  constexpr unsigned long kShared = MS_NOSUID | MS_NODEV;
  auto done = mount_or_fail("none", "/", nullptr, MS_REC | MS_SLAVE, nullptr);
  if (done) done = mount_or_fail("proc", "/proc", "proc", kPlain, nullptr);
  if (done) done = mount_or_fail("stasis", kSharedMemory, "tmpfs", kShared, "mode=1777");
  if (done) done = make_environment_file({});
  if (done) done = kept.bring_back();
  if (done) done = mount_or_fail("stasis", state, "tmpfs", kPlain, "mode=0700");
  // The working directory may be one that was kept.
  if (done && !here.empty() && ::chdir(here.c_str()) != 0)
    done = fail(errno_error("cannot change to " + here, errno));
  return done;
}

class Loop {
 public:
  Loop(JobSpec spec, std::string state, Channel outside, StreamEnds streams)
      : spec_(std::move(spec)),
        state_(std::move(state)),
        outside_(std::move(outside)),
        streams_(std::move(streams)) {}

  [[noreturn]] void run() {
    sigset_t child;
    ::sigemptyset(&child);
    ::sigaddset(&child, SIGCHLD);
    ::sigprocmask(SIG_BLOCK, &child, nullptr);
    children_ = UniqueFd(::signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK));
    auto ready = set_up_mounts(state_, spec_.keep);
    // So that the numbers of its terminals are free wherever it is restored. Where that cannot be,
    // it has none.
    if (::mount("stasis", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC,
                "newinstance,ptmxmode=0666,mode=0620") != 0 ||
        !opens_these_terminals())
      spec_.terminal = 0;
    if (ready && !children_.valid()) ready = fail(errno_error("cannot wait for signals", errno));
    tell(ready ? InitEvent(Ready{}) : Failed{std::move(ready.error())});
    while (true)
      turn();
  }

 private:
  // LXC mounts the ptmx of the old devpts instance on /dev/ptmx: the new one is mounted over it.
  static bool opens_these_terminals() {
    struct stat link {};
    struct statfs system {};
    if (::lstat("/dev/ptmx", &link) != 0 || S_ISLNK(link.st_mode) ||
        ::statfs("/dev/ptmx", &system) != 0 || system.f_type != DEVPTS_SUPER_MAGIC)
      return true;
    return ::mount("/dev/pts/ptmx", "/dev/ptmx", nullptr, MS_BIND, nullptr) == 0;
  }

  // Without the supervisor there is no job: init ends too.
  void tell(const InitEvent& event) {
    if (!send(outside_, event)) ::_exit(1);
  }

  void turn() {
    std::array<pollfd, 3> wait{{{outside_.fd(), POLLIN, 0},
                                {children_.get(), POLLIN, 0},
                                {worker_ ? worker_->channel().fd() : -1, POLLIN, 0}}};
    if (::poll(wait.data(), wait.size(), ended_ && !worker_ ? kVerbPollMs : -1) < 0) return;
    if (wait[1].revents != 0) reap();
    if (wait[2].revents != 0) hear_worker();
    if (wait[0].revents != 0) obey();
    if (ended_ && !worker_ && !is_visited()) {
      tell(Ended{*std::exchange(ended_, std::nullopt)});
      job_ = 0;
    }
  }

  // By a verb that was given the job's name: it ends with the namespace, and a dump that has just
  // ended the job has yet to give the image its name.
  static bool is_visited() {
    const auto all_processes = proc::ProcFs().all();
    return all_processes && std::any_of(all_processes->begin(), all_processes->end(),
                                        [](const proc::ProcessInfo& info) {
                                          return info.parent.value == 0 &&
                                                 info.pid.value != ::getpid() &&
                                                 info.comm == kVerbName && !info.has_ended();
                                        });
  }

  void reap() {
    std::array<signalfd_siginfo, 8> drained{};
    (void)!::read(children_.get(), drained.data(), sizeof drained);
    int status = 0;
    pid_t pid = 0;
    while ((pid = ::waitpid(-1, &status, WNOHANG)) > 0) {
      if (pid == job_) ended_ = status;
      // The restored job is the worker's child until the worker ends, and may end sooner.
      gone_.emplace_back(pid, status);
      if (gone_.size() > kRemembered) gone_.erase(gone_.begin());
    }
  }

  std::optional<int> status_of(int pid) const {
    for (const auto& [gone, status] : gone_) {
      if (gone == pid) return status;
    }
    return std::nullopt;
  }

  void hear_worker() {
    auto message = worker_->channel().receive(0);
    if (message && !*message) return;
    const auto answer = message ? parse_event(**message) : std::nullopt;
    const auto* given = answer ? std::get_if<WorkResult>(&*answer) : nullptr;
    const int worker = worker_->pid().value;
    (void)worker_->end_after(kWorkerEndMs);
    reap();
    WorkResult result = given != nullptr ? *given : WorkResult{WorkerDied{how_ended(worker)}, {}};
    if (auto* restored = std::get_if<Restored>(&result.what)) {
      job_ = restored->root.value;
      restored->terminal = held_streams(restored->root);
      if (const auto status = status_of(job_)) ended_ = status;
    }
    worker_.reset();
    tell(result);
  }

  std::string how_ended(int worker) const {
    // The quicker of the two has collected it.
    if (const auto status = status_of(worker); status && WIFSIGNALED(*status))
      return fmt::format("was killed by signal {}", WTERMSIG(*status));
    const std::string& how = worker_->how_it_ended();
    return how.empty() ? "ended without a word" : how;
  }

  void obey() {
    auto message = outside_.receive(0);
    if (!message) ::_exit(1);
    if (!*message) return;
    const auto order = parse_order(**message);
    if (!order) return;
    std::visit(Cases{[this](const StartJob&) { start_job(); },
                     [this](const WorkOrder& work) { start_worker(work); },
                     [this](const SendSignal& signal) { signal_job(signal); },
                     [this](const Resize& size) { set_size(size); },
                     [this](const StopWorker&) { signal_worker(SIGTERM); },
                     [this](const KillWorker&) { signal_worker(SIGKILL); }},
               *order);
  }

  void signal_worker(int number) const {
    if (worker_) (void)::kill(worker_->pid().value, number);
  }

  void signal_job(const SendSignal& signal) const {
    if (job_ <= 0 || ended_) return;
    const pid_t of = signal.group ? ::getpgid(job_) : 0;
    (void)::kill(of > 1 ? -of : job_, signal.number);
  }

  // The kernel tells the job.
  void set_size(const Resize& wanted) const {
    if (job_ <= 0 || held_streams(Pid{job_}) == 0) return;
    auto terminal = open_file(AT_FDCWD, kTerminal, O_RDWR | O_NOCTTY | O_NONBLOCK);
    winsize size{};
    size.ws_row = static_cast<unsigned short>(wanted.rows);
    size.ws_col = static_cast<unsigned short>(wanted.columns);
    if (terminal) (void)::ioctl(terminal->get(), TIOCSWINSZ, &size);
  }

  void start_worker(WorkOrder order) {
    gone_.clear();
    order.root = Pid{job_};
    auto started = HelperProcess::start(
        "stasis-worker", [this](const Channel& channel) { serve(channel, spec_.work); });
    if (started) {
      worker_.emplace(std::move(*started));
      auto sent = send(worker_->channel(), order, streams_);
      if (sent) return;
      worker_.reset();
      started = fail(std::move(sent.error()));
    }
    tell(WorkResult{std::move(started.error()), {}});
  }

  // In the worker.
  static void serve(const Channel& channel, const Work& work) {
    auto message = channel.receive(-1);
    if (!message || !*message || (*message)->descriptors.size() != kStreams) return;
    const auto order = parse_order(**message);
    const auto* wanted = order ? std::get_if<WorkOrder>(&*order) : nullptr;
    if (wanted == nullptr) return;
    StreamEnds streams;
    std::move((*message)->descriptors.begin(), (*message)->descriptors.end(), streams.begin());
    (void)send(channel, work(*wanted, streams));
  }

  void start_job() {
    auto numbered = number_from_first();
    std::array<int, 2> ends{};
    if (numbered && ::pipe2(ends.data(), O_CLOEXEC) != 0) {
      numbered = fail(errno_error("cannot make a pipe", errno));
    }
    if (!numbered) return tell(Failed{std::move(numbered.error())});
    UniqueFd from(ends[0]);
    UniqueFd to(ends[1]);
    const pid_t pid = ::fork();
    if (pid < 0) return tell(Failed{errno_error("cannot start a process", errno)});
    if (pid == 0) become_job(to);
    to.reset();
    int error = 0;
    if (::read(from.get(), &error, sizeof error) == sizeof error) {
      if (error < 0) return tell(Failed{cannot_do_without_io_uring(-error)});
      return tell(NotStarted{error});
    }
    job_ = pid;
    tell(Started{Pid{job_}, spec_.terminal});
  }

  [[noreturn]] void become_job(const UniqueFd& to) {
    (void)::setsid();  // CRIU wants the leader of its session in the image
    // Of the job and not of this process: what of System V is in the namespace of the process that
    // runs CRIU is not saved. A kernel without such namespaces has nothing to be kept apart.
    (void)::unshare(CLONE_NEWIPC);
    bool placed = true;
    for (std::size_t i = 0; i < kStreams; ++i)
      placed = placed && ::dup2(streams_.at(i).get(), static_cast<int>(i)) >= 0;
    if (spec_.terminal != 0)
      spec_.command = holder_command(spec_.terminal, spec_.size, spec_.command);
    std::vector<char*> argv;
    for (std::string& word : spec_.command)
      argv.push_back(word.data());
    argv.push_back(nullptr);
    ::sigprocmask(SIG_SETMASK, &spec_.mask, nullptr);
    ::setenv("LD_PRELOAD", spec_.preload.c_str(), 1);
    ::setenv("STASIS_ENV_FILE", kEnvironmentFile, 1);
    const int filtered = spec_.io_uring == IoUring::kKeptOut ? do_without_io_uring() : 0;
    if (placed && filtered == 0) ::execvp(argv[0], argv.data());
    const int error = filtered != 0 ? -filtered : errno;
    (void)!::write(to.get(), &error, sizeof error);
    ::_exit(127);
  }

  static constexpr std::size_t kRemembered = 4096;

  JobSpec spec_;
  std::string state_;  // the state directory
  Channel outside_;
  StreamEnds streams_;
  UniqueFd children_;
  std::optional<HelperProcess> worker_;
  std::vector<std::pair<int, int>> gone_;  // the last that were reaped
  int job_ = 0;
  std::optional<int> ended_;
};

Error malformed() {
  return {ErrorCode::kInternal, "the job's first process sent a malformed message"};
}

}  // namespace

Result<void> make_environment_file(const std::string& changes) {
  STASIS_TRY_ASSIGN(auto file,
                    open_file(AT_FDCWD, kEnvironmentFile, O_WRONLY | O_CREAT | O_EXCL, 0644));
  if (::fchmod(file.get(), 0644) != 0) {
    return fail(errno_error("cannot let every user read the job's environment", errno));
  }
  return write_all(file.get(), changes.data(), changes.size(), kEnvironmentFile);
}

Result<void> number_from_first() { return proc::go_on_after(kFirstNumber - 1); }

Result<Init> Init::start(JobSpec spec, StreamEnds streams) {
  STASIS_TRY_ASSIGN(auto ends, Channel::pair());
  // Asked for here, where /proc is that of our numbers.
  STASIS_TRY_ASSIGN(auto state, journal_directory());
  // Not fork() after unshare(): a process whose children have another PID namespace may not have
  // threads (EINVAL).
  const long pid = ::syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | SIGCHLD, 0, 0, 0, 0);
  if (pid < 0) {
    Error error = errno_error("cannot make namespaces for the job", errno);
    error.remedy =
        fmt::format("run stasis as root, in a container with CAP_SYS_ADMIN{}", kOrAsAnotherUser);
    return fail(std::move(error));
  }
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a parent that ended before has closed the channel
    std::vector<int> kept = {ends.second.fd()};
    for (const UniqueFd& stream : streams)
      kept.push_back(stream.get());
    close_all_but(kept);
    Loop(std::move(spec), std::move(state), std::move(ends.second), std::move(streams)).run();
  }
  Init init(static_cast<int>(pid), std::move(ends.first));
  ends.second.close();
  STASIS_TRY_ASSIGN(auto ready, init.receive());
  if (std::holds_alternative<Ready>(ready)) return init;
  if (auto* failed = std::get_if<Failed>(&ready)) return fail(std::move(failed->error));
  return fail(malformed());
}

Result<void> Init::send(const InitOrder& order) const { return job::send(channel_, order); }

Result<InitEvent> Init::receive() const {
  STASIS_TRY_ASSIGN(auto message, channel_.receive(-1));
  auto event = message ? parse_event(*message) : std::nullopt;
  if (!event) return fail(malformed());
  return std::move(*event);
}

void Init::end() {
  if (pid_ == 0) return;
  (void)::kill(pid_, SIGKILL);
  (void)TEMP_FAILURE_RETRY(::waitpid(pid_, nullptr, 0));
  pid_ = 0;
}

}  // namespace stasis::job
