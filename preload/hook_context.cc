// Contexts come and go, and take their memory with them; peers; captures.
// Long because contexts, peers and captures end together, and each end takes the others' state
// along.
#include <algorithm>
#include <climits>
#include <cstdint>

#include "agent.h"
#include "eviction_internal.h"
#include "gate.h"
#include "intercept.h"
#include "ipc_broker.h"
#include "pools.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

// The program has made it.
void enter_created(CUcontext context, CUdevice device) {
  const TablesLock lock;
  tables().contexts.devices[context] = device;
  tables().contexts.lives[context] = {next_number(), 0};
}

// The driver's number of a context, which no other ever has. 0 if there is none to be had.
unsigned long long id_of(CUcontext context) {
  unsigned long long id = 0;
  const auto& call = driver();
  return call.cuCtxGetId && call.cuCtxGetId(context, &id) == CUDA_SUCCESS ? id : 0;
}

// A device's primary context has the same handle each time that it is retained anew (580.159.04).
Life enter_primary(CUcontext context, CUdevice device, unsigned long long id) {
  const TablesLock lock;
  tables().contexts.devices[context] = device;
  tables().contexts.primaries[device] = context;
  auto& life = tables().contexts.lives[context];
  if (life.number == 0 || id == 0 || life.id != id) life = {next_number(), id};
  return life;
}

// What a call may be about to end.
struct Ending {
  CUcontext context = nullptr;
  Life life;
  std::vector<StreamId> streams;  // in which memory was freed
};

Ending ending_of(CUcontext context) {
  auto streams = streams_in(context);
  const TablesLock lock;
  const auto at = tables().contexts.lives.find(context);
  return {context, at == tables().contexts.lives.end() ? Life{} : at->second, std::move(streams)};
}

Ending ending_primary(CUdevice device) {
  CUcontext context = nullptr;
  {
    const TablesLock lock;
    const auto at = tables().contexts.primaries.find(device);
    if (at != tables().contexts.primaries.end()) context = at->second;
  }
  if (!context) return {};
  // It may have ended and begun again past the agent.
  const auto id = id_of(context);
  return id ? Ending{context, enter_primary(context, device, id), streams_in(context)}
            : ending_of(context);
}

// With the tables locked.
void count_captures() { tables().captures.store(static_cast<int>(tables().capturing.size())); }

// What goes with a context: given back when the tables are no longer locked.
struct Gone {
  std::vector<std::pair<CUdeviceptr, std::size_t>> ranges;
  std::vector<Opening> openings;
};

// Takes out what was entered before `number`. With the tables locked.
Gone take_out(CUcontext context, std::uint64_t number) {
  Gone gone;
  const auto goes = [&](const auto& entry) {
    return entry.context == context && entry.number < number;
  };
  const auto note = [&](CUdeviceptr address, const Allocation& allocation) {
    if (!allocation.in_unit()) gone.ranges.emplace_back(address, allocation.reserved);
    if (const auto* opening = allocation.opening()) {
      auto& pieces = tables().opened_pieces;
      pieces.erase(pieces.lower_bound(address), pieces.lower_bound(address + allocation.reserved));
      gone.openings.push_back(*opening);
    }
  };
  std::erase_if(tables().contexts.peers, [&](const Peer& peer) {
    return (peer.owner == context || peer.accessor == context) && peer.number < number;
  });
  std::erase_if(tables().driver_shares, [&](const auto& entry) { return goes(entry.second); });
  std::erase_if(tables().opened_by_driver, [&](const auto& entry) {
    if (!goes(entry.second)) return false;
    gone.openings.push_back(entry.second.opening);
    return true;
  });
  std::erase_if(tables().small.units, [&](const auto& entry) {
    if (!goes(entry.second)) return false;
    gone.ranges.emplace_back(entry.first, entry.second.size);
    forget_places_in(entry);
    return true;
  });
  std::erase_if(tables().allocations, [&](const auto& entry) {
    // A small one goes with its unit, also one that has come there since.
    const auto* place = entry.second.in_unit();
    if (place ? tables().small.units.contains(place->unit) : !goes(entry.second)) return false;
    note(entry.first, entry.second);
    return true;
  });
  std::erase_if(tables().to_free, [&](const auto& entry) {
    if (!goes(entry.second)) return false;
    note(entry.first, entry.second);
    return true;
  });
  // The driver frees it itself.
  std::erase_if(tables().managed, [&](const auto& entry) { return goes(entry.second); });
  // What another context's memory was attached to has gone.
  for (auto& [address, managed] : tables().managed)
    managed.hints.forget([&](const Hint& hint) { return hint.context == context; });
  tables().spares.erase(context);
  // The program cannot end a capture in a stream that is gone.
  std::erase_if(tables().capturing,
                [&](const auto& entry) { return owner_in(entry.second) == context; });
  count_captures();
  return gone;
}

