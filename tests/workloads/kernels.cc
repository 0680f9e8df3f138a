#include "tests/workloads/kernels.h"

#include <algorithm>
#include <atomic>
#include <ctime>

#include "sim/stasis_sim_kernel.h"
#include "tests/workloads/kernels_ptx.h"

namespace stasis::workloads {
namespace {

constexpr unsigned kBlock = 256;
constexpr std::uint64_t kMaxBlocks = 1024;  // larger data is walked in strides

}  // namespace

Kernels::Kernels(const programs::CudaApi& cuda) : cuda_(cuda) {
  cuda::CUmodule module = nullptr;
  cuda_.cuModuleLoadData(&module, internal::kKernelsPtx);
  cuda_.cuModuleGetFunction(&fill_, module, "fill");
  cuda_.cuModuleGetFunction(&advance_, module, "advance");
  cuda_.cuModuleGetFunction(&combine_, module, "combine");
  cuda_.cuModuleGetFunction(&spin_, module, "spin");
}

template <class... Args>
void Kernels::launch(cuda::CUfunction function, cuda::CUstream stream, std::uint64_t words,
                     Args... args) const {
  const auto blocks = std::clamp<std::uint64_t>((words + kBlock - 1) / kBlock, 1, kMaxBlocks);
  std::uint64_t values[] = {static_cast<std::uint64_t>(args)...};
  void* params[sizeof...(args)];
  for (std::size_t i = 0; i < sizeof...(args); ++i)
    params[i] = &values[i];
  cuda_.cuLaunchKernel(function, static_cast<unsigned>(blocks), 1, 1, words == 1 ? 1 : kBlock, 1, 1,
                       0, stream, params, nullptr);
}

void Kernels::fill(cuda::CUstream stream, cuda::CUdeviceptr data, std::uint64_t words,
                   std::uint64_t seed) const {
  launch(fill_, stream, words, data, words, seed);
}

void Kernels::advance(cuda::CUstream stream, cuda::CUdeviceptr data, std::uint64_t words,
                      std::uint64_t from, std::uint64_t to, cuda::CUdeviceptr result) const {
  launch(advance_, stream, words, data, words, from, to, result);
}

void Kernels::combine(cuda::CUstream stream, cuda::CUdeviceptr target, cuda::CUdeviceptr source,
                      std::uint64_t words, cuda::CUdeviceptr key) const {
  launch(combine_, stream, words, target, source, words, key);
}

void Kernels::spin(cuda::CUstream stream, std::uint64_t nanoseconds, cuda::CUdeviceptr done) const {
  launch(spin_, stream, 1, nanoseconds, done);
}

namespace {

std::uint64_t number(void** args, int i) { return *static_cast<std::uint64_t*>(args[i]); }
std::uint64_t* pointer(void** args, int i) { return *static_cast<std::uint64_t**>(args[i]); }

constexpr std::uint64_t kPart = 2048;

struct Wrong {
  std::uint64_t count = 0;
  std::uint64_t first = 0;  // where there is one
};

// A part of `advance`, in loops that a compiler can do several words of at a time.
[[gnu::always_inline]] inline Wrong advance_part(std::uint64_t* data, std::uint64_t begin,
                                                 std::uint64_t words, std::uint64_t from,
                                                 std::uint64_t to) {
  Wrong wrong;
  for (std::uint64_t i = begin; i < begin + words; ++i)
    wrong.count += data[i] == word(i, from) ? 0 : 1;
  if (wrong.count != 0)
    for (wrong.first = begin; data[wrong.first] == word(wrong.first, from);)
      ++wrong.first;
  for (std::uint64_t i = begin; i < begin + words; ++i)
    data[i] = word(i, to);
  return wrong;
}

// Tests wait for this work.
__attribute__((target("avx512f,avx512dq"))) Wrong advance_part_wide(std::uint64_t* data,
                                                                    std::uint64_t begin,
                                                                    std::uint64_t words,
                                                                    std::uint64_t from,
                                                                    std::uint64_t to) {
  return advance_part(data, begin, words, from, to);
}

}  // namespace
}  // namespace stasis::workloads

