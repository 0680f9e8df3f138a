// Long because allocations, mappings and handles are checked against each other under one lock.
#include "sim/memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace stasis::sim {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

constexpr std::uint64_t kSlabLimit = std::uint64_t{1} << 20;  // smaller ones share a granule
constexpr std::uint64_t kAlignment = 512;

std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

struct IpcContent {
  std::uint32_t magic;
  std::uint32_t restored;
  CUuuid gpu;
  ObjectId object;
  std::uint64_t offset;
  std::uint64_t size;
};
static_assert(sizeof(IpcContent) <= sizeof(CUipcMemHandle));
constexpr std::uint32_t kIpcMagic = 0x51a5151c;

}  // namespace

Memory::Memory(const Config& config)
    : dir_(config.dir),
      context_bytes_(config.context_bytes),
      takes_freed_(config.takes_freed),
      exports_restored_below_(config.exports_restored_below) {
  for (const auto& gpu : config.gpus)
    slots_.push_back({gpu, nullptr, 0});
  void* page = ::mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw std::bad_alloc();
  device_page_ = static_cast<const volatile char*>(page);
}

bool Memory::hold(int index) {
  std::lock_guard lock(mutex_);
  auto& s = slot(index);
  if (!s.holding) {
    auto holding = std::make_unique<Holding>(dir_, s.spec);
    if (!holding->open()) return false;
    s.holding = std::move(holding);
  }
  ++s.holds;
  return true;
}

void Memory::unhold(int index) {
  std::lock_guard lock(mutex_);
  auto& s = slot(index);
  if (--s.holds == 0 && s.holding->bytes() == 0) s.holding.reset();
}

std::uint64_t Memory::free_bytes(int index) const {
  const auto& spec = slot(index).spec;
  return spec.capacity - std::min(spec.capacity, usage(dir_, spec.uuid).used);
}

// --- Objects and where they are mapped

CUresult Memory::new_object(int index, std::uint64_t size, ObjectKind kind, Object*& out) {
  auto& s = slot(index);
  if (!s.holding) {
    auto holding = std::make_unique<Holding>(dir_, s.spec);
    if (!holding->open()) return CUDA_ERROR_UNKNOWN;
    s.holding = std::move(holding);
  }
  auto object = std::make_unique<Object>();
  Fd file;
  auto outcome = s.holding->create(size, kind, object->id, file);
  if (outcome == Holding::Outcome::kFull && trim_all(index)) {
    // It may have gone with the last that was in it.
    if (!s.holding) {
      s.holding = std::make_unique<Holding>(dir_, s.spec);
      if (!s.holding->open()) return CUDA_ERROR_UNKNOWN;
    }
    outcome = s.holding->create(size, kind, object->id, file);
  }
  if (outcome == Holding::Outcome::kFull) return CUDA_ERROR_OUT_OF_MEMORY;
  if (outcome != Holding::Outcome::kOk) return CUDA_ERROR_UNKNOWN;
  object->size = size;
  object->gpu = index;
  object->kind = kind;
  objects_.insert(object.get());
  out = object.release();
  return CUDA_SUCCESS;
}

CUresult Memory::adopt(int index, const ObjectTrailer& trailer, int fd, Object::Origin origin,
                       Object*& out) {
  auto& s = slot(index);
  if (!s.holding) {
    auto holding = std::make_unique<Holding>(dir_, s.spec);
    if (!holding->open()) return CUDA_ERROR_UNKNOWN;
    s.holding = std::move(holding);
  }
  for (auto* known : objects_) {
    if (known->id == trailer.id) {  // our own, or imported before
      out = known;
      return CUDA_SUCCESS;
    }
  }
  if (s.holding->adopt(trailer, fd) != Holding::Outcome::kOk) return CUDA_ERROR_INVALID_VALUE;
  auto* object = new Object;
  object->id = trailer.id;
  object->size = trailer.size;
  object->gpu = index;
  object->origin = origin;
  object->kind = trailer.kind;
  // What was imported cannot be exported again, and its properties say so (580.159.04).
  if (origin == Object::Origin::kImported) object->kind.handle_types = 0;
  objects_.insert(object);
  out = object;
  return CUDA_SUCCESS;
}

