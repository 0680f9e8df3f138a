// Legacy CUDA IPC. The driver has no handle for memory that the agent serves, so the agent has one
// of its own (ipc_broker.h); and of the driver's, only the agents' connection tells the owner for
// how long it is open.
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "activation.h"
#include "agent.h"
#include "gate.h"
#include "intercept.h"
#include "ipc_broker.h"
#include "sharing.h"

namespace stasis::preload::hooks {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

CUresult no_service() {
  static std::atomic<bool> said{false};
  constexpr char kText[] =
      "stasis: cuIpcGetMemHandle needs a socket and a thread, which could not be had "
      "(ulimit -n, -u?); without the agent: STASIS_AGENT=off\n";
  if (!said.exchange(true)) (void)!::write(STDERR_FILENO, kText, sizeof kText - 1);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

// The driver says whether it can be shared. Its own handle goes over the agents' connection.
CUresult share_of_driver(CUipcMemHandle* handle, CUdeviceptr pointer) {
  const auto& call = driver();
  const auto result = call.cuIpcGetMemHandle(handle, pointer);
  // A process that the program starts after the agent was brought to it has none.
  if (result != CUDA_SUCCESS || is_inactive() || is_attached()) return result;
  CUdeviceptr base = pointer;
  std::size_t size = 0;
  CUcontext context = nullptr;
  call.cuMemGetAddressRange_v2(&base, &size, pointer);
  if (call.cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, base) != CUDA_SUCCESS)
    call.cuCtxGetCurrent(&context);
  const auto ours = handle_of_driver_share(base, context);
  if (!ours) return no_service();
  *handle = *ours;
  Agent::start();
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  const Gate::Pass pass;
  CUdeviceptr base = 0;
  {
    const TablesLock lock;
    const auto at = allocation_in(pointer);
    if (at != tables().allocations.end() && pointer - at->first < at->second.asked) {
      // What another process shares with this one is not its own to share.
      if (at->second.opening()) return CUDA_ERROR_INVALID_VALUE;
      base = at->first;
    }
  }
  if (!handle) return driver().cuIpcGetMemHandle(handle, pointer);
  if (!base) return share_of_driver(handle, pointer);
  CUcontext context = nullptr;
  if (driver().cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context)
    return CUDA_ERROR_INVALID_CONTEXT;
  const auto ours = handle_of_share(base);
  if (!ours) return no_service();
  *handle = *ours;
  return CUDA_SUCCESS;
}

namespace {

// One that is open already, by its handle.
std::map<CUdeviceptr, Allocation>::iterator open_already(const ShareKey& key) {
  for (const auto& [address, mapping] : tables().mappings) {
    if (mapping.physical->reach.key() != key) continue;
    const auto at = tables().allocations.find(address);
    if (at != tables().allocations.end() && at->second.opening()) return at;
  }
  return tables().allocations.end();
}

// One more opening of what this process has open already. Null if it has not.
CUdeviceptr open_again(const ShareKey& key) {
  const TablesLock lock;
  const auto at = open_already(key);
  if (at != tables().allocations.end()) {
    ++at->second.opening()->opens;
    return at->first;
  }
  for (auto& [address, opened] : tables().opened_by_driver) {
    if (!opened.has_owners_agent() || opened.opening.key != key) continue;
    ++opened.opening.opens;
    return address;
  }
  return 0;
}

CUresult map_shared(CUmemGenericAllocationHandle real, CUdevice device, std::size_t size,
                    CUdeviceptr& address) {
  const auto& call = driver();
  auto result = call.cuMemAddressReserve(&address, size, 0, 0, 0);
  if (result != CUDA_SUCCESS) return result;
  result = call.cuMemMap(address, size, 0, real, 0);
  if (result == CUDA_SUCCESS) {
    const auto right = full_right(device);
    result = call.cuMemSetAccess(address, size, &right, 1);
    if (result == CUDA_SUCCESS) return result;
    call.cuMemUnmap(address, size);
  }
  call.cuMemAddressFree(address, size);
  return result;
}

void enter_opened(CUdeviceptr address, CUmemGenericAllocationHandle real, CUdevice device,
                  Allocation opened) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  auto* physical = enter_physical(MemoryOrigin::kImported, real, opened.reserved, prop, 0);
  physical->mappings = 1;
  physical->reach.enter_key(opened.opening()->key);
  const Access access{address, opened.reserved, full_right(device)};
  tables().mappings.insert_or_assign(address,
                                     Mapping{address, opened.reserved, 0, physical, {access}});
  opened.physical = physical;
  opened.context = owner_in(opened.context);
  tables().allocations.insert_or_assign(address, opened);
  tables().contexts.devices.emplace(opened.context, device);
}

// Those that the program has let into what is allocated in that context. A device that cannot reach
// the memory stays without.
void let_peers_in(CUcontext context, CUdeviceptr address, std::size_t size) {
  for (const auto& right : rights_of_peers(context)) {
    if (driver().cuMemSetAccess(address, size, &right, 1) != CUDA_SUCCESS) continue;
    const TablesLock lock;
    enter_access(address, size, right);
  }
}

// Within the gate: what the owner's driver serves, by the handle that its agent has got for us.
template <class Call>
CUresult open_by_driver(Call* call, CUdeviceptr* pointer, CUcontext context, const Fetched& fetched,
                        const ShareKey& key) {
  const auto result = call(pointer, *fetched.drivers, kIpcMemLazyEnablePeerAccess);
  bool another = false;
  if (result == CUDA_SUCCESS) {
    const TablesLock lock;
    auto& opened = tables().opened_by_driver[*pointer];
    another = opened.opening.opens++ > 0;
    if (!another) opened = {owner_in(context), {1, fetched.connection, key}};
  }
  if (result != CUDA_SUCCESS || another) end_connection(fetched.connection, key);
  // Another thread was quicker. For the driver it is open once.
  if (another) driver().cuIpcCloseMemHandle(*pointer);
  return result;
}

CUresult open_by_descriptor(CUdeviceptr* pointer, CUcontext context, CUdevice device,
                            const Fetched& fetched, const ShareKey& key) {
  const auto& call = driver();
  CUmemGenericAllocationHandle real = 0;
  CUdeviceptr address = 0;
  auto result = call.cuMemImportFromShareableHandle(
      &real, reinterpret_cast<void*>(static_cast<std::intptr_t>(fetched.memory)),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  ::close(fetched.memory);
  if (result == CUDA_SUCCESS) {
    result = map_shared(real, device, fetched.reserved, address);
    if (result != CUDA_SUCCESS) call.cuMemRelease(real);
  }
  if (result != CUDA_SUCCESS) {
    end_connection(fetched.connection, key);
    return result;
  }
  {
    const TablesLock lock;
    const auto at = open_already(key);
    if (at == tables().allocations.end()) {
      enter_opened(
          address, real, device,
          {fetched.asked, fetched.reserved, context, nullptr, Opening{1, fetched.connection, key}});
      *pointer = address;
    } else {
      // Another thread was quicker.
      ++at->second.opening()->opens;
      *pointer = at->first;
    }
  }
  if (*pointer == address) {
    let_peers_in(context, address, fetched.reserved);
  } else {
    call.cuMemUnmap(address, fetched.reserved);
    call.cuMemAddressFree(address, fetched.reserved);
    call.cuMemRelease(real);
    end_connection(fetched.connection, key);
  }
  return CUDA_SUCCESS;
}

template <class Call>
CUresult open_shared(Call* call, CUdeviceptr* pointer, const ShareKey& key) {
  CUcontext context = nullptr;
  CUdevice device = 0;
  // Before cuInit the driver has its own word for it.
  auto result = driver().cuCtxGetCurrent(&context);
  if (result == CUDA_SUCCESS) result = driver().cuCtxGetDevice(&device);
  if (result != CUDA_SUCCESS) return result;
  if (!context || is_own(key)) return CUDA_ERROR_INVALID_CONTEXT;
  if ((*pointer = open_again(key)) != 0) return CUDA_SUCCESS;
  const SharingCall sharing;
  for (;;) {
    const auto changes = Gate::changes();
    const auto fetched = fetch(key);
    if (fetched.result != CUDA_SUCCESS) return fetched.result;
    const Gate::TryPass pass;
    if (!is_of_use(fetched, key, changes, pass)) continue;
    return fetched.drivers ? open_by_driver(call, pointer, context, fetched, key)
                           : open_by_descriptor(pointer, context, device, fetched, key);
  }
}

CUresult close_by_driver(CUdeviceptr pointer) {
  auto& known = tables().opened_by_driver;
  std::optional<OpenedByDriver> ours;
  {
    const TablesLock lock;
    const auto at = known.find(pointer);
    if (at != known.end() && at->second.has_owners_agent()) {
      if (at->second.opening.opens > 1) {
        --at->second.opening.opens;
        return CUDA_SUCCESS;
      }
      // So that no thread opens it again meanwhile.
      ours = at->second;
      known.erase(at);
    }
  }
  const auto result = driver().cuIpcCloseMemHandle(pointer);
  const TablesLock lock;
  if (ours) {
    if (result == CUDA_SUCCESS || !known.emplace(pointer, *ours).second)
      end_connection(ours->opening);
  } else if (result == CUDA_SUCCESS) {
    const auto at = known.find(pointer);
    if (at != known.end() && --at->second.opening.opens == 0) known.erase(at);
  }
  return result;
}

// One opening less of what begins at `pointer`.
CUresult close_opening(CUdeviceptr pointer) {
  std::optional<Allocation> opened;
  {
    const TablesLock lock;
    const auto at = tables().allocations.find(pointer);
    if (at != tables().allocations.end()) {
      auto* opening = at->second.opening();
      if (!opening) return CUDA_ERROR_INVALID_VALUE;
      if (opening->opens > 1) {
        --opening->opens;
        return CUDA_SUCCESS;
      }
      opened = at->second;
      tables().allocations.erase(at);
      if (defer_in_capture(pointer, *opened)) return CUDA_SUCCESS;
    }
  }
  return opened ? give_back(pointer, *opened) : close_by_driver(pointer);
}

// In the unit that was opened for it, at `pointer`, which then is the piece's.
CUresult enter_piece(CUdeviceptr& pointer, const SmallPiece& piece) {
  {
    const TablesLock lock;
    const auto at = tables().allocations.find(pointer);
    if (at != tables().allocations.end() && at->second.opening() &&
        piece.offset < at->second.reserved && piece.asked <= at->second.reserved - piece.offset) {
      pointer += piece.offset;
      auto& opened = tables().opened_pieces[pointer];
      opened.asked = piece.asked;
      ++opened.opens;
      return CUDA_SUCCESS;
    }
  }
  // Another thread has closed it meanwhile, or the handle was altered. Other pieces stay open.
  const Gate::Pass pass;
  (void)close_opening(pointer);
  return CUDA_ERROR_INVALID_VALUE;
}

template <class Call>
CUresult open(Call* call, CUdeviceptr* pointer, const CUipcMemHandle& handle, unsigned flags) {
  const auto key = key_of(handle);
  // Not within the gate: the owner may be suspended, and this process is to be suspended meanwhile.
  if (key && pointer && flags == kIpcMemLazyEnablePeerAccess) {
    CUdeviceptr base = 0;
    if (const auto result = open_shared(call, &base, *key); result != CUDA_SUCCESS) return result;
    if (const auto piece = piece_of(handle))
      if (const auto result = enter_piece(base, *piece); result != CUDA_SUCCESS) return result;
    *pointer = base;
    return CUDA_SUCCESS;
  }
  if (key) return CUDA_ERROR_INVALID_VALUE;
  const Gate::Pass pass;
  const SharingCall sharing;
  const auto result = call(pointer, handle, flags);
  if (result != CUDA_SUCCESS) return result;
  CUcontext context = nullptr;
  driver().cuCtxGetCurrent(&context);
  {
    const TablesLock lock;
    auto& opened = tables().opened_by_driver[*pointer];
    opened.context = owner_in(context);
    ++opened.opening.opens;
  }
  return result;
}

}  // namespace

CUresult cuIpcOpenMemHandle(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
  return open(driver().cuIpcOpenMemHandle, pointer, handle, flags);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
  return open(driver().cuIpcOpenMemHandle_v2, pointer, handle, flags);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  const Gate::Pass pass;
  {
    const TablesLock lock;
    auto& pieces = tables().opened_pieces;
    if (const auto piece = pieces.find(pointer); piece != pieces.end()) {
      if (--piece->second.opens == 0) pieces.erase(piece);
      pointer = allocation_in(pointer)->first;
    } else if (const auto unit = allocation_in(pointer);
               unit != tables().allocations.end() && has_opened_piece(*unit)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return close_opening(pointer);
}

}  // namespace stasis::preload::hooks
