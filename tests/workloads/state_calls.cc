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

#include <csignal>
#include <ctime>

#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

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

long wait_for_reading(const timespec* limit) {
  fd_set set;
  FD_ZERO(&set);
  FD_SET(quiet_pipe(), &set);
  return pselect(quiet_pipe() + 1, &set, nullptr, nullptr, limit, nullptr);
}

}  // namespace

void add_calls(Probe& probe) {
  static pollfd file{quiet_pipe(), POLLIN, 0};
  probe.add_call("poll, without a time-out", [] { return poll(&file, 1, -1); });
  probe.add_call("poll, timed", [] { return poll(&file, 1, 100'000'000); });
  probe.add_call("ppoll, timed", [] { return ppoll(&file, 1, &kLong, nullptr); });
  probe.add_call("select, timed", [] {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(quiet_pipe(), &set);
    timeval limit{kLong.tv_sec, 0};
    return select(quiet_pipe() + 1, &set, nullptr, nullptr, &limit);
  });
  static const int epoll = epoll_create1(EPOLL_CLOEXEC);
  probe.add_call("epoll_wait, timed", [] {
    epoll_event event{};
    return epoll_wait(epoll, &event, 1, 100'000'000);
  });
  probe.add_call("nanosleep", [] {
    const timespec limit = kLong;
    return nanosleep(&limit, nullptr);
  });
  probe.add_call("nanosleep that tells what is left", [] {
    timespec limit = kLong;
    return nanosleep(&limit, &limit);
  });
  probe.add_call("clock_nanosleep",
                 [] { return clock_nanosleep(CLOCK_MONOTONIC, 0, &kLong, nullptr); });
  probe.add_call("clock_nanosleep, at a time", [] {
    const timespec at = later(CLOCK_MONOTONIC);
    return clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr);
  });
  static std::uint32_t words[2] = {};
  probe.add_call("futex, without a time-out", [] { return futex_wait(words[0], nullptr); });
  probe.add_call("futex, timed", [] { return futex_wait(words[1], &kLong); });
  probe.add_call("sem_timedwait", [] {
    static sem_t semaphore;
    sem_init(&semaphore, 0, 0);
    const timespec at = later(CLOCK_REALTIME);
    return sem_timedwait(&semaphore, &at);
  });
  probe.add_call("pthread_cond_timedwait", [] {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
    const timespec at = later(CLOCK_REALTIME);
    pthread_mutex_lock(&mutex);
    return pthread_cond_timedwait(&never, &mutex, &at);
  });
  probe.add_call("sigtimedwait", [] {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN + 9);
    return sigtimedwait(&set, nullptr, &kLong);
  });
  probe.add_call("sigwaitinfo", [] {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN + 9);
    return sigwaitinfo(&set, nullptr);
  });
  probe.add_call("read of a pipe", [] {
    char byte = 0;
    return read(quiet_pipe(), &byte, 1);
  });
  probe.add_call("read of an eventfd", [] {
    eventfd_t value = 0;
    return eventfd_read(eventfd(0, EFD_CLOEXEC), &value);
  });
  probe.add_call("recv", [] {
    char byte = 0;
    return recv(quiet_socket(false), &byte, 1, 0);
  });
  probe.add_call("recv with SO_RCVTIMEO", [] {
    char byte = 0;
    return recv(quiet_socket(true), &byte, 1, 0);
  });
  probe.add_call("accept", [] {
    const int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    listen(made, 1);
    return accept(made, nullptr, nullptr);
  });
  probe.add_call("pause", [] { return pause(); });
  probe.add_call("ppoll, without a time-out", [] { return ppoll(&file, 1, nullptr, nullptr); });
  probe.add_call("pselect, timed", [] { return wait_for_reading(&kLong); });
  probe.add_call("pselect, without a time-out", [] { return wait_for_reading(nullptr); });
  probe.add_call("epoll_wait, without a time-out", [] {
    epoll_event event{};
    return epoll_wait(epoll, &event, 1, -1);
  });
  probe.add_call("epoll_pwait2, timed", [] {
    epoll_event event{};
    return syscall(SYS_epoll_pwait2, epoll, &event, 1, &kLong, nullptr, 8UL);
  });
  probe.add_call("sigsuspend", [] {
    sigset_t all;
    sigfillset(&all);
    return sigsuspend(&all);
  });
  if (!probe.is_child())
    probe.add_call("waitid", [] { return waitid(P_ALL, 0, nullptr, WEXITED | WNOWAIT); });
  if (!probe.is_child()) probe.add_call("waitpid", [] { return waitpid(-1, nullptr, 0); });
}

}  // namespace stasis::workloads
