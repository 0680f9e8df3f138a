// A pool destroyed with memory of it in use: it goes when that has. In a process of its own, which
// ends at once: the next pool may end it, in the driver (580.159.04 on H200s; with glibc's checks
// always).
#include <sys/wait.h>
#include <unistd.h>

#include "calls_pools.h"

namespace stasis::agent_test {

void try_pool_in_use() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl("/proc/self/exe", "stasis-agent-calls", "pool-in-use", nullptr);
    ::_exit(127);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  SAY(status);
}

void be_pool_in_use() {
  CU(cuCtxGetDevice)(&g_device);
  const auto props = props_of(g_device);
  CUmemoryPool pool = nullptr;
  SAY(CU(cuMemPoolCreate)(&pool, &props));
  const auto stream = new_stream();
  CUdeviceptr address = 0;
  SAY(CU(cuMemAllocFromPoolAsync)(&address, 5 * kMiB, pool, stream));
  SAY(CU(cuDeviceSetMemPool)(g_device, pool));
  const auto by_current = allocate_in(stream, kMiB);
  SAY(CU(cuMemPoolDestroy)(pool));
  CUmemoryPool current = nullptr;
  SAY(CU(cuDeviceGetMemPool)(&current, g_device));
  SAY(current == default_pool());
  SAY(spoiled(address, 5 * kMiB, 8));
  SAY(CU(cuMemFreeAsync)(address, stream));
  SAY(CU(cuMemFreeAsync)(by_current, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  CUdeviceptr base = 0;
  SAY(CU(cuMemGetAddressRange_v2)(&base, nullptr, address));
  std::fflush(stdout);
  ::_exit(0);
}

}  // namespace stasis::agent_test
