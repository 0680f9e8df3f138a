#include "tests/workloads/spawn.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "examples/common/cuda_api.h"

namespace stasis::workloads {

Child::Child(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  std::string name = program_invocation_name;
  argv.push_back(name.data());
  std::vector<std::string> copy = arguments;
  for (std::string& argument : copy)
    argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  if (pid < 0) programs::die(1, std::string("cannot start a child: ") + std::strerror(errno));
  pid_ = Pid{pid};
}

Child::Child(Child&& other) noexcept
    : pid_(other.pid_), exited_(other.exited_), status_(other.status_) {
  other.exited_ = true;
}

bool Child::exited() {
  if (!exited_) exited_ = waitpid(pid_.value, &status_, WNOHANG) == pid_.value;
  return exited_;
}

void Child::wait() {
  while (!exited_) {
    if (waitpid(pid_.value, &status_, 0) == pid_.value) {
      exited_ = true;
    } else if (errno != EINTR) {
      programs::die(1, std::string("cannot wait for a child: ") + std::strerror(errno));
    }
  }
}

void Child::request_stop() const {
  if (!exited_) kill(pid_.value, SIGTERM);
}

void Child::stop() {
  request_stop();
  wait();
}

bool Child::ended_well() const { return WIFEXITED(status_) && WEXITSTATUS(status_) == 0; }

int Child::exit_status() const { return WIFEXITED(status_) ? WEXITSTATUS(status_) : -1; }

std::string Child::how_it_ended() const {
  if (WIFSIGNALED(status_)) return "was killed by signal " + std::to_string(WTERMSIG(status_));
  return "ended with status " + std::to_string(WEXITSTATUS(status_));
}

void sleep_ms(int milliseconds) {
  const timespec pause{milliseconds / 1000, (milliseconds % 1000) * 1'000'000L};
  nanosleep(&pause, nullptr);
}

}  // namespace stasis::workloads
