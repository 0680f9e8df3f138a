// Memory's part for virtual memory management: address ranges, handles, mappings, access, sharing.
#include <algorithm>
#include <iterator>

#include "sim/driver.h"
#include "sim/memory.h"

namespace stasis::sim {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

CUresult Memory::reserve(std::uint64_t size, std::uint64_t alignment, Address hint, Address& out) {
  if (size == 0 || size % kGranule) return CUDA_ERROR_INVALID_VALUE;
  if (alignment & (alignment - 1)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  const auto base = reserve_range(size, std::max(alignment, kGranule), hint);
  if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
  reservations_[base] = size;
  out = base;
  return CUDA_SUCCESS;
}

CUresult Memory::unreserve(Address base, std::uint64_t size) {
  std::lock_guard lock(mutex_);
  auto it = reservations_.find(base);
  if (it == reservations_.end() || it->second != size) return CUDA_ERROR_INVALID_VALUE;
  auto inside = placements_.lower_bound(base);
  if (inside != placements_.end() && inside->first < base + size) return CUDA_ERROR_INVALID_VALUE;
  ::munmap(reinterpret_cast<void*>(base), size);
  reservations_.erase(it);
  return CUDA_SUCCESS;
}

CUresult Memory::create(int index, std::uint64_t size, ObjectKind kind, Object*& out) {
  if (size == 0 || size % kGranule) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  if (auto rc = new_object(index, size, kind, out); rc != CUDA_SUCCESS) return rc;
  out->handles = 1;
  return CUDA_SUCCESS;
}

// One that is only mapped is none, until it is retained: then it has the same number again
// (580.159.04).
bool Memory::is_handle(const Object* object) const {
  std::lock_guard lock(mutex_);
  auto* key = const_cast<Object*>(object);
  return objects_.contains(key) && key->handles > 0;
}

CUresult Memory::release(Object* object) {
  if (!is_handle(object)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  --object->handles;
  drop_if_unused(object);
  return CUDA_SUCCESS;
}

CUresult Memory::map(Address at, std::uint64_t size, std::uint64_t offset, Object* object,
                     int device) {
  if (!is_handle(object)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  // Only whole objects, from their start.
  if (offset != 0 || size > object->size) return CUDA_ERROR_NOT_SUPPORTED;
  if (size == 0 || size != object->size || at % kGranule) return CUDA_ERROR_INVALID_VALUE;
  auto range = reservations_.upper_bound(at);
  if (range == reservations_.begin()) return CUDA_ERROR_INVALID_VALUE;
  --range;
  if (at - range->first > range->second || size > range->second - (at - range->first)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto next = placements_.upper_bound(at);
  if (next != placements_.end() && next->first < at + size) return CUDA_ERROR_INVALID_VALUE;
  if (next != placements_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second.size > at) return CUDA_ERROR_INVALID_VALUE;
  }
  const Placement placement{size, offset, object, PROT_NONE, device, 0, 0};
  if (!place(at, placement)) return CUDA_ERROR_MAP_FAILED;
  placements_[at] = placement;
  ++object->uses;
  Allocation allocation;
  allocation.base = at;
  allocation.size = size;
  allocation.kind = Kind::kMapped;
  allocation.device = device;
  allocation.object = object;
  remember(allocation);
  return CUDA_SUCCESS;
}

CUresult Memory::unmap(Address at, std::uint64_t size) {
  std::lock_guard lock(mutex_);
  // The range must lie in a reservation and cut no mapping; parts without any are fine.
  auto range = reservations_.upper_bound(at);
  if (size == 0 || range == reservations_.begin()) return CUDA_ERROR_INVALID_VALUE;
  --range;
  if (at - range->first > range->second || size > range->second - (at - range->first)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto first = placements_.lower_bound(at);
  if (first != placements_.begin()) {
    const auto before = std::prev(first);
    if (before->first + before->second.size > at) return CUDA_ERROR_INVALID_VALUE;
  }
  std::vector<Address> found;
  for (; first != placements_.end() && first->first < at + size; ++first) {
    if (first->second.size > at + size - first->first) return CUDA_ERROR_INVALID_VALUE;
    found.push_back(first->first);
  }
  for (auto start : found) {
    auto* object = placements_[start].object;
    clear(start, placements_[start].size);
    placements_.erase(start);
    allocations_.erase(start);
    --object->uses;
    drop_if_unused(object);
  }
  return CUDA_SUCCESS;
}

CUresult Memory::protect(Address at, std::uint64_t size, const Rights& rights) {
  std::lock_guard lock(mutex_);
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  for (int apply = 0; apply < 2; ++apply) {  // check everything first, then change it
    for (auto end = at; end < at + size;) {
      auto it = placements_.find(end);
      if (it == placements_.end() || it->second.size > at + size - end) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      if (apply) {
        auto& placement = it->second;
        const auto unchanged = ~(rights.readers | rights.writers | rights.others);
        placement.readers = (placement.readers & unchanged) | rights.readers;
        placement.writers = (placement.writers & unchanged) | rights.writers;
        placement.prot = placement.writers   ? PROT_READ | PROT_WRITE
                         : placement.readers ? PROT_READ
                                             : PROT_NONE;
        if (::mprotect(reinterpret_cast<void*>(end), placement.size, placement.prot) < 0) {
          return CUDA_ERROR_UNKNOWN;
        }
      }
      end += it->second.size;
    }
  }
  return CUDA_SUCCESS;
}

CUresult Memory::protection(Address at, int device, int& prot) const {
  std::lock_guard lock(mutex_);
  const auto* a = find_locked(at, 1);
  // Of a pool's memory the driver says that there is no access (580.159.04).
  if (a && a->pool) {
    prot = PROT_NONE;
    return CUDA_SUCCESS;
  }
  if (!a || a->kind != Kind::kMapped) return CUDA_ERROR_INVALID_VALUE;
  const Placement& placement = placements_.at(a->base);
  prot = placement.writers >> device & 1   ? PROT_READ | PROT_WRITE
         : placement.readers >> device & 1 ? PROT_READ
                                           : PROT_NONE;
  return CUDA_SUCCESS;
}

bool Memory::may_use(Address at, int device) const {
  std::lock_guard lock(mutex_);
  const auto* a = find_locked(at, 1);
  if (!a || a->kind != Kind::kMapped) return true;
  const Placement& placement = placements_.at(a->base);
  return ((placement.readers | placement.writers) >> device & 1) != 0;
}

CUresult Memory::export_fd(Object* object, int& out) const {
  if (!is_handle(object)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  if (!(object->kind.handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (object->restored && object->size >= exports_restored_below_) {
    (void)open_undumpable();  // as the driver: a descriptor that it leaves open
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto file = slot(object->gpu).holding->reopen(object->id);
  if (!file) return CUDA_ERROR_UNKNOWN;
  out = file.release();
  return CUDA_SUCCESS;
}

CUresult Memory::import_fd(int fd, Object*& out) {
  ObjectTrailer trailer;
  if (!read_trailer(fd, trailer)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  for (int i = 0; i < gpus(); ++i) {
    if (!same(slot(i).spec.uuid, trailer.gpu)) continue;
    if (auto rc = adopt(i, trailer, fd, Object::Origin::kImported, out); rc != CUDA_SUCCESS) {
      return rc;
    }
    ++out->handles;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

std::pair<Address, std::uint64_t> Memory::range_of(const Allocation& allocation) const {
  if (allocation.kind == Kind::kMapped) return reservation_at(allocation.base);
  return {allocation.base, allocation.size};
}

std::pair<Address, std::uint64_t> Memory::reservation_at(Address at) const {
  const std::lock_guard lock(mutex_);
  const auto behind = reservations_.upper_bound(at);
  if (behind == reservations_.begin()) return {0, 0};
  const auto& [start, size] = *std::prev(behind);
  return at - start < size ? std::pair{start, size} : std::pair<Address, std::uint64_t>{0, 0};
}

CUresult Memory::retain(Address at, Object*& out) {
  std::lock_guard lock(mutex_);
  const auto* a = find_locked(at, 1);
  if (!a || a->kind != Kind::kMapped) return CUDA_ERROR_INVALID_VALUE;
  out = a->object;
  ++out->handles;
  return CUDA_SUCCESS;
}

}  // namespace stasis::sim
