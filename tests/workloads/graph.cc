// CUDA graphs: a captured chain of kernels and copies, launched again in each round with other
// data. With a copy to the host at its end it holds the memory that it was instantiated with
// (sim/graph.h).
#include <algorithm>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

using GraphExec = cuda::CUgraphExec;
constexpr unsigned kCaptureModeThreadLocal = 1;
constexpr std::uint64_t kDefaultSize = 4u << 20;
constexpr int kLinks = 5;

struct GraphApi {
  programs::Call<cuda::CUresult(cuda::CUstream, unsigned)> begin_capture{"cuStreamBeginCapture_v2"};
  programs::Call<cuda::CUresult(cuda::CUstream, cuda::CUgraph*)> end_capture{"cuStreamEndCapture"};
  programs::Call<cuda::CUresult(GraphExec*, cuda::CUgraph, unsigned long long)> instantiate{
      "cuGraphInstantiateWithFlags"};
  programs::Call<cuda::CUresult(GraphExec, cuda::CUstream)> launch{"cuGraphLaunch"};

  GraphApi() {
    begin_capture.bind(programs::CudaApi::find("cuStreamBeginCapture_v2"));
    end_capture.bind(programs::CudaApi::find("cuStreamEndCapture"));
    instantiate.bind(programs::CudaApi::find("cuGraphInstantiateWithFlags"));
    launch.bind(programs::CudaApi::find("cuGraphLaunch"));
  }
};

// What the graph works on. The addresses are fixed in it; the content is not.
struct Data {
  cuda::CUdeviceptr input = 0;
  cuda::CUdeviceptr keys = 0;
  cuda::CUdeviceptr sum = 0;
  cuda::CUdeviceptr copy = 0;
  std::uint64_t words = 0;
  std::uint64_t* host = nullptr;  // pinned; null: nothing is copied there
};

GraphExec capture(const Gpu& gpu, const GraphApi& api, const Data& data, cuda::CUstream stream) {
  const cuda::CUresult begun = api.begin_capture.raw(stream, kCaptureModeThreadLocal);
  if (begun == cuda::CUDA_ERROR_NOT_SUPPORTED || begun == cuda::CUDA_ERROR_NOT_FOUND) {
    programs::die_absent("no CUDA graphs on this driver: cuStreamBeginCapture: " +
                         programs::describe(begun));
  }
  if (begun != cuda::CUDA_SUCCESS) {
    programs::die(1, "cuStreamBeginCapture failed: " + programs::describe(begun));
  }
  // sum += word(input, key); then a chain in which each link depends on all words before it.
  for (int link = 0; link < kLinks; ++link) {
    const cuda::CUdeviceptr source = link == 0 ? data.input : data.copy;
    gpu.kernels().combine(stream, data.sum, source, data.words,
                          data.keys + static_cast<std::uint64_t>(link) * sizeof(std::uint64_t));
    gpu.cuda().cuMemcpyDtoDAsync_v2(data.copy, data.sum, data.words * sizeof(std::uint64_t),
                                    stream);
  }
  if (data.host) {
    gpu.cuda().cuMemcpyDtoHAsync_v2(data.host, data.copy, data.words * sizeof(std::uint64_t),
                                    stream);
  }
  cuda::CUgraph graph = nullptr;
  api.end_capture(stream, &graph);
  GraphExec executable = nullptr;
  api.instantiate(&executable, graph, 0);
  return executable;
}

void launch_again_and_again(Run& run, bool to_host) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const auto& cuda = gpu.cuda();
  const GraphApi api;
  Data data;
  data.words = run.size_or(kDefaultSize) / 3 / sizeof(std::uint64_t);
  const std::uint64_t bytes = data.words * sizeof(std::uint64_t);
  data.input = gpu.allocate(bytes);
  data.sum = gpu.allocate(bytes);
  data.copy = gpu.allocate(bytes);
  data.keys = gpu.allocate(kLinks * sizeof(std::uint64_t));
  if (to_host) {
    void* host = nullptr;
    cuda.cuMemHostAlloc(&host, bytes, 0);
    data.host = static_cast<std::uint64_t*>(host);
  }
  const cuda::CUstream stream = gpu.stream();
  const GraphExec executable = capture(gpu, api, data, stream);

  std::vector<std::uint64_t> model(data.words);
  std::vector<std::uint64_t> answer(data.words);
  gpu.kernels().fill(stream, data.sum, data.words, run.seed(0));
  cuda.cuStreamSynchronize(stream);
  for (std::uint64_t i = 0; i < data.words; ++i)
    model[i] = word(i, run.seed(0));

  while (run.next()) {
    std::uint64_t keys[kLinks];
    for (int link = 0; link < kLinks; ++link) {
      keys[link] = run.seed(run.round(), 10 + static_cast<std::uint64_t>(link));
    }
    cuda.cuMemcpyHtoD_v2(data.keys, keys, sizeof keys);
    gpu.kernels().fill(stream, data.input, data.words, run.seed(run.round()));
    run.pause_ahead();
    api.launch(executable, stream);
    for (std::uint64_t i = 0; i < data.words; ++i) {
      model[i] += word(word(i, run.seed(run.round())), keys[0]);
      for (int link = 1; link < kLinks; ++link)
        model[i] += word(model[i], keys[link]);
    }
    cuda.cuStreamSynchronize(stream);
    if (to_host)
      std::copy_n(data.host, data.words, answer.begin());
    else
      cuda.cuMemcpyDtoH_v2(answer.data(), data.copy, bytes);
    const auto wrong = std::mismatch(model.begin(), model.end(), answer.begin());
    if (wrong.first != model.end()) {
      run.mismatch("word " + std::to_string(wrong.first - model.begin()) +
                   " of the graph's result");
    }
    run.finish();
  }
}

}  // namespace

void run_graph(Run& run) { launch_again_and_again(run, false); }
void run_graph_host(Run& run) { launch_again_and_again(run, true); }

}  // namespace stasis::workloads
