#include "direct/gpu_digest.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/threads.h"
#include "direct/copy_job.h"
#include "direct/gpu_digest_ptx.h"
#include "image/xxh3_lanes.h"

namespace stasis::direct {
namespace {

constexpr unsigned kThreadsPerBlock = 256;
// For one thread at a time.
constexpr std::uint64_t kChunksAtOnce = 1024;

constexpr std::uint64_t kTriedChunk = std::uint64_t{16} << 10;
constexpr std::uint64_t kTriedChunks = 5;

static_assert(sizeof(Xxh3LaneKeys) == 19 * sizeof(std::uint64_t));
static_assert(sizeof(Digest) <= sizeof(Xxh3Lanes));

Digest digest_of(std::span<const std::byte> lanes, std::uint64_t bytes) {
  Xxh3Lanes all;
  std::memcpy(all.data(), lanes.data(), sizeof all);
  return xxh3_of_lanes(all, bytes);
}

}  // namespace

Result<GpuDigest> GpuDigest::load(const DeviceCalls& calls, const Device& device, Stop& stop) {
  if (calls.load_module == nullptr || calls.find_function == nullptr || calls.launch == nullptr)
    return stasis::fail(ErrorCode::kNotSupported, "the driver has no calls for kernels");
  STASIS_TRY(device.make_current());
  const auto refused = [&](cuda::CUresult code, const char* call) {
    Error error =
        calls.error(code, call, fmt::format("compute digests on GPU {}", device.ordinal()));
    error.code = ErrorCode::kNotSupported;
    return stasis::fail(std::move(error));
  };
  cuda::CUmodule module = nullptr;
  if (auto code = calls.load_module(&module, kDigestPtx); code != cuda::CUDA_SUCCESS)
    return refused(code, "cuModuleLoadData");
  cuda::CUfunction function = nullptr;
  if (auto code = calls.find_function(&function, module, "stasis_xxh3_lanes");
      code != cuda::CUDA_SUCCESS)
    return refused(code, "cuModuleGetFunction");
  const auto& keys = xxh3_lane_keys();
  STASIS_TRY_ASSIGN(auto memory, DeviceMemory::make(calls, device, sizeof keys));
  // Memory that is not pinned has been read when this returns.
  auto code = calls.copy_in(memory.base(), keys.data(), sizeof keys, device.stream(0));
  if (code != cuda::CUDA_SUCCESS) return refused(code, "cuMemcpyHtoDAsync");
  GpuDigest digest(calls, function, std::move(memory));
  if (auto right = digest.try_out(device, stop); !right) {
    // The GPU may still use it.
    digest.keys_.abandon();
    return stasis::fail(std::move(right.error()));
  }
  return digest;
}

cuda::CUresult GpuDigest::queue(cuda::CUdeviceptr data, std::uint64_t chunks,
                                std::uint64_t chunk_bytes, cuda::CUdeviceptr lanes,
                                cuda::CUstream stream) const {
  cuda::CUdeviceptr keys = keys_.base();
  std::uint64_t blocks = chunk_bytes / kXxh3Block;
  void* arguments[] = {&data, &keys, &chunks, &blocks, &lanes};
  const auto grid = (chunks * kXxh3Lanes + kThreadsPerBlock - 1) / kThreadsPerBlock;
  return calls_->launch(function_, static_cast<unsigned>(grid), 1, 1, kThreadsPerBlock, 1, 1, 0,
                        stream, arguments, nullptr);
}

Result<void> GpuDigest::try_out(const Device& device, Stop& stop) const {
  std::vector<std::uint64_t> pattern(kTriedChunks * kTriedChunk / sizeof(std::uint64_t));
  for (std::size_t i = 0; i < pattern.size(); ++i)
    pattern[i] = (i + 1) * 0x9E3779B97F4A7C15;
  auto data = DeviceMemory::make(*calls_, device, kTriedChunks * kTriedChunk);
  auto lanes = DeviceMemory::make(*calls_, device, kTriedChunks * sizeof(Xxh3Lanes));
  if (!data || !lanes) return stasis::fail(std::move(!data ? data.error() : lanes.error()));
  std::vector<Xxh3Lanes> found(kTriedChunks);
  auto* stream = device.stream(0);
  auto code = calls_->copy_in(data->base(), pattern.data(), kTriedChunks * kTriedChunk, stream);
  if (code == cuda::CUDA_SUCCESS)
    code = queue(data->base(), kTriedChunks, kTriedChunk, lanes->base(), stream);
  if (code == cuda::CUDA_SUCCESS)
    code = calls_->copy_out(found.data(), lanes->base(), kTriedChunks * sizeof(Xxh3Lanes), stream);
  const bool ended = code == cuda::CUDA_SUCCESS && wait_for_stream(*calls_, stream, stop);
  if (!ended || stop.stopped()) {
    data->abandon();
    lanes->abandon();
    Error error = code != cuda::CUDA_SUCCESS
                      ? calls_->error(code, "cuLaunchKernel", "try the digests of a GPU")
                      : stop.result().error();
    error.code = ErrorCode::kInternal;
    return stasis::fail(std::move(error));
  }
  const auto bytes = std::as_bytes(std::span(pattern));
  for (std::size_t i = 0; i < kTriedChunks; ++i) {
    if (xxh3_of_lanes(found[i], kTriedChunk) == xxh3(bytes.subspan(i * kTriedChunk, kTriedChunk)))
      continue;
    return stasis::fail(ErrorCode::kInternal,
                        fmt::format("GPU {} computes wrong digests", device.ordinal()));
  }
  return {};
}

std::vector<ChunkRun> chunk_runs(std::span<const Stretch> stretches, std::uint64_t chunk_bytes) {
  std::vector<ChunkRun> runs;
  for (const Stretch& stretch : stretches) {
    const std::uint64_t skipped = (chunk_bytes - stretch.content % chunk_bytes) % chunk_bytes;
    if (stretch.bytes < skipped) continue;
    const std::uint64_t count = (stretch.bytes - skipped) / chunk_bytes;
    if (count > 0) runs.push_back({stretch.mapped + skipped, stretch.content + skipped, count});
  }
  return runs;
}

std::vector<Stretch> without_chunks(std::span<const Stretch> stretches,
                                    std::span<const ChunkRun> runs, std::uint64_t chunk_bytes,
                                    std::span<const char> gone) {
  std::vector<Stretch> left;
  const auto add = [&](const Stretch& from, std::uint64_t begin, std::uint64_t end) {
    if (begin < end) left.push_back({begin, from.content + (begin - from.mapped), end - begin});
  };
  std::size_t run = 0;
  std::size_t number = 0;  // of the run's first chunk
  for (const Stretch& stretch : stretches) {
    const std::uint64_t end = stretch.mapped + stretch.bytes;
    std::uint64_t from = stretch.mapped;
    // A stretch has one run, or none.
    if (run < runs.size() && runs[run].mapped < end) {
      for (std::uint64_t i = 0; i < runs[run].count; ++i) {
        if (gone[number + i] == 0) continue;
        const std::uint64_t at = runs[run].mapped + i * chunk_bytes;
        add(stretch, from, at);
        from = at + chunk_bytes;
      }
      number += runs[run++].count;
    }
    add(stretch, from, end);
  }
  return left;
}

namespace {

// The work queued on one GPU, whose results come to its buffers.
class PartAtWork {
 public:
  PartAtWork(const DeviceCalls& calls, const DigestPart& part, std::uint64_t chunk_bytes)
      : calls_(&calls), part_(&part), chunk_bytes_(chunk_bytes) {}

