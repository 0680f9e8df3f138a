// A real target: stasis-workload on the simulated driver, which verifies its own GPU memory in
// rounds. Killed and collected on every path out.
#pragma once

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/units.h"

namespace stasis::fakes {

class Workload {
 public:
  // `arguments` begin with the kind. Writes "status" and "log" in `dir`.
  Workload(const std::filesystem::path& build, const std::filesystem::path& dir,
           const std::vector<std::string>& arguments)
      : status_file_(dir / "status") {
    const std::string program = build / "bin/stasis-workload";
    ::setenv("LD_LIBRARY_PATH", (build / "lib/stasis/sim").c_str(), 1);
    std::vector<std::string> words = {program};
    words.insert(words.end(), arguments.begin(), arguments.end());
    words.insert(words.end(), {"--status", status_file_});
    std::vector<char*> argv;
    argv.reserve(words.size() + 1);
    for (std::string& word : words)
      argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    ::posix_spawn_file_actions_init(&files);
    ::posix_spawn_file_actions_addopen(&files, 1, (dir / "log").c_str(), O_WRONLY | O_CREAT, 0600);
    ::posix_spawn_file_actions_adddup2(&files, 1, 2);
    if (::posix_spawn(&pid_, program.c_str(), &files, nullptr, argv.data(), environ) != 0)
      pid_ = -1;
    ::posix_spawn_file_actions_destroy(&files);
  }
  ~Workload() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  Pid pid() const { return Pid{pid_}; }
  // The number of the last round it has verified, 0 before the first.
  long round() const {
    std::ifstream file(status_file_);
    std::string word;
    long number = 0;
    return file >> word >> number ? number : 0;
  }
  bool gets_past(long round_number) const {
    const auto start = Clock::now();
    while (round() <= round_number) {
      if (since(start) > std::chrono::seconds(30)) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }
  // Its exit status after SIGTERM: 0 if every round was right.
  int end() {
    ::kill(pid_, SIGTERM);
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  std::filesystem::path status_file_;
  pid_t pid_ = -1;
};

}  // namespace stasis::fakes
