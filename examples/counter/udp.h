// The loopback UDP socket of the counter: one packet in, one packet out.
//
// Errors end the program with a message. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/fd.h"

namespace stasis::counter {

class UdpServer {
 public:
  // Binds 127.0.0.1:port; port 0 takes any that is free.
  explicit UdpServer(std::uint16_t port);
  std::uint16_t port() const { return port_; }

  // Waits for a packet and answers it with what `answer` returns.
  template <class F>
  void serve_one(F answer) {
    if (receive()) reply(answer());
  }

 private:
  bool receive();
  void reply(const std::string& text);

  UniqueFd socket_;
  std::uint16_t port_ = 0;
  std::uint32_t peer_address_ = 0;  // network order
  std::uint16_t peer_port_ = 0;     // network order
};

// Sends one packet to 127.0.0.1:port and returns the answer, nothing after `timeout_s` seconds.
std::optional<std::string> ask(std::uint16_t port, int timeout_s);

}  // namespace stasis::counter