  // False: without this GPU.
  bool begin() {
    if (part_->digest == nullptr || part_->buffers.empty()) return false;
    per_buffer_ = part_->buffers.front().size() / sizeof(Xxh3Lanes);
    runs_ = chunk_runs(part_->stretches, chunk_bytes_);
    for (const ChunkRun& run : runs_)
      chunks_ += run.count;
    if (chunks_ == 0) return false;
    auto lanes = DeviceMemory::make(*calls_, *part_->device, chunks_ * sizeof(Xxh3Lanes));
    if (!lanes) return false;
    lanes_.emplace(std::move(*lanes));
    gone_.assign(chunks_, 0);
    std::uint64_t first = 0;
    for (const ChunkRun& run : runs_) {
      if (!queued(part_->digest->queue(part_->base + run.mapped, run.count, chunk_bytes_,
                                       lanes_->base() + first * sizeof(Xxh3Lanes), part_->stream)))
        break;
      first += run.count;
    }
    return true;
  }

  // Brings as many digests as the buffers take. False: there are no more, or they cannot be
  // trusted.
  bool next() {
    items_.clear();
    next_ = 0;
    if (code_ != cuda::CUDA_SUCCESS || done_ == chunks_) return false;
    (void)part_->device->make_current();
    const std::uint64_t begin = done_;
    const std::uint64_t end = std::min(chunks_, begin + per_buffer_ * part_->buffers.size());
    for (std::uint64_t at = begin; at < end; at += per_buffer_) {
      const std::uint64_t count = std::min(per_buffer_, end - at);
      if (!queued(calls_->copy_out(part_->buffers[(at - begin) / per_buffer_].data(),
                                   lanes_->base() + at * sizeof(Xxh3Lanes),
                                   count * sizeof(Xxh3Lanes), part_->stream)))
        break;
    }
    std::uint64_t first = 0;
    for (const ChunkRun& run : runs_) {
      add_items(run, first, begin, end);
      first += run.count;
    }
    done_ = end;
    return true;
  }

