#include "proc/tcp_keys.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

constexpr SocketKind kTcpFour{AF_INET, SOCK_STREAM, IPPROTO_TCP};

UniqueFd tcp() { return UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

sockaddr_in loopback() {
  sockaddr_in out{};
  out.sin_family = AF_INET;
  out.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return out;
}

bool give_key(const UniqueFd& socket) {
  tcp_md5sig key{};
  const sockaddr_in peer = loopback();
  std::memcpy(&key.tcpm_addr, &peer, sizeof peer);
  key.tcpm_keylen = 3;
  std::memcpy(key.tcpm_key, "key", 3);
  return ::setsockopt(socket.get(), IPPROTO_TCP, TCP_MD5SIG, &key, sizeof key) == 0;
}

sockaddr_in listen_at(const UniqueFd& socket) {
  sockaddr_in name = loopback();
  socklen_t size = sizeof name;
  auto* const at = reinterpret_cast<sockaddr*>(&name);
  EXPECT_EQ(::bind(socket.get(), at, size), 0);
  EXPECT_EQ(::listen(socket.get(), 4), 0);
  EXPECT_EQ(::getsockname(socket.get(), at, &size), 0);
  return name;
}

bool connect_to(const UniqueFd& socket, const sockaddr_in& name) {
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0;
}

TEST(TcpKeys, AreSeenOfListenersAndConnections) {
  const Pid own{::getpid()};
  const ino_t network = network_of(own);
  TcpKeys keys;
  const UniqueFd plain = tcp();
  const sockaddr_in plain_name = listen_at(plain);
  const UniqueFd to_plain = tcp();
  ASSERT_TRUE(connect_to(to_plain, plain_name));
  EXPECT_FALSE(keys.has_key(own, network, plain, kTcpFour));
  EXPECT_FALSE(keys.has_key(own, network, to_plain, kTcpFour));
  EXPECT_FALSE(keys.has_key(own, network, tcp(), kTcpFour));

  const UniqueFd signing = tcp();
  if (!give_key(signing) || ::geteuid() != 0) GTEST_SKIP() << "no keys of MD5 here";
  const sockaddr_in name = listen_at(signing);
  const UniqueFd client = tcp();
  ASSERT_TRUE(give_key(client));
  ASSERT_TRUE(connect_to(client, name));
  const UniqueFd accepted(::accept(signing.get(), nullptr, nullptr));
  ASSERT_TRUE(accepted.valid());
  EXPECT_TRUE(keys.has_key(own, network, signing, kTcpFour));
  EXPECT_TRUE(keys.has_key(own, network, client, kTcpFour));
  EXPECT_TRUE(keys.has_key(own, network, accepted, kTcpFour));
  EXPECT_FALSE(keys.has_key(own, network, plain, kTcpFour));
}

}  // namespace
}  // namespace stasis::proc
