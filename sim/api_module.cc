// Modules, functions, launches. A kernel is a function of the program; see stasis_sim_kernel.h.
#include <dlfcn.h>

#include <cstring>
#include <ctime>
#include <memory>

#include "sim/api.h"
#include "sim/driver.h"
#include "sim/kernels.h"
#include "sim/objects.h"
#include "sim/ptx.h"
#include "sim/stasis_sim_kernel.h"

namespace stasis::sim {

struct Function {
  const PtxKernel* kernel = nullptr;
  KernelFunction* code = nullptr;
  int dynamic_shared_bytes = 49152;
};

struct Module {
  Context* context = nullptr;
  PtxModule text;
  std::vector<Address> managed;  // of each of the text's managed variables
  std::vector<std::unique_ptr<Function>> functions;
};

void unload_modules(Driver& driver, Context& context) {
  std::lock_guard lock(driver.mutex);
  for (auto* module : context.modules) {
    driver.modules.erase(module);
    delete module;
  }
  context.modules.clear();
}

}  // namespace stasis::sim

using namespace stasis::cuda;  // NOLINT: this file is the driver's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

namespace {

// A managed variable is in memory of the driver's own, which makes all of the process refused to
// the checkpoint (801, driver 580.159.04) until the module is unloaded.
CUresult make_variables(Driver& driver, Context& context, Module& module) {
  for (const PtxVariable& variable : module.text.managed) {
    Address address = 0;
    const auto rc = driver.memory.allocate_host(Kind::kManaged, context.device, variable.size,
                                                &context, CU_MEM_ATTACH_GLOBAL, address);
    if (rc != CUDA_SUCCESS) {
      for (const Address made : module.managed)
        driver.memory.free(made);
      return rc;
    }
    std::memset(reinterpret_cast<void*>(address), 0, variable.size);
    module.managed.push_back(address);
  }
  return CUDA_SUCCESS;
}

Module* find_module(Driver& driver, CUmodule handle) {
  auto* module = reinterpret_cast<Module*>(handle);
  std::lock_guard lock(driver.mutex);
  return driver.modules.contains(module) ? module : nullptr;
}

Function* find_function(Driver& driver, CUfunction handle) {
  auto* wanted = reinterpret_cast<Function*>(handle);
  std::lock_guard lock(driver.mutex);
  for (auto* module : driver.modules) {
    for (auto& function : module->functions) {
      if (function.get() == wanted) return wanted;
    }
  }
  return nullptr;
}

// Values of a launch, copied at the call, laid out as the PTX says.
struct Arguments {
  std::vector<char> buffer;
  std::vector<void*> pointers;
};

bool read_extra(void** extra, const PtxKernel& kernel, Arguments& out) {
  const void* buffer = nullptr;
  std::size_t size = 0;
  for (; *extra != kLaunchParamEnd; extra += 2) {
    if (extra[0] == kLaunchParamBufferPointer)
      buffer = extra[1];
    else if (extra[0] == kLaunchParamBufferSize)
      size = *static_cast<std::size_t*>(extra[1]);
    else
      return false;
  }
  if (!buffer || size < kernel.argument_bytes) return false;
  std::memcpy(out.buffer.data(), buffer, kernel.argument_bytes);
  return true;
}

bool read_arguments(const PtxKernel& kernel, void** params, void** extra, Arguments& out) {
  out.buffer.resize(kernel.argument_bytes);
  if (params && extra) return false;
  if (!kernel.parameters.empty()) {
    if (params) {
      for (std::size_t i = 0; i < kernel.parameters.size(); ++i) {
        const auto& parameter = kernel.parameters[i];
        std::memcpy(out.buffer.data() + parameter.offset, params[i], parameter.size);
      }
    } else if (!extra || !read_extra(extra, kernel, out)) {
      return false;
    }
  }
  for (const auto& parameter : kernel.parameters) {
    out.pointers.push_back(out.buffer.data() + parameter.offset);
  }
  return true;
}

// Of the addresses that a kernel is given. The real driver says so after the launch.
bool may_use_all(const Driver& driver, const PtxKernel& kernel, const Arguments& arguments,
                 int device) {
  for (std::size_t i = 0; i < kernel.parameters.size(); ++i) {
    Address at = 0;
    if (kernel.parameters[i].size != sizeof at) continue;
    std::memcpy(&at, arguments.pointers[i], sizeof at);
    if (!driver.memory.may_use(at, device)) return false;
  }
  return true;
}

bool legal_shape(const Launch& launch) {
  const auto& [grid, block] = std::pair(launch.grid, launch.block);
  const auto threads = std::uint64_t{block.x} * block.y * block.z;
  return grid.x && grid.y && grid.z && threads >= 1 && threads <= 1024 && block.z <= 64 &&
         grid.x <= 2147483647 && grid.y <= 65535 && grid.z <= 65535;
}

std::int64_t realtime_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

// Driver 580.159.04 cannot switch a GPU away from a kernel of a context that it has restored: it
// waits for some time, reports Xid 109 and ends the program's work
// (docs/results/2026-11-23-restored-kernels.md).
void lose_if_switched(Driver& driver, Context& context, std::int64_t begin) {
  const std::int64_t end = realtime_ns();
  const auto limit = static_cast<std::int64_t>(driver.config.switch_ns);
  if (end - begin < limit) return;
  const std::int64_t at = last_switch(driver.memory.dir(), driver.gpu(context.device).uuid);
  if (at > begin && end - at >= limit) context.failure = CUDA_ERROR_LAUNCH_FAILED;
}

CUresult launch_kernel(CUfunction handle, Launch launch, CUstream stream_handle, void** params,
                       void** extra) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    auto* function = find_function(driver, handle);
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    auto* stream = find_stream(driver, context, stream_handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!legal_shape(launch)) return CUDA_ERROR_INVALID_VALUE;
    if (launch.shared_bytes > static_cast<unsigned>(function->dynamic_shared_bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    auto arguments = std::make_shared<Arguments>();
    if (!read_arguments(*function->kernel, params, extra, *arguments)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    launch.device = stream->context->device;
    if (!may_use_all(driver, *function->kernel, *arguments, launch.device))
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    stream->context->submit(
        *stream, [&driver, context = stream->context, code = function->code, launch, arguments] {
          const std::int64_t begin = realtime_ns();
          code(launch, arguments->pointers.data());
          if (context->restored) lose_if_switched(driver, *context, begin);
        });
    return CUDA_SUCCESS;
  });
}

}  // namespace

CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!out || !image) return CUDA_ERROR_INVALID_VALUE;
    if (auto rc = suffer(driver.next_plan(FaultAction::kModule)); rc != CUDA_SUCCESS) return rc;
    auto module = std::make_unique<Module>();
    module->context = &context;
    // A compiled image (ELF, fat binary) has no PTX text at its start.
    const auto* text = static_cast<const char*>(image);
    if (!std::memcmp(text, "\177ELF", 4)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    std::uint32_t magic;
    std::memcpy(&magic, text, sizeof magic);
    if (magic == 0xba55ed50) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (!parse_ptx(text, module->text)) return CUDA_ERROR_INVALID_IMAGE;
    if (const auto rc = make_variables(driver, context, *module); rc != CUDA_SUCCESS) return rc;
    std::lock_guard lock(driver.mutex);
    context.modules.insert(module.get());
    driver.modules.insert(module.get());
    *out = reinterpret_cast<CUmodule>(module.release());
    return CUDA_SUCCESS;
  });
}

CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned int, CUjit_option*, void**) {
  return cuModuleLoadData(out, image);
}

CUresult cuModuleUnload(CUmodule handle) {
  return in_context([&](Driver& driver, Context&) -> CUresult {
    auto* module = find_module(driver, handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    module->context->synchronize();
    for (const Address variable : module->managed)
      driver.memory.free(variable);
    std::lock_guard lock(driver.mutex);
    module->context->modules.erase(module);
    driver.modules.erase(module);
    delete module;
    return CUDA_SUCCESS;
  });
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  return in_context([&](Driver& driver, Context&) -> CUresult {
    if (!out || !name || !*name) return CUDA_ERROR_INVALID_VALUE;
    auto* module = find_module(driver, handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    for (const auto& kernel : module->text.kernels) {
      if (kernel.name != name) continue;
      const auto symbol = "stasis_sim_kernel_" + kernel.name;
      auto* code = reinterpret_cast<KernelFunction*>(::dlsym(RTLD_DEFAULT, symbol.c_str()));
      if (!code) code = built_in_kernel(kernel.name);
      if (!code) return CUDA_ERROR_NOT_FOUND;
      auto function = std::make_unique<Function>();
      function->kernel = &kernel;
      function->code = code;
      std::lock_guard lock(driver.mutex);
      *out = reinterpret_cast<CUfunction>(function.get());
      module->functions.push_back(std::move(function));
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
  });
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, std::size_t* bytes, CUmodule handle,
                              const char* name) {
  return in_context([&](Driver& driver, Context&) -> CUresult {
    if (!name) return CUDA_ERROR_INVALID_VALUE;
    const auto* module = find_module(driver, handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    for (std::size_t i = 0; i < module->managed.size(); ++i) {
      const PtxVariable& variable = module->text.managed[i];
      if (variable.name != name) continue;
      if (address) *address = module->managed[i];
      if (bytes) *bytes = variable.size;
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;  // other variables of a module are not simulated
  });
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  return gated([&](Driver& driver) -> CUresult {
    auto* function = find_function(driver, handle);
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    switch (attribute) {
      case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = 1024;
        break;
      case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = 32;
        break;
      case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *value = 90;
        break;
      case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = function->dynamic_shared_bytes;
        break;
      case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        *value = -1;
        break;
      case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
      case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
      case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
        *value = 0;
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  return gated([&](Driver& driver) -> CUresult {
    auto* function = find_function(driver, handle);
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_SUCCESS;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
        value > 232448) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    function->dynamic_shared_bytes = value;
    return CUDA_SUCCESS;
  });
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                        unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                        unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                        void** params, void** extra) {
  const Launch launch{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, 0};
  return launch_kernel(function, launch, stream, params, extra);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** params,
                          void** extra) {
  if (!c) return CUDA_ERROR_INVALID_VALUE;
  const Launch launch{{c->gridDimX, c->gridDimY, c->gridDimZ},
                      {c->blockDimX, c->blockDimY, c->blockDimZ},
                      c->sharedMemBytes,
                      0};
  return launch_kernel(function, launch, c->hStream, params, extra);
}
