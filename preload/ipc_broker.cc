// Long because owner and importer share the messages between them, and one thread serves both.
#include "ipc_broker.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "abi/agent_protocol.h"
#include "abi/descriptor_message.h"
#include "agent.h"
#include "gate.h"
#include "intercept.h"
#include "thread.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

constexpr char kMagic[16] = {'s', 't', 'a', 's', 'i', 's', '.', 'a',
                             'g', 'e', 'n', 't', '.', 'i', 'p', 'c'};
// Of a small piece: an agent that knows none takes such a handle for another's.
constexpr char kMagicOfPiece[16] = {'s', 't', 'a', 's', 'i', 's', '.', 'a',
                                    'g', 'e', 'n', 't', '.', 'i', 'p', 'p'};
// Programs open what they were sent one after the other.
constexpr int kBacklog = 128;

// A file of memory that a program passes on as the descriptor of a piece.
constexpr char kDescriptorName[] = "stasis-share";
constexpr int kDescriptorSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

// What lies in a descriptor, and first in the 64 bytes that the program passes on.
struct HandleContent {
  char magic[sizeof kMagic];
  ShareKey key;
  std::int32_t pid;  // for people
  std::uint32_t reserved;
};
struct PieceContent {
  HandleContent unit;
  SmallPiece piece;
};
static_assert(sizeof(PieceContent) <= sizeof(CUipcMemHandle));

// The owner writes first. CRIU dumps a connection that waits to be accepted, but none on which
// something has been said already.
constexpr char kGreeting = '!';

// What is said in place of a number when the answer was imported by its descriptor.
constexpr std::uint64_t kHolds = 0;

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
  const int length =
      std::snprintf(name.address.sun_path + 1, sizeof name.address.sun_path - 1, "%s%016llx",
                    direct::kShareSocket, static_cast<unsigned long long>(service));
  name.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                     static_cast<std::size_t>(length));
  return name;
}

// A program may close all that it did not open, and open others, which get the same numbers: every
// use asks first whether a descriptor is still ours.

bool is_listening_as(int fd, std::uint64_t service) {
  const Name wanted = name_of(service);
  sockaddr_un found{};
  socklen_t size = sizeof found;
  return fd >= 0 && ::getsockname(fd, reinterpret_cast<sockaddr*>(&found), &size) == 0 &&
         size == wanted.size && std::memcmp(&found, &wanted.address, size) == 0;
}

// A connection is told by a limit for sending that no program sets, years long: CRIU restores that,
// and leaves the name out. Nothing here waits to send.
timeval mark_of(std::uint64_t service) {
  constexpr std::uint64_t kYears = std::uint64_t{1} << 28;  // seconds
  return {static_cast<time_t>(kYears | (service % kYears)), 0};
}

bool mark_connection(int fd, std::uint64_t service) {
  const timeval mark = mark_of(service);
  return ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &mark, sizeof mark) == 0;
}

bool is_connection(int fd, std::uint64_t service) {
  const timeval wanted = mark_of(service);
  int domain = 0;
  timeval found{};
  socklen_t domain_size = sizeof domain;
  socklen_t size = sizeof found;
  return fd >= 0 && ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &domain_size) == 0 &&
         domain == AF_UNIX && ::getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &found, &size) == 0 &&
         found.tv_sec == wanted.tv_sec;
}

// Of this process's end, which no other socket has.
Name name_of_holder(std::uint64_t service) {
  std::uint64_t number = 0;
  (void)!::getrandom(&number, sizeof number, 0);
  Name name = name_of(service);
  const auto used = static_cast<std::size_t>(name.size) - offsetof(sockaddr_un, sun_path);
  const int length =
      std::snprintf(name.address.sun_path + used, sizeof name.address.sun_path - used, "-%016llx",
                    static_cast<unsigned long long>(number));
  name.size += static_cast<socklen_t>(length);
  return name;
}

bool bind_as_holder(int fd, std::uint64_t service) {
  const Name name = name_of_holder(service);
  return ::bind(fd, reinterpret_cast<const sockaddr*>(&name.address), name.size) == 0;
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
  bool holds = false;       // it has imported by descriptor, and stands for all that it so has
};

// Changed with the tables locked, so that a forked child finds it whole.
struct Service {
  std::uint64_t token = 0;  // 0: there is none
  int listening = -1;
  std::vector<Connection> connections;
  std::vector<std::uint64_t> former_tokens;
  std::uint64_t last_share = 0;
  int plug = -1;  // our own connection, which waits in the place of others
};
std::atomic<std::uint32_t> g_services_made{0};
Service& service() {
  static auto* made = new Service;
  return *made;
}

