// How another process comes to memory of the agent's: the socket, its thread, and the processes
// that connect. One process is both here. The thread stays to the end, so nothing is forgotten
// between the tests.
//
// Long because each test has two sides.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "eviction.h"
#include "fake_driver.h"
#include "gate.h"
#include "ipc_broker.h"
#include "sharing.h"

namespace stasis::preload {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace)

constexpr uid_t kOtherUser = 65534;
constexpr std::size_t kMiB = std::size_t{1} << 20;

CUdeviceptr allocated(std::size_t bytes) {
  static CUcontext context = nullptr;
  if (!context) {
    fake().exported = ::memfd_create("exported", MFD_CLOEXEC);
    EXPECT_EQ(hooks::cuCtxCreate_v2(&context, 0, 0), CUDA_SUCCESS);
  }
  CUdeviceptr address = 0;
  EXPECT_EQ(hooks::cuMemAlloc_v2(&address, bytes), CUDA_SUCCESS);
  return address;
}

// Of this process's own that others have open, and of others' that this one has.
std::uint32_t open_pieces() {
  std::uint32_t count = 0;
  for (const Shared& piece : list_shared())
    count += piece.role == direct::ShareRole::kOwner ? piece.open : 1;
  return count;
}

Fetched fetch(const CUipcMemHandle& handle) {
  const auto key = key_of(handle);
  return preload::fetch(key ? *key : ShareKey{});
}

CUipcMemHandle handle_of(CUdeviceptr address) {
  CUipcMemHandle handle{};
  EXPECT_EQ(hooks::cuIpcGetMemHandle(&handle, address), CUDA_SUCCESS);
  return handle;
}

sockaddr_un name_in(const CUipcMemHandle& handle, socklen_t& size) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const int length =
      std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "stasis-ipc-%016llx",
                    static_cast<unsigned long long>(key_of(handle)->service));
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                static_cast<std::size_t>(length));
  return name;
}

int connected(const CUipcMemHandle& handle) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t size = 0;
  const auto name = name_in(handle, size);
  EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&name), size), 0);
  char greeting = 0;
  EXPECT_EQ(::recv(fd, &greeting, 1, 0), 1) << "the owner does not speak first";
  return fd;
}

// The descriptor on which the agent listens.
int listening(const CUipcMemHandle& handle) {
  socklen_t size = 0;
  const auto wanted = name_in(handle, size);
  for (int fd = 3; fd < 64; ++fd) {
    sockaddr_un name{};
    socklen_t length = sizeof name;
    int listens = 0;
    socklen_t one = sizeof listens;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) == 0 && length == size &&
        std::memcmp(&name, &wanted, size) == 0 &&
        ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &one) == 0 && listens)
      return fd;
  }
  return -1;
}

// So many of one descriptor in one message, with content of that size.
bool send_descriptors(int socket, int fd, std::size_t count, std::size_t size = 1) {
  std::vector<char> bytes(size);
  iovec content{bytes.data(), size};
  std::vector<cmsghdr> control(CMSG_SPACE(count * sizeof fd) / sizeof(cmsghdr) + 1);
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(count * sizeof fd);
  auto* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(count * sizeof fd);
  for (std::size_t i = 0; i < count; ++i)
    std::memcpy(CMSG_DATA(header) + i * sizeof fd, &fd, sizeof fd);
  return ::sendmsg(socket, &message, 0) == static_cast<ssize_t>(size);
}

