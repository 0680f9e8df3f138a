#include "sim/managed.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <optional>

namespace stasis::sim {
namespace {

constexpr std::uint64_t kPage = 4096;

std::uint64_t units_of(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}
void* place_of(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// The first gap between `items`, which lie in [begin, end), that takes `bytes`.
template <class Items, class Size>
std::optional<std::uint64_t> gap_in(const Items& items, Size size, std::uint64_t begin,
                                    std::uint64_t end, std::uint64_t bytes, std::uint64_t unit) {
  std::uint64_t at = begin;
  for (const auto& [address, item] : items) {
    if (address - at >= bytes) return at;
    at = units_of(address + size(item), unit);
  }
  if (at <= end && end - at >= bytes) return at;
  return std::nullopt;
}

// Managed memory is told by its file: /dev/nvidia-uvm with the real driver.
bool map_file(std::uint64_t address, std::uint64_t bytes) {
  const int file = ::memfd_create("nvidia-uvm", MFD_CLOEXEC);
  if (file < 0) return false;
  const bool sized = ::ftruncate(file, static_cast<off_t>(bytes)) == 0;
  void* at = sized ? ::mmap(place_of(address), bytes, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_FIXED, file, 0)
                   : MAP_FAILED;
  ::close(file);
  return at != MAP_FAILED;
}

void map_nothing(std::uint64_t address, std::uint64_t bytes) {
  (void)::mmap(place_of(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

// 0 if there is no room.
std::uint64_t take_area(std::uint64_t bytes) {
  const std::uint64_t room = bytes + ManagedAreas::kArea - kPage;
  void* raw = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return 0;
  const auto from = reinterpret_cast<std::uint64_t>(raw);
  const std::uint64_t begin = units_of(from, ManagedAreas::kArea);
  if (begin > from) ::munmap(raw, begin - from);
  if (begin + bytes < from + room) ::munmap(place_of(begin + bytes), from + room - begin - bytes);
  return begin;
}

}  // namespace

std::uint64_t ManagedAreas::new_block(std::uint64_t bytes, bool shared) {
  const auto size = [](const Block& block) { return block.bytes; };
  const auto enter = [&](std::uint64_t address, Area& area) -> std::uint64_t {
    if (!map_file(address, bytes)) return 0;
    area.blocks.emplace(address, Block{bytes, shared, {}});
    return address;
  };
  for (auto& [begin, area] : areas_) {
    const auto at = gap_in(area.blocks, size, begin, begin + area.bytes, bytes, kUnit);
    if (at) return enter(*at, area);
  }
  const std::uint64_t whole = units_of(bytes, kArea);
  const std::uint64_t begin = take_area(whole);
  return begin == 0 ? 0 : enter(begin, areas_.emplace(begin, Area{whole, {}}).first->second);
}

std::uint64_t ManagedAreas::in_shared_unit(std::uint64_t bytes) {
  const auto size = [](std::uint64_t piece) { return piece; };
  for (auto& [begin, area] : areas_) {
    for (auto& [address, block] : area.blocks) {
      if (!block.shared) continue;
      const auto at = gap_in(block.pieces, size, address, address + kUnit, bytes, kPage);
      if (!at) continue;
      block.pieces.emplace(*at, bytes);
      return *at;
    }
  }
  const std::uint64_t address = new_block(kUnit, true);
  if (address == 0) return 0;
  auto& blocks = std::prev(areas_.upper_bound(address))->second.blocks;
  blocks.at(address).pieces.emplace(address, bytes);
  return address;
}

std::uint64_t ManagedAreas::allocate(std::uint64_t bytes) {
  bytes = units_of(bytes, kPage);
  return bytes < kUnit ? in_shared_unit(bytes) : new_block(bytes, false);
}

void ManagedAreas::note(std::uint64_t address, std::uint64_t bytes,
                        cuda::CUmem_range_attribute attribute, int value) {
  Notes& notes = notes_[attribute];
  const auto at = [&](std::uint64_t place) {
    const auto next = notes.upper_bound(place);
    return next == notes.begin() ? cuda::kDeviceInvalid : std::prev(next)->second;
  };
  const std::uint64_t end = address + units_of(bytes, kPage);
  const int behind = at(end);
  notes.erase(notes.lower_bound(address), notes.lower_bound(end));
  notes[address] = value;
  notes[end] = behind;
}

int ManagedAreas::noted(std::uint64_t address, std::uint64_t bytes,
                        cuda::CUmem_range_attribute attribute) const {
  const auto known = notes_.find(attribute);
  if (known == notes_.end()) return cuda::kDeviceInvalid;
  auto next = known->second.upper_bound(address);
  const int value = next == known->second.begin() ? cuda::kDeviceInvalid : std::prev(next)->second;
  for (; next != known->second.end() && next->first < address + bytes; ++next)
    if (next->second != value) return cuda::kDeviceInvalid;
  return value;
}

void ManagedAreas::free(std::uint64_t address, std::uint64_t bytes) {
  for (auto& [attribute, notes] : notes_)
    note(address, bytes, attribute, cuda::kDeviceInvalid);
  const auto area = std::prev(areas_.upper_bound(address));
  auto& blocks = area->second.blocks;
  const auto block = std::prev(blocks.upper_bound(address));
  block->second.pieces.erase(address);
  if (!block->second.pieces.empty()) return;
  map_nothing(block->first, block->second.bytes);
  blocks.erase(block);
  if (!blocks.empty()) return;
  ::munmap(place_of(area->first), area->second.bytes);
  areas_.erase(area);
}

}  // namespace stasis::sim