  // False: it still runs. Nothing may be freed then.
  bool end(Stop& stop) {
    (void)stop.ok(part_->device->make_current());
    if (!wait_for_stream(*calls_, part_->stream, stop)) {
      lanes_->abandon();
      return false;
    }
    if (code_ != cuda::CUDA_SUCCESS) items_.clear();
    return true;
  }

  // One thread's work.
  void ask(Content& content, Stop& stop) {
    for (;;) {
      const std::size_t index = next_.fetch_add(1);
      if (index >= items_.size() || !stop.go_on()) return;
      const Item& item = items_[index];
      // In place: a digest is shorter than its accumulators.
      for (std::uint64_t i = 0; i < item.count; ++i) {
        const Digest digest =
            digest_of(item.lanes.subspan(i * sizeof(Xxh3Lanes), sizeof(Xxh3Lanes)), chunk_bytes_);
        std::memcpy(item.lanes.data() + i * sizeof digest, digest.data(), sizeof digest);
      }
      const auto digests = item.lanes.first(item.count * sizeof(Digest));
      if (!stop.ok(content.deduplicate(item.content, digests))) return;
      for (std::uint64_t i = 0; i < item.count; ++i)
        gone_[item.first + i] = digests[i * sizeof(Digest)] != std::byte{0};
    }
  }

  std::vector<Stretch> left() const {
    return without_chunks(part_->stretches, runs_, chunk_bytes_, gone_);
  }

 private:
  struct Item {
    std::span<std::byte> lanes;  // in a buffer
    std::uint64_t content = 0;
    std::uint64_t first = 0;  // its number in `gone_`
    std::uint64_t count = 0;
  };

  // After an error the rest is not begun, and no digest is trusted.
  bool queued(cuda::CUresult code) {
    if (code_ == cuda::CUDA_SUCCESS) code_ = code;
    return code_ == cuda::CUDA_SUCCESS;
  }
  // Of a run whose first chunk has the number `first`, what is between `begin` and `end`.
  void add_items(const ChunkRun& run, std::uint64_t first, std::uint64_t begin, std::uint64_t end) {
    end = std::min(end, first + run.count);
    for (std::uint64_t number = std::max(begin, first); number < end;) {
      const std::uint64_t in_buffer = (number - begin) % per_buffer_;
      const std::uint64_t count = std::min({end - number, per_buffer_ - in_buffer, kChunksAtOnce});
      items_.push_back({part_->buffers[(number - begin) / per_buffer_].subspan(
                            in_buffer * sizeof(Xxh3Lanes), count * sizeof(Xxh3Lanes)),
                        run.content + (number - first) * chunk_bytes_, number, count});
      number += count;
    }
  }

  const DeviceCalls* calls_;
  const DigestPart* part_;
  std::uint64_t chunk_bytes_;
  std::uint64_t per_buffer_ = 0;
  std::uint64_t chunks_ = 0;
  std::uint64_t done_ = 0;  // of them: they were brought
  std::vector<ChunkRun> runs_;
  std::optional<DeviceMemory> lanes_;
  std::vector<Item> items_;
  std::vector<char> gone_;
  std::atomic<std::size_t> next_{0};
  cuda::CUresult code_ = cuda::CUDA_SUCCESS;
};

}  // namespace

LeftOut leave_out(const DeviceCalls& calls, std::span<const DigestPart> parts,
                  std::uint64_t chunk_bytes, unsigned threads,
                  const std::function<Content&(unsigned)>& content, Stop& stop) {
  LeftOut out;
  for (const DigestPart& part : parts)
    out.left.emplace_back(part.stretches.begin(), part.stretches.end());
  std::vector<std::pair<std::size_t, std::unique_ptr<PartAtWork>>> working;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    auto part = std::make_unique<PartAtWork>(calls, parts[i], chunk_bytes);
    if (part->begin()) working.emplace_back(i, std::move(part));
  }
  for (bool more = !working.empty(); more && !stop.stopped();) {
    more = false;
    for (auto& [index, part] : working)
      more = part->next() || more;
    for (auto& [index, part] : working)
      if (!part->end(stop)) out.still_running = true;
    if (out.still_running || stop.stopped()) break;
    (void)on_threads(threads, [&](unsigned thread) {
      Content& own = content(thread);
      for (auto& [index, part] : working)
        part->ask(own, stop);
    });
  }
  if (out.still_running) return out;
  for (auto& [index, part] : working)
    out.left[index] = part->left();
  return out;
}

}  // namespace stasis::direct