void give_up(const Gone& gone) {
  for (const auto& [address, size] : gone.ranges) {
    driver().cuMemUnmap(address, size);
    drop_and_release(address, size);
    driver().cuMemAddressFree(address, size);
  }
  for (const auto& opening : gone.openings)
    end_connection(opening);
  Agent::note_managed();
}

// The driver has destroyed it: its memory goes, as the driver's own has. By now there may be
// another with the same handle, whose memory stays.
void drop_context(const Ending& ended) {
  forget_work_in(ended.context, ended.streams);
  Gone gone;
  {
    const TablesLock lock;
    const auto now = tables().contexts.lives.find(ended.context);
    if (now != tables().contexts.lives.end() && now->second.number != ended.life.number) {
      gone = take_out(ended.context, now->second.number);
    } else {
      gone = take_out(ended.context, UINT64_MAX);
      tables().contexts.devices.erase(ended.context);
      tables().contexts.lives.erase(ended.context);
    }
  }
  give_up(gone);
}

// A primary context ends when the last user of it releases it, or by a reset.
void drop_ended_primary(CUdevice device, const Ending& ending) {
  unsigned flags = 0;
  int active = 0;
  if (!ending.context ||
      driver().cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS)
    return;
  // Another thread may have retained it anew.
  const auto id = active ? id_of(ending.context) : 0;
  const bool another = id && ending.life.id && id != ending.life.id;
  if (!active || another) drop_context(ending);
}

template <class Call>
CUresult end_primary(Call* call, CUdevice device) {
  const Gate::Pass pass;
  const auto ending = ending_primary(device);
  const auto result = call(device);
  if (result == CUDA_SUCCESS) drop_ended_primary(device, ending);
  return result;
}

// A stream that is being captured. Each thread has its own "per-thread" stream, of one name.
std::pair<CUstream, pthread_t> capture_key(CUstream stream, bool per_thread) {
  if (per_thread && stream == nullptr) stream = kStreamPerThread;
  return {stream, stream == kStreamPerThread ? ::pthread_self() : pthread_t{}};
}

// A thread takes its stream along, and the next one may get its number.
void forget_captures_of_thread(void*) {
  const TablesLock lock;
  std::erase_if(tables().capturing, [](const auto& entry) {
    return entry.first.first == kStreamPerThread && entry.first.second == ::pthread_self();
  });
  count_captures();
}

void at_end_of_thread() {
  static const pthread_key_t key = [] {
    pthread_key_t made = PTHREAD_KEYS_MAX;  // stays if none is left
    ::pthread_key_create(&made, &forget_captures_of_thread);
    return made;
  }();
  ::pthread_setspecific(key, &tables());
}

}  // namespace

void enter_primary_context(CUcontext context, CUdevice device) {
  (void)enter_primary(context, device, id_of(context));
}

CUcontext context_of(CUstream stream) {
  CUcontext context = nullptr;
  const auto& call = driver();
  if (!call.cuStreamGetCtx || !stream || stream == kStreamPerThread ||
      call.cuStreamGetCtx(stream, &context) != CUDA_SUCCESS)
    call.cuCtxGetCurrent(&context);
  return context;
}

