// Threads that wait in system calls for what others hold, take or send: semaphores, queues, locks,
// room in a pipe or socket.
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

constexpr timespec kLongWait{100000, 0};
constexpr timeval kLongOfSockets{100000, 0};

// What outlives the process is written down, so that the test removes it.
int note_for_removal(const Probe& probe, const char* kind, int id) {
  std::ofstream(probe.file("ipc"), std::ios::app) << kind << " " << id << "\n";
  return id;
}

long wait_for_semaphore(int set, const timespec* limit) {
  sembuf operation{0, -1, 0};
  return limit != nullptr ? semtimedop(set, &operation, 1, limit) : semop(set, &operation, 1);
}

void add_system_v(Probe& probe) {
  const int set = note_for_removal(probe, "-s", semget(IPC_PRIVATE, 1, 0600));
  probe.add_call("semop", [=] { return wait_for_semaphore(set, nullptr); });
  probe.add_call("semtimedop", [=] { return wait_for_semaphore(set, &kLongWait); });
  struct QueuedMessage {
    long type = 1;
    char text[1024] = {};
  };
  const int queue = note_for_removal(probe, "-q", msgget(IPC_PRIVATE, 0600));
  probe.add_call("msgrcv", [=] {
    QueuedMessage message;
    return msgrcv(queue, &message, sizeof message.text, 0, 0);
  });
  const int full = note_for_removal(probe, "-q", msgget(IPC_PRIVATE, 0600));
  const QueuedMessage message;
  while (msgsnd(full, &message, sizeof message.text, IPC_NOWAIT) == 0) {
  }
  probe.add_call("msgsnd to a full queue",
                 [=] { return msgsnd(full, &message, sizeof message.text, 0); });
}

void add_asynchronous_io(Probe& probe) {
  const auto context = std::make_shared<aio_context_t>();
  if (syscall(SYS_io_setup, 8, context.get()) != 0) return;
  probe.add_call("io_getevents, without a time-out", [=] {
    io_event event{};
    return syscall(SYS_io_getevents, *context, 1L, 1L, &event, nullptr);
  });
  probe.add_call("io_getevents, timed", [=] {
    io_event event{};
    timespec limit = kLongWait;
    return syscall(SYS_io_getevents, *context, 1L, 1L, &event, &limit);
  });
  probe.add_call("io_pgetevents, timed", [=] {
    io_event event{};
    timespec limit = kLongWait;
    return syscall(SYS_io_pgetevents, *context, 1L, 1L, &event, &limit, nullptr);
  });
}

