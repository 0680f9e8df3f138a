#include <algorithm>
#include <cerrno>
#include <utility>

#include "abi/futex.h"
#include "eviction_internal.h"
#include "intercept.h"
#include "ipc_broker.h"
#include "precopy.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

Tables& tables() {
  // Never destroyed: programs free device memory in destructors that run after ours.
  static auto* made = new Tables;
  return *made;
}

void OwnedMutex::wait() {
  const int error = errno;
  while (!try_lock()) {
    auto seen = word_.load(std::memory_order_relaxed);
    if (seen == 0) continue;
    if (seen & kWaited ||
        word_.compare_exchange_strong(seen, seen | kWaited, std::memory_order_relaxed))
      futex::wait(word_, seen | kWaited, false);
  }
  errno = error;
}

void OwnedMutex::wake() {
  const int error = errno;
  futex::wake_all(word_, false);
  errno = error;
}

CUcontext any_context() {
  const TablesLock lock;
  const auto& contexts = tables().contexts.devices;
  return contexts.empty() ? nullptr : contexts.begin()->first;
}

CurrentContext::CurrentContext(CUcontext context) {
  CUcontext current = nullptr;
  if (!context || (driver().cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context))
    return;
  pushed_ = driver().cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
}

CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  if (pushed_) driver().cuCtxPopCurrent_v2(&popped);
}

namespace {

// The entry in whose `size` bytes the address lies, or the end.
template <class Entry>
auto entry_at(std::map<CUdeviceptr, Entry>& all, CUdeviceptr address, std::size_t Entry::*size) {
  const auto next = all.upper_bound(address);
  if (next == all.begin()) return all.end();
  const auto at = std::prev(next);
  return address - at->first < at->second.*size ? at : all.end();
}

}  // namespace

std::map<CUdeviceptr, Managed>::iterator managed_at(CUdeviceptr address) {
  return entry_at(tables().managed, address, &Managed::size);
}

std::map<CUdeviceptr, Allocation>::iterator allocation_in(CUdeviceptr address) {
  return entry_at(tables().allocations, address, &Allocation::reserved);
}

std::optional<Allocation> find_allocation(CUdeviceptr address) {
  const TablesLock lock;
  const auto at = tables().allocations.find(address);
  return at == tables().allocations.end() ? std::nullopt : std::optional(at->second);
}

std::optional<Allocation> take_own(CUdeviceptr address) {
  const TablesLock lock;
  const auto at = tables().allocations.find(address);
  if (at == tables().allocations.end() || at->second.opening()) return std::nullopt;
  const auto taken = at->second;
  tables().allocations.erase(at);
  return taken;
}

std::uint64_t life_of(CUcontext context) {
  const auto at = tables().contexts.lives.find(context);
  return at == tables().contexts.lives.end() ? 0 : at->second.number;
}

void forget_places_in(const std::pair<const CUdeviceptr, SmallUnit>& unit) {
  const auto memory = tables().small.memory.find({unit.second.context, unit.second.life});
  memory->second.remove(unit.first);
  if (memory->second.has_units()) return;
  const auto anchor = tables().small.anchors.extract(memory->first);
  if (anchor) tables().spares[unit.second.context].push_back(anchor.mapped());
  tables().small.memory.erase(memory);
}

bool has_opened_piece(const std::pair<const CUdeviceptr, Allocation>& opened) {
  const auto piece = tables().opened_pieces.lower_bound(opened.first);
  return piece != tables().opened_pieces.end() &&
         piece->first - opened.first < opened.second.reserved;
}

Physical* physical_of(CUmemGenericAllocationHandle handle) {
  auto& all = tables().physicals;
  const auto at = all.find(handle);
  return at == all.end() ? nullptr : at->second.get();
}

Physical* enter_physical(MemoryOrigin origin, CUmemGenericAllocationHandle real, std::size_t size,
                         const CUmemAllocationProp& prop, unsigned asked_handle_types) {
  // The driver's handles are addresses as well: one of before the agent may lie there.
  std::vector<std::unique_ptr<Physical>> taken;
  auto fresh = std::make_unique<Physical>();
  while (physical_of(reinterpret_cast<CUmemGenericAllocationHandle>(fresh.get())))
    taken.push_back(std::exchange(fresh, std::make_unique<Physical>()));
  fresh->origin = origin;
  fresh->real = real;
  fresh->size = size;
  fresh->prop = prop;
  fresh->asked_handle_types = asked_handle_types;
  fresh->handle = reinterpret_cast<CUmemGenericAllocationHandle>(fresh.get());
  auto* physical = fresh.get();
  tables().physicals.emplace(physical->handle, std::move(fresh));
  return physical;
}

Physical* enter_program_memory(CUmemGenericAllocationHandle real, unsigned handles,
                               std::size_t size, const CUmemAllocationProp& prop) {
  auto* physical = enter_physical(MemoryOrigin::kProgram, real, size, prop,
                                  static_cast<unsigned>(prop.requestedHandleTypes));
  if (handles == 0) return physical;
  auto entry = tables().physicals.extract(physical->handle);
  entry.key() = physical->handle = real;
  physical->handles = handles;
  tables().physicals.insert(std::move(entry));
  return physical;
}

CUcontext owner_in(CUcontext current) {
  for (const auto& [handle, green] : tables().contexts.green)
    if (green.context == current) return green.primary;
  return current;
}

Mapping* mapping_at(CUdeviceptr address) {
  auto& all = tables().mappings;
  auto after = all.upper_bound(address);
  if (after == all.begin()) return nullptr;
  auto& mapping = std::prev(after)->second;
  return address - mapping.address < mapping.size ? &mapping : nullptr;
}