namespace {

template <class Begin>
CUresult begin_capture(CUstream stream, bool per_thread, Begin begin) {
  const Gate::Pass pass;
  tell_watch_of_graph();
  const auto key = capture_key(stream, per_thread);
  // Before the capture begins: what the driver says of the stream in a capture was not tried.
  CUcontext context = context_of(stream);
  const PoolsKept kept;
  const auto result = begin();
  if (result != CUDA_SUCCESS) return result;
  if (key.first == kStreamPerThread) at_end_of_thread();
  const TablesLock lock;
  tables().capturing.insert_or_assign(key, context);
  count_captures();
  return result;
}

// What was freed or closed meanwhile can be given back now.
void end_capture(CUstream stream, bool per_thread) {
  {
    const TablesLock lock;
    tables().capturing.erase(capture_key(stream, per_thread));
    count_captures();
  }
  give_back_deferred();
}

CUresult ended(CUresult result, CUstream stream, bool per_thread = false) {
  // A capture that has failed has ended too; one that another thread must end has not.
  if (result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) end_capture(stream, per_thread);
  // It may have begun before the agent came.
  tell_watch_of_graph();
  return result;
}

}  // namespace

namespace hooks {

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  const Gate::Pass pass;
  const auto result = driver().cuDevicePrimaryCtxRetain(context, device);
  if (result == CUDA_SUCCESS && context) enter_primary(*context, device, id_of(*context));
  return result;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return end_primary(driver().cuDevicePrimaryCtxRelease, device);
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return end_primary(driver().cuDevicePrimaryCtxRelease_v2, device);
}

namespace {

template <class Call>
CUresult reset_primary(Call* call, CUdevice device) {
  const Gate::Pass pass;
  const auto ending = ending_primary(device);
  const auto number = next_number();
  const auto result = call(device);
  if (result != CUDA_SUCCESS || !ending.context) return result;
  // A reset destroys what the context held, even where it stays retained.
  forget_work_in(ending.context, ending.streams);
  Gone gone;
  {
    const TablesLock lock;
    gone = take_out(ending.context, number);
  }
  give_up(gone);
  drop_ended_primary(device, ending);
  return result;
}

}  // namespace

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
  return reset_primary(driver().cuDevicePrimaryCtxReset, device);
}
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  return reset_primary(driver().cuDevicePrimaryCtxReset_v2, device);
}

CUresult cuCtxCreate(CUcontext* context, unsigned flags, CUdevice device) {
  const Gate::Pass pass;
  const auto result = driver().cuCtxCreate(context, flags, device);
  if (result == CUDA_SUCCESS && context) enter_created(*context, device);
  return result;
}

CUresult cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
  const Gate::Pass pass;
  const auto result = driver().cuCtxCreate_v2(context, flags, device);
  if (result == CUDA_SUCCESS && context) enter_created(*context, device);
  return result;
}

CUresult cuCtxCreate_v3(CUcontext* context, void* affinity, int count, unsigned flags,
                        CUdevice device) {
  const Gate::Pass pass;
  const auto result = driver().cuCtxCreate_v3(context, affinity, count, flags, device);
  if (result == CUDA_SUCCESS && context) enter_created(*context, device);
  return result;
}

CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* params, unsigned flags,
                        CUdevice device) {
  const Gate::Pass pass;
  const auto result = driver().cuCtxCreate_v4(context, params, flags, device);
  if (result == CUDA_SUCCESS && context) enter_created(*context, device);
  return result;
}

namespace {

template <class Call>
CUresult destroy_context(Call* call, CUcontext context) {
  const Gate::Pass pass;
  const auto ending = ending_of(context);
  const auto result = call(context);
  if (result == CUDA_SUCCESS) drop_context(ending);
  return result;
}

}  // namespace

CUresult cuCtxDestroy(CUcontext context) { return destroy_context(driver().cuCtxDestroy, context); }
CUresult cuCtxDestroy_v2(CUcontext context) {
  return destroy_context(driver().cuCtxDestroy_v2, context);
}

// The old way to share a context and to end it.
CUresult cuCtxAttach(CUcontext* context, unsigned flags) {
  const Gate::Pass pass;
  const auto result = driver().cuCtxAttach(context, flags);
  CUcontext current = nullptr;
  if (result != CUDA_SUCCESS || driver().cuCtxGetCurrent(&current) != CUDA_SUCCESS || !current)
    return result;
  const TablesLock lock;
  ++tables().contexts.attached[current];
  return result;
}

