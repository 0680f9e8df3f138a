#include "proc/held_files.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include "base/units.h"
#include "proc/served_files.h"

namespace stasis::proc {
namespace {

using std::chrono::milliseconds;

enum class LockOf { kAPipe, kASocket, kAnEpoll };

struct Question {
  LockOf lock;
  int pid;
  int descriptor;
};

constexpr std::size_t kMostAsked = 65536;
constexpr milliseconds kNoProgress{10000};
constexpr int kBetween = 50;  // milliseconds
constexpr int kTries = 3;

std::optional<LockOf> lock_of(Pid pid, const OpenFile& file) {
  if (file.path == "anon_inode:[eventpoll]") return LockOf::kAnEpoll;
  if (file.path.starts_with("pipe:[")) return LockOf::kAPipe;
  if (file.path.starts_with("socket:[")) return LockOf::kASocket;
  if (!file.path.starts_with('/')) return std::nullopt;
  const auto status = known_status(fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor));
  return status && S_ISFIFO(status->st_mode) ? std::optional(LockOf::kAPipe) : std::nullopt;
}

// "D" of /proc/PID/stat, after the name.
bool waits_for_lock(pid_t pid) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/stat", pid), 4096);
  const std::size_t name = text ? text->rfind(") ") : std::string::npos;
  return name != std::string::npos && (*text)[name + 2] == 'D';
}

}  // namespace

struct HeldFiles::Shared {
  std::atomic<std::uint32_t> next = 0;  // to be asked
  std::uint32_t end = 0;
  std::array<Question, kMostAsked> questions;
};

// --- In the processes. They call the kernel and little else: other threads of ours may have had
// locks of the C library.

namespace {

// By its address, which wants the lock of an IP socket, and its filter, that of each kind. For what
// is read of a unix socket there is a lock of its own. Nothing is taken from it: an error that
// waits in it would be, so that one with an error is not asked for more.
void ask_socket(int file) {
  sockaddr_storage name{};
  socklen_t size = sizeof name;
  (void)::getsockname(file, reinterpret_cast<sockaddr*>(&name), &size);
  socklen_t none = 0;
  (void)::getsockopt(file, SOL_SOCKET, SO_GET_FILTER, nullptr, &none);
  int type = 0;
  size = sizeof type;
  if (name.ss_family != AF_UNIX || ::getsockopt(file, SOL_SOCKET, SO_TYPE, &type, &size) != 0)
    return;
  char byte = 0;
  pollfd state{file, 0, 0};
  if (type == SOCK_STREAM)
    (void)::recv(file, &byte, 1, MSG_OOB | MSG_PEEK | MSG_DONTWAIT);
  else if (::poll(&state, 1, 0) == 0)
    (void)::recv(file, &byte, 0, MSG_PEEK | MSG_DONTWAIT);
}

void ask(const Question& question, int process) {
  if (question.lock == LockOf::kAnEpoll) {
    std::array<char, 64> path{};
    (void)std::snprintf(path.data(), path.size(), "/proc/%d/fdinfo/%d", question.pid,
                        question.descriptor);
    const int file = ::open(path.data(), O_RDONLY | O_CLOEXEC);
    char byte = 0;
    (void)!::read(file, &byte, 1);
    ::close(file);
    return;
  }
  const int file = static_cast<int>(::syscall(SYS_pidfd_getfd, process, question.descriptor, 0));
  if (file < 0) return;
  if (question.lock == LockOf::kAPipe)
    (void)::fcntl(file, F_GETPIPE_SZ);
  else
    ask_socket(file);
  ::close(file);
}

template <class Shared>
[[noreturn]] void ask_all(Shared& shared) {
  int of = 0;
  int process = -1;
  for (std::uint32_t i = shared.next; i < shared.end; i = ++shared.next) {
    const Question& question = shared.questions[i];
    if (question.pid != of) {
      if (process >= 0) ::close(process);
      of = question.pid;
      process = static_cast<int>(::syscall(SYS_pidfd_open, of, 0));
    }
    ask(question, process);
  }
  ::_exit(0);
}

pid_t start_process(int end_signal) {
  return static_cast<pid_t>(::syscall(SYS_clone, end_signal, nullptr, nullptr, nullptr, nullptr));
}

// Starts one that asks for each byte that comes, and answers with its number.
template <class Shared>
[[noreturn]] void serve(int socket, Shared& shared) {
  sigset_t all;
  ::sigfillset(&all);
  (void)::sigprocmask(SIG_SETMASK, &all, nullptr);
  // One that has ended keeps its number until the next is asked for: our caller takes it by that.
  struct sigaction usual {};
  usual.sa_handler = SIG_DFL;
  (void)::sigaction(SIGCHLD, &usual, nullptr);
  (void)::dup2(socket, 0);
  (void)::syscall(SYS_close_range, 1, ~0U, 0);
  for (char byte = 0; ::read(0, &byte, 1) == 1;) {
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    const pid_t pid = start_process(SIGCHLD);
    if (pid == 0) ask_all(shared);
    if (::write(0, &pid, sizeof pid) != sizeof pid) break;
  }
  ::_exit(0);
}

}  // namespace

