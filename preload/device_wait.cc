#include "device_wait.h"

#include <sys/prctl.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "abi/futex.h"
#include "intercept.h"
#include "thread.h"

namespace stasis::preload {
namespace {

// Waits for all devices, in a thread that may be left behind: what it waits for may need threads
// that the gate holds.
struct DeviceWait {
  std::vector<cuda::CUcontext> contexts;
  std::atomic<std::uint32_t> done{0};
  std::atomic<std::uint32_t> users{2};  // the last frees it
  Outcome outcome;

  void leave() {
    if (users.fetch_sub(1) == 1) delete this;
  }
  static void* run(void* argument) {
    // Not the agent's, which it would inherit: this one may be left behind in the driver.
    ::prctl(PR_SET_NAME, "stasis-wait");
    auto* self = static_cast<DeviceWait*>(argument);
    for (auto* context : self->contexts) {
      // Given up: the gate is open again, and the next context may be gone by now.
      if (self->users.load() == 1) break;
      auto result = driver().cuCtxSetCurrent(context);
      // One that was destroyed meanwhile has nothing to wait for.
      if (result != cuda::CUDA_SUCCESS) continue;
      result = driver().cuCtxSynchronize();
      if (result != cuda::CUDA_SUCCESS) {
        self->outcome = {result, "cuCtxSynchronize"};
        break;
      }
    }
    driver().cuCtxSetCurrent(nullptr);
    self->done.store(1, std::memory_order_release);
    futex::wake_all(self->done, false);
    self->leave();
    return nullptr;
  }
};

}  // namespace

Waited wait_for_devices(const Timeout& timeout, Outcome& outcome) {
  auto* wait = new DeviceWait;
  wait->contexts = known_contexts();
  if (!start_thread(&DeviceWait::run, wait)) {
    delete wait;
    outcome = {cuda::CUDA_ERROR_OPERATING_SYSTEM, "no thread to be had"};
    return Waited::kFailed;
  }
  while (!wait->done.load(std::memory_order_acquire)) {
    if (timeout.over()) break;
    futex::wait(wait->done, 0, false, timeout.poll_interval());
  }
  auto waited = Waited::kTimeout;
  if (wait->done.load(std::memory_order_acquire)) {
    outcome = wait->outcome;
    waited = outcome.ok() ? Waited::kDone : Waited::kFailed;
  }
  wait->leave();
  return waited;
}

}  // namespace stasis::preload