CUresult cuCtxDetach(CUcontext context) {
  const Gate::Pass pass;
  const auto ending = ending_of(context);
  const auto result = driver().cuCtxDetach(context);
  if (result != CUDA_SUCCESS) return result;
  {
    const TablesLock lock;
    const auto at = tables().contexts.attached.find(context);
    if (at != tables().contexts.attached.end()) {
      if (--at->second == 0) tables().contexts.attached.erase(at);
      return result;
    }
  }
  drop_context(ending);
  return result;
}

// A part of a device, with streams of its own. It retains the primary context, has its memory in
// that, and is waited for with it; current it can be in one thread alone, so the agent never makes
// it so (CUDA 13, driver API manual).
CUresult cuGreenCtxCreate(CUgreenCtx* green, void* resources, CUdevice device, unsigned flags) {
  const Gate::Pass pass;
  const auto& call = driver();
  const auto result = call.cuGreenCtxCreate(green, resources, device, flags);
  CUcontext context = nullptr;
  CUcontext primary = nullptr;
  if (result != CUDA_SUCCESS || !green || !call.cuCtxFromGreenCtx ||
      call.cuCtxFromGreenCtx(&context, *green) != CUDA_SUCCESS ||
      call.cuDevicePrimaryCtxRetain(&primary, device) != CUDA_SUCCESS)
    return result;
  call.cuDevicePrimaryCtxRelease_v2(device);
  enter_primary(primary, device, id_of(primary));
  const TablesLock lock;
  tables().contexts.green[*green] = {context, primary, device};
  return result;
}

CUresult cuGreenCtxDestroy(CUgreenCtx green) {
  const Gate::Pass pass;
  GreenContext ended;
  {
    const TablesLock lock;
    const auto at = tables().contexts.green.find(green);
    if (at != tables().contexts.green.end()) ended = at->second;
  }
  const auto ending = ended.primary ? ending_primary(ended.device) : Ending{};
  const auto result = driver().cuGreenCtxDestroy(green);
  if (result != CUDA_SUCCESS || !ended.primary) return result;
  // Its streams go on; what is spare of its events goes with it.
  forget_work_in(ended.context, {});
  {
    const TablesLock lock;
    const auto at = tables().contexts.green.find(green);
    // Another may have its handle by now.
    if (at != tables().contexts.green.end() && at->second.number == ended.number)
      tables().contexts.green.erase(at);
    std::erase_if(tables().capturing,
                  [&](const auto& entry) { return entry.second == ended.context; });
    count_captures();
  }
  drop_ended_primary(ended.device, ending);
  return result;
}

namespace {

// What the program has allocated in `owner` so far, for `device`. Memory that it maps itself it
// also gives rights on itself.
void set_peer_access(CUcontext owner, CUdevice device, CUmemAccess_flags flags) {
  const CUmemAccessDesc right{{CU_MEM_LOCATION_TYPE_DEVICE, device}, flags};
  std::vector<std::pair<CUdeviceptr, std::size_t>> ranges;
  {
    const TablesLock lock;
    for (const auto& [address, allocation] : tables().allocations)
      if (allocation.context == owner && !allocation.in_unit())
        ranges.emplace_back(address, allocation.reserved);
    for (const auto& [address, unit] : tables().small.units)
      if (unit.context == owner) ranges.emplace_back(address, unit.size);
  }
  for (const auto& [address, size] : ranges) {
    if (driver().cuMemSetAccess(address, size, &right, 1) != CUDA_SUCCESS) continue;
    const TablesLock lock;
    enter_access(address, size, right);
  }
}

}  // namespace

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  const Gate::Pass pass;
  const auto result = driver().cuCtxEnablePeerAccess(peer, flags);
  CUcontext accessor = nullptr;
  CUdevice device = 0;
  if (result != CUDA_SUCCESS || driver().cuCtxGetCurrent(&accessor) != CUDA_SUCCESS ||
      driver().cuCtxGetDevice(&device) != CUDA_SUCCESS)
    return result;
  {
    const TablesLock lock;
    tables().contexts.peers.push_back({peer, accessor, device});
  }
  set_peer_access(peer, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  return result;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  const Gate::Pass pass;
  const auto result = driver().cuCtxDisablePeerAccess(peer);
  CUcontext accessor = nullptr;
  CUdevice device = 0;
  if (result != CUDA_SUCCESS || driver().cuCtxGetCurrent(&accessor) != CUDA_SUCCESS ||
      driver().cuCtxGetDevice(&device) != CUDA_SUCCESS)
    return result;
  bool others = false;
  {
    const TablesLock lock;
    std::erase_if(tables().contexts.peers, [&](const Peer& known) {
      return known.owner == peer && known.accessor == accessor;
    });
    // Rights are a device's, not a context's.
    others = std::any_of(
        tables().contexts.peers.begin(), tables().contexts.peers.end(),
        [&](const Peer& known) { return known.owner == peer && known.device == device; });
    const auto owner = tables().contexts.devices.find(peer);
    others = others || (owner != tables().contexts.devices.end() && owner->second == device);
  }
  if (!others) set_peer_access(peer, device, CU_MEM_ACCESS_FLAGS_PROT_NONE);
  return result;
}

