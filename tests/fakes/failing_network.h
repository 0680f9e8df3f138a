// A network between the parts of a group that fails when a test wants it to.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/fd.h"
#include "base/units.h"
#include "rendezvous/address.h"

namespace stasis::fakes {

// A network between a part and the one that serves: what listens at the first address, and carries
// all to the second.
class FailingNetwork {
 public:
  FailingNetwork(const std::string& from, const std::string& to) : to_(to) {
    auto addresses = rendezvous::resolve(*rendezvous::parse_host_port(from));
    listener_ = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int yes = 1;
    ::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    EXPECT_EQ(
        ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&addresses->front().storage),
               addresses->front().size),
        0);
    EXPECT_EQ(::listen(listener_.get(), 16), 0);
    thread_ = std::jthread([this](const std::stop_token& end) { run(end); });
  }
  // From now on nothing comes from the one that serves, though it hears; after `answers` all
  // connections are cut, and none is taken for `away` more.
  void fail_for(std::chrono::milliseconds answers, std::chrono::milliseconds away) {
    cut_at_ = Clock::now() + answers;
    back_at_ = Clock::now() + answers + away;
    fails_ = true;
  }

 private:
  struct Link {
    UniqueFd client, server;
  };
  static bool carry(const UniqueFd& from, const UniqueFd& to, bool drop) {
    char bytes[65536];
    const ssize_t got = ::recv(from.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0) return false;
    return drop || ::send(to.get(), bytes, static_cast<std::size_t>(got), MSG_NOSIGNAL) == got;
  }
  void take() {
    UniqueFd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fails_ && Clock::now() > cut_at_.load() && Clock::now() < back_at_.load()) return;
    auto addresses = rendezvous::resolve(*rendezvous::parse_host_port(to_));
    UniqueFd server(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(server.get(), reinterpret_cast<const sockaddr*>(&addresses->front().storage),
                  addresses->front().size) == 0)
      links_.push_back({std::move(client), std::move(server)});
  }
  void run(const std::stop_token& end) {
    while (!end.stop_requested()) {
      const bool fails = fails_ && Clock::now() < back_at_.load();
      if (fails && Clock::now() > cut_at_.load()) links_.clear();
      std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
      for (const Link& link : links_) {
        polled.push_back({link.client.get(), POLLIN, 0});
        polled.push_back({link.server.get(), POLLIN, 0});
      }
      if (::poll(polled.data(), polled.size(), 20) <= 0) continue;
      std::erase_if(links_, [&](const Link& link) {
        return !carry(link.client, link.server, false) || !carry(link.server, link.client, fails);
      });
      if (polled.front().revents != 0) take();
    }
  }

  const std::string to_;
  UniqueFd listener_;
  std::vector<Link> links_;
  std::atomic<Clock::time_point> cut_at_{}, back_at_{};
  std::atomic<bool> fails_ = false;
  std::jthread thread_;  // ends first
};

}  // namespace stasis::fakes
