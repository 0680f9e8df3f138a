// What the agent adds to a call of the driver: cuEventQuery of an event that has happened, over and
// over. Run it under `stasis run` and without, or with --both, which does that by itself.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "driver/cuda_abi.h"

namespace stasis {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace)

constexpr int kCalls = 1000000;
constexpr int kRepeats = 9;

template <class Function>
Function* find(const char* name) {
  static void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
  void* at = library ? ::dlsym(library, name) : nullptr;
  if (!at) {
    std::fprintf(stderr, "the driver has no %s\n", name);
    std::exit(77);
  }
  return reinterpret_cast<Function*>(at);
}
#define CU(name) (find<fn::name>(#name))

// Nanoseconds per call in one thread, and the same event in none other.
double one_thread(CUcontext context) {
  CU(cuCtxSetCurrent)(context);
  CUevent event = nullptr;
  if (CU(cuEventCreate)(&event, 0) != CUDA_SUCCESS) std::exit(1);
  auto* query = CU(cuEventQuery);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i)
    if (query(event) != CUDA_SUCCESS) std::exit(1);
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / kCalls;
}

// The fastest of several runs: everything else is other programs' doing.
double measure(CUcontext context, int threads) {
  double best = 1e9;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    std::vector<double> each(static_cast<std::size_t>(threads));
    std::vector<std::thread> running;
    for (auto& took : each)
      running.emplace_back([&took, context] { took = one_thread(context); });
    for (auto& thread : running)
      thread.join();
    best = std::min(best, *std::min_element(each.begin(), each.end()));
  }
  return best;
}

int run() {
  CUcontext context = nullptr;
  CUdeviceptr memory = 0;
  // The allocation starts the agent.
  if (CU(cuInit)(0) != CUDA_SUCCESS || CU(cuCtxCreate_v2)(&context, 0, 0) != CUDA_SUCCESS ||
      CU(cuMemAlloc_v2)(&memory, std::size_t{4} << 20) != CUDA_SUCCESS)
    return 1;
  std::printf("%.2f %.2f\n", measure(context, 1), measure(context, 8));
  return 0;
}

struct Pair {
  double one = 0;
  double eight = 0;
};

Pair run_with(const std::string& command) {
  Pair found;
  std::FILE* output = ::popen(command.c_str(), "r");
  if (!output || std::fscanf(output, "%lf %lf", &found.one, &found.eight) != 2) std::exit(1);
  ::pclose(output);
  return found;
}

}  // namespace
}  // namespace stasis

int main(int argc, char** argv) {
  if (argc < 3 || std::strcmp(argv[1], "--both") != 0) return stasis::run();
  // argv[2]: the agent's library.
  const std::string self = std::string("\"") + argv[0] + "\"";
  const auto without = stasis::run_with(self);
  const auto with = stasis::run_with(std::string("LD_PRELOAD=\"") + argv[2] + "\" " + self);
  std::printf("cuEventQuery, ns per call   1 thread   8 threads\n");
  std::printf("without the agent         %10.2f  %10.2f\n", without.one, without.eight);
  std::printf("with it                   %10.2f  %10.2f\n", with.one, with.eight);
  std::printf("added                     %10.2f  %10.2f\n", with.one - without.one,
              with.eight - without.eight);
}