void count_open(std::uint64_t share, int change) {
  const auto at = tables().shares.find(share);
  if (at != tables().shares.end()) at->second->reach.count_open(change);
  const auto by_driver = tables().driver_shares.find(share);
  if (by_driver != tables().driver_shares.end())
    by_driver->second.open_elsewhere += static_cast<unsigned>(change);
}

bool send_answer(int connection, const Answer& answer, int memory) {
  return send_with_descriptor(connection, &answer, sizeof answer, memory, MSG_DONTWAIT);
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
  if (at != tables().shares.end() && at->second->present) {
    if (at->second->is_programs()) {
      named.answer = {CUDA_SUCCESS, 0, 0, at->second->size, {}};
      named.real = at->second->real;
    }
    // Of small pieces there may be many more than of mappings.
    for (const auto& [address, mapping] : tables().mappings) {
      if (mapping.physical != at->second) continue;
      const auto allocation = tables().allocations.find(address);
      const bool is_unit = tables().small.units.contains(address);
      if (!is_unit && allocation == tables().allocations.end()) continue;
      const auto size = at->second->size;
      named.answer = {CUDA_SUCCESS, 0, is_unit ? size : allocation->second.asked, size, {}};
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
bool probe(Connection& connection) {
  std::uint64_t share = 0;
  const auto got = ::recv(connection.fd, &share, sizeof share, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got != sizeof share || connection.holds) return false;
  if (connection.share == 0) return answer(connection, share);
  if (share != kHolds) return false;
  const TablesLock lock;
  count_open(connection.share, -1);
  connection.share = 0;
  connection.holds = true;
  return true;
}

// Like a call of the program's: while the gate is closed, a process that connects waits to be
// accepted, and CRIU finds no connection to a process outside the tree. False if no descriptor is
// left.
bool accept_one() {
  const Gate::Pass pass;
  const int fd = ::accept4(service().listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return false;
  const TablesLock lock;
  if (same_user_or_root(fd) && mark_connection(fd, service().token) &&
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
      const bool here = is_connection(connection.fd, token);
      if (here && probe(connection)) continue;
      const TablesLock lock;
      if (here) ::close(connection.fd);
      if (connection.share) count_open(connection.share, -1);
      mine.connections.erase(mine.connections.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (!is_listening_as(mine.listening, token)) break;
    if (!(polled[0].revents & POLLIN)) continue;
    // The other side waits until there is one.
    if (!accept_one()) ::usleep(10000);
  }
  // The program has closed it. The next handle names another.
  const TablesLock lock;
  for (const auto& connection : mine.connections) {
    if (connection.share) count_open(connection.share, -1);
    if (is_connection(connection.fd, token)) ::close(connection.fd);
  }
  mine.connections.clear();
  mine.former_tokens.push_back(mine.token);
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
      ::listen(fd, kBacklog) == 0 && start_thread(&serve, nullptr)) {
    Agent::note_services(++g_services_made);
    return true;
  }
  ::close(fd);
  mine.token = 0;
  return false;
}

HandleContent content_for(const ShareKey& key) {
  HandleContent content{};
  std::memcpy(content.magic, kMagic, sizeof kMagic);
  content.key = key;
  content.pid = ::getpid();
  return content;
}

CUipcMemHandle handle_of_number(std::uint64_t share, const std::optional<SmallPiece>& piece = {}) {
  PieceContent content{content_for({service().token, share}), {}};
  if (piece) {
    std::memcpy(content.unit.magic, kMagicOfPiece, sizeof kMagicOfPiece);
    content.piece = *piece;
  }
  CUipcMemHandle handle{};
  std::memcpy(handle.reserved, &content, sizeof content);
  return handle;
}

// The same number each time, as the driver's handle: programs look pieces up by it.
std::uint64_t number_of(Physical& physical) {
  if (!physical.reach.share()) {
    physical.reach.enter_share(++service().last_share);
    tables().shares.emplace(physical.reach.share(), &physical);
  }
  return physical.reach.share();
}

// --- The other's side

bool is_marked(const PieceContent& content, const char (&magic)[sizeof kMagic]) {
  return std::memcmp(content.unit.magic, magic, sizeof magic) == 0;
}

PieceContent content_of(const CUipcMemHandle& handle) {
  PieceContent content{};
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

void say_unreachable() {
  static std::atomic<bool> said{false};
  constexpr char kText[] =
      "stasis: the owner of GPU memory that another process shares could not be reached: it has "
      "ended, or is another user's or in another network namespace; to share memory with such, "
      "start both with STASIS_AGENT=off\n";
  if (!said.exchange(true)) (void)!::write(STDERR_FILENO, kText, sizeof kText - 1);
}

bool receive(int connection, Answer& answer, int& memory) {
  return receive_with_descriptor(connection, &answer, sizeof answer, memory) == sizeof answer;
}

}  // namespace

std::optional<CUipcMemHandle> handle_of_share(CUdeviceptr address) {
  const TablesLock lock;
  const auto at = tables().allocations.find(address);
  if (at == tables().allocations.end() || !have_service()) return std::nullopt;
  auto& physical = *at->second.physical;
  const auto& piece = at->second;
  const auto* place = piece.in_unit();
  if (!place) return handle_of_number(number_of(physical));
  return handle_of_number(number_of(physical),
                          SmallPiece{static_cast<std::uint32_t>(address - place->unit),
                                     static_cast<std::uint32_t>(piece.asked)});
}

int descriptor_of_share(Physical& physical) {
  const bool has_key = physical.reach.has_key();
  if (!has_key && (physical.is_imported() || !have_service())) return -1;
  const ShareKey key =
      has_key ? physical.reach.key() : ShareKey{service().token, number_of(physical)};
  const HandleContent content = content_for(key);
  const int fd = static_cast<int>(
      ::syscall(SYS_memfd_create, kDescriptorName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd < 0) return -1;
  if (::write(fd, &content, sizeof content) == sizeof content &&
      ::fcntl(fd, F_ADD_SEALS, kDescriptorSeals) == 0) {
    physical.reach.give_out();
    return fd;
  }
  ::close(fd);
  return -1;
}

std::optional<ShareKey> key_of_descriptor(int fd) {
  HandleContent content{};
  const int seals = fd < 0 ? -1 : ::fcntl(fd, F_GET_SEALS);
  // The kernel adds one where it forbids to execute such files (vm.memfd_noexec).
  if (seals < 0 || (seals & kDescriptorSeals) != kDescriptorSeals ||
      ::pread(fd, &content, sizeof content, 0) != sizeof content ||
      std::memcmp(content.magic, kMagic, sizeof kMagic) != 0)
    return std::nullopt;
  return content.key;
}

std::uint32_t services_made() { return g_services_made; }

std::vector<ShareKey> keys_of_own(const Physical& physical) {
  std::vector<ShareKey> keys;
  const auto share = physical.reach.share();
  if (!share) return keys;
  for (const auto token : service().former_tokens)
    keys.push_back({token, share});
  if (service().token != 0) keys.push_back({service().token, share});
  return keys;
}

void name_connection(int connection, std::uint64_t service) {
  sockaddr_un found{};
  socklen_t size = sizeof found;
  if (is_connection(connection, service) &&
      ::getsockname(connection, reinterpret_cast<sockaddr*>(&found), &size) == 0 &&
      size == offsetof(sockaddr_un, sun_path))
    (void)bind_as_holder(connection, service);
}

bool has_hung_up(int connection, const ShareKey& key) {
  pollfd polled{connection, POLLRDHUP, 0};
  return is_connection(connection, key.service) && ::poll(&polled, 1, 0) == 1 &&
         (polled.revents & (POLLRDHUP | POLLHUP)) != 0;
}

namespace {

// Those that wait find out, and the agents among them come again.
void send_away(int listening) {
  for (;;) {
    const int fd = ::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0)
      ::close(fd);
    else if (errno != ECONNABORTED && errno != EINTR)
      return;
  }
}

// In the only place that there is. False: another was faster.
bool put_plug(Service& mine) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  const Name name = name_of(mine.token);
  if (mark_connection(fd, mine.token) &&
      ::connect(fd, reinterpret_cast<const sockaddr*>(&name.address), name.size) == 0) {
    mine.plug = fd;
    return true;
  }
  ::close(fd);
  return false;
}

}  // namespace

void close_door() {
  constexpr int kTries = 1000;
  const TablesLock lock;
  auto& mine = service();
  if (mine.token == 0 || mine.plug >= 0 || !is_listening_as(mine.listening, mine.token)) return;
  if (::listen(mine.listening, 0) != 0) return;
  for (int i = 0; i < kTries; ++i) {
    send_away(mine.listening);
    if (put_plug(mine)) return;
  }
  // Without a descriptor left the door stays open.
  ::listen(mine.listening, kBacklog);
}

void open_door() {
  const TablesLock lock;
  auto& mine = service();
  if (mine.token == 0 || mine.plug < 0) return;
  if (is_listening_as(mine.listening, mine.token)) {
    send_away(mine.listening);
    ::listen(mine.listening, kBacklog);
  }
  if (is_connection(mine.plug, mine.token)) ::close(mine.plug);
  mine.plug = -1;
}

ShareKey lending(std::uint32_t& holders) {
  holders = 0;
  for (const Connection& connection : service().connections)
    holders += connection.holds;
  return {service().token, 0};
}

bool is_lending() {
  const TablesLock lock;
  std::uint32_t holders = 0;
  (void)lending(holders);
  return holders != 0;
}

void hold_owner(int connection, const ShareKey& key) {
  const auto [at, is_new] = tables().owners.try_emplace(key.service, connection);
  // The program may have closed what there was.
  if (!is_new && is_connection(at->second, key.service)) return end_connection(connection, key);
  at->second = connection;
  (void)!::send(connection, &kHolds, sizeof kHolds, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void leave_owner(std::uint64_t service) {
  auto& owners = tables().owners;
  const auto at = owners.find(service);
  const bool has_more =
      std::any_of(tables().physicals.begin(), tables().physicals.end(),
                  [&](const auto& entry) { return entry.second->reach.key().service == service; });
  if (at == owners.end() || has_more) return;
  end_connection(at->second, {service, 0});
  owners.erase(at);
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
  const bool ours = is_marked(content, kMagic) || is_marked(content, kMagicOfPiece);
  return ours ? std::optional(content.unit.key) : std::nullopt;
}

std::optional<SmallPiece> piece_of(const CUipcMemHandle& handle) {
  const auto content = content_of(handle);
  return is_marked(content, kMagicOfPiece) ? std::optional(content.piece) : std::nullopt;
}

bool is_own_locked(const ShareKey& key) {
  const auto& former = service().former_tokens;
  return key.service != 0 && (service().token == key.service ||
                              std::find(former.begin(), former.end(), key.service) != former.end());
}

bool is_own(const ShareKey& key) {
  const TablesLock lock;
  return is_own_locked(key);
}

namespace {

// A connection on which the owner has spoken. Below 0: there is none, or it is another user's.
int reach_owner(std::uint64_t service, bool& has_socket) {
  // One that waited when the owner's door was closed was sent away.
  constexpr int kTries = 8;
  for (int i = 0; i < kTries; ++i) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    // Without a name no tool would see that this process has the memory.
    has_socket = fd >= 0 && bind_as_holder(fd, service);
    int connected = -1;
    const Name name = name_of(service);
    do {
      if (!has_socket) break;
      connected = ::connect(fd, reinterpret_cast<const sockaddr*>(&name.address), name.size);
    } while (connected != 0 && (errno == EINTR || errno == EAGAIN));
    const bool reached = connected == 0 && mark_connection(fd, service) && same_user_or_root(fd);
    if (reached && greeted(fd)) return fd;
    if (fd >= 0) ::close(fd);
    if (!reached) return -1;
    ::usleep(1000);
  }
  return -1;
}

}  // namespace

Fetched fetch(const ShareKey& key) {
  Fetched fetched;
  bool has_socket = false;
  const int fd = reach_owner(key.service, has_socket);
  if (!has_socket) return fetched;
  Answer answer = kNoSuchMemory;
  const auto share = key.share;
  if (fd >= 0 && ::send(fd, &share, sizeof share, MSG_NOSIGNAL) == sizeof share &&
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
  if (fd >= 0) ::close(fd);
  if (!fetched.answered) say_unreachable();
  return fetched;
}

bool is_of_use(const Fetched& fetched, const ShareKey& key, std::uint32_t changes,
               const Gate::TryPass& pass) {
  if (pass.is_in() && Gate::changes() == changes) return true;
  if (fetched.memory >= 0) ::close(fetched.memory);
  end_connection(fetched.connection, key);
  if (!pass.is_in()) {
    const Gate::Pass until_it_opens;
  }
  return false;
}

void end_connection(int connection, const ShareKey& key) {
  if (is_connection(connection, key.service)) ::close(connection);
}

void forget_service_after_fork() {
  auto& mine = service();
  if (is_listening_as(mine.listening, mine.token)) ::close(mine.listening);
  if (mine.plug >= 0 && is_connection(mine.plug, mine.token)) ::close(mine.plug);
  for (const auto& connection : mine.connections)
    if (is_connection(connection.fd, mine.token)) ::close(connection.fd);
  mine = Service{};
  g_services_made = 0;
}

}  // namespace stasis::preload
