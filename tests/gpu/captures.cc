// What of allocating and freeing waits for work in flight, and what spoils a stream's capture: the
// driver's own allocations, virtual memory management and cuCtxSynchronize; by the thread that
// captures and by another, in the three modes (0 global, 1 thread-local, 2 relaxed). Then one
// thread that captures all the time, in modes 1 and 2, and one that allocates and frees, in both
// ways.
//
//   g++ -std=c++20 -I. -Isrc -Iinclude tests/gpu/captures.cc -ldl -lpthread && ./a.out
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "../agent/calls.h"

namespace stasis::agent_test {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kBytes = 4 * kMiB;

CUcontext g_context = nullptr;
CUresult (*g_begin)(CUstream, unsigned) = nullptr;
CUresult (*g_end)(CUstream, void**) = nullptr;
CUresult (*g_destroy)(void*) = nullptr;

CUdeviceptr allocated(std::size_t bytes) {
  CUdeviceptr address = 0;
  CU(cuMemAlloc_v2)(&address, bytes);
  return address;
}

struct Virtual {
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;

  CUresult create() {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    return CU(cuMemCreate)(&handle, kBytes, &prop, 0);
  }
  CUresult reserve() { return CU(cuMemAddressReserve)(&address, kBytes, 0, 0, 0); }
  CUresult map() const { return CU(cuMemMap)(address, kBytes, 0, handle, 0); }
  CUresult allow() const {
    const CUmemAccessDesc right{{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return CU(cuMemSetAccess)(address, kBytes, &right, 1);
  }
  CUresult unmap() const { return CU(cuMemUnmap)(address, kBytes); }
  CUresult release() const { return CU(cuMemRelease)(handle); }
  CUresult free() const { return CU(cuMemAddressFree)(address, kBytes); }
};

long ms_with_work_in_flight(const std::function<void()>& what) {
  CUstream stream = nullptr;
  CU(cuStreamCreate)(&stream, 1);
  CU(cuLaunchHostFunc)
  (
      stream, [](void*) { ::usleep(200000); }, nullptr);
  const auto start = std::chrono::steady_clock::now();
  what();
  const auto took = std::chrono::steady_clock::now() - start;
  CU(cuStreamSynchronize)(stream);
  return std::chrono::duration_cast<std::chrono::milliseconds>(took).count();
}

void try_waiting() {
  const auto small = allocated(1);
  const auto large = allocated(kBytes);
  const auto tell = [](const char* name, const std::function<void()>& what) {
    std::printf("beside a host function of 200 ms: %-24s %ld ms\n", name,
                ms_with_work_in_flight(what));
  };
  tell("cuMemAlloc of 1 byte", [] { allocated(1); });
  tell("cuMemFree of 1 byte", [&] { CU(cuMemFree_v2)(small); });
  tell("cuMemFree of 4 MiB", [&] { CU(cuMemFree_v2)(large); });
  Virtual memory;
  tell("virtual memory, made", [&] {
    memory.create();
    memory.reserve();
    memory.map();
    memory.allow();
  });
  tell("virtual memory, let go", [&] {
    memory.unmap();
    memory.release();
    memory.free();
  });
}

void try_one_by_one(CUstream stream, CUdeviceptr kept) {
  struct Try {
    const char* name;
    std::function<void()> before;
    std::function<CUresult()> what;
  };
  CUdeviceptr address = 0;
  Virtual memory;
  const auto mapped = [&] {
    memory.create();
    memory.reserve();
    memory.map();
    memory.allow();
  };
  const std::vector<Try> tries = {
      {"nothing", [] {}, [] { return CUDA_SUCCESS; }},
      {"cuMemAlloc of 1 byte", [] {}, [&] { return CU(cuMemAlloc_v2)(&address, 1); }},
      {"cuMemFree of 1 byte", [&] { address = allocated(1); },
       [&] { return CU(cuMemFree_v2)(address); }},
      {"cuMemFree of 4 MiB", [&] { address = allocated(kBytes); },
       [&] { return CU(cuMemFree_v2)(address); }},
      {"cuMemCreate", [] {}, [&] { return memory.create(); }},
      {"cuMemAddressReserve", [] {}, [&] { return memory.reserve(); }},
      {"cuMemMap",
       [&] {
         memory.create();
         memory.reserve();
       },
       [&] { return memory.map(); }},
      {"cuMemSetAccess", mapped, [&] { return memory.allow(); }},
      {"cuMemUnmap", mapped, [&] { return memory.unmap(); }},
      {"cuMemRelease", mapped, [&] { return memory.release(); }},
      {"cuMemAddressFree", [&] { memory.reserve(); }, [&] { return memory.free(); }},
      {"cuCtxSynchronize", [] {}, [] { return CU(cuCtxSynchronize)(); }}};
  for (const bool other : {false, true}) {
    for (unsigned mode = 0; mode < 3; ++mode) {
      for (const Try& one : tries) {
        one.before();
        CUresult answer = CUDA_SUCCESS;
        const auto ask = [&] {
          CU(cuCtxSetCurrent)(g_context);
          answer = one.what();
        };
        void* graph = nullptr;
        g_begin(stream, mode);
        CU(cuMemsetD8Async)(kept, 1, 99, stream);
        if (other)
          std::thread(ask).join();
        else
          ask();
        const auto ended = g_end(stream, &graph);
        if (graph) g_destroy(graph);
        std::printf("%s thread, mode %u: %-22s answers %d, the capture ends with %d\n",
                    other ? "another" : "the same", mode, one.name, answer, ended);
      }
    }
  }
}

CUresult by_driver() {
  CUdeviceptr address = 0;
  const auto result = CU(cuMemAlloc_v2)(&address, kBytes);
  return result == CUDA_SUCCESS ? CU(cuMemFree_v2)(address) : result;
}

// And a byte of the driver's that is freed first.
CUresult by_virtual_memory() {
  Virtual memory;
  const auto byte = allocated(1);
  const CUresult results[] = {memory.create(),  memory.reserve(),       memory.map(),
                              memory.allow(),   CU(cuMemFree_v2)(byte), memory.unmap(),
                              memory.release(), memory.free()};
  for (const auto result : results)
    if (result != CUDA_SUCCESS) return result;
  return CUDA_SUCCESS;
}

void try_side_by_side(CUstream stream, CUdeviceptr kept) {
  for (const unsigned mode : {1U, 2U}) {
    for (const bool driver : {true, false}) {
      std::atomic<bool> enough{false};
      long captures = 0;
      long spoiled = 0;
      long frees = 0;
      long failed = 0;
      std::thread captures_all_the_time([&] {
        CU(cuCtxSetCurrent)(g_context);
        for (; !enough; ++captures) {
          void* graph = nullptr;
          g_begin(stream, mode);
          CU(cuMemsetD8Async)(kept, 1, 99, stream);
          if (g_end(stream, &graph) != CUDA_SUCCESS || !graph)
            ++spoiled;
          else
            g_destroy(graph);
        }
      });
      std::thread frees_all_the_time([&] {
        CU(cuCtxSetCurrent)(g_context);
        for (; !enough; ++frees)
          if ((driver ? by_driver() : by_virtual_memory()) != CUDA_SUCCESS) ++failed;
      });
      ::sleep(3);
      enough = true;
      captures_all_the_time.join();
      frees_all_the_time.join();
      std::printf("side by side, mode %u, %s: %ld captures, %ld spoiled; %ld frees, %ld failed\n",
                  mode, driver ? "the driver's own" : "virtual memory", captures, spoiled, frees,
                  failed);
    }
  }
}

int run() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  CUstream stream = nullptr;
  if (CU(cuInit)(0) != CUDA_SUCCESS || CU(cuCtxCreate_v2)(&g_context, 0, 0) != CUDA_SUCCESS ||
      CU(cuStreamCreate)(&stream, 1) != CUDA_SUCCESS)
    return 3;
  const auto kept = allocated(kMiB);
  try_waiting();
  const auto call = []<class Function>(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(::dlsym(driver_library(), name));
  };
  call(g_begin, "cuStreamBeginCapture_v2");
  call(g_end, "cuStreamEndCapture");
  call(g_destroy, "cuGraphDestroy");
  if (!g_begin || !g_end || !g_destroy) return 4;
  try_one_by_one(stream, kept);
  try_side_by_side(stream, kept);
  return 0;
}

}  // namespace
}  // namespace stasis::agent_test

int main() { return stasis::agent_test::run(); }
