// The driver in this process: what cuInit makes, and the way every API function comes in.
//
// Ownership: one Driver, made by the first cuInit and never destroyed, because threads of the
// program may be inside it until the very end. A forked child has none and cannot make one.
// Threads: see the members.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <vector>

#include "sim/config.h"
#include "sim/context.h"
#include "sim/control.h"
#include "sim/faults.h"
#include "sim/gate.h"
#include "sim/memory.h"

namespace stasis::sim {

struct Pool {
  int device = 0;
  bool is_default = false;
  std::uint64_t attributes[9] = {0, 1, 1, 1};  // by CUmemPool_attribute
  std::uint64_t max_size = 0;                  // 0: none
  std::set<int> others;                        // devices that may access it
};

struct Device {
  int slot = 0;  // of Memory
  // Guarded by Driver::mutex.
  Context* primary = nullptr;
  int primary_references = 0;
  unsigned primary_flags = 0;
  Pool default_pool;
  Pool* current_pool = nullptr;
};

struct Driver {
  explicit Driver(Config c) : config(std::move(c)), memory(config) {}

  Config config;  // of the process's start; GPUs may have been exchanged since (Memory::gpu)
  Gate gate;
  Outstanding outstanding;
  Memory memory;
  std::vector<Device> devices;  // by ordinal

  // Guards the sets of live handles and the devices' contexts.
  std::mutex mutex;
  std::set<Context*> contexts;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::set<Module*> modules;
  std::set<Pool*> pools;
  std::map<const void*, std::shared_ptr<Graph>> graphs;  // and their executables, by handle

  std::vector<Fault> faults;  // STASIS_SIM_FAULTS of this process, as of cuInit
  std::array<std::atomic<std::uint64_t>, kOwnCalls> own_calls{};  // how often each was made

  // The faults for one more call of the process itself.
  Plan next_plan(FaultAction own_call, int gpu = kAnyGpu);

  const GpuSpec& gpu(int ordinal) const { return memory.gpu(devices[ordinal_index(ordinal)].slot); }
  bool valid_device(int ordinal) const {
    return ordinal >= 0 && ordinal < static_cast<int>(devices.size());
  }
  static std::size_t ordinal_index(int ordinal) { return static_cast<std::size_t>(ordinal); }
};

// Null before cuInit and in a forked child.
Driver* live_driver();
cuda::CUresult start_driver();      // cuInit
cuda::CUresult not_started_code();  // why there is none

// "Device files": a descriptor that CRIU refuses to dump, held while the process has the GPU. It
// stands for /dev/nvidia*; see docs/simulated-driver.md.
void hold_device_file();
// A descriptor of what CRIU cannot dump; negative if there is none.
int open_undumpable();
void drop_device_file();

// The control block of this process.
ControlBlock& control_block();
std::atomic<int>& server_end_fd();  // the end of the socket pair that the restore thread reads
bool start_restore_thread(Driver& driver);

// The way in for API functions that the driver's lock does not stop: they answer while the process
// is locked, and so must leave everything alone that a checkpoint or restore touches.
template <class F>
cuda::CUresult passing(F&& body) {
  Driver* driver = live_driver();
  if (!driver) return not_started_code();
  try {
    return body(*driver);
  } catch (const std::bad_alloc&) {
    return cuda::CUDA_ERROR_OUT_OF_MEMORY;
  }
}

// The way in for API functions that wait while the process is locked.
template <class F>
cuda::CUresult gated(F&& body) {
  return passing([&](Driver& driver) -> cuda::CUresult {
    struct Pass {
      explicit Pass(Gate& g) : gate(g) { gate.enter(); }
      ~Pass() { gate.leave(); }
      Gate& gate;
    } pass(driver.gate);
    return body(driver);
  });
}

// For functions that need a current context, inside either of the two.
template <class F>
cuda::CUresult with_context(Driver& driver, F&& body) {
  Context* context = CurrentContext::get();
  if (!context) return cuda::CUDA_ERROR_INVALID_CONTEXT;
  if (context->destroyed) return cuda::CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (const auto failure = context->failure.load(); failure != cuda::CUDA_SUCCESS) return failure;
  return body(driver, *context);
}

template <class F>
cuda::CUresult in_context(F&& body) {
  return gated([&](Driver& driver) { return with_context(driver, body); });
}

template <class F>
cuda::CUresult in_context_passing(F&& body) {
  return passing([&](Driver& driver) { return with_context(driver, body); });
}

// A call has waited for work: pools give back what is more than their thresholds. Waits while the
// process is locked, but only if there is something to give back.
void trim_pools(Driver& driver);

// What a fault makes of a call of the process itself: waits, ends the process, or says what to
// return. A fault that hangs never comes back.
cuda::CUresult suffer(const Plan& plan);

// A stream handle's stream; the default streams belong to the current context.
Stream* find_stream(Driver& driver, Context& context, cuda::CUstream handle);

}  // namespace stasis::sim
