// The tables behind pools.h: pools, their addresses, the streams that have freed, and how memory
// comes and goes. Private to pools.cc and pool_store.cc.
//
// Everything here, but for mark(), with the pools locked.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "eviction_internal.h"
#include "pool_arena.h"
#include "pools.h"

namespace stasis::preload::pool_store {

struct Pool {
  cuda::CUmemoryPool handle = nullptr;  // null once the program has destroyed it
  cuda::CUdevice device = 0;
  // Each twice as large as what was needed when it was made: addresses cost time each time that
  // the maps of the process are read, as by CRIU.
  std::vector<std::unique_ptr<PoolArena>> arenas;
  std::vector<cuda::CUmemAccessDesc> rights;  // of other devices
  std::set<cuda::CUdeviceptr> sync_memops;    // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
  std::uint64_t threshold = 0;
  bool looks_at_streams = true;    // CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
  bool makes_streams_wait = true;  // CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
  std::uint64_t reserved_high = 0;
  std::uint64_t used_high = 0;

  std::uint64_t reserved() const {
    std::uint64_t sum = 0;
    for (const auto& arena : arenas)
      sum += arena->reserved();
    return sum;
  }
  std::uint64_t used() const {
    std::uint64_t sum = 0;
    for (const auto& arena : arenas)
      sum += arena->used();
    return sum;
  }
  bool empty() const {
    return std::all_of(arenas.begin(), arenas.end(), [](const auto& one) { return one->empty(); });
  }
  PoolArena* arena_at(cuda::CUdeviceptr pointer) const {
    for (const auto& arena : arenas)
      if (arena->covers(pointer)) return arena.get();
    return nullptr;
  }
  void note_highs() {
    reserved_high = std::max(reserved_high, reserved());
    used_high = std::max(used_high, used());
  }
};

// A place in a stream behind a free.
struct Mark {
  FreeNumber number = 0;
  cuda::CUevent event = nullptr;
};

// What the streams of a context had to do; the events go with the context.
struct Stream {
  cuda::CUcontext context = nullptr;
  std::deque<Mark> marks;
  FreeNumber passed = 0;  // the last that it has come past
};

// Of cuMemAlloc, freed in a stream.
struct Leaving {
  StreamId stream = 0;
  FreeNumber number = 0;
  cuda::CUdeviceptr address = 0;
  Allocation allocation;
};

// Pools by the handles that the program has, and whether the agent serves them.
struct Known {
  cuda::CUdevice device = 0;
  bool served = false;
  bool is_default = false;  // the device's, which the driver has made
};

struct Pools {
  // Taken before that of the tables. Held over calls of the driver: another thread that allocates
  // from a pool would have to wait for the same.
  OwnedMutex mutex;
  std::vector<std::unique_ptr<Pool>> pools;
  std::map<cuda::CUmemoryPool, Known> known;
  std::map<StreamId, Stream> streams;
  std::map<cuda::CUcontext, std::vector<cuda::CUevent>> spare_events;
  std::vector<Leaving> leaving;
  FreeNumber last_free = 0;
  const Pools* of_parent = nullptr;  // in a forked child; never looked at
};

Pools& pools();
// Whether there is anything at all to look for: most programs have no pools.
bool are_in_use();
void note_in_use();
// In a forked child.
void forget();

class PoolsLock {
 public:
  PoolsLock() : locked_(pools()) { locked_.mutex.lock(); }
  ~PoolsLock() { locked_.mutex.unlock(); }
  PoolsLock(const PoolsLock&) = delete;
  PoolsLock& operator=(const PoolsLock&) = delete;

 private:
  Pools& locked_;
};

Pool* pool_of(cuda::CUmemoryPool handle);
struct Place {
  Pool* pool = nullptr;
  PoolArena* arena = nullptr;
};
// Nothing where no pool of the agent's is.
Place place_of(cuda::CUdeviceptr pointer);

// Null if the agent cannot serve it.
Pool* make_pool(cuda::CUmemoryPool handle);
// Down to `keep` bytes. True if anything was given back.
bool trim(Pool& pool, std::uint64_t keep);
// What pools of the device keep and nothing is in. True if there was any.
bool give_back_idle_of(cuda::CUdevice device);
// An allocation in memory that is there, or in more. 0: not to be had.
cuda::CUdeviceptr settle(Pool& pool, std::size_t bytes, const StreamName& stream, bool may_grow);
cuda::CUresult give_rights(cuda::CUdeviceptr address, std::size_t size,
                           const std::vector<cuda::CUmemAccessDesc>& rights);

// Gives up the pools that the program has destroyed, and that nothing is in any more.
void bury_pools();

// The stream has come so far. True if memory of cuMemAlloc was given back.
bool let_leave(StreamId stream, FreeNumber last);
void note_passed(Pool& pool, StreamId stream, FreeNumber last);
// What a call has waited for the program knows; what the agent finds out by looking it does not.
enum class Seen { kByProgram, kByAgent };
// Which streams have come past their frees. True if memory of cuMemAlloc was given back.
bool collect(Seen seen);

// A place in a stream. Without the lock: the driver may have to wait until the stream takes more.
cuda::CUresult mark(const StreamName& stream, cuda::CUevent& event);
FreeNumber enter_mark(const StreamName& stream, cuda::CUevent event);
// Events behind all that was freed so far in another stream, of this pool.
struct Behind {
  StreamId stream = 0;
  FreeNumber last = 0;
  std::vector<cuda::CUevent> events;
};
std::vector<Behind> others_with_memory(const Pool& pool, StreamId stream);

}  // namespace stasis::preload::pool_store
