// A driver in memory, for tests: processes with states, failures on demand, and a record of what
// was asked. It obeys the state machine of the real one and counts the calls that break it, so that
// a test can prove that none was made. Thread-safe.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "driver/driver.h"
#include "proc/procfs.h"

namespace stasis {

class FakeDriver final : public Driver {
 public:
  struct Call {
    Action action;
    Pid pid;
    std::chrono::milliseconds timeout{0};
    std::vector<GpuPair> pairs;
  };

  DriverInfo driver_info{.cuda_version = 13000,
                         .driver_version = "580.0",
                         .library = "fake",
                         .simulated = false,
                         .has_device_map = true,
                         .has_jobs = false};
  std::vector<Gpu> all_gpus;
  std::map<Pid, std::vector<GpuUse>> use;
  // Called before each call is answered, without the lock held.
  std::function<void(const Call&)> on_call;

  void add(Pid pid, CudaState state = CudaState::kRunning) {
    const std::scoped_lock lock(mutex_);
    states_[pid] = state;
  }
  void remove(Pid pid) {
    const std::scoped_lock lock(mutex_);
    states_.erase(pid);
  }
  CudaState state_of(Pid pid) const {
    const std::scoped_lock lock(mutex_);
    return states_.at(pid);
  }

  // The nth call from now (1 is the next) answers `cu_result` and does nothing.
  void fail_nth(std::size_t nth, int cu_result) {
    const std::scoped_lock lock(mutex_);
    failures_[calls_.size() + nth] = cu_result;
  }
  // Every call of this kind, of one process or of all, answers so, until forgiven.
  void fail_always(Action action, int cu_result) {
    const std::scoped_lock lock(mutex_);
    always_[action] = cu_result;
  }
  void fail_always(Action action, Pid pid, int cu_result) {
    const std::scoped_lock lock(mutex_);
    always_for_[{action, pid}] = cu_result;
  }
  void forgive() {
    const std::scoped_lock lock(mutex_);
    failures_.clear();
    always_.clear();
    always_for_.clear();
  }

  // calls() and what follows: only while no thread calls the driver.
  const std::vector<Call>& calls() const { return calls_; }
  // The calls that change something, in order.
  std::vector<Action> actions() const {
    std::vector<Action> out;
    for (const Call& call : calls_) {
      if (call.action != Action::kGetState && call.action != Action::kGetRestoreThreadId) {
        out.push_back(call.action);
      }
    }
    return out;
  }
  // Calls in a state that does not allow them.
  int illegal_calls() const { return illegal_calls_; }
  void forget_calls() {
    calls_.clear();
    illegal_calls_ = 0;
  }

  const DriverInfo& info() const override { return driver_info; }
  DriverResult<CudaState> state(Pid pid) override {
    std::optional<CudaState> seen;
    if (auto done = act({Action::kGetState, pid, {}, {}}, std::nullopt, CudaState::kRunning, &seen);
        !done) {
      return tl::unexpected<DriverFailure>(done.error());
    }
    return *seen;
  }
  DriverResult<Tid> restore_thread_id(Pid pid) override {
    if (auto done = act({Action::kGetRestoreThreadId, pid, {}, {}}, std::nullopt, {}); !done) {
      return tl::unexpected<DriverFailure>(done.error());
    }
    return Tid{pid.value};  // its main thread
  }
  DriverResult<void> lock(Pid pid, std::chrono::milliseconds timeout) override {
    return act({Action::kLock, pid, timeout, {}}, CudaState::kRunning, CudaState::kLocked);
  }
  DriverResult<void> checkpoint(Pid pid) override {
    return act({Action::kCheckpoint, pid, {}, {}}, CudaState::kLocked, CudaState::kCheckpointed);
  }
  DriverResult<void> restore(Pid pid, std::span<const GpuPair> pairs) override {
    return act({Action::kRestore, pid, {}, {pairs.begin(), pairs.end()}}, CudaState::kCheckpointed,
               CudaState::kLocked);
  }
  DriverResult<void> unlock(Pid pid) override {
    return act({Action::kUnlock, pid, {}, {}}, CudaState::kLocked, CudaState::kRunning);
  }

  // The driver's own words.
  DriverFailure describe(int cu_result) const override {
    static const std::map<int, std::pair<std::string, std::string>> kTexts = {
        {1, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
        {2, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
        {3, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
        {304,
         {"CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"}},
        {401,
         {"CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"}},
        {600, {"CUDA_ERROR_NOT_READY", "device not ready"}},
        {800, {"CUDA_ERROR_NOT_PERMITTED", "operation not permitted"}},
        {801, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}}};
    const auto it = kTexts.find(cu_result);
    if (it == kTexts.end()) return {cu_result, "CUDA_ERROR_UNKNOWN", "unknown error"};
    return {cu_result, it->second.first, it->second.second};
  }

  Result<std::vector<Gpu>> gpus() override { return all_gpus; }
  Result<std::map<Pid, std::vector<GpuUse>>> memory_by_process() override { return use; }

 private:
  DriverResult<void> act(Call call, std::optional<CudaState> from, CudaState to,
                         std::optional<CudaState>* seen = nullptr) {
    if (on_call) on_call(call);
    const std::scoped_lock lock(mutex_);
    const Pid pid = call.pid;
    const Action action = call.action;
    calls_.push_back(std::move(call));
    if (const auto it = failures_.find(calls_.size()); it != failures_.end()) {
      return tl::unexpected<DriverFailure>(describe(it->second));
    }
    if (const auto it = always_.find(action); it != always_.end()) {
      return tl::unexpected<DriverFailure>(describe(it->second));
    }
    if (const auto it = always_for_.find({action, pid}); it != always_for_.end()) {
      return tl::unexpected<DriverFailure>(describe(it->second));
    }
    const auto state = states_.find(pid);
    if (state == states_.end()) return tl::unexpected<DriverFailure>(describe(3));
    if (seen != nullptr) *seen = state->second;
    if (!from) return {};
    if (state->second != *from) {
      ++illegal_calls_;
      return tl::unexpected<DriverFailure>(describe(401));
    }
    state->second = to;
    return {};
  }

  mutable std::mutex mutex_;
  std::map<Pid, CudaState> states_;
  std::vector<Call> calls_;
  std::map<std::size_t, int> failures_;  // by the number of the call
  std::map<Action, int> always_;
  std::map<std::pair<Action, Pid>, int> always_for_;
  int illegal_calls_ = 0;
};

}  // namespace stasis
