#include "pool_arena.h"

#include <algorithm>
#include <iterator>

namespace stasis::preload {

using cuda::CUdeviceptr;

namespace {

std::size_t whole(std::size_t bytes) {
  constexpr auto kAlignment = PoolArena::kAlignment;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

PoolArena::PoolArena(CUdeviceptr base, std::size_t units)
    : base_(base), units_(units), is_present_(units, false) {
  pieces_.emplace(base, Piece{units * kUnit, State::kAbsent, 0, 0, 0});
}

bool PoolArena::Piece::same_kind(const Piece& other) const {
  return state == other.state && state != State::kUsed &&
         (state != State::kPending || stream == other.stream);
}

bool PoolArena::is_free_for(const Piece& piece, StreamId stream, bool may_grow) {
  switch (piece.state) {
    case State::kAbsent:
      return may_grow;
    case State::kFree:
      return true;
    case State::kPending:
      return piece.stream == stream;
    case State::kUsed:
      return false;
  }
  return false;
}

PoolArena::Fit PoolArena::fit_at(CUdeviceptr address, std::size_t size) const {
  Fit fit{address, {}};
  const std::size_t last = (address + size - 1 - base_) / kUnit;
  for (std::size_t unit = (address - base_) / kUnit; unit <= last; ++unit)
    if (!is_present_[unit]) fit.missing.push_back(unit);
  return fit;
}

std::optional<PoolArena::Fit> PoolArena::find(std::size_t bytes, StreamId stream,
                                              bool may_grow) const {
  if (bytes > size()) return std::nullopt;
  const std::size_t size = whole(bytes);
  if (!may_grow) {
    const auto among = [&](const auto& set) { return set.lower_bound({size, 0}); };
    const auto free = among(free_);
    const auto own = pending_.find(stream);
    if (own != pending_.end()) {
      const auto pending = among(own->second.by_size);
      if (pending != own->second.by_size.end() &&
          (free == free_.end() || pending->first <= free->first))
        return Fit{pending->second, {}};
    }
    if (free != free_.end()) return Fit{free->second, {}};
  }
  // Of pieces that lie side by side.
  std::optional<Fit> best;
  std::size_t cost = SIZE_MAX;  // units that are missing; or bytes, if it may not grow
  CUdeviceptr from = 0;
  std::size_t length = 0;
  const auto consider = [&] {
    if (length < size) return;
    auto fit = fit_at(from, size);
    const std::size_t its = may_grow ? fit.missing.size() : length;
    if (its >= cost) return;
    cost = its;
    best = std::move(fit);
  };
  for (const auto& [address, piece] : pieces_) {
    if (!is_free_for(piece, stream, may_grow)) {
      consider();
      length = 0;
      continue;
    }
    if (length == 0) from = address;
    length += piece.size;
  }
  consider();
  return best;
}

void PoolArena::enter(CUdeviceptr address, const Piece& piece) {
  if (piece.state == State::kFree) free_.emplace(piece.size, address);
  if (piece.state != State::kPending) return;
  auto& pending = pending_[piece.stream];
  pending.by_size.emplace(piece.size, address);
  pending.by_number.emplace(piece.number, address);
}

void PoolArena::leave(CUdeviceptr address, const Piece& piece) {
  if (piece.state == State::kFree) free_.erase({piece.size, address});
  if (piece.state != State::kPending) return;
  const auto at = pending_.find(piece.stream);
  at->second.by_size.erase({piece.size, address});
  at->second.by_number.erase({piece.number, address});
  if (at->second.by_size.empty()) pending_.erase(at);
}

PoolArena::Pieces::const_iterator PoolArena::piece_at(CUdeviceptr address) const {
  return std::prev(pieces_.upper_bound(address));
}

void PoolArena::replace(CUdeviceptr address, Piece piece) {
  const CUdeviceptr end = address + piece.size;
  auto at = pieces_.find(piece_at(address)->first);
  while (at != pieces_.end() && at->first < end) {
    const CUdeviceptr from = at->first;
    const Piece old = at->second;
    const CUdeviceptr to = from + old.size;
    leave(from, old);
    at = pieces_.erase(at);
    // What is left of it keeps its kind. A block in use is only replaced as a whole.
    const auto keep = [&](CUdeviceptr begin, CUdeviceptr behind) {
      Piece rest = old;
      rest.size = behind - begin;
      pieces_.emplace(begin, rest);
      enter(begin, rest);
    };
    if (from < address) keep(from, address);
    if (to > end) keep(end, to);
  }
  const auto join = [&](Pieces::iterator neighbour) {
    address = std::min(address, neighbour->first);
    piece.size += neighbour->second.size;
    piece.number = std::max(piece.number, neighbour->second.number);
    leave(neighbour->first, neighbour->second);
    pieces_.erase(neighbour);
  };
  const auto next = pieces_.lower_bound(end);
  if (next != pieces_.end() && next->second.same_kind(piece)) join(next);
  const auto after = pieces_.lower_bound(address);
  if (after != pieces_.begin() && std::prev(after)->second.same_kind(piece)) join(std::prev(after));
  pieces_.emplace(address, piece);
  enter(address, piece);
}

void PoolArena::take(CUdeviceptr address, std::size_t bytes) {
  replace(address, Piece{whole(bytes), State::kUsed, 0, 0, bytes});
  used_ += bytes;
  ++blocks_;
}

bool PoolArena::give(CUdeviceptr address, StreamId stream, FreeNumber number) {
  const auto at = pieces_.find(address);
  if (at == pieces_.end() || at->second.state != State::kUsed) return false;
  used_ -= at->second.asked;
  --blocks_;
  replace(address, Piece{at->second.size, State::kPending, stream, number, 0});
  return true;
}

bool PoolArena::give_to_all(CUdeviceptr address) {
  const auto at = pieces_.find(address);
  if (at == pieces_.end() || at->second.state != State::kUsed) return false;
  used_ -= at->second.asked;
  --blocks_;
  replace(address, Piece{at->second.size, State::kFree, 0, 0, 0});
  return true;
}

void PoolArena::passed(StreamId stream, FreeNumber last) {
  auto at = pending_.find(stream);
  while (at != pending_.end() && at->second.by_number.begin()->first <= last) {
    const CUdeviceptr address = at->second.by_number.begin()->second;
    replace(address, Piece{pieces_.find(address)->second.size, State::kFree, 0, 0, 0});
    at = pending_.find(stream);
  }
}

bool PoolArena::would_fit(std::size_t bytes) const {
  std::size_t length = 0;
  for (const auto& [address, piece] : pieces_) {
    const bool free = piece.state == State::kFree || piece.state == State::kPending;
    length = free ? length + piece.size : 0;
    if (length >= bytes) return true;
  }
  return false;
}

void PoolArena::hand_over(StreamId from, FreeNumber last, StreamId to, FreeNumber number) {
  auto at = pending_.find(from);
  while (at != pending_.end() && at->second.by_number.begin()->first <= last) {
    const CUdeviceptr address = at->second.by_number.begin()->second;
    replace(address, Piece{pieces_.find(address)->second.size, State::kPending, to, number, 0});
    at = pending_.find(from);
  }
}

void PoolArena::set_present(std::size_t unit, bool present) {
  if (is_present_[unit] == present) return;
  is_present_[unit] = present;
  if (present)
    ++present_;
  else
    --present_;
  replace(address_of(unit), Piece{kUnit, present ? State::kFree : State::kAbsent, 0, 0, 0});
}

std::vector<std::size_t> PoolArena::idle() const {
  std::vector<std::size_t> found;
  for (const auto& [size, address] : free_) {
    const std::size_t first = (address - base_ + kUnit - 1) / kUnit;
    const std::size_t behind = (address + size - base_) / kUnit;
    for (std::size_t unit = first; unit < behind; ++unit)
      found.push_back(unit);
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

std::optional<PoolArena::Block> PoolArena::block_at(CUdeviceptr address) const {
  if (!covers(address)) return std::nullopt;
  const auto at = piece_at(address);
  if (at->second.state != State::kUsed || address - at->first >= at->second.asked)
    return std::nullopt;
  return Block{at->first, at->second.asked};
}

}  // namespace stasis::preload
