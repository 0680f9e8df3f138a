// A libcuda.so.1 that does nothing but record what it was asked and answer what the test says, for
// the tests of src/driver. Built twice: FAKE_WITHOUT_CHECKPOINT leaves the checkpoint calls out.
#include "tests/fakes/fake_libcuda.h"

#include <cstring>

using namespace stasis::cuda;  // NOLINT(google-build-using-namespace): the names are the driver's

#define FAKE_EXPORT __attribute__((visibility("default")))

extern "C" {

extern FAKE_EXPORT stasis::fakes::FakeLibcuda fake_libcuda;
stasis::fakes::FakeLibcuda fake_libcuda;

FAKE_EXPORT CUresult cuInit(unsigned int /*flags*/) {
  ++fake_libcuda.inits;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = fake_libcuda.cuda_version;
  return fake_libcuda.version_result;
}

FAKE_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_ILLEGAL_STATE ? "CUDA_ERROR_ILLEGAL_STATE" : nullptr;
  return *name == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_ILLEGAL_STATE
              ? "the operation cannot be performed in the present state"
              : nullptr;
  return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

#ifndef FAKE_WITHOUT_CHECKPOINT

namespace {

CUresult called(const char* name, int pid) {
  fake_libcuda.calls.emplace_back(name);
  fake_libcuda.pid = pid;
  return fake_libcuda.result;
}

void check_zero(const void* begin, const void* end) {
  for (const char* byte = static_cast<const char*>(begin); byte != end; ++byte) {
    if (*byte != 0) fake_libcuda.reserved_zero = false;
  }
}

}  // namespace

FAKE_EXPORT CUresult cuCheckpointProcessGetState(int pid, CUprocessState* state) {
  std::memcpy(state, &fake_libcuda.state, sizeof *state);
  return called("state", pid);
}

FAKE_EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int* tid) {
  *tid = pid + 1;
  return called("tid", pid);
}

FAKE_EXPORT CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs* args) {
  fake_libcuda.timeout_ms = args->timeoutMs;
  check_zero(&args->reserved0, args + 1);
  return called("lock", pid);
}

FAKE_EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs* args) {
  check_zero(args, args + 1);
  return called("checkpoint", pid);
}

FAKE_EXPORT CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs* args) {
  fake_libcuda.pairs.assign(args->gpuPairs, args->gpuPairs + args->gpuPairsCount);
  if (args->gpuPairsCount == 0) check_zero(args, args + 1);
  check_zero(&args->gpuPairsCount + 1, args + 1);
  return called("restore", pid);
}

FAKE_EXPORT CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs* args) {
  check_zero(args, args + 1);
  return called("unlock", pid);
}

#endif

}  // extern "C"
