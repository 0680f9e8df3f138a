#include "local_memory.h"

#include <tuple>

#include "eviction_internal.h"
#include "intercept.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

bool is_current(CUcontext context) {
  CUcontext current = nullptr;
  return driver().cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context;
}

}  // namespace

void release_local_memory() {
  const auto& call = driver();
  if (!call.cuCtxGetLimit || !call.cuCtxSetLimit) return;
  for (auto* context : known_contexts()) {
    const CurrentContext current(context);
    std::size_t bytes = 0;
    if (!is_current(context) || call.cuCtxGetLimit(&bytes, CU_LIMIT_STACK_SIZE) != CUDA_SUCCESS ||
        bytes == 0 || call.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 0) != CUDA_SUCCESS)
      continue;
    const TablesLock lock;
    tables().contexts.stack_sizes.emplace(context, bytes);
  }
}

Outcome take_local_memory() {
  for (;;) {
    CUcontext context = nullptr;
    std::size_t bytes = 0;
    {
      const TablesLock lock;
      const auto first = tables().contexts.stack_sizes.begin();
      if (first == tables().contexts.stack_sizes.end()) return {};
      std::tie(context, bytes) = *first;
    }
    const CurrentContext current(context);
    if (!is_current(context)) return {CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent"};
    const auto result = driver().cuCtxSetLimit(CU_LIMIT_STACK_SIZE, bytes);
    if (result != CUDA_SUCCESS) return {result, "cuCtxSetLimit"};
    const TablesLock lock;
    tables().contexts.stack_sizes.erase(context);
  }
}

}  // namespace stasis::preload
