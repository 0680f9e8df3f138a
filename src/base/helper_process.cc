#include "base/helper_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "base/helper_start.h"
#include "base/own_helpers.h"
#include "base/scope_guard.h"

namespace stasis {
namespace {

constexpr int kEndTimeoutMs = 5000;

[[noreturn]] void run(const char* name, const Channel& channel,
                      const std::function<void(const Channel&)>& serve) {
  ::prctl(PR_SET_NAME, name);
  (void)::setpgid(0, 0);
  ignore_signals();
  close_all_but(std::array{channel.fd()});
  serve(channel);
  ::_exit(0);
}

}  // namespace

Result<HelperProcess> HelperProcess::start(const char* name,
                                           const std::function<void(const Channel&)>& serve) {
  STASIS_TRY_ASSIGN(auto ends, Channel::pair());
  const int self = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return fail(errno_error(fmt::format("cannot start a process ({})", name), errno));
  if (pid == 0) {
    ends.first.close();
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    // It ended before the line above. One in another PID namespace has the number 0 here, and is
    // missed at the channel.
    if (const int parent = ::getppid(); parent != self && parent != 0) ::_exit(0);
    run(name, ends.second, serve);
  }
  return held(pid, std::move(ends.first));
}

Result<HelperProcess> HelperProcess::start_program(const std::string& program,
                                                   std::span<const std::string> arguments) {
  STASIS_TRY_ASSIGN(auto ends, Channel::pair());
  const UniqueFd theirs = ends.second.take();
  STASIS_TRY_ASSIGN(auto pid, spawn_with_socket(program, arguments, theirs));
  return held(pid, std::move(ends.first));
}

Result<HelperProcess> HelperProcess::held(int pid, Channel channel) {
  auto process = Pidfd::open(Pid{pid});
  if (!process) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    return fail(std::move(process.error()));
  }
  add_own_helper(Pid{pid});
  return HelperProcess(pid, std::move(*process), std::move(channel));
}

void end_with_starter() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // It may have ended before.
  pollfd socket{kHelperSocket, POLLRDHUP, 0};
  if (::poll(&socket, 1, 0) > 0 && (socket.revents & (POLLRDHUP | POLLHUP)) != 0) ::_exit(1);
}

void serve_as_helper(const char* name, const std::function<void(const Channel&)>& serve) {
  run(name, Channel(UniqueFd(kHelperSocket)), serve);
}

Result<int> spawn_with_socket(const std::string& program, std::span<const std::string> arguments,
                              const UniqueFd& socket) {
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawnattr_init(&attributes);
  const ScopeGuard end([&] {
    ::posix_spawn_file_actions_destroy(&files);
    ::posix_spawnattr_destroy(&attributes);
  });
  ::posix_spawn_file_actions_adddup2(&files, socket.get(), kHelperSocket);
  // The program does the same, but a moment too late for a key that is typed meanwhile.
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
  std::vector<std::string> words{program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words)
    argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  const int failed =
      ::posix_spawn(&pid, program.c_str(), &files, &attributes, argv.data(), environ);
  if (failed == 0) return pid;
  Error error = errno_error("cannot start " + program, failed);
  error.remedy = "it belongs beside libstasis: install Stasis anew";
  return fail(std::move(error));
}

bool HelperProcess::end_after(int timeout_ms) {
  if (pid_ != 0) (void)process_.wait_exit(timeout_ms);
  return end();
}

bool HelperProcess::let_end(int timeout_ms) {
  if (pid_ == 0) return true;
  channel_.shut_down();
  return end_after(timeout_ms);
}

bool HelperProcess::end() {
  if (pid_ == 0) return true;
  const bool ran = process_.alive();
  channel_.close();
  if (ran) (void)process_.signal(SIGKILL);
  if (!process_.wait_exit(kEndTimeoutMs)) return false;
  int status = 0;
  const pid_t got = ::waitpid(pid_, &status, 0);
  remove_own_helper(Pid{std::exchange(pid_, 0)});
  if (ran) return true;
  if (got > 0 && WIFSIGNALED(status)) {
    end_ = fmt::format("was killed by signal {} ({})", WTERMSIG(status),
                       ::strsignal(WTERMSIG(status)));
  } else if (got > 0 && WIFEXITED(status)) {
    end_ = fmt::format("ended with status {}", WEXITSTATUS(status));
  } else {
    end_ = "ended";
  }
  return true;
}

}  // namespace stasis
