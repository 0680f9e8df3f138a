#include "proc/tcp_connections.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include <gtest/gtest.h>

#include "base/fd.h"

namespace stasis::proc {
namespace {

TEST(TcpTable, AConnectionStaysWithinWhereBothEndsAreOurs) {
  const TcpTable table({{1, 80, false, true, "0100007F:0050", "0100007F:9000"},
                        {2, 36864, false, true, "0100007F:9000", "0100007F:0050"},
                        {3, 80, true, false, "00000000:0050", "00000000:0000"},
                        {4, 36865, false, true, "0100007F:9001", "0100007F:0050"},
                        {0, 80, false, true, "0100007F:0050", "0100007F:9001"},
                        {5, 36866, false, false, "0100007F:9002", "0100007F:0050"},
                        {0, 80, false, false, "0100007F:0050", "0100007F:9002"},
                        {6, 1234, false, true, "0A00000A:04D2", "0B00000A:0050"}});
  const auto& sockets = table.sockets();
  EXPECT_TRUE(table.stays_within(sockets[0], {1, 2}));
  EXPECT_TRUE(table.stays_within(sockets[1], {1, 2}));
  EXPECT_FALSE(table.stays_within(sockets[0], {1, 3})) << "another program has the other end";
  EXPECT_TRUE(table.stays_within(sockets[3], {3, 4})) << "one of ours is to accept it";
  EXPECT_FALSE(table.stays_within(sockets[3], {4})) << "another program is to accept it";
  EXPECT_TRUE(table.stays_within(sockets[5], {5})) << "the other end is closed";
  EXPECT_FALSE(table.stays_within(sockets[7], {6})) << "to another machine";
}

struct Ends {
  UniqueFd listener, one, other;
};

// By IPv4, or from IPv6 to an IPv4 address.
Ends connect_to_myself(bool mapped) {
  Ends ends;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ends.listener = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t size = sizeof v4;
  EXPECT_EQ(::bind(ends.listener.get(), reinterpret_cast<sockaddr*>(&v4), size), 0);
  EXPECT_EQ(::listen(ends.listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(ends.listener.get(), reinterpret_cast<sockaddr*>(&v4), &size), 0);
  if (mapped) {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = v4.sin_port;
    EXPECT_EQ(::inet_pton(AF_INET6, "::ffff:127.0.0.1", &v6.sin6_addr), 1);
    ends.one = UniqueFd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (ends.one.get() < 0) return ends;
    EXPECT_EQ(::connect(ends.one.get(), reinterpret_cast<sockaddr*>(&v6), sizeof v6), 0);
  } else {
    ends.one = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(ends.one.get(), reinterpret_cast<sockaddr*>(&v4), sizeof v4), 0);
  }
  ends.other = UniqueFd(::accept4(ends.listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return ends;
}

// Both ends are the process's own, whenever they are looked at.
TEST(TcpReach, HoldsForConnectionsThatComeAndGo) {
  const ProcFs procfs;
  const auto self = procfs.process(Pid{::getpid()});
  ASSERT_TRUE(self);
  std::atomic<bool> enough = false;
  std::thread renews([&enough] {
    while (!enough) {
      Ends ends = connect_to_myself(false);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
  while (std::chrono::steady_clock::now() < end)
    EXPECT_NE(tcp_reach(procfs, std::array{*self}), TcpReach::kOutside);
  enough = true;
  renews.join();
}

TEST(TcpReach, IsToldOfRealSockets) {
  const ProcFs procfs;
  const auto self = procfs.process(Pid{::getpid()});
  ASSERT_TRUE(self);
  EXPECT_EQ(tcp_reach(procfs, std::array{*self}), TcpReach::kNone);
  for (const bool mapped : {false, true}) {
    Ends ends = connect_to_myself(mapped);
    if (ends.one.get() < 0) GTEST_SKIP() << "no IPv6";
    EXPECT_EQ(tcp_reach(procfs, std::array{*self}), TcpReach::kWithin) << mapped;
    // The other end goes to a process outside.
    const pid_t child = ::fork();
    if (child == 0) {
      ends.one.reset();
      ::pause();
      ::_exit(0);
    }
    ends.other.reset();
    ends.listener.reset();
    EXPECT_EQ(tcp_reach(procfs, std::array{*self}), TcpReach::kOutside) << mapped;
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
}

}  // namespace
}  // namespace stasis::proc
