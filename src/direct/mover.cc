#include "direct/mover.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "direct/copy_job.h"
#include "direct/device.h"
#include "direct/plan.h"
#include "direct/threads.h"

namespace stasis::direct {
namespace {

struct RingSize {
  std::uint64_t chunk_bytes = 0;
  unsigned chunks = 0;
};

Result<RingSize> ring_size(const MoverOptions& options) {
  RingSize size;
  size.chunk_bytes = std::min(options.buffer_bytes, options.ring_bytes) / kPage * kPage;
  if (size.chunk_bytes == 0 || options.ring_bytes / size.chunk_bytes > 4096) {
    return stasis::fail(
        ErrorCode::kUsage,
        fmt::format("a ring of {} in buffers of {} is of no use", format_bytes(options.ring_bytes),
                    format_bytes(options.buffer_bytes)),
        "take buffers of 1 to 64 MiB, and at most 4096 of them");
  }
  size.chunks = static_cast<unsigned>(options.ring_bytes / size.chunk_bytes);
  return size;
}

}  // namespace

// Members are destroyed from the last to the first: the ring is unpinned before its context goes.
struct Mover::State {
  MoverOptions options;
  DeviceCalls calls;
  std::map<int, Device> devices;  // by ordinal
  Ring ring;
  bool unusable = false;  // the GPU still copies to or from the ring

  explicit State(const MoverOptions& o, DeviceCalls c, Ring r)
      : options(o), calls(c), ring(std::move(r)) {}

