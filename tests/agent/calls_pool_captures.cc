// Pools while a stream is being captured, of which the simulated driver has nothing, and between
// GPUs.
#include <chrono>
#include <thread>

#include "calls_pools.h"

namespace stasis::agent_test {

namespace {

namespace fn {
using cuStreamBeginCapture_v2 = CUresult(CUstream stream, unsigned mode);
using cuStreamEndCapture = CUresult(CUstream stream, void** graph);
using cuStreamIsCapturing = CUresult(CUstream stream, unsigned* status);
using cuGraphInstantiateWithFlags = CUresult(void** exec, void* graph, unsigned long long flags);
using cuGraphLaunch = CUresult(void* exec, CUstream stream);
using cuGraphExecDestroy = CUresult(void* exec);
using cuGraphDestroy = CUresult(void* graph);
}  // namespace fn

}  // namespace

void try_captures() {
  std::printf("== pools: captures\n");
  // The simulated driver has captures, and refuses nothing while there is one.
  if (!has("cuStreamBeginCapture_v2") || has("stasis_sim_driver_version")) return;
  const auto pool = default_pool();
  const auto stream = new_stream();
  const auto other = new_stream();
  auto* const at_once = pool_for_frees_at_once();
  CUdeviceptr before = 0;
  SAY(CU(cuMemAllocFromPoolAsync)(&before, 4 * kMiB, at_once, stream));
  auto also_before = allocate_in(stream, 4 * kMiB);
  bool is_left = true;
  CUdeviceptr plain = 0;
  SAY(CU(cuMemAlloc_v2)(&plain, 4 * kMiB));
  SAY(CU(cuStreamSynchronize)(stream));
  for (const unsigned mode : {0U, 1U, 2U}) {
    for (int what = 0; what < 8; ++what) {
      std::printf("-- mode %u, %d\n", mode, what);
      SAY(OTHER(cuStreamBeginCapture_v2)(stream, mode));
      CUdeviceptr inside = 0;
      CUdeviceptr beside = 0;
      if (what == 0) {
        SAY(CU(cuMemAllocAsync)(&inside, 4 * kMiB, stream));
        SAY(CU(cuMemsetD8Async)(inside, 3, 4 * kMiB, stream));
        ask_about("in a capture", inside, inside, nullptr);
        SAY(CU(cuMemFreeAsync)(inside, stream));
      } else if (what == 1) {
        SAY(CU(cuMemFreeAsync)(before, stream));
      } else if (what == 2) {
        SAY(CU(cuMemFreeAsync)(plain, stream));
      } else if (what == 3) {
        SAY(CU(cuMemAllocAsync)(&beside, 4 * kMiB, other));
        SAY(CU(cuMemsetD8Async)(beside, 3, 4 * kMiB, other));
        if (beside) SAY(CU(cuMemFreeAsync)(beside, other));
      } else if (what == 4) {
        if (CU(cuMemFree_v2)(before) == CUDA_SUCCESS) {
          std::printf("freed\n");
          SAY(CU(cuMemAllocFromPoolAsync)(&before, 4 * kMiB, at_once, other));
        }
      } else if (what == 5) {
        SAY(CU(cuMemPoolTrimTo)(pool, 0));
        say_pool(pool);
      } else if (what == 6) {
        SAY(CU(cuMemAllocAsync)(&beside, 4 * kMiB, nullptr));
      } else {
        const auto freed = CU(cuMemFreeAsync)(also_before, other);
        say("freed beside it", freed);
        is_left = is_left && freed != CUDA_SUCCESS;
      }
      unsigned status = 77;
      SAY(OTHER(cuStreamIsCapturing)(stream, &status));
      SAY(status);
      void* graph = nullptr;
      SAY(OTHER(cuStreamEndCapture)(stream, &graph));
      void* exec = nullptr;
      if (!graph) continue;
      SAY(OTHER(cuGraphInstantiateWithFlags)(&exec, graph, 0));
      if (exec) {
        SAY(OTHER(cuGraphLaunch)(exec, stream));
        SAY(CU(cuStreamSynchronize)(stream));
        SAY(OTHER(cuGraphExecDestroy)(exec));
      }
      SAY(OTHER(cuGraphDestroy)(graph));
      if (beside && what == 6) SAY(CU(cuMemFreeAsync)(beside, nullptr));
      if (what != 4) say("pool memory is there", CU(cuMemsetD8_v2)(before, 3, 4 * kMiB));
      say("other memory is there", CU(cuMemsetD8_v2)(plain, 3, 4 * kMiB));
    }
  }
  // Another thread's wait ends while a stream is captured: it must not spoil that, nor take what
  // other streams have yet to come to.
  std::printf("-- a wait that ends in a capture\n");
  const auto waited_for = new_stream();
  const auto busy = new_stream();
  const auto pending = allocate_in(busy, 40 * kMiB);
  const auto freed = allocate_in(waited_for, 4 * kMiB);
  SAY(CU(cuCtxSynchronize)());
  work_for(busy, 300);
  SAY(CU(cuMemsetD8Async)(pending, 1, 40 * kMiB, busy));
  SAY(CU(cuMemFreeAsync)(pending, busy));
  work_for(waited_for, 100);
  SAY(CU(cuMemFreeAsync)(freed, waited_for));
  CUcontext context = nullptr;
  SAY(CU(cuCtxGetCurrent)(&context));
  CUresult waited = CUDA_SUCCESS;
  std::thread waiting([&] {
    CU(cuCtxSetCurrent)(context);
    waited = CU(cuStreamSynchronize)(waited_for);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  SAY(OTHER(cuStreamBeginCapture_v2)(stream, 0));
  waiting.join();
  SAY(waited);
  void* graph = nullptr;
  SAY(OTHER(cuStreamEndCapture)(stream, &graph));
  if (graph) SAY(OTHER(cuGraphDestroy)(graph));
  SAY(CU(cuStreamSynchronize)(busy));
  SAY(CU(cuStreamDestroy_v2)(waited_for));
  SAY(CU(cuStreamDestroy_v2)(busy));
  SAY(CU(cuMemFree_v2)(before));
  SAY(CU(cuMemPoolDestroy)(at_once));
  if (is_left) SAY(CU(cuMemFreeAsync)(also_before, stream));
  SAY(CU(cuMemFree_v2)(plain));
  SAY(CU(cuCtxSynchronize)());
  say_pool(pool);
  SAY(CU(cuStreamDestroy_v2)(stream));
  SAY(CU(cuStreamDestroy_v2)(other));
}

void try_peers_of_pools(CUcontext first) {
  std::printf("== pools: peers\n");
  int count = 0;
  SAY(CU(cuDeviceGetCount)(&count));
  if (count < 2) return;
  CUcontext other = nullptr;
  SAY(CU(cuCtxCreate_v2)(&other, 0, 1));
  const auto theirs = new_stream();
  SAY(CU(cuCtxSetCurrent)(first));
  const auto stream = new_stream();
  auto props = props_of(0);
  CUmemoryPool pool = nullptr;
  SAY(CU(cuMemPoolCreate)(&pool, &props));
  CUdeviceptr address = 0;
  SAY(CU(cuMemAllocFromPoolAsync)(&address, 5 * kMiB, pool, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  const CUmemAccessDesc both{{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  SAY(CU(cuMemPoolSetAccess)(pool, &both, 1));
  SAY(CU(cuCtxSetCurrent)(other));
  SAY(spoiled(address, 5 * kMiB, 9));
  // From a stream of the other GPU, out of the first one's pool.
  CUdeviceptr second = 0;
  SAY(CU(cuMemAllocFromPoolAsync)(&second, 5 * kMiB, pool, theirs));
  SAY(spoiled(second, 5 * kMiB, 9));
  const auto ordinary = allocate_in(theirs, 5 * kMiB);
  ask_about("of the other GPU", ordinary, ordinary, other);
  SAY(CU(cuMemFreeAsync)(ordinary, theirs));
  SAY(CU(cuMemFreeAsync)(second, theirs));
  SAY(CU(cuMemFreeAsync)(address, theirs));
  SAY(CU(cuStreamSynchronize)(theirs));
  const CUmemAccessDesc none{{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_NONE};
  SAY(CU(cuMemPoolSetAccess)(pool, &none, 1));
  auto flags = static_cast<CUmemAccess_flags>(77);
  CUmemLocation of_other = none.location;
  SAY(CU(cuMemPoolGetAccess)(&flags, pool, &of_other));
  SAY(flags);
  SAY(CU(cuMemPoolDestroy)(pool));
  SAY(CU(cuCtxDestroy_v2)(other));
  SAY(CU(cuCtxSetCurrent)(first));
  SAY(CU(cuStreamDestroy_v2)(stream));
}

}  // namespace stasis::agent_test
