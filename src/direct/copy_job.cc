#include "direct/copy_job.h"

#include <array>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "base/threads.h"

namespace stasis::direct {
namespace {

// The poll interval of a stream. A load of 32 MiB takes some 9 ms when 16 threads share a PCIe 5
// link, so this is below what can be seen, and costs no processor as a spinning wait would.
constexpr std::chrono::microseconds kPollInterval{50};
// For copies that were submitted before something went wrong.
constexpr std::chrono::seconds kDrainTimeout{5};

class Worker {
 public:
  Worker(const CopyJob& job, const DevicePart& part, std::atomic<std::size_t>& next, Stop& stop,
         Content& content, unsigned in_part, std::span<const std::span<std::byte>> buffers)
      : job_(&job), part_(&part), next_(&next), stop_(&stop), content_(&content) {
    for (std::size_t i = 0; i < sides_.size(); ++i) {
      sides_[i].buffer = buffers[i];
      sides_[i].stream = part.device->stream(2 * in_part + static_cast<unsigned>(i));
    }
  }

  void run() {
    if (!stop_->ok(part_->device->make_current())) return;
    for (std::size_t turn = 0;; turn = 1 - turn) {
      Side& side = sides_[turn];
      if (!stop_->go_on() || !finish(side)) return;
      const std::size_t index = next_->fetch_add(1);
      if (index >= part_->loads.size()) {
        (void)finish(sides_[1 - turn]);
        return;
      }
      if (!begin(side, part_->loads[index])) return;
    }
  }

  // True once no copy of this worker is under way. Also asked where run() has failed.
  bool drain() {
    const auto end = Clock::now() + kDrainTimeout;
    for (Side& side : sides_) {
      while (side.submitted &&
             job_->calls->query_stream(side.stream) == cuda::CUDA_ERROR_NOT_READY) {
        if (Clock::now() > end) return false;
        std::this_thread::sleep_for(kPollInterval);
      }
      side.submitted = false;
    }
    return true;
  }

 private:
  struct Side {
    std::span<std::byte> buffer;
    cuda::CUstream stream = nullptr;
    const Load* load = nullptr;  // whose content is in the buffer, or comes there
    bool submitted = false;      // to the stream; may not have ended
  };

  bool begin(Side& side, const Load& load) {
    const bool out = job_->direction == Direction::kOut;
    for (const Stretch& part : load.parts) {
      if (out) break;
      if (!stop_->ok(content_->read(part.content, side.buffer.subspan(part.mapped, part.bytes))))
        return false;
    }
    const cuda::CUdeviceptr at = part_->base + load.mapped;
    const cuda::CUresult code =
        out ? job_->calls->copy_out(side.buffer.data(), at, load.bytes, side.stream)
            : job_->calls->copy_in(at, side.buffer.data(), load.bytes, side.stream);
    side.submitted = true;  // it may have begun, even if it failed
    side.load = &load;
    if (code == cuda::CUDA_SUCCESS) return true;
    failed(code, out ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync");
    return false;
  }

  bool finish(Side& side) {
    if (side.load == nullptr) return true;
    const Load& load = *std::exchange(side.load, nullptr);
    if (!wait(side)) return false;
    if (!part_->done.empty())
      part_->done[static_cast<std::size_t>(&load - &part_->loads[0])] = true;
    if (job_->direction == Direction::kIn) return true;
    for (const Stretch& part : load.parts) {
      if (!stop_->ok(content_->write(part.content, side.buffer.subspan(part.mapped, part.bytes))))
        return false;
    }
    return true;
  }

  bool wait(Side& side) {
    for (;;) {
      const cuda::CUresult code = job_->calls->query_stream(side.stream);
      if (code == cuda::CUDA_SUCCESS) {
        side.submitted = false;
        return true;
      }
      if (code != cuda::CUDA_ERROR_NOT_READY) {
        failed(code, "cuStreamQuery");
        return false;
      }
      if (!stop_->go_on()) return false;
      std::this_thread::sleep_for(kPollInterval);
    }
  }

  void failed(cuda::CUresult code, const char* call) {
    stop_->fail(job_->calls->error(
        code, call, fmt::format("copy the memory of GPU {}", part_->device->ordinal())));
  }

  const CopyJob* job_;
  const DevicePart* part_;
  std::atomic<std::size_t>* next_;
  Stop* stop_;
  Content* content_;
  std::array<Side, 2> sides_;
};

}  // namespace

bool wait_for_stream(const DeviceCalls& calls, cuda::CUstream stream, Stop& stop) {
  std::optional<Clock::time_point> given_up;
  for (;;) {
    const cuda::CUresult code = calls.query_stream(stream);
    if (code == cuda::CUDA_SUCCESS) return true;
    if (code != cuda::CUDA_ERROR_NOT_READY) {
      stop.fail(calls.error(code, "cuStreamQuery", "copy within a GPU"));
      return true;
    }
    if (!stop.go_on() && !given_up) given_up = Clock::now() + kDrainTimeout;
    if (given_up && Clock::now() > *given_up) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
}

CopyEnd run_copy(const CopyJob& job, Stop& stop) {
  std::vector<std::atomic<std::size_t>> next(job.parts.size());
  std::atomic<bool> still_copying{false};
  const auto parts = static_cast<unsigned>(job.parts.size());
  std::vector<std::atomic<bool>> served(parts);
  const auto work = [&](unsigned thread) {
    // Neighbours in number belong to different GPUs: where the system gives fewer threads than
    // wished, each GPU has some.
    const unsigned part = thread % parts;
    const unsigned in_part = thread / parts;
    served[part] = true;
    const std::size_t first = 2 * (std::size_t{part} * job.threads_per_part + in_part);
    Worker worker(job, job.parts[part], next[part], stop, job.content(thread), in_part,
                  job.buffers.subspan(first, 2));
    worker.run();
    if (!worker.drain()) still_copying = true;
  };
  (void)on_threads(parts * job.threads_per_part, work);
  for (unsigned part = 0; part < parts; ++part) {
    if (!served[part]) {
      stop.fail(Error{ErrorCode::kOutOfHostMemory, "the system gives no thread for every GPU",
                      "raise the limit of processes (ulimit -u)"});
    }
  }
  return {still_copying};
}

}  // namespace stasis::direct
