// Threads that wait in system calls: the call goes on, and returns nothing of a stop.
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <semaphore.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>

#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

constexpr const char* kCallsSubject = "system calls that wait";
constexpr timespec kLong{100000, 0};

timespec later(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  time.tv_sec += kLong.tv_sec;
  return time;
}

int quiet_pipe() {
  static const int end = [] {
    int ends[2] = {-1, -1};
    return pipe2(ends, O_CLOEXEC) == 0 ? ends[0] : -1;
  }();
  return end;
}

// A datagram socket that nothing is sent to.
int quiet_socket(bool timed) {
  const int made = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  (void)bind(made, reinterpret_cast<const sockaddr*>(&here), sizeof here);
  const timeval limit{kLong.tv_sec, 0};
  if (timed) setsockopt(made, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  return made;
}

long futex_wait(std::uint32_t& word, const timespec* limit) {
  return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, limit, nullptr, 0);
}

// A thread that makes `call`, which does not come back as long as all is well. Without any signal:
// those of the tool are for the others.
void add_call(Probe& probe, const char* name, const std::function<long()>& call) {
  struct Seen {
    std::atomic<bool> returned{false};
    std::string how;
  };
  auto seen = std::make_shared<Seen>();
  probe.add_check(
      kCallsSubject, name,
      [=] {
        std::thread([=] {
          sigset_t all;
          sigfillset(&all);
          pthread_sigmask(SIG_SETMASK, &all, nullptr);
          errno = 0;
          const long result = call();
          seen->how = "returned " + std::to_string(result) + ", " + because("errno");
          seen->returned = true;
        }).detach();
        return Problem();
      },
      [=] { return seen->returned ? Problem(seen->how) : std::nullopt; });
}

}  // namespace

void add_calls(Probe& probe) {
  static pollfd file{quiet_pipe(), POLLIN, 0};
  add_call(probe, "poll, without a time-out", [] { return poll(&file, 1, -1); });
  add_call(probe, "poll, timed", [] { return poll(&file, 1, 100'000'000); });
  add_call(probe, "ppoll, timed", [] { return ppoll(&file, 1, &kLong, nullptr); });
  add_call(probe, "select, timed", [] {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(quiet_pipe(), &set);
    timeval limit{kLong.tv_sec, 0};
    return select(quiet_pipe() + 1, &set, nullptr, nullptr, &limit);
  });
  static const int epoll = epoll_create1(EPOLL_CLOEXEC);
  add_call(probe, "epoll_wait, timed", [] {
    epoll_event event{};
    return epoll_wait(epoll, &event, 1, 100'000'000);
  });
  add_call(probe, "nanosleep", [] {
    const timespec limit = kLong;
    return nanosleep(&limit, nullptr);
  });
  add_call(probe, "nanosleep that tells what is left", [] {
    timespec limit = kLong;
    return nanosleep(&limit, &limit);
  });
  add_call(probe, "clock_nanosleep",
           [] { return clock_nanosleep(CLOCK_MONOTONIC, 0, &kLong, nullptr); });
  add_call(probe, "clock_nanosleep, at a time", [] {
    const timespec at = later(CLOCK_MONOTONIC);
    return clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr);
  });
  static std::uint32_t words[2] = {};
  add_call(probe, "futex, without a time-out", [] { return futex_wait(words[0], nullptr); });
  add_call(probe, "futex, timed", [] { return futex_wait(words[1], &kLong); });
  add_call(probe, "sem_timedwait", [] {
    static sem_t semaphore;
    sem_init(&semaphore, 0, 0);
    const timespec at = later(CLOCK_REALTIME);
    return sem_timedwait(&semaphore, &at);
  });
  add_call(probe, "pthread_cond_timedwait", [] {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
    const timespec at = later(CLOCK_REALTIME);
    pthread_mutex_lock(&mutex);
    return pthread_cond_timedwait(&never, &mutex, &at);
  });
  add_call(probe, "sigtimedwait", [] {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN + 9);
    return sigtimedwait(&set, nullptr, &kLong);
  });
  add_call(probe, "sigwaitinfo", [] {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN + 9);
    return sigwaitinfo(&set, nullptr);
  });
  add_call(probe, "read of a pipe", [] {
    char byte = 0;
    return read(quiet_pipe(), &byte, 1);
  });
  add_call(probe, "read of an eventfd", [] {
    eventfd_t value = 0;
    return eventfd_read(eventfd(0, EFD_CLOEXEC), &value);
  });
  add_call(probe, "recv", [] {
    char byte = 0;
    return recv(quiet_socket(false), &byte, 1, 0);
  });
  add_call(probe, "recv with SO_RCVTIMEO", [] {
    char byte = 0;
    return recv(quiet_socket(true), &byte, 1, 0);
  });
  add_call(probe, "accept", [] {
    const int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    listen(made, 1);
    return accept(made, nullptr, nullptr);
  });
  add_call(probe, "pause", [] { return pause(); });
  if (!probe.is_child()) add_call(probe, "waitpid", [] { return waitpid(-1, nullptr, 0); });
}

}  // namespace stasis::workloads
