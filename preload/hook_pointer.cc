// What the program asks of memory by its address: in which allocation it lies, and its attributes.
// What the agent serves is told as the driver would tell its own (580.159.04).
#include <algorithm>
#include <iterator>
#include <optional>

#include "eviction_internal.h"
#include "gate.h"
#include "intercept.h"
#include "managed.h"
#include "pools.h"

namespace stasis::preload::hooks {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

// What the program asked for, of an allocation of which the driver knows more.
struct Asked {
  CUdeviceptr base;
  std::size_t size;
};

// In which `pointer` lies, or behind which.
std::optional<Asked> asked_at(CUdeviceptr pointer) {
  if (in_pool(pointer)) {
    const auto block = pool_block_at(pointer);
    return block ? Asked{block->address, block->asked} : Asked{pointer, 0};
  }
  const TablesLock lock;
  if (const auto managed = managed_at(pointer); managed != tables().managed.end())
    return Asked{managed->first, managed->second.asked};
  if (const auto at = allocation_in(pointer); at != tables().allocations.end()) {
    if (!has_opened_piece(*at)) return Asked{at->first, at->second.asked};
    const auto next = tables().opened_pieces.upper_bound(pointer);
    if (next == tables().opened_pieces.begin()) return Asked{pointer, 0};
    return Asked{std::prev(next)->first, std::prev(next)->second.asked};
  }
  // Between small ones there is nothing.
  return is_allocated(pointer, 1) ? std::optional(Asked{pointer, 0}) : std::nullopt;
}

}  // namespace

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* size, CUdeviceptr pointer) {
  const Gate::Pass pass;
  auto result = driver().cuMemGetAddressRange_v2(base, size, pointer);
  // Of addresses without memory the driver may say that.
  if ((result != CUDA_SUCCESS && !in_pool(pointer)) || (!base && !size)) return result;
  const auto asked = asked_at(pointer);
  if (!asked) return result;
  // As the driver does where there is nothing (seen on an H200, 580).
  const bool behind = pointer - asked->base >= asked->size;
  if (base) *base = behind ? 0 : asked->base;
  if (size) *size = behind ? 0 : asked->size;
  return behind ? CUDA_ERROR_NOT_FOUND : result;
}

