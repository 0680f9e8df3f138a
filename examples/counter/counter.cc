// A UDP server that counts in GPU memory: the smallest program whose state lives on both sides.
//
// Each packet increments a number in device memory, and the answer is the number in decimal. It
// starts at 100, so the first answer is 101. Suspended or dumped and restored in between, the next
// answer has to be the next number. No CUDA toolkit is needed: the kernel is PTX, which the driver
// compiles, and the driver is loaded at run time.
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "examples/common/cuda_api.h"
#include "examples/counter/udp.h"
#include "sim/stasis_sim_kernel.h"

namespace stasis::counter {
namespace {

using programs::CudaApi;
using programs::die;

constexpr std::uint32_t kFirst = 100;
constexpr int kAskTimeoutSeconds = 5;

constexpr const char kPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64

// increment(uint32_t *counter)
.visible .entry increment(.param .u64 counter)
{
  .reg .b64 %rd<3>;
  .reg .b32 %r<3>;
  ld.param.u64 %rd1, [counter];
  cvta.to.global.u64 %rd2, %rd1;
  ld.global.u32 %r1, [%rd2];
  add.u32 %r2, %r1, 1;
  st.global.u32 [%rd2], %r2;
  ret;
}
)";

// The number in device memory, and the kernel that increments it.
class DeviceCounter {
 public:
  DeviceCounter() : cuda_(CudaApi::load()) {
    cuda_.cuInit(0);
    cuda::CUdevice device = 0;
    cuda_.cuDeviceGet(&device, 0);
    cuda::CUcontext context = nullptr;
    cuda_.cuDevicePrimaryCtxRetain(&context, device);
    cuda_.cuCtxSetCurrent(context);
    cuda::CUmodule module = nullptr;
    cuda_.cuModuleLoadData(&module, kPtx);
    cuda_.cuModuleGetFunction(&increment_, module, "increment");
    cuda_.cuMemAlloc_v2(&number_, sizeof kFirst);
    cuda_.cuMemcpyHtoD_v2(number_, &kFirst, sizeof kFirst);
  }

  // More device memory in use, so that one sees it come and go.
  void hold(std::uint64_t bytes) {
    cuda::CUdeviceptr memory = 0;
    cuda_.cuMemAlloc_v2(&memory, bytes);
    cuda_.cuMemsetD8_v2(memory, 0x5a, bytes);
  }

  std::uint32_t increment() {
    void* params[] = {&number_};
    cuda_.cuLaunchKernel(increment_, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr);
    std::uint32_t value = 0;
    cuda_.cuMemcpyDtoH_v2(&value, number_, sizeof value);
    return value;
  }

 private:
  const CudaApi& cuda_;
  cuda::CUfunction increment_ = nullptr;
  cuda::CUdeviceptr number_ = 0;
};

[[noreturn]] void serve(std::uint16_t port, std::uint64_t gpu_memory) {
  DeviceCounter counter;
  if (gpu_memory > 0) counter.hold(gpu_memory);
  UdpServer server(port);
  std::printf("listening on 127.0.0.1:%d\n", server.port());
  std::fflush(stdout);
  for (;;)
    server.serve_one([&] { return std::to_string(counter.increment()) + "\n"; });
}

int ask_and_print(std::uint16_t port) {
  const auto answer = ask(port, kAskTimeoutSeconds);
  if (!answer) {
    die(1, "no answer from 127.0.0.1:" + std::to_string(port) + " within " +
               std::to_string(kAskTimeoutSeconds) +
               " s; is the counter suspended, or is something else listening there?");
  }
  std::fputs(answer->c_str(), stdout);
  return 0;
}

// Of a value its name alone: not its type, nor what excludes what.
class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string type = option->get_type_name();
    return type.empty() ? type : " " + type.substr(0, type.find(':'));
  }
};

}  // namespace
}  // namespace stasis::counter

int main(int argc, char** argv) {
  CLI::App app(
      "Counts in GPU memory: each UDP packet to 127.0.0.1 is answered with the next number, "
      "starting at 101.");
  std::uint16_t port = 0;
  std::uint16_t ask_port = 0;
  std::uint64_t gpu_memory = 0;
  app.formatter(std::make_shared<stasis::counter::HelpFormatter>());
  auto* port_option =
      app.add_option("--port", port, "UDP port to listen on; 0 takes a free one [0]")
          ->type_name("PORT");
  auto* ask_option =
      app.add_option("--ask", ask_port, "send one packet to this port and print the answer")
          ->type_name("PORT");
  auto* memory_option = app.add_option("--gpu-memory", gpu_memory,
                                       "GPU memory to hold besides, with K, M or G, e.g. 2G [0]")
                            ->type_name("SIZE")
                            ->transform(CLI::AsSizeValue(false));
  app.footer(
      "Examples:\n"
      "  stasis run --name counter -- stasis-counter --port 8123 --gpu-memory 64M\n"
      "  stasis-counter --ask 8123");
  ask_option->excludes(port_option)->excludes(memory_option);
  CLI11_PARSE(app, argc, argv);
  if (ask_option->count() > 0) return stasis::counter::ask_and_print(ask_port);
  stasis::counter::serve(port, gpu_memory);
}

// The same kernel for the simulated driver.
extern "C" void stasis_sim_kernel_increment(const stasis::sim::Launch&, void** args);
extern "C" void stasis_sim_kernel_increment(const stasis::sim::Launch&, void** args) {
  ++**static_cast<std::uint32_t**>(args[0]);
}
