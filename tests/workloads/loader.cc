// A CUDA process with workers that it forked when it already used CUDA, as PyTorch's data loader
// does: they prepare the numbers of each round, and have no CUDA themselves.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <deque>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kLoaderSize = 8u << 20;

// All of it, also if a signal or a checkpoint comes in between. False at the end of the pipe.
bool read_number(int fd, std::uint64_t& number) {
  std::size_t done = 0;
  auto* bytes = reinterpret_cast<char*>(&number);
  while (done < sizeof number) {
    const ssize_t n = ::read(fd, bytes + done, sizeof number - done);
    if (n > 0) done += static_cast<std::size_t>(n);
    if (n == 0 || (n < 0 && errno != EINTR)) return false;
  }
  return true;
}

bool write_number(int fd, std::uint64_t number) {
  ssize_t n = 0;
  do
    n = ::write(fd, &number, sizeof number);
  while (n < 0 && errno == EINTR);
  return n == static_cast<ssize_t>(sizeof number);
}

struct LoaderWorker {
  pid_t pid = -1;
  UniqueFd orders;
  UniqueFd answers;
};

// A function of what it was forked with and of what it is asked: both have to survive.
[[noreturn]] void serve(int orders, int answers, std::uint64_t seed) {
  std::signal(SIGTERM, SIG_IGN);  // it ends with its parent's end of the pipe
  std::uint64_t asked = 0;
  while (read_number(orders, asked) && write_number(answers, word(asked, seed))) {
  }
  ::_exit(0);
}

LoaderWorker start_worker(const Run& run, std::size_t which, std::vector<LoaderWorker>& others) {
  std::array<int, 2> orders{};
  std::array<int, 2> answers{};
  if (::pipe2(orders.data(), O_CLOEXEC) != 0 || ::pipe2(answers.data(), O_CLOEXEC) != 0) {
    programs::die(1, std::string("cannot make a pipe: ") + std::strerror(errno));
  }
  const pid_t pid = ::fork();
  if (pid < 0) programs::die(1, std::string("cannot start a worker: ") + std::strerror(errno));
  if (pid == 0) {
    others.clear();
    ::close(orders[1]);
    ::close(answers[0]);
    serve(orders[0], answers[1], run.seed(0, 1000 + which));
  }
  ::close(orders[0]);
  ::close(answers[1]);
  return {pid, UniqueFd(orders[1]), UniqueFd(answers[0])};
}

// Starts a worker every few milliseconds. Each lives a moment only.
void start_workers_until(const std::stop_token& stop) {
  using std::chrono::milliseconds;
  constexpr milliseconds kEvery{5};
  constexpr milliseconds kLife{200};
  std::deque<pid_t> alive;
  while (!stop.stop_requested()) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      std::this_thread::sleep_for(kLife);
      ::_exit(0);
    }
    if (pid > 0) alive.push_back(pid);
    std::this_thread::sleep_for(kEvery);
    while (!alive.empty() && ::waitpid(alive.front(), nullptr, WNOHANG) != 0)
      alive.pop_front();
  }
  for (const pid_t pid : alive)
    ::waitpid(pid, nullptr, 0);
}

}  // namespace

void run_loader(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  Buffer buffer{"buffer", 0, run.size_or(kLoaderSize) / sizeof(std::uint64_t), run.seed(0)};
  buffer.data = gpu.allocate(buffer.bytes());
  gpu.kernels().fill(nullptr, buffer.data, buffer.words, buffer.seed);
  std::vector<LoaderWorker> workers;
  for (std::size_t i = 0; i < run.options().children; ++i)
    workers.push_back(start_worker(run, i, workers));
  std::jthread restless;
  if (run.options().restless) restless = std::jthread(start_workers_until);
  Checker checker(gpu, workers.size());
  while (run.next()) {
    checker.begin(nullptr);
    for (std::size_t i = 0; i < workers.size(); ++i) {
      std::uint64_t answer = 0;
      if (!write_number(workers[i].orders.get(), run.round()) ||
          !read_number(workers[i].answers.get(), answer)) {
        run.mismatch("worker " + std::to_string(i) + " does not answer");
      }
      if (answer != word(run.round(), run.seed(0, 1000 + i))) {
        run.mismatch("worker " + std::to_string(i) + " gives a wrong answer");
      }
      checker.advance(nullptr, buffer, answer);
    }
    checker.verify(nullptr, run);
    run.finish();
  }
  restless = std::jthread();
  for (LoaderWorker& worker : workers) {
    worker.orders = UniqueFd();
    int status = 0;
    while (::waitpid(worker.pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (status != 0) run.mismatch("a worker ended with " + std::to_string(status));
  }
}

}  // namespace stasis::workloads
