// Memory shared with another process by legacy CUDA IPC, a line per answer.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "calls.h"

namespace stasis::agent_test {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kBytes = 5 * kMiB + 777;
constexpr std::size_t kSmall = kMiB / 2;
constexpr unsigned kLazy = kIpcMemLazyEnablePeerAccess;

std::string to_hex(const CUipcMemHandle& handle) {
  std::string text;
  for (const char byte : handle.reserved) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    text += digits;
  }
  return text;
}

CUipcMemHandle from_hex(const std::string& text) {
  CUipcMemHandle handle{};
  for (std::size_t i = 0; i < sizeof handle.reserved; ++i)
    handle.reserved[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return handle;
}

bool same(const CUipcMemHandle& a, const CUipcMemHandle& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// How many of the bytes are not that one.
long long not_all(CUdeviceptr address, std::size_t bytes, unsigned char expected) {
  std::vector<unsigned char> host(bytes);
  if (CU(cuMemcpyDtoH_v2)(host.data(), address, bytes) != CUDA_SUCCESS) return -1;
  long long wrong = 0;
  for (const auto byte : host)
    wrong += byte != expected;
  return wrong;
}

long long ipc_capable(CUdeviceptr address) {
  int capable = 0;
  const auto result =
      CU(cuPointerGetAttribute)(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address);
  return result == CUDA_SUCCESS ? capable : -static_cast<int>(result);
}

int run_child(const CUipcMemHandle& handle, const char* bytes) {
  std::fflush(stdout);
  const std::string text = to_hex(handle);
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl("/proc/self/exe", "stasis-agent-calls", "ipc-child", text.c_str(), bytes, nullptr);
    ::_exit(127);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

}  // namespace

// Opens the memory, finds 1 in it, leaves 2.
void be_ipc_child(const char* text, const char* size) {
  std::printf("-- in another process\n");
  const std::size_t bytes = std::stoul(size);
  const auto handle = from_hex(text);
  CUdeviceptr address = 0;
  SAY(CU(cuIpcOpenMemHandle_v2)(&address, handle, kLazy));
  SAY(CU(cuInit)(0));
  SAY(CU(cuIpcOpenMemHandle_v2)(&address, handle, kLazy));
  CUcontext context = nullptr;
  SAY(CU(cuCtxCreate_v2)(&context, 0, 0));
  SAY(CU(cuIpcOpenMemHandle_v2)(&address, handle, 0));
  SAY(CU(cuIpcOpenMemHandle_v2)(nullptr, handle, kLazy));
  const auto opened = CU(cuIpcOpenMemHandle_v2)(&address, handle, kLazy);
  SAY(opened);
  if (opened != CUDA_SUCCESS) return;
  CUdeviceptr again = 0;
  SAY(CU(cuIpcOpenMemHandle_v2)(&again, handle, kLazy));
  SAY(again == address);
  CUdeviceptr base = 0;
  std::size_t range = 0;
  SAY(CU(cuMemGetAddressRange_v2)(&base, &range, address + 100));
  SAY(address - base);
  SAY(range);
  CUcontext owner = nullptr;
  SAY(CU(cuPointerGetAttribute)(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, address));
  SAY(owner == context);
  SAY(ipc_capable(address));
  CUipcMemHandle of_opened{};
  SAY(CU(cuIpcGetMemHandle)(&of_opened, address));
  SAY(not_all(address, bytes, 1));
  SAY(CU(cuMemsetD8_v2)(address, 2, bytes));
  SAY(CU(cuMemFree_v2)(address));
  SAY(CU(cuIpcCloseMemHandle)(address));
  SAY(not_all(address, bytes, 2));
  SAY(CU(cuIpcCloseMemHandle)(address));
  SAY(not_all(address, bytes, 2));
  SAY(CU(cuIpcCloseMemHandle)(address));
  // Once more, and left to the end of the context.
  SAY(CU(cuIpcOpenMemHandle_v2)(&address, handle, kLazy));
  SAY(not_all(address, bytes, 2));
  SAY(CU(cuCtxDestroy_v2)(context));
}

void try_ipc() {
  for (const std::size_t bytes : {kBytes, kSmall}) {
    std::printf("== shared by IPC: %zu bytes\n", bytes);
    CUdeviceptr address = 0;
    SAY(CU(cuMemAlloc_v2)(&address, bytes));
    SAY(ipc_capable(address));
    SAY(CU(cuMemsetD8_v2)(address, 1, bytes));
    CUipcMemHandle handle{};
    CUipcMemHandle again{};
    CUipcMemHandle within{};
    SAY(CU(cuIpcGetMemHandle)(&handle, address));
    SAY(CU(cuIpcGetMemHandle)(&again, address));
    SAY(same(handle, again));
    SAY(CU(cuIpcGetMemHandle)(&within, address + 4096));
    SAY(same(handle, within));
    SAY(CU(cuIpcGetMemHandle)(nullptr, address));
    SAY(CU(cuIpcGetMemHandle)(&again, 4096));
    CUdeviceptr opened = 0;
    SAY(CU(cuIpcOpenMemHandle_v2)(&opened, handle, kLazy));
    SAY(CU(cuIpcOpenMemHandle_v2)(&opened, CUipcMemHandle{}, kLazy));
    SAY(CU(cuIpcCloseMemHandle)(address));
    SAY(CU(cuIpcCloseMemHandle)(0));
    const auto size = std::to_string(bytes);
    SAY(run_child(handle, size.c_str()));
    SAY(not_all(address, bytes, 2));
    SAY(CU(cuMemsetD8_v2)(address, 1, bytes));
    SAY(run_child(handle, size.c_str()));
    SAY(CU(cuMemFree_v2)(address));
    SAY(CU(cuIpcGetMemHandle)(&again, address));
    SAY(run_child(handle, size.c_str()));
  }
}

}  // namespace stasis::agent_test
