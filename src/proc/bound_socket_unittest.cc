#include "proc/bound_socket.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <gtest/gtest.h>

#include "base/fd.h"

namespace stasis::proc {
namespace {

in6_addr address(const char* text) {
  in6_addr out{};
  EXPECT_EQ(::inet_pton(AF_INET6, text, &out), 1) << text;
  return out;
}

BoundSocket four(const char* text, std::uint16_t port) {
  BoundSocket out;
  out.address = address(text);
  out.port = port;
  out.is_four = true;
  return out;
}

BoundSocket six(const char* text, std::uint16_t port, bool only_six) {
  BoundSocket out;
  out.address = address(text);
  out.port = port;
  out.only_six = only_six;
  return out;
}

// Listens; its port.
std::uint16_t listen_at(UniqueFd& socket, const char* text, bool only_six = false) {
  const int only = only_six;
  socket = UniqueFd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 name{};
  socklen_t size = sizeof name;
  name.sin6_family = AF_INET6;
  name.sin6_addr = address(text);
  EXPECT_EQ(::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only), 0);
  EXPECT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), size), 0);
  EXPECT_EQ(::listen(socket.get(), 1), 0);
  EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&name), &size), 0);
  return ntohs(name.sin6_port);
}

TEST(BoundSocket, IsTakenOnlyWhereAnotherHasItsAddress) {
  UniqueFd listens;
  const std::uint16_t port = listen_at(listens, "::ffff:127.0.0.1");
  EXPECT_TRUE(is_taken(four("::ffff:127.0.0.1", port)));
  EXPECT_TRUE(is_taken(four("::ffff:0.0.0.0", port)));
  EXPECT_TRUE(is_taken(six("::", port, false)));
  EXPECT_FALSE(is_taken(six("::", port, true)));
  EXPECT_FALSE(is_taken(four("::ffff:127.0.0.2", port)));
  BoundSocket datagrams = four("::ffff:127.0.0.1", port);
  datagrams.is_tcp = false;
  EXPECT_FALSE(is_taken(datagrams));
}

TEST(BoundSocket, OneOfIpv6AloneTakesNoneOfIpv4) {
  UniqueFd listens;
  std::uint16_t port = listen_at(listens, "::", true);
  EXPECT_FALSE(is_taken(four("::ffff:0.0.0.0", port)));
  EXPECT_FALSE(is_taken(four("::ffff:127.0.0.1", port)));
  EXPECT_TRUE(is_taken(six("::1", port, true)));
  port = listen_at(listens, "::");
  EXPECT_TRUE(is_taken(four("::ffff:127.0.0.1", port)));
  listens.reset();
  EXPECT_FALSE(is_taken(four("::ffff:127.0.0.1", port)));
}

TEST(BoundSocket, WhatAClosedConnectionHoldsIsItsAddressAlone) {
  const in6_addr first = address("::ffff:127.0.0.1");
  EXPECT_TRUE(four("::ffff:127.0.0.1", 80).takes(first));
  EXPECT_TRUE(four("::ffff:0.0.0.0", 80).takes(first));
  EXPECT_FALSE(four("::ffff:127.0.0.2", 80).takes(first));
  EXPECT_FALSE(four("::ffff:0.0.0.0", 80).takes(address("::1")));
  EXPECT_TRUE(six("::", 80, false).takes(first));
  EXPECT_FALSE(six("::", 80, true).takes(first));
  EXPECT_EQ(four("::ffff:127.0.0.1", 80).text(), "127.0.0.1:80");
  EXPECT_EQ(six("::1", 80, true).text(), "[::1]:80");
}

}  // namespace
}  // namespace stasis::proc