int new_file(const Probe& probe, const char* name) {
  return open(probe.file(name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

struct flock whole_file() {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

// The file that the root of the tree holds the lock of: it is there before the child is.
std::string g_held_by_root;  // NOLINT: set before there are threads

void add_locks(Probe& probe) {
  if (probe.is_child()) {
    probe.add_call("fcntl, F_SETLKW", [] {
      const int other = open(g_held_by_root.c_str(), O_RDWR | O_CLOEXEC);
      struct flock lock = whole_file();
      return fcntl(other, F_SETLKW, &lock);
    });
  }
  struct flock lock = whole_file();
  fcntl(new_file(probe, "ofd"), F_OFD_SETLK, &lock);
  probe.add_call("fcntl, F_OFD_SETLKW", [&probe] {
    struct flock wanted = whole_file();
    return fcntl(new_file(probe, "ofd"), F_OFD_SETLKW, &wanted);
  });
  flock(new_file(probe, "flock"), LOCK_EX);
  probe.add_call("flock", [&probe] { return flock(new_file(probe, "flock"), LOCK_EX); });
}

// Nothing is read from its other end.
int full_pipe() {
  int ends[2] = {-1, -1};
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return -1;
  const std::array<char, 4096> page{};
  while (write(ends[1], page.data(), page.size()) > 0) {
  }
  fcntl(ends[1], F_SETFL, 0);
  return ends[1];
}

// Datagrams take as much room after a restore; one stream of bytes takes less than its pieces did.
int full_socket(bool timed) {
  int ends[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends) != 0) return -1;
  if (timed) setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &kLongOfSockets, sizeof kLongOfSockets);
  const std::array<char, 4096> page{};
  while (send(ends[0], page.data(), page.size(), MSG_DONTWAIT) > 0) {
  }
  return ends[0];
}

sockaddr_un some_name() {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  return name;
}

// A connection to a socket whose queue is full waits until there is room.
long connect_to_full(int listener, bool timed) {
  const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (timed) setsockopt(made, SOL_SOCKET, SO_SNDTIMEO, &kLongOfSockets, sizeof kLongOfSockets);
  sockaddr_un name{};
  socklen_t size = sizeof name;
  getsockname(listener, reinterpret_cast<sockaddr*>(&name), &size);
  return connect(made, reinterpret_cast<const sockaddr*>(&name), size);
}

void add_sockets(Probe& probe) {
  probe.add_call("write to a full pipe", [] { return write(full_pipe(), "", 1); });
  probe.add_call("send to a full socket", [] { return send(full_socket(false), "", 1, 0); });
  probe.add_call("send to a full socket with SO_SNDTIMEO",
                 [] { return send(full_socket(true), "", 1, 0); });
  probe.add_call("recvmmsg", [] {
    int ends[2] = {-1, -1};
    (void)socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends);
    char byte = 0;
    iovec part{&byte, 1};
    mmsghdr message{};
    message.msg_hdr.msg_iov = &part;
    message.msg_hdr.msg_iovlen = 1;
    timespec limit = kLongWait;
    return recvmmsg(ends[0], &message, 1, 0, &limit);
  });
  probe.add_call("accept with SO_RCVTIMEO", [] {
    const int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(made, SOL_SOCKET, SO_RCVTIMEO, &kLongOfSockets, sizeof kLongOfSockets);
    listen(made, 1);
    return accept(made, nullptr, nullptr);
  });
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_un name = some_name();
  // The kernel gives it a name of its own.
  (void)bind(listener, reinterpret_cast<const sockaddr*>(&name), sizeof name.sun_family);
  listen(listener, 0);
  connect_to_full(listener, false);  // has room for one
  probe.add_call("connect to a full socket", [=] { return connect_to_full(listener, false); });
  probe.add_call("connect to a full socket with SO_SNDTIMEO",
                 [=] { return connect_to_full(listener, true); });
}

// linux/futex.h, since Linux 5.16
struct Waiter {
  std::uint64_t value = 0;
  std::uint64_t address = 0;
  std::uint32_t flags = 2 | 128;  // FUTEX_32, FUTEX_PRIVATE_FLAG
  std::uint32_t reserved = 0;
};
constexpr long kFutexWaitv = 449;

void add_futexes(Probe& probe) {
  static std::uint32_t words[4] = {};
  probe.add_call("futex, FUTEX_WAIT_BITSET, at a time", [] {
    timespec at{};
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += kLongWait.tv_sec;
    return syscall(SYS_futex, &words[0], FUTEX_WAIT_BITSET_PRIVATE, 0, &at, nullptr, ~0U);
  });
  probe.add_call("futex, FUTEX_WAIT_BITSET, at a time of day", [] {
    timespec at{};
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += kLongWait.tv_sec;
    return syscall(SYS_futex, &words[1], FUTEX_WAIT_BITSET_PRIVATE | FUTEX_CLOCK_REALTIME, 0, &at,
                   nullptr, ~0U);
  });
  probe.add_call("futex_waitv, at a time", [] {
    Waiter waiters[2];
    for (int i = 0; i < 2; ++i)
      waiters[i].address = reinterpret_cast<std::uintptr_t>(&words[2 + i]);
    timespec at{};
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += kLongWait.tv_sec;
    return syscall(kFutexWaitv, waiters, 2, 0, &at, CLOCK_MONOTONIC);
  });
}

}  // namespace

void hold_lock_for_child(const std::string& files) {
  g_held_by_root = files + ".posix.cuda-file";
  struct flock lock = whole_file();
  fcntl(open(g_held_by_root.c_str(), O_RDWR | O_CREAT, 0600), F_SETLK, &lock);
}

void add_queues(Probe& probe) {
  add_system_v(probe);
  add_asynchronous_io(probe);
  if (probe.with_locks()) add_locks(probe);
  add_sockets(probe);
  add_futexes(probe);
}

}  // namespace stasis::workloads
