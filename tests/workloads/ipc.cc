// Device memory shared between two processes by a legacy IPC handle: the parent exports, the child
// opens. The driver cannot bring such processes back, so this is for tests of the refusal.
//
// The shared buffer begins with a header: the round that the parent wrote, and the round that the
// child has verified. Both are read by polling; the rest is content keyed by round.

#include <cstdio>

#include "tests/workloads/gpu.h"
#include "tests/workloads/spawn.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kWords = 1u << 18;
constexpr std::uint64_t kHeaderWords = 2;
constexpr int kPollMs = 2;

std::string to_hex(const cuda::CUipcMemHandle& handle) {
  std::string out;
  for (char byte : handle.reserved) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    out += digits;
  }
  return out;
}

cuda::CUipcMemHandle from_hex(const std::string& text) {
  cuda::CUipcMemHandle handle{};
  if (text.size() != 2 * sizeof handle.reserved) {
    programs::die(1, "the IPC handle has " + std::to_string(text.size()) + " digits instead of " +
                         std::to_string(2 * sizeof handle.reserved));
  }
  for (std::size_t i = 0; i < sizeof handle.reserved; ++i) {
    handle.reserved[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return handle;
}

std::uint64_t read_word(const Gpu& gpu, cuda::CUdeviceptr at) {
  std::uint64_t value = 0;
  gpu.cuda().cuMemcpyDtoH_v2(&value, at, sizeof value);
  return value;
}

void write_word(const Gpu& gpu, cuda::CUdeviceptr at, std::uint64_t value) {
  gpu.cuda().cuMemcpyHtoD_v2(at, &value, sizeof value);
}

}  // namespace

void run_ipc(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const cuda::CUdeviceptr shared = gpu.allocate((kHeaderWords + kWords) * sizeof(std::uint64_t));
  const cuda::CUdeviceptr acknowledged = shared + sizeof(std::uint64_t);
  Buffer content{"shared memory", shared + kHeaderWords * sizeof(std::uint64_t), kWords, 0};
  gpu.cuda().cuMemsetD8_v2(shared, 0, kHeaderWords * sizeof(std::uint64_t));
  cuda::CUipcMemHandle handle{};
  gpu.cuda().cuIpcGetMemHandle(&handle, shared);
  Child child(
      {"ipc-child", "--ipc-handle", to_hex(handle), "--seed", std::to_string(run.options().seed)});
  while (run.next()) {
    content.seed = run.seed(run.round());
    gpu.kernels().fill(nullptr, content.data, content.words, content.seed);
    gpu.cuda().cuStreamSynchronize(nullptr);
    write_word(gpu, shared, run.round());
    while (read_word(gpu, acknowledged) != run.round()) {
      if (child.exited()) run.mismatch("the child " + child.how_it_ended());
      if (Run::stop_requested()) break;
      sleep_ms(kPollMs);
    }
    if (read_word(gpu, acknowledged) != run.round()) break;
    run.finish();
  }
  child.stop();
}

void run_ipc_child(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  cuda::CUdeviceptr shared = 0;
  gpu.cuda().cuIpcOpenMemHandle_v2(&shared, from_hex(run.options().ipc_handle),
                                   cuda::kIpcMemLazyEnablePeerAccess);
  Buffer content{"shared memory in the child", shared + kHeaderWords * sizeof(std::uint64_t),
                 kWords, 0};
  while (run.next()) {
    while (read_word(gpu, shared) != run.round()) {
      if (Run::stop_requested()) return;
      sleep_ms(kPollMs);
    }
    content.seed = run.seed(run.round());
    verify_span(gpu, run, content, 0, content.words);
    write_word(gpu, shared + sizeof(std::uint64_t), run.round());
    run.finish();
  }
}

}  // namespace stasis::workloads
