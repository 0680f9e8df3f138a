#include "examples/common/cuda_api.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace stasis::programs {
namespace {

// Never closed: the driver's own threads outlive any owner.
void* g_library = nullptr;
IfAbsent g_if_absent = IfAbsent::kFail;

// "cuMemAlloc_v2" -> "cuMemAlloc": cuGetProcAddress takes names without their version.
std::string unversioned(const std::string& symbol) {
  const auto at = symbol.rfind("_v");
  return at == std::string::npos ? symbol : symbol.substr(0, at);
}

void* look_up(Lookup lookup, const char* symbol, int version) {
  if (lookup != Lookup::kDlsym) {
    auto* get =
        reinterpret_cast<cuda::fn::cuGetProcAddress_v2*>(dlsym(g_library, "cuGetProcAddress_v2"));
    void* address = nullptr;
    auto flags = cuda::CU_GET_PROC_ADDRESS_DEFAULT;
    if (lookup == Lookup::kPerThreadDefaultStream) {
      flags = cuda::CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
      version = std::max(version, 7000);  // which has such functions first
    }
    if (get &&
        get(unversioned(symbol).c_str(), &address, version, flags, nullptr) == cuda::CUDA_SUCCESS) {
      return address;
    }
  }
  return dlsym(g_library, symbol);
}

}  // namespace

void die(int status, const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, message.c_str());
  std::fflush(stderr);
  _exit(status);
}

void die_absent(const std::string& what) {
  if (g_if_absent == IfAbsent::kSkip) die(kExitSkipped, "skipped: " + what);
  die(1, what);
}

std::string describe(cuda::CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (g_library) {
    auto* get_name =
        reinterpret_cast<cuda::fn::cuGetErrorName*>(dlsym(g_library, "cuGetErrorName"));
    auto* get_text =
        reinterpret_cast<cuda::fn::cuGetErrorString*>(dlsym(g_library, "cuGetErrorString"));
    if (get_name) get_name(result, &name);
    if (get_text) get_text(result, &text);
  }
  std::string out = name ? name : "CUresult";
  out += " (" + std::to_string(static_cast<unsigned>(result)) + ")";
  if (text) out += std::string(": ") + text;
  return out;
}

void internal::die_of_call(const char* symbol, cuda::CUresult result) {
  if (g_library && !dlsym(g_library, symbol)) {
    die_absent(std::string("this CUDA driver has no function ") + symbol);
  }
  const std::string what = std::string(symbol) + " failed: " + describe(result);
  if (result == cuda::CUDA_ERROR_NO_DEVICE) die_absent(what);
  die(1, what);
}

const CudaApi& CudaApi::load(Lookup lookup, IfAbsent absent) {
  static const CudaApi api = [lookup, absent] {
    g_if_absent = absent;
    g_library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!g_library) {
      const char* why = dlerror();
      die_absent(std::string("no CUDA driver: ") + (why ? why : "cannot load libcuda.so.1") +
                 "; install NVIDIA's driver, or point LD_LIBRARY_PATH at the folder of the "
                 "simulated one");
    }
    CudaApi loaded;
#define STASIS_PROGRAMS_BIND(symbol, version) loaded.symbol.bind(look_up(lookup, #symbol, version));
    STASIS_PROGRAMS_CUDA_SYMBOLS(STASIS_PROGRAMS_BIND)
#undef STASIS_PROGRAMS_BIND
    loaded.simulated = dlsym(g_library, cuda::kSimulatedMarkerSymbol) != nullptr;
    return loaded;
  }();
  return api;
}

void* CudaApi::find(const char* symbol) { return g_library ? dlsym(g_library, symbol) : nullptr; }

}  // namespace stasis::programs
