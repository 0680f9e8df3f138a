#include "small_memory.h"

#include <iterator>

namespace stasis::preload {

using cuda::CUdeviceptr;

void SmallMemory::enter(CUdeviceptr address, std::size_t size) {
  free_.emplace(address, size);
  by_size_.emplace(size, address);
}

SmallMemory::Places::iterator SmallMemory::leave(Places::iterator place) {
  by_size_.erase({place->second, place->first});
  return free_.erase(place);
}

void SmallMemory::add(CUdeviceptr unit, std::size_t size, std::size_t first) {
  units_.emplace(unit, size);
  if (const auto room = room_for(first); room < size) enter(unit + room, size - room);
}

void SmallMemory::remove(CUdeviceptr unit) {
  const auto known = units_.find(unit);
  for (auto place = free_.lower_bound(unit);
       place != free_.end() && place->first - unit < known->second;)
    place = leave(place);
  units_.erase(known);
}

CUdeviceptr SmallMemory::take(std::size_t bytes) {
  const std::size_t room = room_for(bytes);
  const auto best = by_size_.lower_bound({room, 0});
  if (best == by_size_.end()) return 0;
  const auto [size, address] = *best;
  leave(free_.find(address));
  if (size > room) enter(address + room, size - room);
  return address;
}

bool SmallMemory::give(CUdeviceptr address, std::size_t bytes) {
  std::size_t size = room_for(bytes);
  const auto unit = std::prev(units_.upper_bound(address));
  const CUdeviceptr end = unit->first + unit->second;
  auto next = free_.upper_bound(address);
  if (next != free_.end() && next->first == address + size && next->first != end) {
    size += next->second;
    next = leave(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first >= unit->first && before->first + before->second == address) {
      address = before->first;
      size += before->second;
      leave(before);
    }
  }
  enter(address, size);
  return size == unit->second;
}

}  // namespace stasis::preload
