#include "ipc_broker.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "gate.h"
#include "intercept.h"
#include "thread.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

constexpr char kMagic[16] = {'s', 't', 'a', 's', 'i', 's', '.', 'a',
                             'g', 'e', 'n', 't', '.', 'i', 'p', 'c'};
// Programs open what they were sent one after the other.
constexpr int kBacklog = 128;

// What lies in the 64 bytes that the program passes on.
struct HandleContent {
  char magic[sizeof kMagic];
  ShareKey key;
  std::int32_t pid;  // for people
  std::uint32_t reserved;
};
static_assert(sizeof(HandleContent) <= sizeof(CUipcMemHandle));

// The owner speaks first. CRIU dumps a connection that waits to be accepted, but none on which
// something has been said already.
constexpr char kGreeting = '!';

// The answer to a number, with the descriptor, or with the driver's handle.
struct Answer {
  std::uint32_t result;
  std::uint32_t by_driver;
  std::uint64_t asked;
  std::uint64_t bytes;
  CUipcMemHandle drivers;
};
constexpr Answer kNoSuchMemory{CUDA_ERROR_INVALID_VALUE, 0, 0, 0, {}};

struct Name {
  sockaddr_un address{};
  socklen_t size = 0;
};

Name name_of(std::uint64_t service) {
  Name name;
  name.address.sun_family = AF_UNIX;
  // The first byte is 0: a name without a file.
  const int length = std::snprintf(name.address.sun_path + 1, sizeof name.address.sun_path - 1,
                                   "stasis-ipc-%016llx", static_cast<unsigned long long>(service));
  name.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                     static_cast<std::size_t>(length));
  return name;
}

// Whether the descriptor is still a socket of that name, or connected with one: a program may close
// all that it did not open, and open others, which get the same numbers.
bool is_socket(int fd, std::uint64_t service, decltype(::getsockname)* ask) {
  const Name wanted = name_of(service);
  sockaddr_un found{};
  socklen_t size = sizeof found;
  return fd >= 0 && ask(fd, reinterpret_cast<sockaddr*>(&found), &size) == 0 &&
         size == wanted.size && std::memcmp(&found, &wanted.address, size) == 0;
}

bool same_user_or_root(int connection) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         (peer.uid == ::geteuid() || peer.uid == 0);
}

// --- The owner's side

struct Connection {
  int fd = -1;
  std::uint64_t share = 0;  // 0: nothing asked yet
};

// Changed with the tables locked, so that a forked child finds it whole.
struct Service {
  std::uint64_t token = 0;  // 0: there is none
  int listening = -1;
  std::vector<Connection> connections;
  std::uint64_t last_share = 0;
};
Service& service() {
  static auto* made = new Service;
  return *made;
}

void count_open(std::uint64_t share, int change) {
  const auto at = tables().shares.find(share);
  if (at != tables().shares.end()) at->second->open_elsewhere += static_cast<unsigned>(change);
  const auto by_driver = tables().driver_shares.find(share);
  if (by_driver != tables().driver_shares.end())
    by_driver->second.open_elsewhere += static_cast<unsigned>(change);
}

bool send_answer(int connection, const Answer& answer, int memory) {
  iovec content{const_cast<Answer*>(&answer), sizeof answer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  if (memory >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    auto* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof memory);
    std::memcpy(CMSG_DATA(header), &memory, sizeof memory);
  }
  return ::sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof answer;
}

// What a number names. It counts as open from here on: the driver's call comes after.
struct Named {
  Answer answer = kNoSuchMemory;
  CUmemGenericAllocationHandle real = 0;
  DriverShare drivers;
};

Named find_share(std::uint64_t share) {
  Named named;
  const TablesLock lock;
  const auto by_driver = tables().driver_shares.find(share);
  if (by_driver != tables().driver_shares.end() && !by_driver->second.being_freed) {
    named.answer = {CUDA_SUCCESS, 1, 0, 0, {}};
    named.drivers = by_driver->second;
  }
  const auto at = tables().shares.find(share);
  if (at != tables().shares.end()) {
    for (const auto& [address, allocation] : tables().allocations) {
      if (allocation.physical != at->second) continue;
      named.answer = {CUDA_SUCCESS, 0, allocation.asked, allocation.reserved, {}};
      named.real = at->second->real;
    }
  }
  if (named.answer.result == CUDA_SUCCESS) count_open(share, +1);
  return named;
}

