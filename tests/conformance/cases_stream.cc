// Cases about asynchrony: streams, events, host functions.
#include <unistd.h>

#include <atomic>

#include "api.h"
#include "kernels.h"
#include "report.h"

namespace stasis::conformance {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

// A context, the kernel that waits for a flag, and the flag in pinned memory.
struct Setup {
  Setup() {
    api().cuInit(0);
    api().cuDevicePrimaryCtxRetain(&context, 0);
    api().cuCtxSetCurrent(context);
    void* host = nullptr;
    api().cuMemHostAlloc(&host, 4096, kMemHostAllocDeviceMap);
    flag = new (host) std::atomic<unsigned>(0);
    api().cuMemHostGetDevicePointer_v2(&flag_address, host, 0);
    api().cuModuleLoadData(&module, kPtx);
    api().cuModuleGetFunction(&wait, module, "wait_flag");
    api().cuModuleGetFunction(&increment, module, "increment");
  }
  CUresult block(CUstream stream) {
    *flag = 0;
    void* params[] = {&flag_address};
    return api().cuLaunchKernel(wait, 1, 1, 1, 1, 1, 1, 0, stream, params, nullptr);
  }
  void release() { *flag = 1; }

  CUcontext context = nullptr;
  CUmodule module = nullptr;
  CUfunction wait = nullptr;
  CUfunction increment = nullptr;
  std::atomic<unsigned>* flag = nullptr;
  CUdeviceptr flag_address = 0;
};

constexpr useconds_t kAWhile = 200'000;

void queries(Report& r) {
  Setup s;
  CUstream stream = nullptr;
  CUevent event = nullptr;
  unsigned flags = 77;
  float ms = 0;
  r.note("create_flags", api().cuStreamCreate(&stream, 8));
  r.note("create", api().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  r.note("flags", api().cuStreamGetFlags(stream, &flags));
  r.note("flags_value", flags);
  r.note("event", api().cuEventCreate(&event, 0));
  r.note("event_unrecorded", api().cuEventQuery(event));
  r.note("event_unrecorded_sync", api().cuEventSynchronize(event));
  r.note("elapsed_unrecorded", api().cuEventElapsedTime(&ms, event, event));
  r.note("query_idle", api().cuStreamQuery(stream));
  r.note("launch", s.block(stream));
  r.note("record", api().cuEventRecord(event, stream));
  ::usleep(kAWhile);
  r.note("query_busy", api().cuStreamQuery(stream));
  r.note("event_busy", api().cuEventQuery(event));
  r.note("elapsed_busy", api().cuEventElapsedTime(&ms, event, event));
  s.release();
  r.note("sync", api().cuStreamSynchronize(stream));
  r.note("query_done", api().cuStreamQuery(stream));
  r.note("event_done", api().cuEventQuery(event));
  r.note("elapsed", api().cuEventElapsedTime(&ms, event, event));
  r.note("destroy", api().cuStreamDestroy_v2(stream));
  r.note("event_destroy", api().cuEventDestroy_v2(event));
}

void ordering(Report& r) {
  Setup s;
  CUstream blocking = nullptr;
  CUstream free_running = nullptr;
  CUstream waiting = nullptr;
  CUevent event = nullptr;
  CUdeviceptr memory = 0;
  api().cuMemAlloc_v2(&memory, 4096);
  api().cuStreamCreate(&blocking, CU_STREAM_DEFAULT);
  api().cuStreamCreate(&free_running, CU_STREAM_NON_BLOCKING);
  api().cuStreamCreate(&waiting, CU_STREAM_NON_BLOCKING);
  api().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
  s.block(blocking);
  api().cuEventRecord(event, blocking);
  // The default stream waits for the blocking one; the third runs past both; the fourth was told.
  api().cuMemsetD32Async(memory, 1, 1, nullptr);
  api().cuMemsetD32Async(memory + 8, 1, 1, free_running);
  r.note("wait_event", api().cuStreamWaitEvent(waiting, event, 0));
  api().cuMemsetD32Async(memory + 16, 1, 1, waiting);
  ::usleep(kAWhile);
  r.note("default_waits", api().cuStreamQuery(nullptr));
  r.note("non_blocking_runs", api().cuStreamQuery(free_running));
  r.note("told_waits", api().cuStreamQuery(waiting));
  s.release();
  r.note("sync", api().cuCtxSynchronize());
  r.note("default_done", api().cuStreamQuery(nullptr));
  r.note("told_done", api().cuStreamQuery(waiting));
  // And the other way round.
  s.block(nullptr);
  api().cuMemsetD32Async(memory, 2, 1, blocking);
  ::usleep(kAWhile);
  r.note("blocking_waits", api().cuStreamQuery(blocking));
  s.release();
  r.note("sync_again", api().cuCtxSynchronize());
  unsigned value = 0;
  r.note("read", api().cuMemcpyDtoH_v2(&value, memory, 4));
  r.note("value", value);
}

void host_functions(Report& r) {
  Setup s;
  CUstream stream = nullptr;
  api().cuStreamCreate(&stream, 0);
  static std::atomic<int> order{0};
  static int first = 0;
  static int second = 0;
  s.block(stream);
  r.note("launch", api().cuLaunchHostFunc(
                       stream, [](void*) { first = ++order; }, nullptr));
  r.note("launch_second", api().cuLaunchHostFunc(
                              stream, [](void*) { second = ++order; }, nullptr));
  ::usleep(kAWhile);
  r.note("before", order.load());
  s.release();
  r.note("sync", api().cuStreamSynchronize(stream));
  r.note("first", first);
  r.note("second", second);
  r.note("null", api().cuLaunchHostFunc(stream, nullptr, nullptr));
}

void staging(Report& r) {
  Setup s;
  CUstream stream = nullptr;
  CUdeviceptr memory = 0;
  api().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  api().cuMemAlloc_v2(&memory, 4096);
  // Pageable memory may be changed as soon as the call returns, although the stream is busy.
  std::vector<unsigned> source(256, 5);
  s.block(stream);
  r.note("copy", api().cuMemcpyHtoDAsync_v2(memory, source.data(), 1024, stream));
  source.assign(256, 9);
  s.release();
  api().cuStreamSynchronize(stream);
  unsigned value = 0;
  api().cuMemcpyDtoH_v2(&value, memory, 4);
  r.note("value", value);
}

void pools(Report& r) {
  Setup s;
  CUstream stream = nullptr;
  CUdeviceptr memory = 0;
  api().cuStreamCreate(&stream, 0);
  r.note("alloc_null", api().cuMemAllocAsync(nullptr, 4096, stream));
  r.note("alloc", api().cuMemAllocAsync(&memory, 4096, stream));
  r.note("set", api().cuMemsetD32Async(memory, 3, 1024, stream));
  r.note("free", api().cuMemFreeAsync(memory, stream));
  r.note("sync", api().cuStreamSynchronize(stream));
  r.note("alloc_again", api().cuMemAllocAsync(&memory, 4096, stream));
  r.note("free_plain", api().cuMemFree_v2(memory));
  r.note("free_unknown", api().cuMemFreeAsync(4096, stream));
  r.note("alloc_too_much", api().cuMemAllocAsync(&memory, std::size_t{1} << 50, stream));
}

}  // namespace

std::vector<Case> stream_cases() {
  return {
      {"stream_queries", "streams and events say NOT_READY while work runs, and then not", queries},
      {"stream_ordering", "default, blocking and non-blocking streams; waiting for an event",
       ordering},
      {"host_functions", "host functions run in the stream's order", host_functions},
      {"staging", "a pageable source may be changed when the asynchronous copy returns", staging},
      {"pools", "stream-ordered allocation", pools},
  };
}

}  // namespace stasis::conformance
