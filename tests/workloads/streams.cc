// Several streams at once: kernels, copies, events between streams and host functions, all queued
// before anything is waited for, so that a checkpoint meets work in flight.
#include <array>
#include <atomic>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::size_t kStreams = 4;
constexpr int kSteps = 6;
constexpr std::uint64_t kStreamsSize = 1u << 20;
constexpr std::uint32_t kStreamsBusyMs = 2;

// Counts the host functions of one stream, which the driver must call once each and in order.
struct HostCalls {
  std::atomic<std::uint64_t> count{0};
  std::atomic<bool> out_of_order{false};
};

struct HostCall {
  HostCalls* calls;
  std::uint64_t number;
};

void on_host(void* data) {
  auto* call = static_cast<HostCall*>(data);
  if (call->calls->count.fetch_add(1) != call->number) call->calls->out_of_order.store(true);
}

// A stream with its data, and what the data must be, computed on the CPU.
struct Lane {
  cuda::CUstream stream = nullptr;
  cuda::CUevent event = nullptr;
  cuda::CUdeviceptr data = 0;
  cuda::CUdeviceptr scratch = 0;
  cuda::CUdeviceptr key = 0;
  std::uint64_t* key_host = nullptr;  // pinned
  std::uint64_t* answer = nullptr;    // pinned
  std::vector<std::uint64_t> model;
  HostCalls calls;
  std::array<HostCall, kSteps> call_slots;
};

class Lanes {
 public:
  explicit Lanes(Run& run)
      : run_(run),
        gpu_(Gpu::primary(initialised_driver(run.options()), 0)),
        words_(run.size_or(kStreamsSize) / kStreams / 2 / sizeof(std::uint64_t)),
        spins_(gpu_.allocate(sizeof(std::uint64_t))) {
    gpu_.cuda().cuMemsetD8_v2(spins_, 0, sizeof(std::uint64_t));
    for (std::size_t k = 0; k < kStreams; ++k)
      set_up(lanes_[k], run.seed(0, k));
  }

  void round() {
    for (Lane& lane : lanes_) {
      lane.calls.count = 0;
      lane.calls.out_of_order = false;
    }
    for (int step = 0; step < kSteps; ++step) {
      for (std::size_t k = 0; k < kStreams; ++k)
        queue_step(k, step);
    }
    for (Lane& lane : lanes_) {
      gpu_.cuda().cuMemcpyDtoHAsync_v2(lane.answer, lane.data, bytes(), lane.stream);
    }
    for (int step = 0; step < kSteps; ++step) {
      for (std::size_t k = 0; k < kStreams; ++k)
        model_step(k, step);
    }
    for (std::size_t k = 0; k < kStreams; ++k) {
      gpu_.cuda().cuStreamSynchronize(lanes_[k].stream);
      verify(k);
    }
  }

  void verify_spins() {
    std::uint64_t spins = 0;
    gpu_.cuda().cuMemcpyDtoH_v2(&spins, spins_, sizeof spins);
    const std::uint64_t wanted = run_.round() * kStreams * kSteps;
    if (spins != wanted) {
      run_.mismatch("the long kernel ran " + std::to_string(spins) + " times instead of " +
                    std::to_string(wanted));
    }
  }

 private:
  std::uint64_t bytes() const { return words_ * sizeof(std::uint64_t); }
  std::uint64_t key_of(std::size_t k, int step) const {
    return run_.seed(run_.round(), 100 * k + static_cast<std::size_t>(step));
  }
  // Which stream's data a step takes in; only streams whose step was queued before.
  static std::size_t neighbour(std::size_t k) { return (k + kStreams - 1) % kStreams; }