CUresult cuStreamBeginCapture(CUstream stream) {
  return begin_capture(stream, false, [&] { return driver().cuStreamBeginCapture(stream); });
}
CUresult cuStreamBeginCapture_ptsz(CUstream stream) {
  return begin_capture(stream, true, [&] { return driver().cuStreamBeginCapture_ptsz(stream); });
}
CUresult cuStreamBeginCapture_v2(CUstream stream, unsigned mode) {
  return begin_capture(stream, false,
                       [&] { return driver().cuStreamBeginCapture_v2(stream, mode); });
}
CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, unsigned mode) {
  return begin_capture(stream, true,
                       [&] { return driver().cuStreamBeginCapture_v2_ptsz(stream, mode); });
}
CUresult cuStreamBeginCaptureToGraph(CUstream stream, void* graph, const void* nodes,
                                     const void* edges, std::size_t count, unsigned mode) {
  return begin_capture(stream, false, [&] {
    return driver().cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, count, mode);
  });
}
CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, void* graph, const void* nodes,
                                          const void* edges, std::size_t count, unsigned mode) {
  return begin_capture(stream, true, [&] {
    return driver().cuStreamBeginCaptureToGraph_ptsz(stream, graph, nodes, edges, count, mode);
  });
}
CUresult cuStreamBeginRecaptureToGraph(CUstream stream, unsigned mode, void* graph, void* callback,
                                       void* data) {
  return begin_capture(stream, false, [&] {
    return driver().cuStreamBeginRecaptureToGraph(stream, mode, graph, callback, data);
  });
}
CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, unsigned mode, void* graph,
                                            void* callback, void* data) {
  return begin_capture(stream, true, [&] {
    return driver().cuStreamBeginRecaptureToGraph_ptsz(stream, mode, graph, callback, data);
  });
}
CUresult cuStreamEndCapture(CUstream stream, void** graph) {
  const Gate::Pass pass;
  return ended(driver().cuStreamEndCapture(stream, graph), stream);
}
CUresult cuStreamEndCapture_ptsz(CUstream stream, void** graph) {
  const Gate::Pass pass;
  return ended(driver().cuStreamEndCapture_ptsz(stream, graph), stream, true);
}

namespace {

void drop_stream(CUstream stream) {
  end_capture(stream, false);
  forget_stream(stream);
}

}  // namespace

CUresult cuStreamDestroy(CUstream stream) {
  const Gate::Pass pass;
  const auto result = driver().cuStreamDestroy(stream);
  if (result == CUDA_SUCCESS) drop_stream(stream);
  return result;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
  const Gate::Pass pass;
  const auto result = driver().cuStreamDestroy_v2(stream);
  if (result == CUDA_SUCCESS) drop_stream(stream);
  return result;
}

}  // namespace hooks
}  // namespace stasis::preload
