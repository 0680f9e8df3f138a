// In place of intercept.cc: a driver of which a test sees every handle and mapping, and which fails
// when it is told to. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "intercept.h"

namespace stasis::preload {

struct FakeDriver {
  struct Map {
    std::size_t size = 0;
    std::size_t offset = 0;
    cuda::CUmemGenericAllocationHandle handle = 0;
    auto operator<=>(const Map&) const = default;
  };

  // Memory that the driver keeps: until it is released and mapped nowhere.
  std::map<cuda::CUmemGenericAllocationHandle, std::size_t> objects;
  std::set<cuda::CUmemGenericAllocationHandle> released;
  std::vector<cuda::CUmemAllocationProp> created;  // as asked for, in order
  std::map<cuda::CUdeviceptr, Map> maps;
  std::map<cuda::CUdeviceptr, std::size_t> reserved;
  std::map<cuda::CUdeviceptr, std::size_t> managed;
  std::uintptr_t steered = 0;  // where mmap() would be steered to
  bool can_be_steered = true;
  struct Advice {
    cuda::CUdeviceptr address = 0;
    std::size_t size = 0;
    cuda::CUmem_advise advice{};
    cuda::CUdevice device = 0;
    bool operator==(const Advice&) const = default;
  };
  std::vector<Advice> advice;  // as given, in order
  std::vector<Advice> prefetched;
  struct Attached {
    cuda::CUstream stream = nullptr;
    cuda::CUdeviceptr address = 0;
    std::size_t size = 0;
    unsigned flags = 0;
    bool operator==(const Attached&) const = default;
  };
  std::vector<Attached> attached;
  std::set<cuda::CUdeviceptr> own_allocations;   // cuMemAlloc of the driver itself
  std::map<cuda::CUdeviceptr, unsigned> opened;  // by cuIpcOpenMemHandle, and how often
  std::vector<std::pair<cuda::CUdeviceptr, cuda::CUmemAccessDesc>> rights;  // as given, in order
  std::map<cuda::CUcontext, cuda::CUdevice> contexts;
  std::vector<cuda::CUcontext> current;
  std::map<cuda::CUstream, cuda::CUcontext> stream_contexts;  // otherwise the current one
  std::map<cuda::CUcontext, std::size_t> stack_sizes;
  std::size_t& stack_size() { return stack_sizes.try_emplace(current.back(), 1024).first->second; }
  // Stream-ordered memory. A stream's number is its handle; its work is done when finish() says so.
  struct Event {
    cuda::CUstream stream = nullptr;
    int place = 0;
  };
  std::map<cuda::CUevent, Event> events;
  std::map<cuda::CUstream, int> recorded;
  std::map<cuda::CUstream, int> finished;
  void finish(cuda::CUstream stream) { finished[stream] = recorded[stream]; }
  std::vector<std::pair<cuda::CUstream, cuda::CUevent>> waits;       // cuStreamWaitEvent
  std::map<cuda::CUmemoryPool, std::map<int, std::uint64_t>> pools;  // attributes that are set
  static cuda::CUmemoryPool default_pool(cuda::CUdevice device) {
    return reinterpret_cast<cuda::CUmemoryPool>(std::uintptr_t{0x9000} +
                                                static_cast<unsigned>(device));
  }
  std::set<cuda::CUstream> captured;
  std::size_t capacity = SIZE_MAX;                   // of cuMemCreate, all together
  cuda::CUresult query_result = cuda::CUDA_SUCCESS;  // what cuEventQuery says, if not that
  std::map<cuda::CUmemoryPool, std::set<int>> pool_rights;
  int primary_active = 1;
  unsigned long long primary_id = 1;
  std::set<cuda::CUdevice> without_rights;  // no peer of another: cuMemSetAccess refuses them
  std::set<cuda::CUdevice> without_rdma;
  std::set<cuda::CUdevice> without_concurrent_access;
  std::set<cuda::CUdevice> without_decompression;  // do not know the flag of cuMemCreate
  int exported = -1;                               // what an exported handle is a duplicate of
  static inline const cuda::CUcontext kPrimary = reinterpret_cast<cuda::CUcontext>(0x7000);

  // The nth call of that name from now on fails, once.
  std::set<cuda::CUmemGenericAllocationHandle> unexportable;
  void fail_at(const std::string& call, int nth) { failures[call] = nth; }
  // Run within the next call of that name.
  void within(const std::string& call, std::function<void()> action) {
    actions[call] = std::move(action);
  }
  int live_objects() const;

  // Every call comes by here. Notes if the agent calls with its tables locked.
  bool enter(const std::string& call);
  std::map<std::string, int> failures;
  std::map<std::string, std::function<void()>> actions;
  std::map<std::string, int> calls;
  std::set<std::string> called_with_lock;
  cuda::CUmemGenericAllocationHandle next_handle = 1;
  cuda::CUdeviceptr next_address = cuda::CUdeviceptr{1} << 40;
};

// The one that driver() leads to. Fresh, and with it all that the agent knows.
FakeDriver& fake();
void forget_everything();

}  // namespace stasis::preload
