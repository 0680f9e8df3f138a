#include "criu/criu_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "criu/criu.h"
#include "criu/criu_rpc.h"
#include "criu/inside_criu.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

constexpr int kSocketNumber = 3;
constexpr std::chrono::seconds kDeath{30};  // from SIGKILL on
constexpr std::size_t kMaxMessage = 1U << 20;
constexpr std::size_t kMaxEarlyErrors = 64U << 10;

// Our environment without what would change criu's behaviour or its libraries.
std::vector<std::string> environment_for_criu(const CriuProcess::StartOptions& options) {
  std::vector<std::string> kept;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (name.starts_with("LD_") || name.starts_with("CRIU_")) continue;
    if (name == inside_criu::kDescriptorVariable || name == inside_criu::kBindVariable) continue;
    kept.emplace_back(text);
  }
  kept.push_back("CRIU_LIBS_DIR=" + options.plugin_dir);
  if (options.hidden != nullptr) {
    kept.push_back("LD_PRELOAD=" + options.hidden->library());
    kept.push_back(
        fmt::format("{}={}", inside_criu::kDescriptorVariable, CriuProcess::kFirstInherited));
  }
  if (!options.binding_library.empty()) {
    kept.push_back("LD_PRELOAD=" + options.binding_library);
    kept.push_back(fmt::format("{}=1", inside_criu::kBindVariable));
  }
  return kept;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& text : strings)
    pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// A copy of a descriptor at a number above all that the child puts into place.
Result<UniqueFd> raised(int fd, int least) {
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, least);
  if (copy < 0) return fail(errno_error("cannot copy a descriptor for criu", errno));
  return UniqueFd(copy);
}

// All that the child needs, made before the fork: after it only system calls are allowed, since
// another thread of ours may have held any lock.
struct ChildPlan {
  std::vector<char*> argv;
  std::vector<char*> envp;
  std::vector<std::pair<int, int>> moves;  // descriptor -> its number in criu
  int first_closed = 0;
  int report = -1;  // where a failure's errno goes; close-on-exec
  bool own_process_group = true;
  bool has_terminal = false;
};

