// Kind sockets: options of sockets and multicast groups, in a CUDA process and in a child without.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>

#include "tests/workloads/gpu.h"
#include "tests/workloads/socket_options.h"

namespace stasis::workloads {
namespace {

std::vector<std::string> lines_of(const SocketOptions& sockets) {
  std::vector<std::string> all = sockets.groups();
  for (std::size_t i = 0; i < sockets.names().size(); ++i)
    for (std::string& line : sockets.options_of(i))
      all.push_back(std::move(line));
  return all;
}

// True if all are as they were. Prints those that are not, or all.
bool verify(const SocketOptions& sockets, bool print) {
  bool all = true;
  for (const std::string& line : lines_of(sockets)) {
    const bool kept = line.ends_with("kept");
    all = all && kept;
    if (print || !kept) std::printf("%s\n", line.c_str());
  }
  std::fflush(stdout);
  return all;
}

// Answers each byte with whether all is as it was, until there are no more.
void serve(const SocketOptions& sockets, int requests, int answers) {
  char byte = 0;
  while (::read(requests, &byte, 1) == 1) {
    byte = verify(sockets, false) ? 'y' : 'n';
    if (::write(answers, &byte, 1) != 1) return;
  }
}

}  // namespace

void run_sockets(Run& run) {
  std::array<int, 2> requests{};
  std::array<int, 2> answers{};
  if (::pipe(requests.data()) != 0 || ::pipe(answers.data()) != 0) run.mismatch("no pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(requests[1]);
    ::close(answers[0]);
    serve(SocketOptions(), requests[0], answers[1]);
    ::_exit(0);
  }
  ::close(requests[0]);
  ::close(answers[1]);
  const SocketOptions sockets;
  [[maybe_unused]] const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  while (run.next()) {
    if (!verify(sockets, false)) run.mismatch("sockets have changed");
    char answer = 0;
    if (::write(requests[1], "?", 1) != 1 || ::read(answers[0], &answer, 1) != 1 || answer != 'y')
      run.mismatch("the child's sockets have changed");
    run.finish();
  }
  verify(sockets, true);
  std::printf("%zu values of sockets verified\n", lines_of(sockets).size());
  ::close(requests[1]);
  ::waitpid(child, nullptr, 0);
}

}  // namespace stasis::workloads