// --- In ours

HeldFiles::HeldFiles(Limits limits) : limits_(limits) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) return;
  socket_ = UniqueFd(ends[0]);
  const UniqueFd theirs(ends[1]);
  void* const memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;
  shared_ = static_cast<Shared*>(memory);  // all zeros, as it is to begin
  // Without a signal at its end: the program that we are in is not to hear of it.
  const pid_t pid = start_process(0);
  if (pid == 0) serve(theirs.get(), *shared_);
  if (pid > 0) server_ = pid;
}

HeldFiles::~HeldFiles() {
  socket_.reset();
  if (server_ > 0) {
    (void)::kill(server_, SIGKILL);
    while (::waitpid(server_, nullptr, __WALL) < 0 && errno == EINTR) {
    }
  }
  if (shared_ != nullptr) ::munmap(shared_, sizeof(Shared));
}

std::optional<std::size_t> HeldFiles::first_held(std::size_t begin, std::size_t end,
                                                 milliseconds limit,
                                                 const std::function<bool()>& is_over) {
  shared_->next = static_cast<std::uint32_t>(begin);
  shared_->end = static_cast<std::uint32_t>(end);
  const char byte = 0;
  pid_t pid = 0;
  pollfd answer{socket_.get(), POLLIN, 0};
  if (::send(socket_.get(), &byte, 1, MSG_NOSIGNAL) != 1 ||
      ::poll(&answer, 1, static_cast<int>(kNoProgress.count())) != 1 ||
      ::recv(socket_.get(), &pid, sizeof pid, 0) != sizeof pid || pid <= 0)
    return std::nullopt;
  const auto asker = Pidfd::open(Pid{pid});
  if (!asker) return std::nullopt;
  std::uint32_t last = shared_->next;
  auto since = Clock::now();
  auto held_since = since;
  while (!asker->wait_exit(kBetween)) {
    const auto now = Clock::now();
    const std::uint32_t next = shared_->next;
    if (next != last) since = now;
    if (next != last || !waits_for_lock(pid)) held_since = now;
    last = next;
    const bool held = now - held_since > limit;
    if (!held && now - since <= kNoProgress && !is_over()) continue;
    (void)asker->signal(SIGKILL);
    return held && last < end ? std::optional<std::size_t>(last) : std::nullopt;
  }
  return std::nullopt;
}

std::optional<HeldFile> HeldFiles::find(const std::vector<FilesOf>& processes,
                                        const std::function<bool()>& is_over) {
  if (server_ == 0) return std::nullopt;
  std::vector<const OpenFile*> files;
  std::set<std::string_view> seen;  // the kernel's own names tell them apart
  for (const FilesOf& process : processes) {
    for (const OpenFile& file : *process.files) {
      if (files.size() == kMostAsked) break;
      const auto lock = lock_of(process.pid, file);
      const bool is_own_name = lock && file.path.ends_with(']') && *lock != LockOf::kAnEpoll;
      if (!lock || (is_own_name && !seen.insert(file.path).second)) continue;
      shared_->questions[files.size()] = {*lock, process.pid.value, file.descriptor};
      files.push_back(&file);
    }
  }
  if (files.empty()) return std::nullopt;
  for (int i = 0; i < kTries && !is_over(); ++i) {
    const auto held = first_held(0, files.size(), limits_.first, is_over);
    if (!held) return std::nullopt;
    if (first_held(*held, *held + 1, limits_.second, is_over))
      return HeldFile{Pid{shared_->questions[*held].pid}, *files[*held]};
  }
  return std::nullopt;
}

}  // namespace stasis::proc
