#include "job/hold_terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <optional>

#include "base/fd.h"
#include "job/exec_failure.h"

namespace stasis::job {
namespace {

constexpr TerminalStreams kInput = 1;
constexpr TerminalStreams kOutput = 2;
constexpr std::size_t kHeldPiece = 4096;
constexpr int kTroubled = 125;

class TerminalHolder {
 public:
  explicit TerminalHolder(HolderOrder order)
      : streams_(order.streams), size_(order.size), command_(std::move(order.command)) {}

  Outcome run() {
    if (auto taken = take_terminal(); !taken) return troubled(std::move(taken.error()));
    sigset_t all;
    ::sigfillset(&all);
    ::sigprocmask(SIG_SETMASK, &all, &before_);
    signals_ = UniqueFd(::signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!signals_.valid()) return troubled(errno_error("cannot wait for signals", errno));
    if (auto started = start(); !started) return troubled(std::move(started.error()));
    if (start_error_ != 0)
      return {exit_status_of_exec_failure(start_error_),
              exec_failure(command_.front(), start_error_),
              {}};
    if ((streams_ & kInput) == 0) ::close(STDIN_FILENO);
    while (!status_)
      turn();
    while (copy_output()) {
    }
    return {end_as_it_did(), {}, {}};
  }

 private:
  static Outcome troubled(Error why) { return {kTroubled, std::move(why), {}}; }
  static tl::unexpected<Error> trouble(const char* what) { return fail(errno_error(what, errno)); }

  Result<void> take_terminal() {
    master_ = UniqueFd(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    std::array<char, 64> name{};
    if (!master_.valid() || ::grantpt(master_.get()) != 0 || ::unlockpt(master_.get()) != 0 ||
        ::ptsname_r(master_.get(), name.data(), name.size()) != 0)
      return trouble("cannot make a terminal for the job");
    // Open as long as this process lives: a closed terminal does not look like the job's end.
    slave_ = UniqueFd(::open(name.data(), O_RDWR | O_NOCTTY | O_CLOEXEC));
    if (!slave_.valid()) return trouble("cannot open the job's terminal");
    (void)::ioctl(slave_.get(), TIOCSWINSZ, &size_);
    if (::fcntl(master_.get(), F_SETFL, O_RDWR | O_NONBLOCK) != 0)
      return trouble("cannot set the job's terminal up");
    return {};
  }

  Result<void> start() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return trouble("cannot make a pipe");
    UniqueFd from(ends[0]);
    UniqueFd to(ends[1]);
    child_ = ::fork();
    if (child_ < 0) return trouble("cannot start a process");
    if (child_ == 0) become_command(to.get());
    to.reset();
    if (::read(from.get(), &start_error_, sizeof start_error_) != sizeof start_error_)
      start_error_ = 0;
    return {};
  }

  [[noreturn]] void become_command(int to) {
    (void)::setsid();
    (void)::ioctl(slave_.get(), TIOCSCTTY, 0);
    for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
      if ((streams_ & (1U << static_cast<unsigned>(stream))) != 0)
        (void)::dup2(slave_.get(), stream);
    }
    std::vector<char*> argv;
    for (std::string& word : command_)
      argv.push_back(word.data());
    argv.push_back(nullptr);
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
    ::execvp(argv[0], argv.data());
    const int error = errno;
    (void)!::write(to, &error, sizeof error);
    ::_exit(127);
  }

  void turn() {
    const bool takes = (streams_ & kInput) != 0 && !ended_ && typed_.empty();
    const auto wanted = static_cast<short>(POLLIN | (typed_.empty() ? 0 : POLLOUT));
    std::array<pollfd, 3> wait{{{signals_.get(), POLLIN, 0},
                                {master_.get(), wanted, 0},
                                {takes ? STDIN_FILENO : -1, POLLIN, 0}}};
    if (::poll(wait.data(), wait.size(), -1) < 0) return;
    if ((wait[1].revents & POLLIN) != 0) (void)copy_output();
    if (wait[2].revents != 0) take_input();
    if (!typed_.empty()) pass_input();
    if (wait[0].revents != 0) on_signals();
  }

  // False if there is nothing now.
  bool copy_output() {
    std::array<char, kHeldPiece> piece{};
    const ssize_t got = ::read(master_.get(), piece.data(), piece.size());
    if (got <= 0) return got < 0 && errno == EINTR;
    const int to = (streams_ & kOutput) != 0 ? STDOUT_FILENO : STDERR_FILENO;
    // A reader that has gone gets nothing more.
    (void)write_all(to, piece.data(), static_cast<std::size_t>(got), "standard output");
    return true;
  }

  void take_input() {
    std::array<char, kHeldPiece> piece{};
    const ssize_t got = ::read(STDIN_FILENO, piece.data(), piece.size());
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (got > 0) {
      typed_.assign(piece.data(), static_cast<std::size_t>(got));
      return;
    }
    // At a terminal the end is typed.
    ended_ = true;
    termios mode{};
    if (::tcgetattr(slave_.get(), &mode) == 0 && (mode.c_lflag & ICANON) != 0)
      typed_.assign(1, static_cast<char>(mode.c_cc[VEOF]));
  }

  void pass_input() {
    const ssize_t done = ::write(master_.get(), typed_.data(), typed_.size());
    if (done > 0) typed_.erase(0, static_cast<std::size_t>(done));
  }

  void on_signals() {
    signalfd_siginfo info{};
    while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
      const int number = static_cast<int>(info.ssi_signo);
      if (number == SIGCHLD) {
        reap_command();
      } else if (number != SIGPIPE && number != SIGTTIN && number != SIGTTOU) {
        pass_signal(number);
      }
    }
  }

  // Signals of keys go to the foreground group of the terminal, as if they had been typed there.
  void pass_signal(int number) const {
    const bool key = number == SIGINT || number == SIGQUIT || number == SIGTSTP;
    const pid_t group = key ? ::tcgetpgrp(master_.get()) : 0;
    (void)::kill(group > 1 ? -group : child_, number);
  }

  void reap_command() {
    int status = 0;
    pid_t pid = 0;
    while ((pid = ::waitpid(-1, &status, WNOHANG)) > 0) {
      if (pid == child_) status_ = status;
    }
  }

  int end_as_it_did() const {
    if (WIFEXITED(*status_)) return WEXITSTATUS(*status_);
    const int number = WTERMSIG(*status_);
    const rlimit no_core{0, 0};
    (void)::setrlimit(RLIMIT_CORE, &no_core);
    (void)::signal(number, SIG_DFL);
    sigset_t one;
    ::sigemptyset(&one);
    ::sigaddset(&one, number);
    (void)::raise(number);
    ::sigprocmask(SIG_UNBLOCK, &one, nullptr);
    return 128 + number;
  }

  TerminalStreams streams_;
  winsize size_;
  std::vector<std::string> command_;
  sigset_t before_{};
  UniqueFd master_;
  UniqueFd slave_;
  UniqueFd signals_;
  pid_t child_ = 0;
  int start_error_ = 0;  // why the command could not be started
  std::string typed_;    // and not taken yet
  bool ended_ = false;
  std::optional<int> status_;
};

}  // namespace

Outcome hold_terminal(HolderOrder order) { return TerminalHolder(std::move(order)).run(); }

}  // namespace stasis::job
