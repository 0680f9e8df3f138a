#include "rendezvous/sealed_channel.h"

#include <sodium.h>

#include <algorithm>
#include <cstdint>

namespace stasis::rendezvous {
namespace {

constexpr std::size_t kExtra = crypto_secretstream_xchacha20poly1305_ABYTES;
static_assert(kHeaderBytes == crypto_secretstream_xchacha20poly1305_HEADERBYTES);
constexpr std::string_view kToServer = "stasis: client to server";
constexpr std::string_view kToClient = "stasis: server to client";
static_assert(kToServer.size() == kToClient.size());

using Stream = crypto_secretstream_xchacha20poly1305_state;
using StreamKey = std::array<unsigned char, crypto_secretstream_xchacha20poly1305_KEYBYTES>;

const unsigned char* bytes_of(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}
unsigned char* bytes_of(std::string& text) { return reinterpret_cast<unsigned char*>(text.data()); }

StreamKey stream_key(const GroupKey& key, std::string_view direction, const Nonce& client,
                     const Nonce& server) {
  StreamKey out{};
  crypto_generichash_state state;
  ::crypto_generichash_init(&state, key.bytes().data(), key.bytes().size(), out.size());
  ::crypto_generichash_update(&state, bytes_of(direction), direction.size());
  ::crypto_generichash_update(&state, client.data(), client.size());
  ::crypto_generichash_update(&state, server.data(), server.size());
  ::crypto_generichash_final(&state, out.data(), out.size());
  ::sodium_memzero(&state, sizeof state);
  return out;
}

}  // namespace

struct SealedChannel::State {
  Stream out{};
  Stream in{};
  StreamKey in_key{};
  std::string header = std::string(kHeaderBytes, '\0');
  bool is_good = true;

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    ::sodium_memzero(&out, sizeof out);
    ::sodium_memzero(&in, sizeof in);
    ::sodium_memzero(in_key.data(), in_key.size());
  }
};

std::string random_bytes(std::size_t count) {
  std::string out(count, '\0');
  ::randombytes_buf(out.data(), out.size());
  return out;
}

Nonce new_nonce() {
  Nonce out{};
  ::randombytes_buf(out.data(), out.size());
  return out;
}

std::string greeting(const Nonce& nonce) {
  return std::string(kMagic).append(nonce.begin(), nonce.end());
}

std::optional<Nonce> nonce_of(std::string_view greeting) {
  if (greeting.size() != kGreetingBytes || !greeting.starts_with(kMagic)) return std::nullopt;
  Nonce out{};
  std::copy(greeting.begin() + kMagic.size(), greeting.end(), out.begin());
  return out;
}

SealedChannel::SealedChannel(const GroupKey& key, Side own, const Nonce& client,
                             const Nonce& server)
    : state_(std::make_unique<State>()) {
  StreamKey to_server = stream_key(key, kToServer, client, server);
  StreamKey to_client = stream_key(key, kToClient, client, server);
  StreamKey& out_key = own == Side::kClient ? to_server : to_client;
  state_->in_key = own == Side::kClient ? to_client : to_server;
  ::crypto_secretstream_xchacha20poly1305_init_push(&state_->out, bytes_of(state_->header),
                                                    out_key.data());
  ::sodium_memzero(to_server.data(), to_server.size());
  ::sodium_memzero(to_client.data(), to_client.size());
}

SealedChannel::SealedChannel(SealedChannel&&) noexcept = default;
SealedChannel& SealedChannel::operator=(SealedChannel&&) noexcept = default;
SealedChannel::~SealedChannel() = default;

const std::string& SealedChannel::header() const { return state_->header; }

bool SealedChannel::begin(std::string_view header) {
  return header.size() == kHeaderBytes &&
         ::crypto_secretstream_xchacha20poly1305_init_pull(&state_->in, bytes_of(header),
                                                           state_->in_key.data()) == 0;
}

std::string SealedChannel::seal(std::string_view message) {
  const std::size_t size = message.size() + kExtra;
  std::string out(kLengthBytes + size, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    out[i] = static_cast<char>(size >> (8 * i));
  ::crypto_secretstream_xchacha20poly1305_push(&state_->out, bytes_of(out) + kLengthBytes, nullptr,
                                               bytes_of(message), message.size(), nullptr, 0, 0);
  return out;
}

std::optional<std::size_t> SealedChannel::sealed_bytes(std::string_view length, std::size_t limit) {
  if (length.size() < kLengthBytes) return std::nullopt;
  std::size_t size = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    size |= static_cast<std::size_t>(static_cast<std::uint8_t>(length[i])) << (8 * i);
  if (size < kExtra || size - kExtra > limit) return std::nullopt;
  return size;
}

std::optional<std::string> SealedChannel::open(std::string_view sealed) {
  if (!state_->is_good || sealed.size() < kExtra) return std::nullopt;
  std::string out(sealed.size() - kExtra, '\0');
  unsigned char tag = 0;
  state_->is_good = ::crypto_secretstream_xchacha20poly1305_pull(&state_->in, bytes_of(out),
                                                                 nullptr, &tag, bytes_of(sealed),
                                                                 sealed.size(), nullptr, 0) == 0;
  if (!state_->is_good) return std::nullopt;
  return out;
}

}  // namespace stasis::rendezvous
