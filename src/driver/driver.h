// The CUDA driver behind one narrow interface: its six checkpoint calls on another process, and
// what it knows about GPUs. The one real implementation loads libcuda.so.1 at run time.
//
// A Driver may be used from several threads at once, also for the same process. It knows nothing
// of the rest of the system: why the driver refused, in terms of the target, is told apart in
// src/driver/driver_errors.h.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/cuda_state.h"
#include "base/ids.h"
#include "base/interrupt.h"
#include "base/result.h"

namespace stasis {

// A value, or what the driver answered instead.
template <class T>
using DriverResult = tl::expected<T, DriverFailure>;

// No CUresult: what may stand in DriverFailure::number where the driver has not answered at all.
inline constexpr int kDriverNoAnswer = -1;     // in time; the call was ended
inline constexpr int kDriverCallLost = -2;     // because what made the call has ended
inline constexpr int kDriverInterrupted = -3;  // because a stop was requested

struct DriverInfo {
  int cuda_version = 0;         // as the driver reports it: 13000 for driver 580, 12080 for 570
  std::string driver_version;   // "580.159.04"; empty if unknown
  std::string library;          // the file or soname that was loaded
  bool simulated = false;       // the project's own simulated driver
  bool has_device_map = false;  // restore takes GPU pairs (580 and newer)
  bool has_jobs = false;        // cuda-checkpoint --launch-job is possible (590 and newer)
};

// GPU memory that one process uses on one GPU, in bytes.
struct GpuUse {
  GpuUuid gpu;
  std::uint64_t bytes = 0;
};
// Of all GPUs together.
std::uint64_t total_bytes(std::span<const GpuUse> uses);

// What is asked about a process: the four actions, and two questions.
enum class Action { kGetState, kGetRestoreThreadId, kLock, kCheckpoint, kRestore, kUnlock };
std::string_view action_name(Action action);  // "lock", "get-state", ...

class Driver {
 public:
  virtual ~Driver() = default;

  virtual const DriverInfo& info() const = 0;

  // Costs what the driver costs (0.1-0.2 ms on an H100, driver 580): no cuInit.
  virtual DriverResult<CudaState> state(Pid pid) = 0;
  virtual DriverResult<Tid> restore_thread_id(Pid pid) = 0;
  // Waits for submitted work and then holds back new calls. Zero waits for ever. A time-out is
  // NOT_READY (600) and leaves the process running.
  virtual DriverResult<void> lock(Pid pid, std::chrono::milliseconds timeout) = 0;
  // The same, given up when `interrupt` is requested: kDriverInterrupted, and the process may have
  // been locked at that very moment. A driver whose calls cannot be ended locks in ever longer
  // tries if there is no time-out, and else looks at `interrupt` beforehand only.
  virtual DriverResult<void> lock_unless(Pid pid, std::chrono::milliseconds timeout,
                                         const Interrupt& interrupt);
  virtual DriverResult<void> checkpoint(Pid pid) = 0;
  // Does ahead of time what the first restore() needs (95 ms on an H100, driver 580.159.04, when no
  // other process has the GPU open), to be called from another thread while something else takes
  // its time. Need not be called.
  virtual void prepare_restore() {}
  // `pairs` is empty, or a bijection over all GPUs that the driver sees. Initialises the driver in
  // this process, which `restore` needs unless persistence mode is on.
  virtual DriverResult<void> restore(Pid pid, std::span<const GpuPair> pairs) = 0;
  virtual DriverResult<void> unlock(Pid pid) = 0;

  // Name and text of a CUresult, for situations we recognise before asking the driver.
  virtual DriverFailure describe(int cu_result) const = 0;

  // All GPUs, in the driver's order, also those that CUDA_VISIBLE_DEVICES hides (through NVML).
  virtual Result<std::vector<Gpu>> gpus() = 0;
  // GPU memory per process, as far as NVML knows the numbers of processes (in some containers it
  // does not).
  virtual Result<std::map<Pid, std::vector<GpuUse>>> memory_by_process() = 0;
};

// What all GPUs have together, in bytes. Where that is unknown, more than any machine has.
std::uint64_t memory_of_all_gpus(Driver& driver);

// Loads the driver: `library` if not empty, else the environment's STASIS_LIBCUDA, else
// "libcuda.so.1". kDriverMissing, kDriverTooOld, kDriverUnsupported, each with its remedy.
Result<std::unique_ptr<Driver>> load_driver(const std::string& library = {});

}  // namespace stasis
