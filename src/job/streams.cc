#include "job/streams.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include <fmt/format.h>

namespace stasis::job {
namespace {

constexpr std::size_t kPiece = 64 << 10;
constexpr int kForeground = 200;  // milliseconds between two looks at the foreground group
constexpr std::array<const char*, kStreams> kNames = {"standard input", "standard output",
                                                      "standard error"};

// 0, or the errno. Waits for a reader also where the descriptor was made not to.
int write_whole(int fd, const char* data, std::size_t size) {
  while (size > 0) {
    const ssize_t done = ::write(fd, data, size);
    if (done >= 0) {
      data += done;
      size -= static_cast<std::size_t>(done);
    } else if (errno == EAGAIN) {
      pollfd wait{fd, POLLOUT, 0};
      (void)::poll(&wait, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

// A program in the background may not read from its terminal: the kernel would stop it.
bool may_read() { return ::isatty(STDIN_FILENO) == 0 || ::tcgetpgrp(STDIN_FILENO) == ::getpgrp(); }

}  // namespace

struct Streams::State {
  StreamEnds ours;
  UniqueFd stop;  // an eventfd: readable when the input is to end
  std::array<std::string, kStreams> trouble;
  std::array<std::thread, kStreams> threads;
  std::atomic<bool> wants_raw{false};
  std::mutex terminal;
  std::optional<termios> before;  // of our terminal

  ~State() = default;

  bool stopped(int timeout_ms) const {
    pollfd wait{stop.get(), POLLIN, 0};
    return ::poll(&wait, 1, timeout_ms) > 0;
  }
  // False if the input is to end, or no process can read it any more.
  bool wait_for(int fd, short events) const {
    std::array<pollfd, 2> wait{{{fd, events, 0}, {stop.get(), POLLIN, 0}}};
    while (::poll(wait.data(), wait.size(), -1) < 0) {
      if (errno != EINTR) return false;
    }
    return wait[1].revents == 0 && (wait[0].revents & POLLERR) == 0;
  }

  // The process that had the terminal meanwhile may have changed it.
  void keep_raw();
  void give_back_terminal();
  void copy_input();
  void copy_output(std::size_t which);
};

void Streams::State::keep_raw() {
  const std::scoped_lock lock(terminal);
  termios mode{};
  if (!wants_raw || !may_read() || ::tcgetattr(STDIN_FILENO, &mode) != 0) return;
  if ((mode.c_lflag & (ICANON | ECHO | ISIG)) == 0 && before) return;
  if (!before) before = mode;
  ::cfmakeraw(&mode);
  (void)::tcsetattr(STDIN_FILENO, TCSADRAIN, &mode);
}

void Streams::State::give_back_terminal() {
  const std::scoped_lock lock(terminal);
  wants_raw = false;
  if (before && may_read()) (void)::tcsetattr(STDIN_FILENO, TCSADRAIN, &*before);
  before.reset();
}

void Streams::State::copy_input() {
  std::vector<char> buffer(kPiece);
  while (true) {
    if (!may_read()) {
      if (stopped(kForeground)) break;
      continue;
    }
    keep_raw();
    if (!wait_for(STDIN_FILENO, POLLIN)) break;
    if (!may_read()) continue;
    const ssize_t got = ::read(STDIN_FILENO, buffer.data(), buffer.size());
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    // The process lost the foreground between the check and the read.
    if (got < 0 && errno == EIO && !may_read()) continue;
    if (got <= 0) break;
    std::size_t sent = 0;
    while (sent < static_cast<std::size_t>(got)) {
      const ssize_t done =
          ::write(ours[0].get(), buffer.data() + sent, static_cast<std::size_t>(got) - sent);
      if (done >= 0) {
        sent += static_cast<std::size_t>(done);
      } else if (errno != EINTR && (errno != EAGAIN || !wait_for(ours[0].get(), POLLOUT))) {
        ours[0].reset();
        return;
      }
    }
  }
  ours[0].reset();  // the job sees the end
}

void Streams::State::copy_output(std::size_t which) {
  std::vector<char> buffer(kPiece);
  const int to = which == 1 ? STDOUT_FILENO : STDERR_FILENO;
  while (true) {
    const ssize_t got =
        TEMP_FAILURE_RETRY(::read(ours.at(which).get(), buffer.data(), buffer.size()));
    if (got <= 0) break;
    if (const int error = write_whole(to, buffer.data(), static_cast<std::size_t>(got))) {
      trouble.at(which) = fmt::format("{}: {}", kNames.at(which), std::strerror(error));
      break;
    }
  }
  ours.at(which).reset();  // a writer gets EPIPE, or SIGPIPE, as from a reader that is gone
}

Result<std::string> pipe_name(const UniqueFd& pipe) {
  struct stat info {};
  if (::fstat(pipe.get(), &info) != 0) return fail(errno_error("cannot stat a pipe", errno));
  return fmt::format("pipe:[{}]", info.st_ino);
}

Streams::Streams(std::shared_ptr<State> state) : state_(std::move(state)) {}
Streams::Streams(Streams&&) noexcept = default;

Result<Streams> Streams::make() {
  Streams streams(std::make_shared<State>());
  for (std::size_t i = 0; i < kStreams; ++i) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return fail(errno_error("cannot make a pipe", errno));
    streams.ends_.at(i) = UniqueFd(ends.at(i == 0 ? 0 : 1));
    streams.state_->ours.at(i) = UniqueFd(ends.at(i == 0 ? 1 : 0));
  }
  const int input = streams.state_->ours[0].get();
  if (::fcntl(input, F_SETFL, O_WRONLY | O_NONBLOCK) != 0) {
    return fail(errno_error("cannot set up a pipe", errno));
  }
  streams.state_->stop = UniqueFd(::eventfd(0, EFD_CLOEXEC));
  if (!streams.state_->stop.valid()) return fail(errno_error("cannot make an eventfd", errno));
  return streams;
}

Streams::~Streams() {
  if (!state_) return;
  state_->give_back_terminal();
  for (std::thread& thread : state_->threads) {
    if (thread.joinable()) thread.detach();
  }
}

void Streams::make_raw() {
  state_->wants_raw = true;
  state_->keep_raw();
}

StreamEnds Streams::take_ends() { return std::move(ends_); }

Result<void> Streams::start() {
  try {
    for (std::size_t i = 0; i < kStreams; ++i) {
      state_->threads.at(i) = std::thread([state = state_, i] {
        if (i == 0)
          state->copy_input();
        else
          state->copy_output(i);
      });
    }
  } catch (const std::system_error& error) {
    return fail(errno_error("cannot start a thread", error.code().value()));
  }
  return {};
}

std::vector<std::string> Streams::finish() {
  const std::uint64_t one = 1;
  (void)!::write(state_->stop.get(), &one, sizeof one);
  std::vector<std::string> trouble;
  for (std::size_t i = 0; i < kStreams; ++i) {
    if (state_->threads.at(i).joinable()) state_->threads.at(i).join();
    if (!state_->trouble.at(i).empty()) trouble.push_back(state_->trouble.at(i));
  }
  state_->give_back_terminal();
  return trouble;
}

}  // namespace stasis::job
