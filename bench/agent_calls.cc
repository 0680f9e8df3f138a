// How long calls of the driver take. Reads lines "CALL THREADS" and answers each with the
// nanoseconds per call: bench/agent_calls.py asks two of these in turn, one under the agent and one
// not.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "examples/common/cuda_api.h"
#include "sim/stasis_sim_kernel.h"

extern "C" void stasis_sim_kernel_nothing(const stasis::sim::Launch&, void** args);
void stasis_sim_kernel_nothing(const stasis::sim::Launch&, void**) {}

namespace stasis {
namespace {

using programs::CudaApi;
using Clock = std::chrono::steady_clock;

constexpr char kNothing[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry nothing() { ret; }
)";

constexpr int kSamples = 25;
constexpr int kQuestions = 4000;  // calls in a sample of calls that only ask
constexpr int kWork = 200;        // of calls that give the GPU work: its queue must not fill up

// What one thread calls with.
struct Thread {
  explicit Thread(const CudaApi& api, cuda::CUcontext context, cuda::CUfunction nothing)
      : cuda(api), function(nothing) {
    cuda.cuCtxSetCurrent(context);
    cuda.cuStreamCreate(&stream, cuda::CU_STREAM_NON_BLOCKING);
    cuda.cuEventCreate(&event, 0);
    cuda.cuMemAllocHost_v2(&host, 4096);
    cuda.cuMemAlloc_v2(&device, std::size_t{2} << 20);  // the agent's
  }
  ~Thread() {
    cuda.cuMemFree_v2(device);
    cuda.cuMemFreeHost(host);
    cuda.cuEventDestroy_v2(event);
    cuda.cuStreamDestroy_v2(stream);
  }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  const CudaApi& cuda;
  cuda::CUfunction function;
  cuda::CUstream stream = nullptr;
  cuda::CUevent event = nullptr;
  void* host = nullptr;
  cuda::CUdeviceptr device = 0;
};

// The median of the samples, nanoseconds per call.
template <class Call>
double median_of(const Thread& thread, int calls, Call call) {
  std::vector<double> samples;
  for (int sample = 0; sample <= kSamples; ++sample) {
    const auto start = Clock::now();
    for (int i = 0; i < calls; ++i)
      call();
    const std::chrono::duration<double, std::nano> took = Clock::now() - start;
    if (sample > 0) samples.push_back(took.count() / calls);  // the first warms up
    thread.cuda.cuStreamSynchronize(thread.stream);
  }
  const auto middle = samples.begin() + kSamples / 2;
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

double measure(const std::string& what, const Thread& own) {
  const auto& cuda = own.cuda;
  if (what == "cuEventQuery")
    return median_of(own, kQuestions, [&] { cuda.cuEventQuery(own.event); });
  if (what == "cuStreamQuery")
    return median_of(own, kQuestions, [&] { cuda.cuStreamQuery(own.stream); });
  if (what == "cuLaunchKernel") {
    return median_of(own, kWork, [&] {
      cuda.cuLaunchKernel(own.function, 1, 1, 1, 1, 1, 1, 0, own.stream, nullptr, nullptr);
    });
  }
  // Its wrapper is the same, and little else: the driver refuses a launch of no function at once.
  if (what == "cuLaunchKernel:refused") {
    return median_of(own, kQuestions, [&] {
      (void)cuda.cuLaunchKernel.raw(nullptr, 1, 1, 1, 1, 1, 1, 0, own.stream, nullptr, nullptr);
    });
  }
  if (what == "cuMemcpyHtoDAsync") {
    return median_of(own, kWork,
                     [&] { cuda.cuMemcpyHtoDAsync_v2(own.device, own.host, 64, own.stream); });
  }
  programs::die(2, "no such call: " + what);
}

}  // namespace
}  // namespace stasis

int main() {
  using namespace stasis;  // NOLINT(google-build-using-namespace)
  const auto& cuda = programs::CudaApi::load(programs::Lookup::kDlsym, programs::IfAbsent::kSkip);
  cuda::CUcontext context = nullptr;
  cuda::CUmodule module = nullptr;
  cuda::CUfunction nothing = nullptr;
  cuda.cuInit(0);
  cuda.cuDevicePrimaryCtxRetain(&context, 0);
  cuda.cuCtxSetCurrent(context);
  cuda.cuModuleLoadData(&module, kNothing);
  cuda.cuModuleGetFunction(&nothing, module, "nothing");
  std::string what;
  unsigned threads = 0;
  while (std::cin >> what >> threads && threads > 0) {
    std::vector<double> each(threads);
    std::vector<std::thread> running;
    for (auto& took : each) {
      running.emplace_back([&] { took = measure(what, Thread(cuda, context, nothing)); });
    }
    double sum = 0;
    for (unsigned i = 0; i < threads; ++i) {
      running[i].join();
      sum += each[i];
    }
    std::printf("%.3f\n", sum / threads);
    std::fflush(stdout);
  }
}
