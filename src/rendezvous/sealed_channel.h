// How the two ends of a connection become sure of each other, and what they then say cannot be
// read, changed, left out, repeated or brought from elsewhere by others.
//
//   client: kMagic, its nonce                       (a Greeting)
//   server: kMagic, its nonce, its stream's header, then messages
//   client: its stream's header, then messages
//
// Each direction has a key made of the secret and both nonces, so the first message that opens
// proves that the other end has the secret and is here now; the server proves it first. The
// messages of a direction are one stream (crypto_secretstream_xchacha20poly1305), each after its
// length in four bytes.
//
// No sockets here. One thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "rendezvous/secret.h"

namespace stasis::rendezvous {

inline constexpr std::string_view kMagic = "stasis-1";
inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kGreetingBytes = 8 + kNonceBytes;
inline constexpr std::size_t kHeaderBytes = 24;
inline constexpr std::size_t kLengthBytes = 4;

using Nonce = std::array<unsigned char, kNonceBytes>;

// Of random bytes.
std::string random_bytes(std::size_t count);

std::string greeting(const Nonce& nonce);
Nonce new_nonce();
// The nonce; nothing for what is none of these.
std::optional<Nonce> nonce_of(std::string_view greeting);

enum class Side { kClient, kServer };

class SealedChannel {
 public:
  SealedChannel(const GroupKey& key, Side own, const Nonce& client, const Nonce& server);
  SealedChannel(SealedChannel&&) noexcept;
  SealedChannel& operator=(SealedChannel&&) noexcept;
  SealedChannel(const SealedChannel&) = delete;
  SealedChannel& operator=(const SealedChannel&) = delete;
  ~SealedChannel();

  // To be sent before the first message.
  const std::string& header() const;
  // The other end's.
  bool begin(std::string_view header);

  // With its length before it.
  std::string seal(std::string_view message);
  // Of a message whose length has come, which is not verified yet: so many bytes follow. Nothing
  // above `limit` bytes of what was sealed, or for what can be none.
  static std::optional<std::size_t> sealed_bytes(std::string_view length, std::size_t limit);
  // Nothing for any but the message that the other end has sealed next; none opens after that.
  std::optional<std::string> open(std::string_view sealed);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stasis::rendezvous