// The same kernels for the simulated driver. One thread does the whole grid's work.
using stasis::workloads::advance_part;
using stasis::workloads::advance_part_wide;
using stasis::workloads::AdvanceResult;
using stasis::workloads::kPart;
using stasis::workloads::number;
using stasis::workloads::pointer;
using stasis::workloads::word;

extern "C" {

void stasis_sim_kernel_fill(const stasis::sim::Launch&, void** args);
void stasis_sim_kernel_advance(const stasis::sim::Launch&, void** args);
void stasis_sim_kernel_combine(const stasis::sim::Launch&, void** args);
void stasis_sim_kernel_spin(const stasis::sim::Launch&, void** args);

// Kernels of several streams run at the same time, as on a GPU.
static void add(std::uint64_t& sum, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(sum).fetch_add(value);
}

void stasis_sim_kernel_fill(const stasis::sim::Launch&, void** args) {
  std::uint64_t* data = pointer(args, 0);
  const std::uint64_t words = number(args, 1);
  for (std::uint64_t i = 0; i < words; ++i)
    data[i] = word(i, number(args, 2));
}

// A GPU does this work beside the processors, which tests that run side by side need: the stream's
// thread leaves them to others five times as long as the work took, at most 100 ms.
class WorkBesideProcessors {
 public:
  WorkBesideProcessors() : began_(processor_time()) {}
  ~WorkBesideProcessors() {
    const long rest = std::min(5 * (processor_time() - began_), 100'000'000L);
    const timespec wait{0, rest};
    nanosleep(&wait, nullptr);
  }
  WorkBesideProcessors(const WorkBesideProcessors&) = delete;
  WorkBesideProcessors& operator=(const WorkBesideProcessors&) = delete;

 private:
  static long processor_time() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1'000'000'000L + now.tv_nsec;
  }
  long began_;
};

void stasis_sim_kernel_advance(const stasis::sim::Launch&, void** args) {
  const WorkBesideProcessors work;
  std::uint64_t* data = pointer(args, 0);
  const std::uint64_t words = number(args, 1);
  const std::uint64_t from = number(args, 2);
  const std::uint64_t to = number(args, 3);
  auto* result = reinterpret_cast<AdvanceResult*>(pointer(args, 4));
  std::uint64_t wrong = 0;
  std::uint64_t worst_rank = 0;
  const bool wide = __builtin_cpu_supports("avx512dq") != 0;
  for (std::uint64_t i = 0; i < words; i += kPart) {
    const std::uint64_t count = std::min(kPart, words - i);
    const auto here =
        wide ? advance_part_wide(data, i, count, from, to) : advance_part(data, i, count, from, to);
    if (here.count != 0 && wrong == 0) worst_rank = words - here.first;
    wrong += here.count;
  }
  add(result->checked, words);
  if (wrong == 0) return;
  add(result->wrong, wrong);
  const std::atomic_ref<std::uint64_t> worst(result->worst_rank);
  std::uint64_t seen = worst.load();
  while (seen < worst_rank && !worst.compare_exchange_weak(seen, worst_rank)) {
  }
}

void stasis_sim_kernel_combine(const stasis::sim::Launch&, void** args) {
  const WorkBesideProcessors work;
  std::uint64_t* target = pointer(args, 0);
  const std::uint64_t* source = pointer(args, 1);
  const std::uint64_t words = number(args, 2);
  const std::uint64_t key = *pointer(args, 3);
  for (std::uint64_t i = 0; i < words; ++i)
    target[i] += word(source[i], key);
}

void stasis_sim_kernel_spin(const stasis::sim::Launch&, void** args) {
  const std::uint64_t ns = number(args, 0);
  const timespec wait{static_cast<time_t>(ns / 1'000'000'000),
                      static_cast<long>(ns % 1'000'000'000)};
  nanosleep(&wait, nullptr);
  add(*pointer(args, 1), 1);
}

}  // extern "C"
