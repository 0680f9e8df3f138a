// One end of a connection between two processes of one program: whole messages, each with file
// descriptors if need be.
//
// Owns its socket. A message goes as it lies in memory, because both ends are the same program.
// One thread at a time may send and one receive.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

class Channel {
 public:
  // The kernel takes 253 in one message (SCM_MAX_FD).
  static constexpr std::size_t kMostDescriptors = 250;
  // Well below what a socket's buffer holds by default (208 KiB).
  static constexpr std::size_t kMostBytes = 64 << 10;

  struct Message {
    std::vector<std::byte> bytes;
    std::vector<UniqueFd> descriptors;

    // The message as a value of the type that it must be, and nothing else.
    template <class T>
    std::optional<T> as() const {
      static_assert(std::is_trivially_copyable_v<T>);
      if (bytes.size() != sizeof(T)) return std::nullopt;
      T value;
      std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::byte*>(&value));
      return value;
    }
  };

  Channel() = default;
  explicit Channel(UniqueFd socket) : socket_(std::move(socket)) {}
  // Both ends of a new connection.
  static Result<std::pair<Channel, Channel>> pair();

  // The descriptors stay the caller's. kProcessGone if the other end is gone.
  Result<void> send(std::span<const std::byte> bytes,
                    std::span<const UniqueFd> descriptors = {}) const;
  // For what may be lost: not if the other end has too much to read.
  void send_if_it_reads(std::span<const std::byte> bytes) const;
  template <class T>
  Result<void> send_value(const T& value, std::span<const UniqueFd> descriptors = {}) const {
    static_assert(std::is_trivially_copyable_v<T>);
    return send(std::as_bytes(std::span(&value, 1)), descriptors);
  }
  // Nothing if none comes in time (negative: waits for ever); kProcessGone at the other's end.
  Result<std::optional<Message>> receive(int timeout_ms) const;

  bool valid() const { return socket_.valid(); }
  void close() { socket_.reset(); }
  // As close() for the other side, also where another process has a copy of this end.
  void shut_down() const;
  // To be handed to another process.
  UniqueFd take() { return std::move(socket_); }
  int fd() const { return socket_.get(); }

 private:
  UniqueFd socket_;
};

}  // namespace stasis
