// The driver's functions by dlsym, and a line of output per answer.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "abi/cuda_abi.h"

namespace stasis::agent_test {

inline void* driver_library() {
  static void* library = [] {
    void* opened = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (!opened) {
      std::printf("skipped: no driver\n");
      std::exit(77);
    }
    return opened;
  }();
  return library;
}

template <class Function>
Function* find(const char* name) {
  void* at = ::dlsym(driver_library(), name);
  if (!at) {
    std::printf("the driver has no %s\n", name);
    std::exit(1);
  }
  return reinterpret_cast<Function*>(at);
}

// The driver's function of that name.
#define CU(name) (::stasis::agent_test::find<::stasis::cuda::fn::name>(#name))

// Of those that not every driver has, whose types the caller declares in a namespace `fn`.
#define OTHER(name) (::stasis::agent_test::find<fn::name>(#name))
inline bool has(const char* name) { return ::dlsym(driver_library(), name) != nullptr; }

inline void say(const std::string& what, long long value) {
  std::printf("%s: %lld\n", what.c_str(), value);
}
// A result, or what was found: both the same with the agent and without.
#define SAY(call) ::stasis::agent_test::say(#call, static_cast<long long>(call))

// Written, read back: how many bytes are wrong.
long long spoiled(cuda::CUdeviceptr address, std::size_t bytes, unsigned char with);
// All that there is to ask about a pointer into memory that begins at `begin`.
void ask_about(const std::string& what, cuda::CUdeviceptr pointer, cuda::CUdeviceptr begin,
               cuda::CUcontext context);
// Where nothing was asked for, though there may be something.
void ask_behind(cuda::CUdeviceptr pointer);
// A dma-buf, for other devices. Where there is one, the memory stays from then on.
void ask_for_dma_buf(cuda::CUdeviceptr address, std::size_t size);

void try_managed(cuda::CUcontext context);
void try_pools(cuda::CUcontext context);
void try_pool_in_use();
void be_pool_in_use();
void try_vmm();
void try_ipc();
void be_ipc_child(const char* text, const char* size);

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

}  // namespace stasis::agent_test
