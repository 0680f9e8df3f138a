#include "driver/driver_worker.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <vector>

#include "abi/descriptor_message.h"
#include "base/helper_process.h"
#include "base/helper_start.h"
#include "base/own_helpers.h"
#include "driver/bounded_driver.h"

namespace stasis {
namespace {

constexpr int kEndTimeoutMs = 5000;

struct SocketPair {
  UniqueFd ours;
  UniqueFd theirs;
};

Result<SocketPair> make_pair() {
  int pair[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return fail(errno_error("cannot create a socket for the driver's calls", errno));
  }
  return SocketPair{UniqueFd(pair[0]), UniqueFd(pair[1])};
}

// One message; 0 at the end of the other side, negative for an error.
ssize_t receive(int socket, void* data, std::size_t size, UniqueFd* passed = nullptr) {
  int fd = -1;
  const ssize_t got = receive_with_descriptor(socket, data, size, fd);
  UniqueFd taken(fd);
  if (passed != nullptr && taken.valid()) *passed = std::move(taken);
  return got;
}

CallAnswer answer_of(const DriverResult<void>& result) {
  return {result ? 0 : result.error().number, 0};
}

CallAnswer call(Driver& driver, const CallRequest& request) {
  const Pid pid{request.pid};
  if (request.kind == CallRequest::Kind::kPrepareRestore) {
    driver.prepare_restore();
    return {};
  }
  switch (request.action) {
    case Action::kGetState: {
      auto state = driver.state(pid);
      if (!state) return {state.error().number, 0};
      return {0, static_cast<std::int32_t>(*state)};
    }
    case Action::kGetRestoreThreadId: {
      auto thread = driver.restore_thread_id(pid);
      if (!thread) return {thread.error().number, 0};
      return {0, thread->value};
    }
    case Action::kLock:
      return answer_of(driver.lock(pid, std::chrono::milliseconds(request.timeout_ms)));
    case Action::kCheckpoint:
      return answer_of(driver.checkpoint(pid));
    case Action::kRestore:
      return answer_of(driver.restore(pid, std::span(request.pairs).first(request.pair_count)));
    case Action::kUnlock:
      return answer_of(driver.unlock(pid));
  }
  return {};
}

[[noreturn]] void serve_calls(Driver& driver, int socket, int parent) {
  // The source ends when the tool does, and its callers with it, in the middle of any call.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(0);
  for (;;) {
    CallRequest request;
    if (receive(socket, &request, sizeof request) != sizeof request) ::_exit(0);
    const CallAnswer answer = call(driver, request);
    if (!send_with_descriptor(socket, &answer, sizeof answer, -1)) ::_exit(0);
  }
}

// Also reaps them: a zombie would go to the process that reaps orphans here, which in a PID
// namespace of its own is stasis itself. One that is stuck in the kernel is not waited for.
[[noreturn]] void end_all(const std::vector<pid_t>& callers) {
  constexpr int kTries = 1000;
  for (const pid_t pid : callers)
    ::kill(pid, SIGKILL);
  for (const pid_t pid : callers) {
    for (int tries = 0; ::waitpid(pid, nullptr, WNOHANG) == 0 && tries < kTries; ++tries)
      ::usleep(1000);
  }
  ::_exit(0);
}

// Forks a caller for each socket that comes, and ends when no process can send one any more.
[[noreturn]] void serve_source(Driver& driver, int socket) {
  // The callers end with the tool in any case; the driver's library collects its own children.
  (void)::setpgid(0, 0);
  ignore_signals();
  close_all_but(std::array{socket});
  const int self = ::getpid();
  std::vector<pid_t> callers;
  for (;;) {
    char word = 0;
    UniqueFd theirs;
    if (receive(socket, &word, sizeof word, &theirs) != sizeof word) end_all(callers);
    // Before the next fork: until then the number of an ended caller is not used again.
    callers.erase(std::remove_if(callers.begin(), callers.end(),
                                 [](pid_t one) { return ::waitpid(one, nullptr, WNOHANG) == one; }),
                  callers.end());
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::close(socket);
      serve_calls(driver, theirs.get(), self);
    }
    if (pid > 0) callers.push_back(pid);
    theirs.reset();
    const std::int32_t number = pid < 0 ? -errno : pid;
    if (!send_with_descriptor(socket, &number, sizeof number, -1)) ::_exit(0);
  }
}

}  // namespace

bool Caller::send(const CallRequest& request) const {
  return send_with_descriptor(socket_.get(), &request, sizeof request, -1);
}

std::optional<CallAnswer> Caller::wait(std::chrono::milliseconds timeout, bool& gone) const {
  pollfd wait{socket_.get(), POLLIN, 0};
  const int ready = ::poll(&wait, 1, static_cast<int>(timeout.count()));
  gone = false;
  if (ready == 0 || (ready < 0 && errno == EINTR)) return std::nullopt;
  CallAnswer answer;
  if (receive(socket_.get(), &answer, sizeof answer) == sizeof answer) return answer;
  gone = true;
  return std::nullopt;
}

void Caller::kill() {
  if (!socket_.valid()) return;
  (void)process_.signal(SIGKILL);
  (void)process_.wait_exit(kEndTimeoutMs);
  socket_.reset();
}

Result<CallerSource> CallerSource::start(Driver& driver) {
  STASIS_TRY_ASSIGN(auto pair, make_pair());
  const pid_t pid = ::fork();
  if (pid < 0) {
    return fail(errno_error("cannot start a process for the driver's calls", errno));
  }
  if (pid == 0) {
    pair.ours.reset();
    serve_source(driver, pair.theirs.get());
  }
  return CallerSource(pid, std::move(pair.ours));
}

Result<CallerSource> CallerSource::start_program(const std::string& program,
                                                 const std::string& library) {
  STASIS_TRY_ASSIGN(auto pair, make_pair());
  const std::array arguments{library};
  auto pid = spawn_with_socket(program, arguments, pair.theirs);
  if (!pid) {
    pid.error().remedy += "; without a limit on the driver's calls it is not needed";
    return fail(std::move(pid.error()));
  }
  return CallerSource(*pid, std::move(pair.ours));
}

void serve_driver_calls(Driver& driver) { serve_source(driver, kHelperSocket); }

CallerSource::CallerSource(int pid, UniqueFd socket) : pid_(pid), socket_(std::move(socket)) {
  add_own_helper(Pid{pid});
}

CallerSource::~CallerSource() {
  if (pid_ == 0) return;
  socket_.reset();
  (void)TEMP_FAILURE_RETRY(::waitpid(pid_, nullptr, 0));
  remove_own_helper(Pid{pid_});
}

Result<Caller> CallerSource::make() const {
  STASIS_TRY_ASSIGN(auto pair, make_pair());
  const char word = 'c';
  std::int32_t number = -ECHILD;
  if (send_with_descriptor(socket_.get(), &word, sizeof word, pair.theirs.get())) {
    (void)receive(socket_.get(), &number, sizeof number);
  }
  if (number < 0) {
    return fail(errno_error("cannot start a process for the driver's calls", -number));
  }
  STASIS_TRY_ASSIGN(auto process, Pidfd::open(Pid{number}));
  return Caller(std::move(process), std::move(pair.ours));
}

}  // namespace stasis