  unsigned threads_for(std::size_t gpus) const {
    if (options.threads != 0) return options.threads;
    return default_threads(static_cast<unsigned>(gpus));
  }
  Result<std::vector<int>> ordinals(std::span<const GpuUuid> gpus) const;
  Result<void> open(const std::vector<int>& ordinals, Stop& stop);
  Result<std::map<int, std::vector<Imported>>> import(std::vector<Segment> segments, Stop& stop);
};

Result<std::vector<int>> Mover::State::ordinals(std::span<const GpuUuid> gpus) const {
  int count = 0;
  if (auto code = calls.device_count(&count); code != cuda::CUDA_SUCCESS) {
    return stasis::fail(calls.error(code, "cuDeviceGetCount", "list the GPUs"));
  }
  std::map<GpuUuid, int> known;
  for (int i = 0; i < count; ++i) {
    cuda::CUdevice device = 0;
    cuda::CUuuid raw{};
    auto code = calls.device(&device, i);
    if (code == cuda::CUDA_SUCCESS) code = calls.uuid(&raw, device);
    if (code != cuda::CUDA_SUCCESS) {
      return stasis::fail(calls.error(code, "cuDeviceGetUuid", fmt::format("identify GPU {}", i)));
    }
    GpuUuid uuid;
    std::memcpy(uuid.bytes.data(), raw.bytes, uuid.bytes.size());
    known[uuid] = device;
  }
  std::vector<int> out;
  for (const GpuUuid& uuid : gpus) {
    const auto found = known.find(uuid);
    if (found == known.end()) {
      return stasis::fail(ErrorCode::kGpuMismatch,
                          fmt::format("the driver shows no GPU {} here", uuid.to_string()),
                          "in a container, start it with all GPUs that the process uses");
    }
    out.push_back(found->second);
  }
  if (gpus.empty()) {
    for (const auto& [uuid, ordinal] : known)
      out.push_back(ordinal);
  }
  return out;
}

Result<void> Mover::State::open(const std::vector<int>& ordinals, Stop& stop) {
  std::vector<int> missing;
  for (const int ordinal : ordinals) {
    if (!devices.contains(ordinal)) missing.push_back(ordinal);
  }
  // Side by side: each takes 0.2 to 0.4 s.
  std::mutex mutex;
  std::atomic<std::size_t> next{0};
  (void)on_threads(static_cast<unsigned>(missing.size()), [&](unsigned) {
    for (std::size_t i = next++; i < missing.size() && stop.go_on(); i = next++) {
      auto device = Device::open(calls, missing[i]);
      if (!device) return stop.fail(std::move(device.error()));
      const std::scoped_lock lock(mutex);
      devices.emplace(missing[i], std::move(*device));
    }
  });
  return stop.result();
}

Result<std::map<int, std::vector<Imported>>> Mover::State::import(std::vector<Segment> segments,
                                                                  Stop& stop) {
  std::map<int, std::vector<Imported>> out;
  for (Segment& segment : segments) {
    if (!stop.go_on()) return stasis::fail(stop.result().error());
    auto imported = Imported::make(calls, std::move(segment));
    if (!imported) return stasis::fail(std::move(imported.error()));
    out[imported->ordinal()].push_back(std::move(*imported));
  }
  return out;
}

void see_every_gpu() { (void)::unsetenv("CUDA_VISIBLE_DEVICES"); }

Mover::Mover(std::unique_ptr<State> state) : state_(std::move(state)) {}
Mover::Mover(Mover&&) noexcept = default;
Mover::~Mover() {
  // A copy still goes to the ring: nothing may be freed, nor be waited for, as closing a context
  // would. It stays until the process ends.
  if (state_ && state_->unusable) (void)state_.release();
}
const Ring& Mover::ring() const { return state_->ring; }

MoverOptions options_for(std::span<const GpuUuid> gpus) {
  MoverOptions options;
  options.ring_bytes *= gpus.empty() ? 2 : gpus.size();
  return options;
}

Result<Mover> Mover::prepare(const MoverOptions& options, std::span<const GpuUuid> gpus,
                             const Interrupt& interrupt, Clock::time_point deadline) {
  Stop stop(interrupt, deadline, "preparing to copy GPU memory");
  auto size = ring_size(options);
  if (!size) return stasis::fail(std::move(size.error()));
  auto calls = DeviceCalls::load();
  if (!calls) return stasis::fail(std::move(calls.error()));

  // The memory comes while the driver starts: the one takes 0.1 to 0.5 s, the other 0.3 s and more.
  const unsigned threads = options.threads != 0 ? options.threads : default_threads(1);
  std::optional<Result<Ring>> ring;
  const auto make_ring = [&] {
    ring.emplace(Ring::make(options.ring, size->chunk_bytes, size->chunks, threads));
  };
  Result<void> started;
  const auto start_driver = [&] {
    if (auto code = calls->init(0); code != cuda::CUDA_SUCCESS) {
      started = stasis::fail(calls->error(code, "cuInit", "start the driver"));
    }
  };
  if (on_threads(2, [&](unsigned i) { i == 0 ? start_driver() : make_ring(); }) < 2) make_ring();
  if (!started) return stasis::fail(std::move(started.error()));
  if (!*ring) return stasis::fail(std::move(ring->error()));

  auto state = std::make_unique<State>(options, *calls, std::move(**ring));
  auto ordinals = state->ordinals(gpus);
  if (!ordinals) return stasis::fail(std::move(ordinals.error()));
  if (auto opened = state->open(*ordinals, stop); !opened) {
    return stasis::fail(std::move(opened.error()));
  }
  auto& devices = state->devices;
  auto shares = share_ring(size->chunk_bytes, size->chunks, static_cast<unsigned>(devices.size()),
                           state->threads_for(devices.size()));
  if (!shares) return stasis::fail(std::move(shares.error()));
  for (auto& [ordinal, device] : devices) {
    if (auto had = device.have_streams(2 * shares->threads); !had) {
      return stasis::fail(std::move(had.error()));
    }
  }
  auto pinned = state->ring.pin(state->calls, devices.begin()->second.context(), threads, stop);
  if (!pinned) return stasis::fail(std::move(pinned.error()));
  return Mover(std::move(state));
}

Result<CopyReport> Mover::copy_out(std::vector<Segment> segments, Content& content,
                                   const Interrupt& interrupt, Clock::time_point deadline) {
  const Contents one{[](unsigned) { return Result<void>(); },
                     [&](unsigned) -> Content& { return content; }};
  return copy(true, std::move(segments), one, interrupt, deadline);
}

Result<CopyReport> Mover::copy_in(std::vector<Segment> segments, Content& content,
                                  const Interrupt& interrupt, Clock::time_point deadline) {
  const Contents one{[](unsigned) { return Result<void>(); },
                     [&](unsigned) -> Content& { return content; }};
  return copy(false, std::move(segments), one, interrupt, deadline);
}

Result<CopyReport> Mover::copy(bool out, std::vector<Segment> segments, const Contents& contents,
                               const Interrupt& interrupt, Clock::time_point deadline) {
  if (state_->unusable) {
    return stasis::fail(ErrorCode::kNoAnswer, "the GPU has not ended the last copy");
  }
  Stop stop(interrupt, deadline, out ? "copying GPU memory out" : "copying GPU memory back");
  CopyReport report;
  if (auto sensible = sort_and_check(segments); !sensible) {
    return stasis::fail(std::move(sensible.error()));
  }
  if (segments.empty()) return report;

  const auto start = Clock::now();
  auto imported = state_->import(std::move(segments), stop);
  if (!imported) return stasis::fail(std::move(imported.error()));
  std::vector<int> ordinals;
  for (const auto& [ordinal, list] : *imported)
    ordinals.push_back(ordinal);
  if (auto opened = state_->open(ordinals, stop); !opened) {
    return stasis::fail(std::move(opened.error()));
  }
  const auto gpus = static_cast<unsigned>(ordinals.size());
  const Ring& ring = state_->ring;
  auto shares = share_ring(ring.chunk_bytes(), ring.chunks(), gpus, state_->threads_for(gpus));
  if (!shares) return stasis::fail(std::move(shares.error()));

  std::vector<Mapping> mappings;
  std::vector<DevicePart> parts;
  for (auto& [ordinal, list] : *imported) {
    Device& device = state_->devices.at(ordinal);
    if (auto had = device.have_streams(2 * shares->threads); !had) {
      return stasis::fail(std::move(had.error()));
    }
    std::vector<Stretch> stretches;
    std::uint64_t total = 0;
    for (const Imported& one : list) {
      const Segment& segment = one.segment();
      append_stretch(stretches, {total, segment.offset, segment.bytes});
      total += segment.bytes;
    }
    report.bytes += total;
    auto mapping = Mapping::make(state_->calls, device, list, stop);
    if (!mapping) return stasis::fail(std::move(mapping.error()));
    const std::uint64_t load = load_size(total, shares->threads, shares->buffer_bytes);
    parts.push_back({&device, mapping->base(), loads_of(stretches, load)});
    mappings.push_back(std::move(*mapping));
  }
  imported->clear();
  std::vector<std::span<std::byte>> buffers;
  for (unsigned i = 0; i < 2 * shares->threads * gpus; ++i) {
    const auto chunk = ring.chunk(i / shares->buffers_per_chunk);
    buffers.push_back(
        chunk.subspan(i % shares->buffers_per_chunk * shares->buffer_bytes, shares->buffer_bytes));
  }
  if (auto begun = contents.begin(shares->threads * gpus); !begun) {
    return stasis::fail(std::move(begun.error()));
  }
  report.map_seconds = since(start);

  const auto copying = Clock::now();
  const CopyJob job{.calls = &state_->calls,
                    .direction = out ? Direction::kOut : Direction::kIn,
                    .parts = parts,
                    .threads_per_part = shares->threads,
                    .buffers = buffers,
                    .content = contents.of};
  const CopyEnd end = run_copy(job, stop);
  report.seconds = since(copying);

  if (end.still_copying) {
    state_->unusable = true;
    for (Mapping& mapping : mappings)
      mapping.abandon();
    Error error{ErrorCode::kNoAnswer,
                "the GPU does not end a copy that was begun",
                "end this process; `nvidia-smi -q -d ECC,PAGE_RETIREMENT` and the kernel's log say "
                "whether the GPU is broken",
                {},
                {}};
    if (auto why = stop.result(); !why) error.context.push_back("after: " + why.error().message);
    return stasis::fail(std::move(error));
  }
  const auto letting_go = Clock::now();
  for (Mapping& mapping : mappings)
    (void)stop.ok(mapping.release());
  report.map_seconds += since(letting_go);
  if (auto result = stop.result(); !result) return stasis::fail(std::move(result.error()));
  return report;
}

}  // namespace stasis::direct