void Memory::drop_if_unused(Object* object) {
  if (object->handles > 0 || object->uses > 0) return;
  auto& s = slot(object->gpu);
  s.holding->drop(object->id);
  objects_.erase(object);
  delete object;
  if (s.holds == 0 && s.holding->bytes() == 0) s.holding.reset();
}

Address Memory::reserve_range(std::uint64_t size, std::uint64_t alignment, Address hint) {
  if (hint && hint % alignment == 0) {
    void* got = ::mmap(pointer(hint), size, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == pointer(hint)) return hint;
    if (got != MAP_FAILED) ::munmap(got, size);
  }
  const auto padded = size + alignment;
  void* got =
      ::mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return 0;
  const auto start = reinterpret_cast<Address>(got);
  const auto base = round_up(start, alignment);
  if (base > start) ::munmap(got, base - start);
  if (start + padded > base + size) ::munmap(pointer(base + size), start + padded - base - size);
  return base;
}

bool Memory::place(Address at, const Placement& p) {
  const auto file = slot(p.object->gpu).holding->reopen(p.object->id);
  if (!file) return false;
  void* got = ::mmap(pointer(at), p.size, p.prot, MAP_SHARED | MAP_FIXED, file.get(),
                     static_cast<off_t>(p.offset));
  if (got == MAP_FAILED) return false;
  // A forked child has no CUDA; without this it would keep the memory alive.
  ::madvise(got, p.size, MADV_DONTFORK);
  return true;
}

