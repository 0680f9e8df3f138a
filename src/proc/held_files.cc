#include "proc/held_files.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/scope_guard.h"
#include "base/units.h"
#include "proc/served_files.h"

namespace stasis::proc {
namespace {

enum class LockOf { kAPipe, kASocket, kAnEpoll };

struct Question {
  LockOf lock;
  HeldFile about;
  std::string description;  // "/proc/12/fdinfo/3", of an epoll
};

// How far the asking process has come.
struct Progress {
  std::atomic<std::uint32_t> begun = 0;
};

constexpr std::chrono::milliseconds kHeld{500};
constexpr std::chrono::milliseconds kBetween{50};

std::optional<LockOf> lock_of(Pid pid, const OpenFile& file) {
  if (file.path == "anon_inode:[eventpoll]") return LockOf::kAnEpoll;
  if (file.path.starts_with("pipe:[")) return LockOf::kAPipe;
  if (file.path.starts_with("socket:[")) return LockOf::kASocket;
  if (!file.path.starts_with('/')) return std::nullopt;
  const auto status = known_status(fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor));
  return status && S_ISFIFO(status->st_mode) ? std::optional(LockOf::kAPipe) : std::nullopt;
}

std::vector<Question> questions_about(const std::vector<FilesOf>& processes) {
  std::vector<Question> out;
  std::set<std::string_view> seen;  // the kernel's own names tell them apart
  for (const FilesOf& process : processes) {
    for (const OpenFile& file : *process.files) {
      const auto lock = lock_of(process.pid, file);
      const bool is_own_name = lock && file.path.ends_with(']') && *lock != LockOf::kAnEpoll;
      if (!lock || (is_own_name && !seen.insert(file.path).second)) continue;
      Question question{*lock, {process.pid, file}, {}};
      if (*lock == LockOf::kAnEpoll)
        question.description =
            fmt::format("/proc/{}/fdinfo/{}", process.pid.value, file.descriptor);
      out.push_back(std::move(question));
    }
  }
  return out;
}

// By its address, which wants the lock of an IP socket; its filter, that of each kind; and for what
// is read of a unix socket that of its readers. Nothing is taken from it: an error that waits in it
// would be, so that one with an error is not asked for more.
void ask_socket(int file) {
  sockaddr_storage name{};
  socklen_t size = sizeof name;
  (void)::getsockname(file, reinterpret_cast<sockaddr*>(&name), &size);
  socklen_t none = 0;
  (void)::getsockopt(file, SOL_SOCKET, SO_GET_FILTER, nullptr, &none);
  char byte = 0;
  (void)::recv(file, &byte, 1, MSG_OOB | MSG_PEEK | MSG_DONTWAIT);
  int type = 0;
  size = sizeof type;
  pollfd state{file, 0, 0};
  if (name.ss_family == AF_UNIX && ::getsockopt(file, SOL_SOCKET, SO_TYPE, &type, &size) == 0 &&
      type != SOCK_STREAM && ::poll(&state, 1, 0) == 0)
    (void)::recv(file, &byte, 0, MSG_PEEK | MSG_DONTWAIT);
}

void ask(const Question& question, int process) {
  if (question.lock == LockOf::kAnEpoll) {
    const int file = ::open(question.description.c_str(), O_RDONLY | O_CLOEXEC);
    char byte = 0;
    (void)!::read(file, &byte, 1);
    ::close(file);
    return;
  }
  const int file =
      static_cast<int>(::syscall(SYS_pidfd_getfd, process, question.about.file.descriptor, 0));
  if (file < 0) return;
  if (question.lock == LockOf::kAPipe)
    (void)::fcntl(file, F_GETPIPE_SZ);
  else
    ask_socket(file);
  ::close(file);
}

// It calls the kernel and nothing else: other threads of ours may have had locks of the C library.
[[noreturn]] void ask_all(const std::vector<Question>& questions, Progress& progress) {
  // What is left behind keeps no file of ours, nor a lock by it.
  (void)::syscall(SYS_close_range, 0, ~0U, 0);
  Pid of;
  int process = -1;
  for (const Question& question : questions) {
    if (question.lock != LockOf::kAnEpoll && question.about.pid != of) {
      if (process >= 0) ::close(process);
      of = question.about.pid;
      process = static_cast<int>(::syscall(SYS_pidfd_open, of.value, 0));
    }
    ask(question, process);
    progress.begun.fetch_add(1);
  }
  ::_exit(0);
}

// "D" of /proc/PID/stat, after the name.
bool waits_for_lock(pid_t pid) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/stat", pid), 4096);
  const std::size_t name = text ? text->rfind(") ") : std::string::npos;
  return name != std::string::npos && (*text)[name + 2] == 'D';
}

}  // namespace

std::optional<HeldFile> find_held(const std::vector<FilesOf>& processes,
                                  const std::function<bool()>& is_over) {
  const auto questions = questions_about(processes);
  if (questions.empty()) return std::nullopt;
  void* const page =
      ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return std::nullopt;
  const ScopeGuard unmap([&] { ::munmap(page, sizeof(Progress)); });
  auto& progress = *new (page) Progress;
  // Without a signal at its end: the program that we are in is not to hear of it.
  const auto pid = static_cast<pid_t>(::syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr));
  if (pid == 0) ask_all(questions, progress);
  if (pid < 0) return std::nullopt;
  const auto pidfd = Pidfd::open(Pid{pid});
  std::uint32_t last = 0;
  auto since = Clock::now();
  for (;;) {
    pollfd ends{pidfd ? pidfd->fd() : -1, POLLIN, 0};
    (void)::poll(&ends, 1, static_cast<int>(kBetween.count()));
    const pid_t ended = ::waitpid(pid, nullptr, WNOHANG | __WALL);
    if (ended == pid || (ended < 0 && errno != EINTR)) return std::nullopt;
    const std::uint32_t now = progress.begun;
    const bool held = now == last && waits_for_lock(pid);
    if (!held) since = Clock::now();
    last = now;
    const bool long_held = held && Clock::now() - since > kHeld;
    if (long_held || is_over()) {
      (void)::kill(pid, SIGKILL);
      if (long_held && last < questions.size()) return questions[last].about;
      return std::nullopt;
    }
  }
}

}  // namespace stasis::proc