// Like a call of the program's: while the gate is closed the memory may be away. False if the other
// side cannot be told.
bool answer(Connection& connection, std::uint64_t share) {
  const Gate::Pass pass;
  auto named = find_share(share);
  auto& given = named.answer;
  int memory = -1;
  if (given.result == CUDA_SUCCESS) {
    connection.share = share;
    // Freed by the program at this moment: the driver says so.
    if (given.by_driver) {
      // Made anew each time: a restore changes the driver's handle.
      const CurrentContext current(named.drivers.context);
      given.result = driver().cuIpcGetMemHandle(&given.drivers, named.drivers.address);
    } else {
      given.result = driver().cuMemExportToShareableHandle(
          &memory, named.real, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    }
    if (given.result != CUDA_SUCCESS) memory = -1;
  }
  bool sent = send_answer(connection.fd, given, memory);
  // More descriptors are under way than the user may have (ETOOMANYREFS): then without.
  if (!sent && memory >= 0) {
    given.result = CUDA_ERROR_OPERATING_SYSTEM;
    sent = send_answer(connection.fd, given, -1);
  }
  if (memory >= 0) ::close(memory);
  return sent;
}

// False if it has ended.
bool look_at(Connection& connection) {
  std::uint64_t share = 0;
  const auto got = ::recv(connection.fd, &share, sizeof share, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got != sizeof share || connection.share != 0) return false;
  return answer(connection, share);
}

// Like a call of the program's: while the gate is closed, a process that connects waits to be
// accepted, and CRIU finds no connection to a process outside the tree. False if no descriptor is
// left.
bool accept_one() {
  const Gate::Pass pass;
  const int fd = ::accept4(service().listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return false;
  const TablesLock lock;
  if (same_user_or_root(fd) &&
      ::send(fd, &kGreeting, sizeof kGreeting, MSG_NOSIGNAL) == sizeof kGreeting)
    service().connections.push_back({fd, 0});
  else
    ::close(fd);
  return true;
}

void* serve(void*) {
  auto& mine = service();
  const auto token = mine.token;
  std::vector<pollfd> polled;
  for (;;) {
    polled.assign(1, {mine.listening, POLLIN, 0});
    for (const auto& connection : mine.connections)
      polled.push_back({connection.fd, POLLIN, 0});
    if (::poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) ::usleep(10000);
    for (std::size_t i = mine.connections.size(); i-- > 0;) {
      auto& connection = mine.connections[i];
      if (!polled[i + 1].revents) continue;
      const bool here = is_socket(connection.fd, token, &::getsockname);
      if (here && look_at(connection)) continue;
      const TablesLock lock;
      if (here) ::close(connection.fd);
      if (connection.share) count_open(connection.share, -1);
      mine.connections.erase(mine.connections.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (!is_socket(mine.listening, token, &::getsockname)) break;
    if (!(polled[0].revents & POLLIN)) continue;
    // The other side waits until there is one.
    if (!accept_one()) ::usleep(10000);
  }
  // The program has closed it. The next handle names another.
  const TablesLock lock;
  for (const auto& connection : mine.connections) {
    if (connection.share) count_open(connection.share, -1);
    if (is_socket(connection.fd, token, &::getsockname)) ::close(connection.fd);
  }
  mine.connections.clear();
  mine.token = 0;
  return nullptr;
}

// With the tables locked.
bool have_service() {
  auto& mine = service();
  if (mine.token) return true;
  std::uint64_t token = 0;
  if (::getrandom(&token, sizeof token, 0) != sizeof token || token == 0) return false;
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  const Name name = name_of(token);
  mine.token = token;
  mine.listening = fd;
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&name.address), name.size) == 0 &&
      ::listen(fd, kBacklog) == 0 && start_thread(&serve, nullptr))
    return true;
  ::close(fd);
  mine.token = 0;
  return false;
}

CUipcMemHandle handle_of_number(std::uint64_t share) {
  HandleContent content{};
  std::memcpy(content.magic, kMagic, sizeof kMagic);
  content.key = {service().token, share};
  content.pid = ::getpid();
  CUipcMemHandle handle{};
  std::memcpy(handle.reserved, &content, sizeof content);
  return handle;
}

// --- The other's side

HandleContent content_of(const CUipcMemHandle& handle) {
  HandleContent content{};
  std::memcpy(&content, handle.reserved, sizeof content);
  return content;
}

bool greeted(int connection) {
  char greeting = 0;
  ssize_t got = -1;
  do {
    got = ::recv(connection, &greeting, sizeof greeting, 0);
  } while (got < 0 && errno == EINTR);
  return got == sizeof greeting && greeting == kGreeting;
}

bool receive(int connection, Answer& answer, int& memory) {
  iovec content{&answer, sizeof answer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = -1;
  do {
    got = ::recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  // The kernel gives as many as there is room for, and one leaves room for two.
  const auto* header = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    const auto count = (header->cmsg_len - CMSG_LEN(0)) / sizeof memory;
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      if (count == 1)
        memory = fd;
      else
        ::close(fd);
    }
  }
  return got == static_cast<ssize_t>(sizeof answer);
}

}  // namespace