void Memory::clear(Address at, std::uint64_t size) {
  (void)::mmap(pointer(at), size, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

// --- Plain device memory

Allocation& Memory::remember(Allocation allocation) {
  allocation.id = next_id_++;
  return allocations_[allocation.base] = allocation;
}

// The first place that is free, as the driver has it: a block that is freed and allocated again
// gets its address back unless another was faster.
Address Memory::take_in_area(int index, std::uint64_t size) {
  for (auto& [base, area] : areas_) {
    if (area.index != index) continue;
    Address at = base;
    for (const auto& [block, length] : area.blocks) {
      if (block - at >= size) break;
      at = block + length;
    }
    if (base + area.size - at < size) continue;
    area.blocks[at] = size;
    return at;
  }
  const auto whole = round_up(size, kAreaUnit);
  const auto last = given_up_.find(whole);
  const auto base = reserve_range(whole, kAreaUnit, last == given_up_.end() ? 0 : last->second);
  if (base) areas_[base] = {index, whole, {{base, size}}};
  return base;
}

void Memory::give_back_in_area(Address at) {
  const auto area = std::prev(areas_.upper_bound(at));
  const auto block = area->second.blocks.find(at);
  clear(at, block->second);
  area->second.blocks.erase(block);
  if (!area->second.blocks.empty()) return;
  ::munmap(pointer(area->first), area->second.size);
  // The kernel's choice, made sure of: a real driver names no address.
  if (takes_freed_)
    (void)::syscall(SYS_mmap, area->first, kGranule, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  given_up_[area->second.size] = area->first;
  areas_.erase(area);
}

CUresult Memory::allocate_in_slab(int index, Allocation& allocation) {
  const auto size = round_up(allocation.size, kAlignment);
  allocation.in_slab = true;
  auto take = [&](Slab& slab) {
    std::uint64_t at = 0;
    for (const auto& [offset, used] : slab.used) {
      if (offset - at >= size) break;
      at = offset + used;
    }
    if (at + size > kGranule) return false;
    slab.used[at] = size;
    ++slab.object->uses;
    allocation.object = slab.object;
    allocation.offset = at;
    allocation.base = slab.base + at;
    return true;
  };
  for (auto& slab : slabs_) {
    if (slab->object->gpu == index && take(*slab)) return CUDA_SUCCESS;
  }
  auto slab = std::make_unique<Slab>();
  if (auto rc = new_object(index, kGranule, {}, slab->object); rc != CUDA_SUCCESS) return rc;
  slab->base = take_in_area(index, kGranule);
  const Placement placement{kGranule, 0, slab->object, PROT_READ | PROT_WRITE, allocation.device};
  if (!slab->base || !place(slab->base, placement)) {
    if (slab->base) give_back_in_area(slab->base);
    drop_if_unused(slab->object);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  placements_[slab->base] = placement;
  take(*slab);
  slabs_.push_back(std::move(slab));
  return CUDA_SUCCESS;
}

CUresult Memory::allocate(int index, int device, std::uint64_t size, Context* context,
                          Address& out) {
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  if (size > slot(index).spec.capacity) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(mutex_);
  Allocation allocation;
  allocation.size = size;
  allocation.device = device;
  allocation.context = context;
  if (size <= kSlabLimit) {
    if (auto rc = allocate_in_slab(index, allocation); rc != CUDA_SUCCESS) return rc;
  } else {
    const auto whole = round_up(size, kGranule);
    if (auto rc = new_object(index, whole, {}, allocation.object); rc != CUDA_SUCCESS) return rc;
    allocation.base = take_in_area(index, whole);
    const Placement placement{whole, 0, allocation.object, PROT_READ | PROT_WRITE, device};
    if (!allocation.base || !place(allocation.base, placement)) {
      if (allocation.base) give_back_in_area(allocation.base);
      drop_if_unused(allocation.object);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    placements_[allocation.base] = placement;
    ++allocation.object->uses;
  }
  out = remember(allocation).base;
  return CUDA_SUCCESS;
}

void Memory::free_locked(std::map<Address, Allocation>::iterator it) {
  const Allocation a = it->second;
  allocations_.erase(it);
  if (a.kind == Kind::kManaged || a.kind == Kind::kPinned) {
    if (a.kind == Kind::kPinned) ::munmap(pointer(a.base), round_up(a.size, 4096));
    if (a.kind == Kind::kManaged) {
      --managed_;
      managed_areas_.free(a.base, a.size);
    }
    return;
  }
  if (a.kind == Kind::kRegistered) return;
  if (a.pool) {
    auto& area = pool_areas_.at(a.pool);
    area.blocks.erase(a.base);
    area.used -= a.size;
    drop_area_if_unused(a.pool);
    return;
  }
  --a.object->uses;
  Address base = a.base;
  if (a.in_slab) {
    auto slab = std::find_if(slabs_.begin(), slabs_.end(),
                             [&](const auto& s) { return s->object == a.object; });
    (*slab)->used.erase(a.offset);
    if (!(*slab)->used.empty()) return;
    base = (*slab)->base;
    slabs_.erase(slab);
  }
  if (a.kind == Kind::kIpc) {
    const auto opened = placements_.find(a.base - a.offset);
    ::munmap(pointer(opened->first), opened->second.size);
    placements_.erase(opened);
  } else {
    placements_.erase(base);
    give_back_in_area(base);
  }
  drop_if_unused(a.object);
}

CUresult Memory::free(Address base) {
  std::lock_guard lock(mutex_);
  auto it = allocations_.find(base);
  if (it == allocations_.end()) return CUDA_ERROR_INVALID_VALUE;
  if (it->second.kind != Kind::kDevice && it->second.kind != Kind::kManaged) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  free_locked(it);
  return CUDA_SUCCESS;
}

void Memory::free_all(const Context* context) {
  std::lock_guard lock(mutex_);
  for (auto it = allocations_.begin(); it != allocations_.end();) {
    auto next = std::next(it);
    if (it->second.context == context && it->second.kind != Kind::kMapped) free_locked(it);
    it = next;
  }
}

// --- Host memory

CUresult Memory::allocate_host(Kind kind, int device, std::uint64_t size, Context* context,
                               unsigned flags, Address& out) {
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  // There are not as many addresses.
  if (size > std::uint64_t{1} << 46) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(mutex_);
  Allocation allocation;
  if (kind == Kind::kManaged) {
    allocation.base = managed_areas_.allocate(size);
    if (allocation.base == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  } else {
    // Shared, and of no file: so is pinned memory on an H200 with driver 580.159.04.
    void* got = ::mmap(nullptr, round_up(size, 4096), PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    allocation.base = reinterpret_cast<Address>(got);
  }
  allocation.size = size;
  allocation.kind = kind;
  allocation.device = device;
  allocation.context = context;
  allocation.flags = flags;
  if (kind == Kind::kManaged) ++managed_;
  out = remember(allocation).base;
  return CUDA_SUCCESS;
}

CUresult Memory::note_managed(Address base, std::uint64_t size, CUmem_range_attribute attribute,
                              int value) {
  std::lock_guard lock(mutex_);
  const Allocation* a = find_locked(base, size);
  if (size == 0 || !a || a->kind != Kind::kManaged) return CUDA_ERROR_INVALID_VALUE;
  managed_areas_.note(base, size, attribute, value);
  return CUDA_SUCCESS;
}

CUresult Memory::noted_managed(Address base, std::uint64_t size, CUmem_range_attribute attribute,
                               int& value) const {
  std::lock_guard lock(mutex_);
  const Allocation* a = find_locked(base, size);
  if (size == 0 || !a || a->kind != Kind::kManaged) return CUDA_ERROR_INVALID_VALUE;
  value = managed_areas_.noted(base, size, attribute);
  return CUDA_SUCCESS;
}

CUresult Memory::register_host(Address base, std::uint64_t size, int device, Context* context,
                               unsigned flags) {
  if (size == 0 || base == 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  auto next = allocations_.upper_bound(base);
  const bool overlaps_next = next != allocations_.end() && next->first < base + size;
  const bool overlaps_previous =
      next != allocations_.begin() && std::prev(next)->first + std::prev(next)->second.size > base;
  if (overlaps_next || overlaps_previous) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  Allocation allocation;
  allocation.base = base;
  allocation.size = size;
  allocation.kind = Kind::kRegistered;
  allocation.device = device;
  allocation.context = context;
  allocation.flags = flags;
  remember(allocation);
  return CUDA_SUCCESS;
}

CUresult Memory::unregister_host(Address base) {
  std::lock_guard lock(mutex_);
  auto it = allocations_.find(base);
  if (it == allocations_.end() || it->second.kind != Kind::kRegistered) {
    // Inside of a registration is another mistake than nowhere, and has another code.
    return find_locked(base, 1) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  allocations_.erase(it);
  return CUDA_SUCCESS;
}

CUresult Memory::free_host(Address base) {
  std::lock_guard lock(mutex_);
  auto it = allocations_.find(base);
  if (it == allocations_.end() || it->second.kind != Kind::kPinned) return CUDA_ERROR_INVALID_VALUE;
  free_locked(it);
  return CUDA_SUCCESS;
}

// --- Looking up

const Allocation* Memory::find_locked(Address address, std::uint64_t size) const {
  auto it = allocations_.upper_bound(address);
  if (it == allocations_.begin()) return nullptr;
  const auto& a = std::prev(it)->second;
  if (address - a.base >= a.size || size > a.size - (address - a.base)) return nullptr;
  return &a;
}

bool Memory::find(Address address, std::uint64_t size, Allocation& out) const {
  std::lock_guard lock(mutex_);
  const auto* a = find_locked(address, size);
  if (a) out = *a;
  return a != nullptr;
}

cuda::CUresult Memory::set_sync_memops(Address address, bool on) {
  std::lock_guard lock(mutex_);
  const auto* a = find_locked(address, 1);
  if (!a) return cuda::CUDA_ERROR_INVALID_VALUE;
  allocations_.at(a->base).sync_memops = on;
  return cuda::CUDA_SUCCESS;
}

bool Memory::accessible(Address address, std::uint64_t size) const {
  std::lock_guard lock(mutex_);
  while (size > 0) {
    const auto* a = find_locked(address, 1);
    if (!a) return false;
    const std::uint64_t part = std::min<std::uint64_t>(size, a->base + a->size - address);
    if (a->kind != Kind::kMapped) return part == size;
    auto placement = placements_.find(a->base);
    if (placement == placements_.end() || placement->second.prot == PROT_NONE) return false;
    address += part;
    size -= part;
  }
  return true;
}

CUresult Memory::foreign_refusal() const {
  for (const auto* object : objects_) {
    if (object->origin == Object::Origin::kOpened) return CUDA_ERROR_INVALID_VALUE;
    if (object->origin == Object::Origin::kImported) return CUDA_ERROR_NOT_SUPPORTED;
    if (object->kind.multicast) return CUDA_ERROR_NOT_SUPPORTED;
    if (object->kind.host) return CUDA_ERROR_UNKNOWN;
  }
  return CUDA_SUCCESS;
}

// --- Legacy IPC

CUresult Memory::export_ipc(Address address, CUipcMemHandle& out) const {
  std::lock_guard lock(mutex_);
  const auto* a = find_locked(address, 1);
  if (!a || a->kind != Kind::kDevice || a->pool) return CUDA_ERROR_INVALID_VALUE;
  IpcContent content{};
  content.magic = kIpcMagic;
  content.gpu = slot(a->object->gpu).spec.uuid;
  content.restored = a->object->restored ? 1 : 0;
  content.object = a->object->id;
  content.offset = a->offset;
  content.size = a->size;
  std::memset(&out, 0, sizeof out);
  std::memcpy(&out, &content, sizeof content);
  return CUDA_SUCCESS;
}

CUresult Memory::import_ipc(const CUipcMemHandle& handle, int device, Context* context,
                            Address& out) {
  IpcContent content;
  int index = 0;
  std::memcpy(static_cast<void*>(&content), handle.reserved, sizeof content);
  if (content.magic != kIpcMagic) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  // Handed out, but no other process may open it, also what is allocated anew in the same slab
  // (580.159.04).
  if (content.restored != 0) return CUDA_ERROR_NOT_PERMITTED;
  // Also from another GPU than the current one, to whose memory that one then has access: NCCL's
  // ranks open each other's so.
  while (index < gpus() && !same(content.gpu, slot(index).spec.uuid))
    ++index;
  if (index == gpus()) return CUDA_ERROR_INVALID_VALUE;
  for (auto* known : objects_) {
    if (!(known->id == content.object)) continue;
    // The exporting process cannot open its own handle; a process that has it open gets it once
    // more.
    if (known->origin != Object::Origin::kOpened) return CUDA_ERROR_INVALID_CONTEXT;
    for (auto& [base, allocation] : allocations_) {
      if (allocation.object != known || allocation.offset != content.offset) continue;
      ++allocation.opens;
      out = base;
      return CUDA_SUCCESS;
    }
  }
  const auto file = open_object(dir_, content.gpu, content.object);
  ObjectTrailer trailer;
  if (!file || !read_trailer(file.get(), trailer)) return CUDA_ERROR_INVALID_VALUE;
  Allocation allocation;
  if (auto rc = adopt(index, trailer, file.get(), Object::Origin::kOpened, allocation.object);
      rc != CUDA_SUCCESS) {
    return rc;
  }
  const auto base = reserve_range(allocation.object->size, kGranule, 0);
  const Placement placement{allocation.object->size, 0, allocation.object, PROT_READ | PROT_WRITE,
                            device};
  if (!base || !place(base, placement)) {
    drop_if_unused(allocation.object);
    return CUDA_ERROR_MAP_FAILED;
  }
  placements_[base] = placement;
  ++allocation.object->uses;
  allocation.base = base + content.offset;
  allocation.size = content.size;
  allocation.kind = Kind::kIpc;
  allocation.opens = 1;
  allocation.device = device;
  allocation.context = context;
  allocation.offset = content.offset;
  out = remember(allocation).base;
  return CUDA_SUCCESS;
}

CUresult Memory::close_ipc(Address base) {
  std::lock_guard lock(mutex_);
  auto it = allocations_.find(base);
  if (it == allocations_.end() || it->second.kind != Kind::kIpc) return CUDA_ERROR_INVALID_VALUE;
  if (--it->second.opens > 0) return CUDA_SUCCESS;
  const Allocation a = it->second;
  allocations_.erase(it);
  const auto start = a.base - a.offset;
  ::munmap(pointer(start), placements_[start].size);
  placements_.erase(start);
  --a.object->uses;
  drop_if_unused(a.object);
  return CUDA_SUCCESS;
}

}  // namespace stasis::sim