[[noreturn]] void run_child(const ChildPlan& plan) {
  const auto report_and_end = [&] {
    const int number = errno;
    (void)!::write(plan.report, &number, sizeof number);
    ::_exit(127);
  };
  if (plan.own_process_group && ::setpgid(0, 0) != 0) report_and_end();
  // As many descriptors as it may have: where it lacks the right to more it keeps the soft limit.
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &files);
  }
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  for (int number = 1; number < NSIG; ++number)
    ::sigaction(number, &action, nullptr);
  // If we are killed, criu's next message to us must fail and make it roll back; the signal that
  // comes with that failure would end it instead, with the tree half dumped.
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
  ::sigaction(SIGXFSZ, &action, nullptr);  // starve(): an error, and not the end
  // Ctrl-Z goes to the whole group, and must not stop criu in the middle; nor must what it does to
  // a terminal in whose background it is. The job gets its own dispositions from the image.
  if (plan.has_terminal) {
    ::sigaction(SIGTSTP, &action, nullptr);
    ::sigaction(SIGTTIN, &action, nullptr);
    ::sigaction(SIGTTOU, &action, nullptr);
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  for (const auto& [from, to] : plan.moves) {
    if (::dup2(from, to) < 0) report_and_end();
  }
  // Everything else of ours stays out of criu, also what some library opened without close-on-exec.
  // Marked and not closed: the report pipe is among them.
  constexpr unsigned kCloseRangeCloexec = 4;
  if (::syscall(SYS_close_range, plan.first_closed, ~0U, kCloseRangeCloexec) != 0) {
    for (int fd = plan.first_closed; fd < 65536; ++fd)
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
  ::execve(plan.argv.front(), plan.argv.data(), plan.envp.data());
  report_and_end();
  ::_exit(127);
}

// Copies of descriptors, by which the plan's moves name them, above all numbers that criu is given.
Result<std::vector<UniqueFd>> plan_moves(const std::vector<std::pair<int, int>>& wanted,
                                         ChildPlan& plan) {
  std::vector<UniqueFd> copies;
  for (const auto& [from, to] : wanted) {
    STASIS_TRY_ASSIGN(auto copy, raised(from, plan.first_closed));
    plan.moves.emplace_back(copy.get(), to);
    copies.push_back(std::move(copy));
  }
  return copies;
}

// When the child has become criu, which closes the pipe, or has said why it cannot.
Result<Pidfd> hold_started(Pid child, const UniqueFd& report, const std::string& path) {
  auto pidfd = Pidfd::open(child);
  int number = 0;
  ssize_t got = 0;
  do {
    got = ::read(report.get(), &number, sizeof number);
  } while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(sizeof number) && pidfd) return pidfd;
  if (got <= 0) ::kill(child.value, SIGKILL);
  while (::waitpid(child.value, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (!pidfd) return fail(std::move(pidfd).error());
  return fail(ErrorCode::kCriuMissing,
              fmt::format("cannot run {}: {}", path, std::strerror(number)),
              fmt::format("{} makes a private one", kGetCriu));
}

tl::unexpected<Error> ended(const std::string& what) {
  return fail(ErrorCode::kCriuFailed, what, {});
}

}  // namespace

CriuProcess::CriuProcess(CriuProcess&& other) noexcept
    : pidfd_(std::move(other.pidfd_)),
      pid_(std::exchange(other.pid_, 0)),
      own_group_(other.own_group_),
      left_behind_(other.left_behind_),
      socket_(std::move(other.socket_)),
      errors_(std::move(other.errors_)) {}

CriuProcess::~CriuProcess() {
  if (pid_ == 0) return;
  kill();
  finish(std::chrono::milliseconds(0));
}

Result<CriuProcess> CriuProcess::start(const std::string& path, const StartOptions& options) {
  std::vector<const UniqueFd*> inherit = options.inherit;
  if (options.hidden != nullptr) inherit.push_back(&options.hidden->descriptor());
  int pair[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return fail(errno_error("cannot create a socket for criu", errno));
  }
  UniqueFd ours(pair[0]);
  const UniqueFd theirs(pair[1]);
  UniqueFd errors(::memfd_create("criu-stderr", MFD_CLOEXEC));
  if (!errors.valid()) return fail(errno_error("cannot create a memory file", errno));
  STASIS_TRY_ASSIGN(auto null, open_file(AT_FDCWD, "/dev/null", O_RDWR));
  if (::pipe2(pair, O_CLOEXEC) != 0) return fail(errno_error("cannot create a pipe", errno));
  const UniqueFd report(pair[0]);
  UniqueFd report_end(pair[1]);

  // Without the user's and the machine's configuration files: an option there, such as
  // leave-stopped, would break what this program promises.
  std::vector<std::string> arguments = {path, "swrk", std::to_string(kSocketNumber),
                                        "--no-default-config"};
  std::vector<std::string> environment = environment_for_criu(options);
  ChildPlan plan;
  plan.argv = pointers_to(arguments);
  plan.envp = pointers_to(environment);
  plan.own_process_group = options.own_process_group;
  plan.has_terminal = options.keep_stdin || !options.own_process_group;
  plan.first_closed = kFirstInherited + static_cast<int>(inherit.size());

  std::vector<std::pair<int, int>> wanted;
  if (!options.keep_stdin) wanted.emplace_back(null.get(), STDIN_FILENO);
  wanted.emplace_back(null.get(), STDOUT_FILENO);
  wanted.emplace_back(errors.get(), STDERR_FILENO);
  wanted.emplace_back(theirs.get(), kSocketNumber);
  for (std::size_t i = 0; i < inherit.size(); ++i) {
    wanted.emplace_back(inherit[i]->get(), kFirstInherited + static_cast<int>(i));
  }
  STASIS_TRY_ASSIGN(const auto copies, plan_moves(wanted, plan));
  STASIS_TRY_ASSIGN(auto report_copy, raised(report_end.get(), plan.first_closed));
  plan.report = report_copy.get();

  const pid_t pid = ::fork();
  if (pid < 0) return fail(errno_error("cannot start a process for criu", errno));
  if (pid == 0) run_child(plan);
  report_end.reset();
  report_copy.reset();
  STASIS_TRY_ASSIGN(auto pidfd, hold_started(Pid{pid}, report, path));
  set_fault_criu(Pid{pid});
  CriuProcess started(std::move(pidfd), pid, std::move(ours), std::move(errors));
  // What is restored onto our terminal is of that group, too.
  started.own_group_ = options.own_process_group && !options.keep_stdin;
  return started;
}

Result<void> CriuProcess::send(const criu_rpc::Request& request) const {
  const std::string bytes = criu_rpc::to_wire(request);
  ssize_t sent = 0;
  do {
    sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent == static_cast<ssize_t>(bytes.size())) return {};
  return ended(fmt::format("criu takes no message: {}", std::strerror(errno)));
}

Result<std::optional<criu_rpc::Response>> CriuProcess::receive(
    std::chrono::milliseconds timeout) const {
  // Its end is looked at too: a helper that it has forked, and that stands stopped for ever once it
  // is gone, keeps the socket open.
  std::array<pollfd, 2> wait = {{{socket_.get(), POLLIN, 0}, {pidfd_.fd(), POLLIN, 0}}};
  const int ready = ::poll(wait.data(), wait.size(), static_cast<int>(timeout.count()));
  if (ready == 0 || (ready < 0 && errno == EINTR)) return std::nullopt;
  if (ready > 0 && wait[0].revents == 0) {
    // What it said last may have come between the two looks.
    if (::poll(wait.data(), 1, 0) <= 0) return ended("criu ended without an answer");
  }
  std::string bytes(kMaxMessage, '\0');
  iovec vector = {bytes.data(), bytes.size()};
  msghdr message = {};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  // No room for control data: a descriptor that criu sends along (orphan-pts-master) is closed by
  // the kernel.
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return ended(fmt::format("criu's socket: {}", std::strerror(errno)));
  if (got == 0) return ended("criu ended without an answer");
  auto response = criu_rpc::response_from_wire(
      std::string_view(bytes).substr(0, static_cast<std::size_t>(got)));
  if ((message.msg_flags & MSG_TRUNC) != 0 || !response) {
    return ended("criu sent a message that cannot be read");
  }
  return response;
}

void CriuProcess::kill() const {
  if (pid_ == 0) return;
  // With its helpers: what it has forked to try the kernel out may stand stopped, and for ever once
  // criu is gone. Restored tasks are its siblings, and not among them.
  std::vector<Pidfd> helpers;
  if (auto tree = proc::ProcFs().tree(Pid{pid_})) {
    for (const proc::ProcessInfo& info : *tree) {
      if (info.pid.value == pid_) continue;
      if (auto helper = Pidfd::open(info.pid)) helpers.push_back(std::move(*helper));
    }
  }
  (void)pidfd_.signal(SIGKILL);
  for (const Pidfd& helper : helpers)
    (void)helper.signal(SIGKILL);
}

void CriuProcess::starve() const {
  const rlimit nothing = {0, 0};
  if (pid_ != 0 && ::prlimit(pid_, RLIMIT_FSIZE, &nothing, nullptr) != 0) kill();
}

CriuProcess::Activity CriuProcess::activity() const {
  Activity found;
  if (pid_ == 0) return found;
  const auto info = proc::ProcFs().process(Pid{pid_});
  if (!info) return found;
  found.processor_ticks = info->cpu_ticks;
  found.blocked = info->state == 'D';
  return found;
}

std::string CriuProcess::finish(std::chrono::milliseconds timeout) {
  socket_.reset();
  if (pid_ == 0) return "has ended";
  if (!pidfd_.wait_exit(static_cast<int>(timeout.count()))) kill();
  if (!pidfd_.wait_exit(static_cast<int>(std::chrono::milliseconds(kDeath).count()))) {
    left_behind_ = Pid{std::exchange(pid_, 0)};
    set_fault_criu(Pid{});
    return "cannot be ended";
  }
  siginfo_t seen = {};
  while (::waitid(P_PID, static_cast<id_t>(pid_), &seen, WEXITED | WNOWAIT) != 0 &&
         errno == EINTR) {
  }
  // Its helpers are left alone then. Not yet reaped, it still has its number, and they their group.
  if (own_group_ && seen.si_code != CLD_EXITED) (void)::kill(-pid_, SIGKILL);
  int status = 0;
  pid_t reaped = 0;
  do {
    reaped = ::waitpid(pid_, &status, 0);
  } while (reaped < 0 && errno == EINTR);
  pid_ = 0;
  set_fault_criu(Pid{});
  if (reaped < 0) return "has ended";
  if (WIFSIGNALED(status)) return fmt::format("was killed by signal {}", WTERMSIG(status));
  return fmt::format("exited with status {}", WEXITSTATUS(status));
}

std::string CriuProcess::early_errors() const {
  std::string text(kMaxEarlyErrors, '\0');
  const ssize_t got = ::pread(errors_.get(), text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return text;
}

}  // namespace stasis
