// Several contexts: on every GPU the primary one and two more, each with its own module and memory,
// and its own size of a thread's stack.
#include <memory>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr int kExtraContexts = 2;
constexpr std::uint64_t kContextsSize = 12u << 20;

// Not in examples/common, as no other workload asks for limits.
struct Limits {
  programs::Call<cuda::fn::cuCtxGetLimit> get{"cuCtxGetLimit"};
  programs::Call<cuda::fn::cuCtxSetLimit> set{"cuCtxSetLimit"};

  Limits() {
    get.bind(programs::CudaApi::find("cuCtxGetLimit"));
    set.bind(programs::CudaApi::find("cuCtxSetLimit"));
  }
  static std::size_t stack_size(std::size_t place) { return 1024 + 512 * place; }
  void choose(std::size_t place) const { set(cuda::CU_LIMIT_STACK_SIZE, stack_size(place)); }
  void verify(std::size_t place, const Run& run) const {
    std::size_t bytes = 0;
    get(&bytes, cuda::CU_LIMIT_STACK_SIZE);
    // The driver makes it larger for a kernel that needs more.
    if (bytes < stack_size(place)) run.mismatch("stack size of context " + std::to_string(place));
  }
};

struct Place {
  explicit Place(Gpu made) : gpu(std::move(made)), checker(gpu, 1) {}
  Gpu gpu;
  Checker checker;
  Buffer buffer;
};

}  // namespace

void run_contexts(Run& run) {
  const auto& cuda = initialised_driver(run.options());
  const int devices = device_count(cuda);
  const auto contexts = static_cast<std::uint64_t>(devices) * (1 + kExtraContexts);
  const std::uint64_t words = run.size_or(kContextsSize) / contexts / sizeof(std::uint64_t);
  const Limits limits;
  std::vector<std::unique_ptr<Place>> places;
  for (int device = 0; device < devices; ++device) {
    for (int i = 0; i <= kExtraContexts; ++i) {
      auto place =
          std::make_unique<Place>(i == 0 ? Gpu::primary(cuda, device) : Gpu::created(cuda, device));
      Buffer& buffer = place->buffer;
      buffer.name = "context " + std::to_string(i) + " of GPU " + std::to_string(device);
      buffer.words = words;
      buffer.data = place->gpu.allocate(buffer.bytes());
      buffer.seed = run.seed(0, places.size());
      limits.choose(places.size());
      place->gpu.kernels().fill(nullptr, buffer.data, buffer.words, buffer.seed);
      places.push_back(std::move(place));
    }
  }
  while (run.next()) {
    // All are started before any is waited for.
    for (std::size_t i = 0; i < places.size(); ++i) {
      places[i]->gpu.make_current();
      limits.verify(i, run);
      places[i]->checker.begin(nullptr);
      places[i]->checker.advance(nullptr, places[i]->buffer, run.seed(run.round(), i));
    }
    for (auto& place : places) {
      place->gpu.make_current();
      place->checker.verify(nullptr, run);
    }
    run.finish();
  }
}

}  // namespace stasis::workloads
