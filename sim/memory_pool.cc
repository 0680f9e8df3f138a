// Stream-ordered memory. A pool is a range of addresses of which units of 32 MiB have memory;
// allocations lie side by side in them (as measured on driver 580.159.04).
#include <algorithm>
#include <iterator>

#include "sim/memory.h"

namespace stasis::sim {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

namespace {

constexpr std::uint64_t kPoolUnit = std::uint64_t{32} << 20;
constexpr std::uint64_t kPoolAlignment = 512;

std::uint64_t whole(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

std::vector<Address> Memory::missing_units(const PoolArea& area, Address at,
                                           std::uint64_t size) const {
  std::vector<Address> missing;
  for (auto unit = at - (at - area.base) % kPoolUnit; unit < at + size; unit += kPoolUnit)
    if (!placements_.contains(unit)) missing.push_back(unit);
  return missing;
}

bool Memory::find_in_pool(const PoolArea& area, std::uint64_t size, std::uint64_t stream,
                          Address& out) const {
  std::size_t fewest = SIZE_MAX;
  Address from = area.base;
  const auto consider = [&](Address to) {
    if (to < from || to - from < size) return;
    const auto missing = missing_units(area, from, size).size();
    if (missing >= fewest) return;
    fewest = missing;
    out = from;
  };
  for (const auto& [at, block] : area.blocks) {
    if (block.freed && block.stream == stream) continue;
    consider(at);
    from = at + block.size;
  }
  consider(area.base + area.size);
  return fewest != SIZE_MAX;
}

// What was freed in the stream makes room.
void Memory::cut_freed(PoolArea& area, Address at, std::uint64_t size) {
  for (auto it = area.blocks.begin(); it != area.blocks.end();) {
    const Address from = it->first;
    const PoolBlock block = it->second;
    const auto to = from + block.size;
    if (to <= at || from >= at + size) {
      ++it;
      continue;
    }
    it = area.blocks.erase(it);
    const auto keep = [&](Address begin, Address end) {
      auto rest = block;
      rest.size = end - begin;
      area.blocks.emplace(begin, rest);
    };
    if (from < at) keep(from, at);
    if (to > at + size) keep(at + size, to);
  }
}

CUresult Memory::allocate_pooled(int index, int device, std::uint64_t size, void* pool,
                                 std::uint64_t max_size, std::uint64_t stream, Address& out) {
  const auto capacity = slot(index).spec.capacity;
  if (size > capacity) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(mutex_);
  auto& area = pool_areas_[pool];
  if (area.base == 0) {
    area.size = whole(capacity, kPoolUnit);
    area.base = reserve_range(area.size, kGranule, 0);
    area.index = index;
    if (area.base == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const auto rounded = whole(size, kPoolAlignment);
  Address at = 0;
  if (!find_in_pool(area, rounded, stream, at)) return CUDA_ERROR_OUT_OF_MEMORY;
  // In place first: a GPU that is full takes what pools only keep, of this one as well.
  const auto blocks_before = area.blocks;
  cut_freed(area, at, rounded);
  area.blocks[at] = {rounded, 0, 0};
  const auto give_up = [&](CUresult why) {
    area.blocks = blocks_before;
    trim_area(area, area.reserved_before);
    return why;
  };
  const auto missing = missing_units(area, at, rounded);
  if (max_size && area.reserved + missing.size() * kPoolUnit > whole(max_size, kPoolUnit))
    return give_up(CUDA_ERROR_OUT_OF_MEMORY);
  for (const auto unit : missing) {
    Object* object = nullptr;
    if (auto rc = new_object(index, kPoolUnit, {}, object); rc != CUDA_SUCCESS) return give_up(rc);
    const Placement placement{kPoolUnit, 0, object, PROT_READ | PROT_WRITE, device};
    if (!place(unit, placement)) {
      drop_if_unused(object);
      return give_up(CUDA_ERROR_OUT_OF_MEMORY);
    }
    placements_[unit] = placement;
    ++object->uses;
    area.reserved += kPoolUnit;
  }
  area.reserved_before = area.reserved;
  area.used += size;
  area.used_high = std::max(area.used_high, area.used);
  area.reserved_high = std::max(area.reserved_high, area.reserved);
  Allocation allocation;
  allocation.base = at;
  allocation.size = size;
  allocation.device = device;
  allocation.pool = pool;
  out = remember(allocation).base;
  return CUDA_SUCCESS;
}

// The highest units first, while no less than `keep` is left. False if there is nothing to give
// back.
bool Memory::trim_area(PoolArea& area, std::uint64_t keep, bool only_look) {
  bool any = false;
  for (auto unit = area.base + area.size; unit > area.base;) {
    unit -= kPoolUnit;
    if (area.reserved < kPoolUnit || area.reserved - kPoolUnit < keep) break;
    const auto placement = placements_.find(unit);
    if (placement == placements_.end()) continue;
    const bool busy = std::any_of(area.blocks.begin(), area.blocks.end(), [&](const auto& entry) {
      return entry.first < unit + kPoolUnit && unit < entry.first + entry.second.size;
    });
    if (busy) continue;
    any = true;
    if (only_look) break;
    auto* object = placement->second.object;
    clear(unit, kPoolUnit);
    placements_.erase(placement);
    --object->uses;
    drop_if_unused(object);
    area.reserved -= kPoolUnit;
  }
  area.reserved_before = area.reserved;
  return any;
}

// A pool that the program has destroyed goes with the last of it.
void Memory::drop_area_if_unused(void* pool) {
  const auto at = pool_areas_.find(pool);
  if (at == pool_areas_.end() || !at->second.destroyed || !at->second.blocks.empty()) return;
  trim_area(at->second, 0);
  ::munmap(reinterpret_cast<void*>(at->second.base), at->second.size);
  pool_areas_.erase(at);
}

CUresult Memory::free_pooled(Address base, std::uint64_t stream, std::uint64_t& freed) {
  std::lock_guard lock(mutex_);
  const auto it = allocations_.find(base);
  if (it == allocations_.end() || !it->second.pool) return CUDA_ERROR_INVALID_VALUE;
  auto& area = pool_areas_.at(it->second.pool);
  auto& block = area.blocks.at(base);
  freed = block.freed = next_id_++;
  block.stream = stream;
  area.used -= it->second.size;
  allocations_.erase(it);
  return CUDA_SUCCESS;
}

void Memory::pass_pooled(std::uint64_t freed) {
  std::lock_guard lock(mutex_);
  std::vector<void*> touched;
  for (auto& [pool, area] : pool_areas_)
    if (std::erase_if(area.blocks, [&](const auto& entry) { return entry.second.freed == freed; }))
      touched.push_back(pool);
  for (auto* pool : touched)
    drop_area_if_unused(pool);
}

void Memory::destroy_pool(void* pool) {
  std::lock_guard lock(mutex_);
  const auto at = pool_areas_.find(pool);
  if (at == pool_areas_.end()) return;
  at->second.destroyed = true;
  drop_area_if_unused(pool);
}

bool Memory::trim_pool(void* pool, std::uint64_t keep, bool only_look) {
  std::lock_guard lock(mutex_);
  const auto at = pool_areas_.find(pool);
  return at != pool_areas_.end() && trim_area(at->second, keep, only_look);
}

// A GPU that is full takes what pools only keep.
bool Memory::trim_all(int index) {
  bool any = false;
  for (auto& [pool, area] : pool_areas_)
    if (area.index == index) any = trim_area(area, 0) || any;
  return any;
}

PoolUse Memory::pool_use(void* pool) const {
  std::lock_guard lock(mutex_);
  const auto at = pool_areas_.find(pool);
  if (at == pool_areas_.end()) return {};
  const auto& area = at->second;
  return {area.reserved, area.reserved_high, area.used, area.used_high};
}

void Memory::reset_pool_highs(void* pool, bool reserved) {
  std::lock_guard lock(mutex_);
  const auto at = pool_areas_.find(pool);
  if (at == pool_areas_.end()) return;
  auto& area = at->second;
  if (reserved)
    area.reserved_high = area.reserved;
  else
    area.used_high = area.used;
}

}  // namespace stasis::sim