std::optional<CUipcMemHandle> handle_of_share(CUdeviceptr address) {
  const TablesLock lock;
  const auto at = tables().allocations.find(address);
  if (at == tables().allocations.end() || !have_service()) return std::nullopt;
  auto& physical = *at->second.physical;
  // The same handle each time, as the driver's: programs look them up by it.
  if (!physical.share) {
    physical.share = ++service().last_share;
    tables().shares.emplace(physical.share, &physical);
  }
  return handle_of_number(physical.share);
}

std::optional<CUipcMemHandle> handle_of_driver_share(CUdeviceptr address, CUcontext context) {
  const TablesLock lock;
  if (!have_service()) return std::nullopt;
  for (const auto& [number, share] : tables().driver_shares)
    if (share.address == address && !share.being_freed) return handle_of_number(number);
  const auto number = ++service().last_share;
  tables().driver_shares[number] = {address, owner_in(context)};
  return handle_of_number(number);
}

std::optional<ShareKey> key_of(const CUipcMemHandle& handle) {
  const auto content = content_of(handle);
  if (std::memcmp(content.magic, kMagic, sizeof kMagic) != 0) return std::nullopt;
  return content.key;
}

bool is_own(const ShareKey& key) {
  const TablesLock lock;
  return service().token != 0 && service().token == key.service;
}

Fetched fetch(const CUipcMemHandle& handle) {
  const auto content = content_of(handle);
  Fetched fetched;
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return fetched;
  const Name name = name_of(content.key.service);
  int connected = -1;
  do {
    connected = ::connect(fd, reinterpret_cast<const sockaddr*>(&name.address), name.size);
  } while (connected != 0 && (errno == EINTR || errno == EAGAIN));
  Answer answer = kNoSuchMemory;
  const auto share = content.key.share;
  if (connected == 0 && same_user_or_root(fd) && greeted(fd) &&
      ::send(fd, &share, sizeof share, MSG_NOSIGNAL) == sizeof share &&
      receive(fd, answer, fetched.memory)) {
    fetched.answered = true;
    if (answer.result != CUDA_SUCCESS) fetched.result = static_cast<CUresult>(answer.result);
    if (answer.result == CUDA_SUCCESS && (answer.by_driver || fetched.memory >= 0)) {
      fetched.result = CUDA_SUCCESS;
      fetched.connection = fd;
      if (answer.by_driver) fetched.drivers = answer.drivers;
      fetched.asked = answer.asked;
      fetched.reserved = answer.bytes;
      return fetched;
    }
  }
  if (fetched.memory >= 0) ::close(fetched.memory);
  fetched.memory = -1;
  ::close(fd);
  return fetched;
}

void end_connection(int connection, const ShareKey& key) {
  if (is_socket(connection, key.service, &::getpeername)) ::close(connection);
}

void forget_service_after_fork() {
  auto& mine = service();
  if (is_socket(mine.listening, mine.token, &::getsockname)) ::close(mine.listening);
  for (const auto& connection : mine.connections)
    if (is_socket(connection.fd, mine.token, &::getsockname)) ::close(connection.fd);
  mine = Service{};
}

}  // namespace stasis::preload
