// What MoverProcess and the process that it forks say to each other. Both are the same program, so
// that values go as they lie in memory.
//
//   asks                                       answers
//   Start                                      Done, with the ring's descriptor; or Failed
//   Open, with the GPUs behind it              Done, or Failed
//   Segments, with places behind it, and       Done
//     their descriptors, 250 at most
//   Hold, with as many descriptors             Done
//   Digests                                    Done, or Failed
//   Copy, with the room that it may keep
//     behind it; Prefetch, with its parts      Begin, with a channel for each copying thread, and
//                                              then Done; or Failed
//
// Over each of those channels the copying thread asks with Piece and is answered with PieceDone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/cuda_state.h"
#include "base/error.h"

namespace stasis::direct::protocol {

enum class Kind : std::uint32_t {
  kStart = 1,
  kOpen,
  kSegments,
  kHold,
  kDigests,
  kCopy,
  kPrefetch,
  kBegin,
  kDone,
  kFailed
};

struct Start {
  Kind kind = Kind::kStart;
  std::uint32_t threads = 0;
  std::uint64_t ring_bytes = 0;
  std::uint64_t buffer_bytes = 0;
};

struct Open {
  Kind kind = Kind::kOpen;
  std::int64_t deadline_ns = 0;  // of the steady clock, which all processes share
};

struct Segments {
  Kind kind = Kind::kSegments;
};
struct Place {
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;
};

struct Hold {
  Kind kind = Kind::kHold;
};

struct Digests {
  Kind kind = Kind::kDigests;
  std::int64_t deadline_ns = 0;
};

// SpareRoom is behind it.
struct Copy {
  Kind kind = Kind::kCopy;
  std::uint32_t out = 0;
  std::int64_t deadline_ns = 0;
  std::uint64_t digest_chunk = 0;
  std::uint64_t zero_chunk = 0;
};

struct PrefetchOf {
  Kind kind = Kind::kPrefetch;
  std::int64_t deadline_ns = 0;
};
struct PrefetchPart {
  GpuUuid gpu;
  std::uint64_t room = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
// In one message.
inline constexpr std::size_t kMostPrefetchParts = 1024;

struct Begin {
  Kind kind = Kind::kBegin;
};

struct Done {
  Kind kind = Kind::kDone;
  std::uint64_t bytes = 0;  // copied; or of the ring
  double seconds = 0;
  double map_seconds = 0;
  std::uint64_t left_out = 0;
};

// An Error is behind it.
struct Failed {
  Kind kind = Kind::kFailed;
};

// "This much of the ring is for, or has to come from, that place of the content", or has the
// digests of the chunks from there on, or is to have a flag for each that is zeros, to be answered
// in their place.
enum class PieceOf : std::uint32_t { kRead, kWrite, kDigests, kZeros };
struct Piece {
  PieceOf what = PieceOf::kRead;
  std::uint64_t ring_offset = 0;
  std::uint64_t content_offset = 0;
  std::uint64_t bytes = 0;
};
struct PieceDone {
  std::uint32_t ok = 0;
};

// The kind that a message begins with.
std::optional<Kind> kind_of(std::span<const std::byte> message);

// A value, and an array behind it.
template <class Head, class Item>
std::vector<std::byte> with_items(const Head& head, std::span<const Item> items) {
  const auto first = std::as_bytes(std::span(&head, 1));
  const auto rest = std::as_bytes(items);
  std::vector<std::byte> out(first.begin(), first.end());
  out.insert(out.end(), rest.begin(), rest.end());
  return out;
}
template <class Head, class Item>
bool take_items(std::span<const std::byte> message, Head& head, std::vector<Item>& items) {
  if (message.size() < sizeof head || (message.size() - sizeof head) % sizeof(Item) != 0) {
    return false;
  }
  const auto rest = message.subspan(sizeof head);
  items.resize(rest.size() / sizeof(Item));
  std::copy(message.begin(), message.begin() + sizeof head, reinterpret_cast<std::byte*>(&head));
  std::copy(rest.begin(), rest.end(), reinterpret_cast<std::byte*>(items.data()));
  return true;
}

// An Error as a message of kind kFailed, without its obstacles; long texts are cut.
std::vector<std::byte> failed(const Error& error);
std::optional<Error> error_of(std::span<const std::byte> message);

}  // namespace stasis::direct::protocol
