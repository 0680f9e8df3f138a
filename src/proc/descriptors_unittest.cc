#include "proc/descriptors.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tests/fakes/child.h"

namespace stasis::proc {
namespace {

// Opened anew by its name in /proc, as root or as its owner, it could be written.
TEST(Descriptors, OneThatIsOnlyReadStaysSo) {
  const UniqueFd whole(::memfd_create("of another program", 0));
  const std::string same = "/proc/self/fd/" + std::to_string(whole.get());
  const UniqueFd to_read(::open(same.c_str(), O_RDONLY));
  ASSERT_TRUE(to_read.valid());
  const fakes::Child child;
  const auto process = Pidfd::open(child.pid());
  ASSERT_TRUE(process);
  const auto read_only = take_descriptor(child.pid(), *process, to_read.get());
  ASSERT_TRUE(read_only) << read_only.error().to_string();
  EXPECT_EQ(::write(read_only->get(), "x", 1), -1);
  EXPECT_EQ(errno, EBADF);
  const auto writable = take_descriptor(child.pid(), *process, whole.get());
  ASSERT_TRUE(writable);
  EXPECT_EQ(::write(writable->get(), "x", 1), 1);
  EXPECT_FALSE(take_descriptor(child.pid(), *process, -1));
}

// Its end that is not returned waits for so long when it is closed as the last one: what it has
// sent is not read, nor taken in by the kernel.
UniqueFd lingering_end(UniqueFd& other) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  UniqueFd out(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof name;
  auto* const at = reinterpret_cast<sockaddr*>(&name);
  constexpr int kSeconds = 20;
  const linger how{1, kSeconds};
  if (::bind(listener.get(), at, size) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), at, &size) != 0 || ::connect(out.get(), at, size) != 0 ||
      ::setsockopt(out.get(), SOL_SOCKET, SO_LINGER, &how, sizeof how) != 0)
    return {};
  other = UniqueFd(::accept(listener.get(), nullptr, nullptr));
  const std::string text(65536, 'x');
  while (::send(out.get(), text.data(), text.size(), MSG_DONTWAIT) > 0)
    ;
  return out;
}

TEST(Descriptors, TheLastCopyOfASocketDoesNotLinger) {
  UniqueFd other;
  UniqueFd end = lingering_end(other);
  ASSERT_TRUE(end.valid() && other.valid());
  const int number = end.get();
  const fakes::Child child;
  end.reset();
  const auto process = Pidfd::open(child.pid());
  ASSERT_TRUE(process);
  const auto refused = take_descriptor(child.pid(), *process, number);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kNotSupported);
  ASSERT_EQ(refused.error().obstacles.size(), 1u);
  EXPECT_EQ(refused.error().obstacles.front().id, ObstacleId("forged-descriptor"));
  auto copy = take_nameless(child.pid(), *process, number);
  ASSERT_TRUE(copy) << copy.error().to_string();
  child.become_zombie();
  const auto begin = std::chrono::steady_clock::now();
  drop(std::move(*copy));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  pollfd closed{other.get(), POLLIN, 0};
  std::array<char, 65536> piece{};
  ssize_t got = 1;
  while (got > 0 && ::poll(&closed, 1, 10000) == 1)
    got = ::read(other.get(), piece.data(), piece.size());
  EXPECT_EQ(got, 0) << "closed, and not broken off";
}

TEST(Descriptors, WhatAProcessPutsThereMeanwhileIsSeenInTheCopy) {
  const UniqueFd file(::memfd_create("of another program", 0));
  const fakes::Child child;
  const auto process = Pidfd::open(child.pid());
  ASSERT_TRUE(process);
  int looks = 0;
  const auto taken = take_descriptor(child.pid(), *process, file.get(),
                                     [&looks](const struct stat&) { return ++looks < 2; });
  EXPECT_FALSE(taken);
  EXPECT_EQ(looks, 2);
}

}  // namespace
}  // namespace stasis::proc
