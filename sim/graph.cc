// Captures and graphs, as the driver's interface has them.
#include "sim/graph.h"

#include "sim/api.h"
#include "sim/driver.h"

using namespace stasis::cuda;  // NOLINT: this file is the driver's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

namespace {

std::shared_ptr<Graph> find_graph(Driver& driver, const void* handle) {
  std::lock_guard lock(driver.mutex);
  const auto at = driver.graphs.find(handle);
  return at == driver.graphs.end() ? nullptr : at->second;
}

// A name of its own for it, as no graph has two.
template <class Handle>
void enter(Driver& driver, const Graph& graph, Handle* out) {
  auto made = std::make_shared<Graph>(graph);
  *out = reinterpret_cast<Handle>(made.get());
  std::lock_guard lock(driver.mutex);
  driver.graphs.emplace(made.get(), made);
}

CUresult forget(const void* handle) {
  return gated([&](Driver& driver) -> CUresult {
    std::lock_guard lock(driver.mutex);
    return driver.graphs.erase(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

}  // namespace

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    auto* stream = find_stream(driver, context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    if (stream->is_default) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    std::lock_guard lock(stream->context->mutex);
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capture = std::make_shared<Graph>();
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* out) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    auto* stream = find_stream(driver, context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Graph> captured;
    {
      std::lock_guard lock(stream->context->mutex);
      captured.swap(stream->capture);
    }
    if (!captured) return CUDA_ERROR_ILLEGAL_STATE;
    enter(driver, *captured, out);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return in_context_passing([&](Driver& driver, Context& context) -> CUresult {
    auto* stream = find_stream(driver, context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(stream->context->mutex);
    *status = stream->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph handle, unsigned long long flags) {
  return in_context([&](Driver& driver, Context&) -> CUresult {
    const auto graph = find_graph(driver, handle);
    if (!out || !graph || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    enter(driver, *graph, out);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    const auto graph = find_graph(driver, handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    auto* stream = find_stream(driver, context, stream_handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!graph->is_whole(driver.memory)) {
      stream->context->failure = CUDA_ERROR_LAUNCH_FAILED;
      return CUDA_ERROR_LAUNCH_FAILED;
    }
    stream->context->submit(*stream, [graph] {
      for (const auto& node : graph->nodes)
        node();
    });
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphExecDestroy(CUgraphExec handle) { return forget(handle); }
CUresult cuGraphDestroy(CUgraph handle) { return forget(handle); }
