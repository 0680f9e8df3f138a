// The addresses of one pool of stream-ordered memory: which are given out, which are free, and for
// which streams. Asks the driver nothing, so that a test can try every order of events.
//
// A pool is a row of units of 32 MiB, each with memory behind it ("present") or without, as the
// driver's own pools are: they grow and shrink by 32 MiB, allocations lie side by side in them at
// multiples of 512 bytes, and one may span several units (580.159.04 on an H100, measured:
// tests/agent/calls_pools.cc).
//
// Memory that was freed in a stream is free for that stream at once, and for all others when the
// stream has got there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "abi/cuda_abi.h"

namespace stasis::preload {

// The driver's number of a stream, which no other ever has (cuStreamGetId).
using StreamId = unsigned long long;
// Numbers the frees, in the order in which their streams were told.
using FreeNumber = std::uint64_t;

class PoolArena {
 public:
  static constexpr std::size_t kUnit = std::size_t{32} << 20;
  static constexpr std::size_t kAlignment = 512;

  // Of `units` units from `base` on, none of them present.
  PoolArena(cuda::CUdeviceptr base, std::size_t units);

  // An allocation that is in use.
  struct Block {
    cuda::CUdeviceptr address = 0;
    std::size_t asked = 0;
  };
  // Where an allocation could lie, once these units are present.
  struct Fit {
    cuda::CUdeviceptr address = 0;
    std::vector<std::size_t> missing;
  };

  // For `bytes`, more than 0, in `stream`. In memory that is present, the smallest place that is
  // large enough; with `may_grow`, that which needs the fewest units more.
  std::optional<Fit> find(std::size_t bytes, StreamId stream, bool may_grow) const;
  // All units of it are present, and all of it is free for the stream.
  void take(cuda::CUdeviceptr address, std::size_t bytes);
  // False if no allocation begins there.
  bool give(cuda::CUdeviceptr address, StreamId stream, FreeNumber number);
  // Free for all streams at once.
  bool give_to_all(cuda::CUdeviceptr address);
  // The stream has come past all frees up to this one.
  void passed(StreamId stream, FreeNumber last);
  // `to` waits for what `from` had to do up to its free `last`: what was freed there so far is free
  // for `to` as well, and for all others when that has come past `number`.
  void hand_over(StreamId from, FreeNumber last, StreamId to, FreeNumber number);
  // Whether it could lie in memory that is present, if all streams had come past their frees.
  bool would_fit(std::size_t bytes) const;
  bool has_pending(StreamId stream) const { return pending_.contains(stream); }

  void set_present(std::size_t unit, bool present);
  // Units that are present and free for all streams, from the last to the first.
  std::vector<std::size_t> idle() const;

  std::optional<Block> block_at(cuda::CUdeviceptr address) const;
  bool covers(cuda::CUdeviceptr address) const { return address - base_ < units_ * kUnit; }
  cuda::CUdeviceptr base() const { return base_; }
  std::size_t size() const { return units_ * kUnit; }
  cuda::CUdeviceptr address_of(std::size_t unit) const { return base_ + unit * kUnit; }
  // In bytes: as they were asked for, and of the units that are present.
  std::uint64_t used() const { return used_; }
  std::uint64_t reserved() const { return present_ * kUnit; }
  // Neither in use nor on the way to be free.
  bool empty() const { return blocks_ == 0 && pending_.empty(); }

 private:
  enum class State { kAbsent, kFree, kPending, kUsed };
  struct Piece {
    std::size_t size = 0;
    State state = State::kAbsent;
    StreamId stream = 0;    // of kPending
    FreeNumber number = 0;  // of kPending
    std::size_t asked = 0;  // of kUsed
    bool same_kind(const Piece& other) const;
  };
  using Pieces = std::map<cuda::CUdeviceptr, Piece>;
  struct Pending {
    std::set<std::pair<std::size_t, cuda::CUdeviceptr>> by_size;
    std::set<std::pair<FreeNumber, cuda::CUdeviceptr>> by_number;
  };

  static bool is_free_for(const Piece& piece, StreamId stream, bool may_grow);
  void enter(cuda::CUdeviceptr address, const Piece& piece);
  void leave(cuda::CUdeviceptr address, const Piece& piece);
  // Puts `piece` in the place of all that is there, and joins it to its neighbours of the same
  // kind.
  void replace(cuda::CUdeviceptr address, Piece piece);
  Pieces::const_iterator piece_at(cuda::CUdeviceptr address) const;
  Fit fit_at(cuda::CUdeviceptr address, std::size_t size) const;

  cuda::CUdeviceptr base_;
  std::size_t units_;
  // All of the addresses, without a gap. Two neighbours of the same kind are one, but for those in
  // use.
  Pieces pieces_;
  std::set<std::pair<std::size_t, cuda::CUdeviceptr>> free_;
  std::map<StreamId, Pending> pending_;
  std::vector<bool> is_present_;
  std::size_t present_ = 0;
  std::size_t blocks_ = 0;
  std::uint64_t used_ = 0;
};

}  // namespace stasis::preload
