// A `__managed__` variable of a module beside memory of cuMemAlloc, and, if asked for (--still), of
// cuMemAllocManaged. It is the driver's own, which
// no agent can give up, so that the program can be suspended only without that module: at SIGUSR1
// it says "unloaded" and has none, at SIGUSR2 "loaded" and has one again.
#include <csignal>
#include <cstdio>
#include <optional>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kPlainSize = 4u << 20;
constexpr char kPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .global .attribute(.managed) .align 8 .b8 kept[65536];
)";

volatile std::sig_atomic_t wants_module = 1;

class ManagedVariable {
 public:
  explicit ManagedVariable(Run& run)
      : run_(run), gpu_(Gpu::primary(initialised_driver(run.options()), 0)) {}

  void work() {
    std::signal(SIGUSR1, [](int) { wants_module = 0; });
    std::signal(SIGUSR2, [](int) { wants_module = 1; });
    const std::uint64_t size = run_.size_or(kPlainSize);
    Buffer buffer = filled("device memory", gpu_.allocate(size), size, 0);
    std::optional<Buffer> managed;
    if (const std::uint64_t bytes = run_.options().still; bytes > 0) {
      cuda::CUdeviceptr data = 0;
      gpu_.cuda().cuMemAllocManaged(&data, bytes, cuda::CU_MEM_ATTACH_GLOBAL);
      managed = filled("managed memory", data, bytes, 2);
    }
    Checker checker(gpu_, 3);
    while (run_.next()) {
      if ((wants_module != 0) != variable_.has_value()) change();
      checker.begin(nullptr);
      checker.advance(nullptr, buffer, run_.seed(run_.round()));
      if (variable_) checker.advance(nullptr, *variable_, run_.seed(run_.round(), 1));
      if (managed) checker.advance(nullptr, *managed, run_.seed(run_.round(), 2));
      checker.verify(nullptr, run_);
      if (variable_) {
        verify_words(run_, variable_->name, reinterpret_cast<const std::uint64_t*>(variable_->data),
                     0, variable_->words, variable_->seed);
      }
      run_.finish();
    }
  }

 private:
  void change() {
    if (variable_) {
      gpu_.cuda().cuModuleUnload(module_);
      variable_.reset();
    } else {
      cuda::CUdeviceptr data = 0;
      std::size_t bytes = 0;
      gpu_.cuda().cuModuleLoadData(&module_, kPtx);
      gpu_.cuda().cuModuleGetGlobal_v2(&data, &bytes, module_, "kept");
      variable_ = filled("a variable of a module", data, bytes, 1);
    }
    std::puts(variable_ ? "loaded" : "unloaded");
    std::fflush(stdout);
  }

  Buffer filled(const char* name, cuda::CUdeviceptr data, std::uint64_t bytes,
                std::uint64_t which) const {
    Buffer buffer{name, data, bytes / sizeof(std::uint64_t), run_.seed(run_.round(), which)};
    gpu_.kernels().fill(nullptr, buffer.data, buffer.words, buffer.seed);
    gpu_.cuda().cuCtxSynchronize();
    return buffer;
  }

  Run& run_;
  const Gpu gpu_;
  cuda::CUmodule module_ = nullptr;
  std::optional<Buffer> variable_;
};

}  // namespace

void run_managed_variable(Run& run) { ManagedVariable(run).work(); }

}  // namespace stasis::workloads