template <class Condition>
bool soon(Condition condition) {
  for (int i = 0; i < 30000 && !condition(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return condition();
}

std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

// Of the memory that is exported.
std::ptrdiff_t open_exports() {
  struct stat wanted {};
  EXPECT_EQ(::fstat(fake().exported, &wanted), 0);
  std::ptrdiff_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    struct stat seen {};
    if (::stat(entry.path().c_str(), &seen) == 0 && seen.st_dev == wanted.st_dev &&
        seen.st_ino == wanted.st_ino)
      ++count;
  }
  return count;
}

bool waits_for_futex(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/syscall");
  long number = -1;
  return file >> number && number == SYS_futex;
}

TEST(AgentShare, WhoHasTheHandleGetsADescriptorAndTheOwnerKnows) {
  const auto address = allocated(5 * kMiB + 1);
  const auto handle = handle_of(address);
  EXPECT_EQ(movable_bytes(), 6 * kMiB);
  for (int i = 0; i < 3; ++i) {
    const auto before = open_descriptors();
    const auto got = fetch(handle);
    ASSERT_EQ(got.result, CUDA_SUCCESS);
    EXPECT_EQ(got.asked, 5 * kMiB + 1);
    EXPECT_EQ(got.reserved, 6 * kMiB);
    struct stat given {};
    struct stat wanted {};
    ASSERT_EQ(::fstat(got.memory, &given), 0);
    ASSERT_EQ(::fstat(fake().exported, &wanted), 0);
    EXPECT_EQ(given.st_ino, wanted.st_ino);
    EXPECT_NE(::fcntl(got.memory, F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_EQ(movable_bytes(), 6 * kMiB) << "those who have it give it up first";
    EXPECT_EQ(open_pieces(), 1U);
    ::close(got.memory);
    ::close(got.connection);
    EXPECT_TRUE(soon([] { return open_pieces() == 0; })) << "closed, and still counted";
    EXPECT_TRUE(soon([&] { return open_descriptors() <= before; })) << "descriptors are left";
  }
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
}

// Its own gate had closed before it asked, and the owner's closed after that had answered.
TEST(AgentShare, WhatWasFetchedBeforeTheGateOpensIsFetchedOnceMore) {
  const auto address = allocated(4 * kMiB);
  const auto handle = handle_of(address);
  const auto got = fetch(handle);
  ASSERT_EQ(got.result, CUDA_SUCCESS);
  const auto open = open_descriptors();
  EXPECT_TRUE(is_of_use(got, *key_of(handle), Gate::changes(), Gate::TryPass()));
  EXPECT_EQ(open_descriptors(), open);
  ASSERT_TRUE(Gate::close(Timeout(Timeout::Clock::now() + std::chrono::minutes(1))));
  const auto when_asked = Gate::changes();
  Gate::open();
  EXPECT_FALSE(is_of_use(got, *key_of(handle), when_asked, Gate::TryPass()));
  EXPECT_TRUE(soon([&] { return open_descriptors() <= open - 2; })) << "descriptors are left";
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
}

TEST(AgentShare, WhatIsFreedIsNotToBeHad) {
  const auto address = allocated(4 * kMiB);
  const auto handle = handle_of(address);
  ASSERT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
  const auto got = fetch(handle);
  EXPECT_TRUE(got.answered);
  EXPECT_EQ(got.result, CUDA_ERROR_INVALID_VALUE);
}

TEST(AgentShare, OneThatCannotBeExportedKeepsNothing) {
  const auto address = allocated(4 * kMiB);
  const auto handle = handle_of(address);
  fake().fail_at("cuMemExportToShareableHandle", 1);
  const auto got = fetch(handle);
  EXPECT_TRUE(got.answered);
  EXPECT_EQ(got.result, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_TRUE(soon([] { return movable_bytes() == 4 * kMiB; }));
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
}

// An owner of the same user that answers otherwise than ours do.
TEST(AgentShare, ADescriptorTooManyIsNotLeftOpen) {
  constexpr std::uint64_t kService = 0x1234567;
  constexpr std::size_t kAnswer = 88;
  const auto address = allocated(4 * kMiB);
  auto handle = handle_of(address);
  std::memcpy(handle.reserved + 16, &kService, sizeof kService);
  ASSERT_EQ(key_of(handle)->service, kService);
  const int owner = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t size = 0;
  const auto name = name_in(handle, size);
  ASSERT_EQ(::bind(owner, reinterpret_cast<const sockaddr*>(&name), size), 0);
  ASSERT_EQ(::listen(owner, 1), 0);
  const auto before = open_descriptors();
  const auto exports = open_exports();
  for (const std::size_t count : {1U, 2U, 3U}) {
    std::thread answering([&] {
      const int connection = ::accept(owner, nullptr, nullptr);
      EXPECT_EQ(::send(connection, "!", 1, MSG_NOSIGNAL), 1);
      std::uint64_t share = 0;
      EXPECT_EQ(::recv(connection, &share, sizeof share, MSG_WAITALL), sizeof share);
      EXPECT_TRUE(send_descriptors(connection, fake().exported, count, kAnswer));
      ::close(connection);
    });
    const auto got = fetch(handle);
    answering.join();
    EXPECT_TRUE(got.answered);
    EXPECT_EQ(got.memory >= 0, count == 1) << count;
    if (got.memory >= 0) ::close(got.memory);
    if (got.connection >= 0) ::close(got.connection);
    EXPECT_EQ(open_exports(), exports) << count;
    // The agent may not have closed a connection of an earlier test before the first look.
    EXPECT_LE(open_descriptors(), before) << count;
  }
  ::close(owner);
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
}

// In a process of its own: without root's rights, and with as many descriptors under way as its
// user may have.
TEST(AgentShare, WhoCannotBeGivenTheDescriptorIsTold) {
  const auto child = ::fork();
  if (child == 0) {
    ::alarm(120);  // for who is not told
    if (::geteuid() == 0 && ::setresuid(kOtherUser, kOtherUser, kOtherUser) != 0) ::_exit(2);
    forget_everything();
    fake().exported = ::memfd_create("exported", MFD_CLOEXEC);
    CUcontext context = nullptr;
    CUdeviceptr address = 0;
    CUipcMemHandle handle{};
    if (hooks::cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS ||
        hooks::cuMemAlloc_v2(&address, 4 * kMiB) != CUDA_SUCCESS ||
        hooks::cuIpcGetMemHandle(&handle, address) != CUDA_SUCCESS)
      ::_exit(3);
    const rlimit few{64, 64};
    int pair[2];
    if (::setrlimit(RLIMIT_NOFILE, &few) != 0 || ::socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) != 0)
      ::_exit(4);
    for (int i = 0; i < 2; ++i)
      if (!send_descriptors(pair[0], fake().exported, 40)) ::_exit(5);
    auto got = fetch(handle);
    if (!got.answered || got.result != CUDA_ERROR_OPERATING_SYSTEM) ::_exit(6);
    if (!soon([] { return open_pieces() == 0; })) ::_exit(7);
    ::close(pair[0]);
    ::close(pair[1]);
    ::_exit(soon([&] { return fetch(handle).result == CUDA_SUCCESS; }) ? 0 : 8);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// Another process, with memory that is there for all who have its handle.
class Owner {
 public:
  explicit Owner(std::size_t bytes) {
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair_), 0);
    child_ = ::fork();
    if (child_ == 0) be(bytes);
    ::close(pair_[1]);
    EXPECT_EQ(::recv(pair_[0], &handle_, sizeof handle_, MSG_WAITALL), sizeof handle_);
  }
  ~Owner() {
    ::close(pair_[0]);
    ::waitpid(child_, nullptr, 0);
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  const CUipcMemHandle& handle() const { return handle_; }
  // Whether it says that others have it open.
  bool knows() const {
    char word = '?';
    EXPECT_EQ(::send(pair_[0], &word, 1, MSG_NOSIGNAL), 1);
    EXPECT_EQ(::recv(pair_[0], &word, 1, 0), 1);
    return word == 'y';
  }

 private:
  [[noreturn]] void be(std::size_t bytes) const {
    ::close(pair_[0]);
    forget_everything();
    fake().exported = ::memfd_create("exported", MFD_CLOEXEC);
    CUcontext context = nullptr;
    CUdeviceptr address = 0;
    CUipcMemHandle handle{};
    if (hooks::cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS ||
        hooks::cuMemAlloc_v2(&address, bytes) != CUDA_SUCCESS ||
        hooks::cuIpcGetMemHandle(&handle, address) != CUDA_SUCCESS)
      ::_exit(1);
    ::send(pair_[1], &handle, sizeof handle, MSG_NOSIGNAL);
    char word = 0;
    while (::recv(pair_[1], &word, 1, 0) == 1) {
      word = open_pieces() > 0 ? 'y' : 'n';
      ::send(pair_[1], &word, 1, MSG_NOSIGNAL);
    }
    ::_exit(0);
  }

  int pair_[2] = {-1, -1};
  pid_t child_ = -1;
  CUipcMemHandle handle_{};
};

CUdeviceptr opened(const CUipcMemHandle& handle) {
  CUdeviceptr address = 0;
  EXPECT_EQ(hooks::cuIpcOpenMemHandle_v2(&address, handle, kIpcMemLazyEnablePeerAccess),
            CUDA_SUCCESS);
  return address;
}

// The driver must find no descriptor of another's memory when it checkpoints this process.
TEST(AgentShare, NoDescriptorIsKeptInFrontOfAClosedGate) {
  EXPECT_EQ(hooks::cuMemFree_v2(allocated(kMiB)), CUDA_SUCCESS);  // there is a context
  const Owner owner(4 * kMiB);
  const auto before = open_descriptors();
  ASSERT_TRUE(Gate::close(Timeout(Timeout::Clock::now() + std::chrono::minutes(1))));
  CUdeviceptr address = 0;
  std::atomic<pid_t> opener_tid{0};
  std::thread opener([&] {
    opener_tid = ::gettid();
    address = opened(owner.handle());
  });
  EXPECT_TRUE(soon([&] { return waits_for_futex(opener_tid); }));
  EXPECT_EQ(open_descriptors(), before);
  EXPECT_TRUE(soon([&] { return !owner.knows(); }));
  Gate::open();
  opener.join();
  EXPECT_TRUE(owner.knows());
  EXPECT_EQ(hooks::cuIpcCloseMemHandle(address), CUDA_SUCCESS);
}

// To wait for the device would spoil the capture, and the memory may be in use until its end.
TEST(AgentShare, WhatIsClosedInACaptureIsClosedAtItsEnd) {
  EXPECT_EQ(hooks::cuMemFree_v2(allocated(kMiB)), CUDA_SUCCESS);  // there is a context
  const Owner owner(4 * kMiB);
  auto* const stream = reinterpret_cast<CUstream>(std::uintptr_t{0x50});
  for (const bool destroyed : {false, true}) {
    const auto maps = fake().maps.size();
    const auto address = opened(owner.handle());
    EXPECT_EQ(opened(owner.handle()), address);
    EXPECT_TRUE(owner.knows());
    ASSERT_EQ(hooks::cuStreamBeginCapture_v2(stream, 2), CUDA_SUCCESS);
    const auto waits = fake().calls["cuMemFree"];
    EXPECT_EQ(hooks::cuIpcCloseMemHandle(address), CUDA_SUCCESS);
    EXPECT_EQ(hooks::cuIpcCloseMemHandle(address), CUDA_SUCCESS);
    EXPECT_EQ(hooks::cuIpcCloseMemHandle(address), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(fake().calls["cuMemFree"], waits);
    EXPECT_EQ(fake().maps.size(), maps + 1);
    EXPECT_EQ(open_pieces(), 1U);
    EXPECT_TRUE(owner.knows());
    ASSERT_EQ(
        destroyed ? hooks::cuStreamDestroy_v2(stream) : hooks::cuStreamEndCapture(stream, nullptr),
        CUDA_SUCCESS);
    EXPECT_EQ(fake().calls["cuMemFree"], waits + 1);
    EXPECT_EQ(fake().maps.size(), maps);
    EXPECT_EQ(open_pieces(), 0U);
    EXPECT_TRUE(soon([&] { return !owner.knows(); }));
  }
}

TEST(AgentShare, StrangersDoNoHarm) {
  const auto address = allocated(4 * kMiB);
  const auto handle = handle_of(address);
  const int silent = connected(handle);
  const int garbled = connected(handle);
  EXPECT_EQ(::send(garbled, "abc", 3, MSG_NOSIGNAL), 3);
  char byte = 0;
  EXPECT_EQ(::recv(garbled, &byte, 1, 0), 0) << "it is not ended";
  const auto got = fetch(handle);
  EXPECT_EQ(got.result, CUDA_SUCCESS);
  // A second word on a connection is one too many.
  EXPECT_EQ(::send(got.connection, "12345678", 8, MSG_NOSIGNAL), 8);
  EXPECT_TRUE(soon([] { return movable_bytes() == 4 * kMiB; }));
  for (const int fd : {silent, garbled, got.memory, got.connection})
    ::close(fd);
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
}

TEST(AgentShare, ASmallPieceIsHadWithItsUnit) {
  const auto first = allocated(4096);
  const auto second = allocated(100);
  const auto handle = handle_of(second + 5);
  EXPECT_EQ(piece_of(handle)->offset, second - first);
  EXPECT_EQ(piece_of(handle)->asked, 100U);
  EXPECT_EQ(piece_of(handle_of(first))->offset, 0U);
  EXPECT_EQ(key_of(handle), key_of(handle_of(first)));
  const auto got = fetch(handle);
  ASSERT_EQ(got.result, CUDA_SUCCESS);
  EXPECT_GE(got.memory, 0);
  EXPECT_EQ(got.asked, 2 * kMiB);
  EXPECT_EQ(got.reserved, 2 * kMiB);
  EXPECT_EQ(open_pieces(), 1U);
  for (const auto address : {first, second})
    EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
  const auto late = fetch(handle);
  EXPECT_EQ(late.result, CUDA_ERROR_INVALID_VALUE) << "nothing is in it any more";
  for (const int fd : {got.memory, got.connection})
    ::close(fd);
  EXPECT_TRUE(soon([] { return open_pieces() == 0; }));
}

// Where another piece of its unit is open, and where none is.
TEST(AgentShare, AHandleThatWasAlteredOpensAndClosesNothing) {
  EXPECT_EQ(hooks::cuMemFree_v2(allocated(kMiB)), CUDA_SUCCESS);  // there is a context
  const Owner owner(4096);
  auto altered = owner.handle();
  constexpr std::size_t kPlaceOfPiece = 40;
  const SmallPiece beyond{std::uint32_t{2 * kMiB - 512}, 513};
  std::memcpy(altered.reserved + kPlaceOfPiece, &beyond, sizeof beyond);
  ASSERT_EQ(piece_of(altered)->asked, beyond.asked);
  const auto is_refused = [&] {
    CUdeviceptr address = 0;
    return hooks::cuIpcOpenMemHandle_v2(&address, altered, kIpcMemLazyEnablePeerAccess) ==
               CUDA_ERROR_INVALID_VALUE &&
           address == 0;
  };
  const auto piece = opened(owner.handle());
  EXPECT_TRUE(is_refused());
  CUdeviceptr base = 0;
  std::size_t size = 0;
  EXPECT_EQ(hooks::cuMemGetAddressRange_v2(&base, &size, piece), CUDA_SUCCESS);
  EXPECT_EQ(size, 4096U);
  EXPECT_TRUE(owner.knows());
  EXPECT_EQ(hooks::cuIpcCloseMemHandle(piece), CUDA_SUCCESS);
  EXPECT_TRUE(soon([&] { return !owner.knows(); })) << "still open";
  EXPECT_TRUE(is_refused());
  EXPECT_TRUE(soon([&] { return !owner.knows(); })) << "still open";
  EXPECT_EQ(hooks::cuIpcCloseMemHandle(piece), CUDA_ERROR_INVALID_VALUE);
}

TEST(AgentShare, WhatTheDriverServesIsHadByTheDriversHandleAndTheOwnerKnows) {
  fake().fail_at("cuMemCreate", 1);
  const auto address = allocated(kMiB);
  const auto handle = handle_of(address);
  const auto same = handle_of(address);
  EXPECT_EQ(std::memcmp(&handle, &same, sizeof handle), 0);
  for (int i = 0; i < 2; ++i) {
    const auto got = fetch(handle);
    ASSERT_EQ(got.result, CUDA_SUCCESS);
    EXPECT_EQ(got.memory, -1);
    ASSERT_TRUE(got.drivers);
    EXPECT_EQ(std::memcmp(got.drivers->reserved, &address, sizeof address), 0);
    EXPECT_EQ(shared_pieces(), 1U);
    ::close(got.connection);
    EXPECT_TRUE(soon([] { return shared_pieces() == 0; })) << "closed, and still counted";
  }
  // A free that fails is none.
  fake().fail_at("cuMemFree", 1);
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_ERROR_OUT_OF_MEMORY);
  const auto again = fetch(handle);
  EXPECT_EQ(again.result, CUDA_SUCCESS);
  ::close(again.connection);
  EXPECT_TRUE(soon([] { return shared_pieces() == 0; }));

  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
  EXPECT_EQ(fetch(handle).result, CUDA_ERROR_INVALID_VALUE);
  // What lies there then is another allocation.
  fake().own_allocations.insert(address);
  const auto other = handle_of(address);
  EXPECT_NE(std::memcmp(&handle, &other, sizeof handle), 0);
  EXPECT_EQ(fetch(handle).result, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
}

// As a program does that closes all that it has not opened, and opens others.
TEST(AgentShare, TheProgramMayTakeTheSocketsNumber) {
  const auto address = allocated(4 * kMiB);
  const auto before = handle_of(address);
  const int number = listening(before);
  ASSERT_GE(number, 0);
  ASSERT_EQ(::dup2(fake().exported, number), number);
  EXPECT_FALSE(fetch(before).answered);
  CUipcMemHandle after{};
  EXPECT_TRUE(soon([&] {
    after = handle_of(address);
    return key_of(after)->service != key_of(before)->service;
  }));
  EXPECT_GE(::fcntl(number, F_GET_SEALS), 0) << "the agent has closed what is not its own";
  const auto got = fetch(after);
  EXPECT_EQ(got.result, CUDA_SUCCESS);
  ::close(got.memory);
  ::close(got.connection);
  EXPECT_TRUE(soon([] { return shared_pieces() == 0; }));
  ::close(number);
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
}

}  // namespace
}  // namespace stasis::preload
