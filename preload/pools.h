// Stream-ordered memory (cuMemAllocAsync) that the agent serves, from virtual memory management, as
// it does cuMemAlloc's: so that it can leave. The pools themselves are the driver's; what is in
// them is the agent's, as long as nothing of it was allocated for others to open, or within a
// capture.
//
// Everything here is called within the gate, and with no lock held.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "driver_calls.h"
#include "eviction.h"
#include "pool_arena.h"

namespace stasis::preload {

// A stream as a call names it.
struct StreamName {
  cuda::CUstream handle = nullptr;  // never null: the default streams by their own names
  cuda::CUcontext context = nullptr;
  cuda::CUdevice device = 0;
  StreamId id = 0;
  // Whether an event can be recorded in it from this thread.
  bool can_be_marked = true;
};
// Nothing if the driver does not know it.
std::optional<StreamName> name_of(cuda::CUstream stream, bool per_thread);

// The program has made it. What the agent cannot serve it leaves to the driver.
void note_pool(cuda::CUmemoryPool pool, const cuda::CUmemPoolProps& props);
// The program destroys it; what is in use of it stays. From before the driver is asked, as another
// may have its handle as soon as that is done.
class PoolEnd {
 public:
  explicit PoolEnd(cuda::CUmemoryPool handle);
  void happened();
  void did_not_happen();

 private:
  cuda::CUmemoryPool handle_;
  const void* pool_ = nullptr;
  bool was_known_ = false;
  cuda::CUdevice device_ = 0;
  bool served_ = false;
};
void note_pool_attribute(cuda::CUmemoryPool pool, cuda::CUmemPool_attribute attribute,
                         const void* value);
cuda::CUresult note_pool_access(cuda::CUmemoryPool pool, const cuda::CUmemAccessDesc* rights,
                                std::size_t count);

// 0 if the agent cannot: then the driver is to answer.
cuda::CUdeviceptr allocate_from_pool(cuda::CUmemoryPool pool, std::size_t bytes,
                                     const StreamName& stream);
// What the program has of a pool, in which `pointer` lies.
struct PoolBlock {
  cuda::CUdeviceptr address = 0;
  std::size_t asked = 0;
  cuda::CUmemoryPool pool = nullptr;
  bool sync_memops = false;  // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
};
// Whether the agent's pools have this address, and what it belongs to.
bool in_pool(cuda::CUdeviceptr pointer);
std::optional<PoolBlock> pool_block_at(cuda::CUdeviceptr pointer);

void set_pool_memops(const PoolBlock& block, bool synchronous);

// Frees what was marked when the stream gets there: memory of a pool, or of cuMemAlloc, which the
// caller has taken out of the tables. An error is the driver's.
cuda::CUresult free_when_passed(const PoolBlock& block, const StreamName& stream);
struct Allocation;
cuda::CUresult free_when_passed(cuda::CUdeviceptr address, const Allocation& allocation,
                                const StreamName& stream);
// At once: the program says that it is done with it.
cuda::CUresult free_to_pool(const PoolBlock& block);

// A call has waited for work: pools give back what they need not keep.
void after_wait();
// What streams have come past leaves: nothing of it needs to be saved.
void finish_frees();
// While it lives no stream is asked how far it is, which would spoil a capture that begins.
class PoolsKept {
 public:
  PoolsKept();
  ~PoolsKept();
  PoolsKept(const PoolsKept&) = delete;
  PoolsKept& operator=(const PoolsKept&) = delete;
};
// Down to so many bytes, if that much is free.
void trim_pool(cuda::CUmemoryPool pool, std::size_t keep);
// The device has no memory left: all that nothing is in. True if there was any.
bool give_back_idle(cuda::CUdevice device);
// In bytes, of what the agent has in it.
struct PoolUse {
  std::uint64_t reserved = 0;
  std::uint64_t reserved_high = 0;
  std::uint64_t used = 0;
  std::uint64_t used_high = 0;
};
PoolUse use_of_pool(cuda::CUmemoryPool pool);

// In which memory was freed so far that is not known to be free for all.
std::vector<StreamId> streams_in(cuda::CUcontext context);
// The context has ended, and all work in it that was in these streams: there may be another by now
// with its handle.
void forget_work_in(cuda::CUcontext context, const std::vector<StreamId>& streams);
// What the program has of a pool, by a call that names no stream.
cuda::CUresult free_pooled(cuda::CUdeviceptr pointer);

// In a forked child.
void forget_pools_after_fork();

}  // namespace stasis::preload