  void set_up(Lane& lane, std::uint64_t seed) {
    const auto& cuda = gpu_.cuda();
    lane.stream = gpu_.stream();
    cuda.cuEventCreate(&lane.event, cuda::CU_EVENT_DISABLE_TIMING);
    lane.data = gpu_.allocate(bytes());
    lane.scratch = gpu_.allocate(bytes());
    lane.key = gpu_.allocate(kSteps * sizeof(std::uint64_t));
    void* pinned = nullptr;
    cuda.cuMemAllocHost_v2(&pinned, kSteps * sizeof(std::uint64_t));
    lane.key_host = static_cast<std::uint64_t*>(pinned);
    cuda.cuMemAllocHost_v2(&pinned, bytes());
    lane.answer = static_cast<std::uint64_t*>(pinned);
    gpu_.kernels().fill(lane.stream, lane.data, words_, seed);
    cuda.cuEventRecord(lane.event, lane.stream);
    cuda.cuStreamSynchronize(lane.stream);
    lane.model.resize(words_);
    for (std::uint64_t i = 0; i < words_; ++i)
      lane.model[i] = word(i, seed);
  }

  // Stream k takes its neighbour's data as the neighbour's last queued step leaves it, and must not
  // be overtaken by the neighbour's next step: hence the waits in both directions.
  void queue_step(std::size_t k, int step) {
    const auto& cuda = gpu_.cuda();
    Lane& lane = lanes_[k];
    Lane& from = lanes_[neighbour(k)];
    const std::uint64_t key_offset = static_cast<std::uint64_t>(step) * sizeof(std::uint64_t);
    lane.key_host[step] = key_of(k, step);
    gpu_.kernels().spin(lane.stream, std::uint64_t{run_.busy_ms_or(kStreamsBusyMs)} * 1'000'000,
                        spins_);
    cuda.cuStreamWaitEvent(lane.stream, from.event, 0);
    cuda.cuMemcpyDtoDAsync_v2(lane.scratch, from.data, bytes(), lane.stream);
    cuda.cuEventRecord(lane.event, lane.stream);
    cuda.cuStreamWaitEvent(from.stream, lane.event, 0);
    cuda.cuMemcpyHtoDAsync_v2(lane.key + key_offset, lane.key_host + step, sizeof(std::uint64_t),
                              lane.stream);
    gpu_.kernels().combine(lane.stream, lane.data, lane.scratch, words_, lane.key + key_offset);
    HostCall& call = lane.call_slots[static_cast<std::size_t>(step)];
    call = {&lane.calls, static_cast<std::uint64_t>(step)};
    cuda.cuLaunchHostFunc(lane.stream, on_host, &call);
    cuda.cuEventRecord(lane.event, lane.stream);
  }

  void model_step(std::size_t k, int step) {
    std::vector<std::uint64_t>& model = lanes_[k].model;
    const std::vector<std::uint64_t>& from = lanes_[neighbour(k)].model;
    const std::uint64_t key = key_of(k, step);
    for (std::uint64_t i = 0; i < words_; ++i)
      model[i] += word(from[i], key);
  }

  void verify(std::size_t k) {
    const Lane& lane = lanes_[k];
    for (std::uint64_t i = 0; i < words_; ++i) {
      if (lane.answer[i] != lane.model[i]) {
        run_.mismatch("stream " + std::to_string(k) + ": word " + std::to_string(i) + " is wrong");
      }
    }
    if (lane.calls.count != kSteps || lane.calls.out_of_order) {
      run_.mismatch("stream " + std::to_string(k) + ": " + std::to_string(lane.calls.count.load()) +
                    " host functions ran instead of " + std::to_string(kSteps) +
                    (lane.calls.out_of_order ? ", out of order" : ""));
    }
  }

  Run& run_;
  Gpu gpu_;
  std::uint64_t words_;
  cuda::CUdeviceptr spins_;
  std::array<Lane, kStreams> lanes_;
};

}  // namespace

void run_streams(Run& run) {
  Lanes lanes(run);
  while (run.next()) {
    lanes.round();
    lanes.verify_spins();
    run.finish();
  }
}

}  // namespace stasis::workloads