namespace {

// The agent's, in which `pointer` lies, or null.
Allocation* allocation_at(CUdeviceptr pointer) {
  const auto at = allocation_in(pointer);
  return at == tables().allocations.end() ? nullptr : &at->second;
}

// With the tables locked: of the small piece in which it lies; 0 if it lies in none.
std::uint64_t number_of_piece(CUdeviceptr pointer) {
  const auto at = allocation_in(pointer);
  if (at == tables().allocations.end()) return 0;
  if (!has_opened_piece(*at)) return at->second.in_unit() ? at->second.number : 0;
  const auto next = tables().opened_pieces.upper_bound(pointer);
  return next == tables().opened_pieces.begin() ? 0 : std::prev(next)->second.number;
}

// What differs between the agent's memory and the driver's own.
void correct_attribute(CUpointer_attribute attribute, void* data, CUdeviceptr pointer) {
  if (const auto asked = asked_at(pointer)) {
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
      *static_cast<std::size_t*>(data) = asked->size;
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
      *static_cast<CUdeviceptr*>(data) = asked->base;
  }
  if (const auto block = pool_block_at(pointer)) {
    if (attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE)
      *static_cast<CUmemoryPool*>(data) = block->pool;
    if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) *static_cast<CUcontext*>(data) = nullptr;
    if (attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
      *static_cast<bool*>(data) = block->sync_memops;
  }
  const TablesLock lock;
  // The driver maps whole units of 2 MiB, and the agent asks it for more.
  if (const auto managed = managed_at(pointer);
      managed != tables().managed.end() && attribute == CU_POINTER_ATTRIBUTE_MAPPING_SIZE) {
    *static_cast<std::size_t*>(data) =
        (managed->second.asked + kManagedBlock - 1) / kManagedBlock * kManagedBlock;
    return;
  }
  const auto* mapping = mapping_at(pointer);
  if (!mapping) return;
  const auto at = allocation_in(pointer);
  // The driver's numbers, which count from 1 on, are of units. Other libraries tell by it that what
  // they know of an address is of another allocation.
  if (const auto number = number_of_piece(pointer);
      number && attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID) {
    auto& id = *static_cast<std::uint64_t*>(data);
    id = id << 32 | (number & UINT32_MAX);
  }
  if (attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES) {
    *static_cast<unsigned long long*>(data) = mapping->physical->asked_handle_types;
  } else if (at != tables().allocations.end()) {
    if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
      *static_cast<CUcontext*>(data) = at->second.context;
    if (attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
      *static_cast<bool*>(data) = at->second.sync_memops;
    // One byte of what may be an int, which the driver has set to 0.
    if (attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE && !at->second.opening())
      *static_cast<bool*>(data) = true;
  }
}

// Behind what was asked for, in what is reserved for it: the driver knows nothing there.
bool is_behind_allocation(CUdeviceptr pointer) {
  const auto asked = asked_at(pointer);
  return asked && pointer - asked->base >= asked->size;
}

}  // namespace

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  const Gate::Pass pass;
  if (is_behind_allocation(pointer)) return CUDA_ERROR_INVALID_VALUE;
  const auto result = driver().cuPointerGetAttribute(data, attribute, pointer);
  if (result == CUDA_SUCCESS) correct_attribute(attribute, data, pointer);
  // Of virtual memory the driver does not know this one; other errors are its own.
  const bool unknown = result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_INVALID_VALUE;
  if (!unknown || !data || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return result;
  if (const auto block = pool_block_at(pointer)) {
    *static_cast<unsigned*>(data) = block->sync_memops ? 1 : 0;
    return CUDA_SUCCESS;
  }
  const TablesLock lock;
  const auto* allocation = allocation_at(pointer);
  if (!allocation) return result;
  *static_cast<unsigned*>(data) = allocation->sync_memops ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr pointer) {
  const Gate::Pass pass;
  // An address where there is never anything, of which the driver says what it says of one behind
  // an allocation (580.159.04 on an H100): no error, and that it knows nothing.
  constexpr CUdeviceptr kNowhere = 1;
  const bool behind = is_behind_allocation(pointer);
  const auto result =
      driver().cuPointerGetAttributes(count, attributes, data, behind ? kNowhere : pointer);
  if (result != CUDA_SUCCESS) return result;
  for (unsigned i = 0; i < count; ++i) {
    if (!behind && data[i]) correct_attribute(attributes[i], data[i], pointer);
    // As if it were memory of the host's: the address itself.
    if (behind && attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER) {
      auto& address = *static_cast<CUdeviceptr*>(data[i]);
      if (address == kNowhere) address = pointer;
    }
  }
  return result;
}

namespace {

// All of the context's, as the driver does not know it of single pieces of virtual memory.
bool synchronise_memops(CUcontext context) {
  const CurrentContext current(context);
  CUcontext now = nullptr;
  unsigned flags = 0;
  return driver().cuCtxGetCurrent(&now) == CUDA_SUCCESS && now == context &&
         driver().cuCtxGetFlags && driver().cuCtxSetFlags &&
         driver().cuCtxGetFlags(&flags) == CUDA_SUCCESS &&
         driver().cuCtxSetFlags(flags | CU_CTX_SYNC_MEMOPS) == CUDA_SUCCESS;
}

}  // namespace

CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute,
                               CUdeviceptr pointer) {
  const Gate::Pass pass;
  if (is_behind_allocation(pointer)) return CUDA_ERROR_INVALID_VALUE;
  const auto result = driver().cuPointerSetAttribute(value, attribute, pointer);
  // Once it has been asked for P2P tokens of it the driver does so for virtual memory, too (580).
  if (result == CUDA_SUCCESS && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) {
    const TablesLock lock;
    const bool wanted = *static_cast<const unsigned char*>(value) != 0;
    if (auto* allocation = allocation_at(pointer)) allocation->sync_memops = wanted;
  }
  // What the driver says of virtual memory, whatever the attribute.
  if (result != CUDA_ERROR_NOT_SUPPORTED || !value) return result;
  CUcontext context = nullptr;
  if (const auto block = pool_block_at(pointer)) {
    if (attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
    const bool wanted = *static_cast<const unsigned char*>(value) != 0;
    if (wanted &&
        (driver().cuCtxGetCurrent(&context) != CUDA_SUCCESS || !synchronise_memops(context)))
      return result;
    set_pool_memops(*block, wanted);
    return CUDA_SUCCESS;
  }
  {
    const TablesLock lock;
    auto* allocation = allocation_at(pointer);
    if (!allocation) return result;
    context = allocation->context;
  }
  if (attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
  const bool wanted = *static_cast<const unsigned char*>(value) != 0;
  if (wanted && !synchronise_memops(context)) return result;
  const TablesLock lock;
  auto* allocation = allocation_at(pointer);
  if (!allocation) return result;
  allocation->sync_memops = wanted;
  return CUDA_SUCCESS;
}

}  // namespace stasis::preload::hooks