namespace {

// The mappings that overlap the range, in order.
template <class Visit>
void for_overlapping(CUdeviceptr address, std::size_t size, Visit visit) {
  auto& all = tables().mappings;
  auto at = all.upper_bound(address);
  if (at != all.begin() && address - std::prev(at)->second.address < std::prev(at)->second.size)
    --at;
  while (at != all.end() && at->first < address + size) {
    auto next = std::next(at);
    visit(at);
    at = next;
  }
}

}  // namespace

void enter_access(CUdeviceptr address, std::size_t size, const CUmemAccessDesc& right) {
  for_overlapping(address, size, [&](auto at) {
    auto& mapping = at->second;
    const auto from = std::max(address, mapping.address);
    const auto to = std::min(address + size, mapping.address + mapping.size);
    // What the same device was given before for no more than that no longer counts.
    std::erase_if(mapping.access, [&](const Access& old) {
      return old.right.location.type == right.location.type &&
             old.right.location.id == right.location.id && old.address >= from &&
             old.address + old.size <= to;
    });
    mapping.access.push_back({from, static_cast<std::size_t>(to - from), right});
  });
}

namespace {

// The part of a mapping in [from, to), with the rights that reach into it.
Mapping part_of(const Mapping& whole, CUdeviceptr from, CUdeviceptr to) {
  Mapping part{from,
               static_cast<std::size_t>(to - from),
               whole.offset + static_cast<std::size_t>(from - whole.address),
               whole.physical,
               {}};
  for (const auto& access : whole.access) {
    const auto begin = std::max(access.address, from);
    const auto end = std::min(access.address + access.size, to);
    if (begin < end)
      part.access.push_back({begin, static_cast<std::size_t>(end - begin), access.right});
  }
  return part;
}

}  // namespace

void drop_mappings(CUdeviceptr address, std::size_t size, Unneeded& unneeded) {
  std::vector<Mapping> rest;
  std::vector<Physical*> affected;
  const auto end = address + size;
  for_overlapping(address, size, [&](auto at) {
    const Mapping& mapping = at->second;
    const auto mapping_end = mapping.address + mapping.size;
    if (mapping.address < address) rest.push_back(part_of(mapping, mapping.address, address));
    if (mapping_end > end) rest.push_back(part_of(mapping, end, mapping_end));
    affected.push_back(mapping.physical);
    --mapping.physical->mappings;
    tables().mappings.erase(at);
  });
  for (auto& part : rest) {
    ++part.physical->mappings;
    const auto at = part.address;
    tables().mappings.insert_or_assign(at, std::move(part));
  }
  std::sort(affected.begin(), affected.end());
  affected.erase(std::unique(affected.begin(), affected.end()), affected.end());
  for (auto* physical : affected)
    forget_if_unused(physical, unneeded);
}

void forget_if_unused(Physical* physical, Unneeded& unneeded) {
  if (physical->handles > 0 || physical->mappings > 0) return;
  if (physical->present) unneeded.push_back(physical->real);
  const auto owner = physical->reach.key().service;
  tables().shares.erase(physical->reach.share());
  tables().physicals.erase(physical->handle);
  if (owner != 0) leave_owner(owner);
}

bool defer_in_capture(CUdeviceptr address, const Allocation& allocation) {
  if (tables().captures.load() == 0) return false;
  tables().to_free.emplace_back(address, allocation);
  return true;
}

void release(const Unneeded& unneeded) {
  if (!unneeded.empty()) wait_for_precopy();
  for (const auto handle : unneeded)
    driver().cuMemRelease(handle);
}

void drop_and_release(CUdeviceptr address, std::size_t size) {
  Unneeded unneeded;
  {
    const TablesLock lock;
    drop_mappings(address, size, unneeded);
  }
  release(unneeded);
}

bool is_allocated(CUdeviceptr address, std::size_t size) {
  for (const auto& [base, length] : tables().pool_ranges)
    if (address < base + length && base < address + size) return true;
  const auto& units = tables().small.units;
  const auto unit = units.lower_bound(address + size);
  if (unit != units.begin() && std::prev(unit)->first + std::prev(unit)->second.size > address)
    return true;
  const auto& all = tables().allocations;
  auto at = all.upper_bound(address);
  if (at != all.begin() && address - std::prev(at)->first < std::prev(at)->second.reserved)
    return true;
  return at != all.end() && at->first - address < size;
}

bool mark_outside(CUdeviceptr address, std::size_t size) {
  bool any = false;
  for_overlapping(address, size, [&](auto at) {
    at->second.physical->reach.set_outside(true);
    any = true;
  });
  auto& all = tables().allocations;
  auto piece = allocation_in(address);
  if (piece == all.end()) piece = all.lower_bound(address);
  for (; piece != all.end() && piece->first < address + size; ++piece)
    if (auto* small = piece->second.in_unit()) small->is_outside = true;
  return any;
}

void look_outside_again(const std::pair<const CUdeviceptr, SmallUnit>& unit) {
  const auto& all = tables().allocations;
  const auto first = all.lower_bound(unit.first);
  const auto last = all.lower_bound(unit.first + unit.second.size);
  mapping_at(unit.first)->physical->reach.set_outside(std::any_of(first, last, [](const auto& one) {
    const auto* piece = one.second.in_unit();
    return piece && piece->is_outside;
  }));
}

void mark_staying(CUdeviceptr address, std::size_t size) {
  for_overlapping(address, size, [](auto at) { at->second.physical->reach.stay(); });
}

}  // namespace stasis::preload
