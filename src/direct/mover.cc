// Long because the mover's state, its start and its copies share the device contexts that they must
// not lose.
#include "direct/mover.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <variant>

#include <fmt/format.h>

#include "base/scope_guard.h"
#include "base/threads.h"
#include "direct/copy_job.h"
#include "direct/device.h"
#include "direct/gpu_digest.h"
#include "direct/plan.h"
#include "direct/zero_fill.h"

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

Error never_ends(const Stop& stop) {
  Error error{ErrorCode::kNoAnswer, "the GPU does not end a copy that was begun",
              "end this process; `nvidia-smi -q -d ECC,PAGE_RETIREMENT` and the kernel's log say "
              "whether the GPU is broken"};
  if (auto why = stop.result(); !why) error.context.push_back("after: " + why.error().message);
  return error;
}

Mover::Contents for_all_threads(Content& content) {
  return {[](unsigned) { return Result<void>(); }, [&](unsigned) -> Content& { return content; },
          content.digest_chunk(), content.zero_chunk()};
}

// Digests need no disk, and take some 15 ms for 16 GiB: the job stands still meanwhile.
Clock::time_point digests_until(std::uint64_t bytes, Clock::time_point deadline) {
  constexpr std::chrono::seconds kTimeout{5};
  constexpr std::uint64_t kSlowest = 10'000'000;  // bytes in a millisecond
  return std::min(deadline, Clock::now() + kTimeout + std::chrono::milliseconds(bytes / kSlowest));
}

std::uint64_t bytes_of(std::span<const Stretch> stretches) {
  std::uint64_t bytes = 0;
  for (const Stretch& stretch : stretches)
    bytes += stretch.bytes;
  return bytes;
}

}  // namespace

// Members are destroyed from the last to the first: the ring is unpinned before its context goes.
struct Mover::State {
  // The content on one GPU before copy_in(): brought by prefetch(), or kept by copy_out().
  struct Early {
    std::variant<DeviceMemory, Mapping> memory;
    std::vector<Stretch> stretches;  // where the content in it belongs
    std::uint64_t bytes = 0;         // of them together
    cuda::CUdeviceptr base() const {
      return std::visit([](const auto& held) { return held.base(); }, memory);
    }
  };
  struct Buffers {
    RingShares shares;
    std::vector<std::span<std::byte>> all;
  };

  MoverOptions options;
  DeviceCalls calls;
  std::map<int, Device> devices;  // by ordinal
  Ring ring;
  std::map<int, Early> early;       // by ordinal
  std::vector<SpareRoom> keep;      // for the next copy out
  std::vector<UniqueFd> files;      // until the next copy in has ended
  std::map<int, GpuDigest> digest;  // by ordinal
  bool unusable = false;            // the GPU still copies to or from the ring

  explicit State(const MoverOptions& o, DeviceCalls c, Ring r)
      : options(o), calls(c), ring(std::move(r)) {}

  unsigned threads_for(std::size_t gpus) const {
    if (options.threads != 0) return options.threads;
    return default_threads(static_cast<unsigned>(gpus));
  }
  Result<std::vector<int>> ordinals(std::span<const GpuUuid> gpus) const;
  Result<void> open(const std::vector<int>& ordinals, Stop& stop);
  Result<std::map<int, std::vector<Imported>>> import(std::vector<Segment> segments, Stop& stop);
  // Contexts and streams on these GPUs, one stream more than buffers, and the ring's shares.
  Result<Buffers> buffers_for(const std::vector<int>& ordinals, Stop& stop);
  // Takes what the content has already out of the stretches of each GPU. True: a GPU still works on
  // it, and has not ended in time.
  bool leave_out(const std::vector<int>& ordinals, const std::vector<Mapping>& mappings,
                 const Buffers& buffers, const Contents& contents,
                 std::vector<std::vector<Stretch>>& stretches, Stop& stop) const;
  // Has the GPUs write zeros where the content is known to be; returns the other stretches.
  std::vector<std::vector<Stretch>> fill_zeros(const std::vector<int>& ordinals,
                                               const std::vector<Mapping>& mappings,
                                               const Buffers& buffers, const Contents& contents,
                                               const std::vector<std::vector<Stretch>>& stretches,
                                               Stop& stop) const;
  // Memory for the beginning of what each request names, as far as its GPU has room. The GPUs that
  // have.
  std::vector<int> reserve_early(const std::vector<PrefetchRequest>& requests,
                                 const std::vector<int>& ordinals_of);
  struct EarlyCopy {
    std::vector<DevicePart> parts;
    std::vector<std::vector<std::atomic<bool>>> done;  // for each load of each part
  };
  EarlyCopy copy_to_early(const std::vector<int>& ordinals, const RingShares& shares) const;
  // Of each, the loads that have come without a gap count. The bytes.
  std::uint64_t count_early(const std::vector<int>& ordinals, const EarlyCopy& copy);
  // Keeps as `early` what there is room for of what was copied out.
  void keep_early(std::vector<SpareRoom> room, const std::vector<int>& ordinals,
                  std::vector<Mapping>& mappings,
                  const std::vector<std::vector<Stretch>>& stretches);
  // The bytes at the beginning of `stretches` that are on the GPU already.
  std::uint64_t early_bytes(int ordinal, const std::vector<Stretch>& stretches) const;
};

Result<Mover::State::Buffers> Mover::State::buffers_for(const std::vector<int>& ordinals,
                                                        Stop& stop) {
  STASIS_TRY(open(ordinals, stop));
  const auto gpus = static_cast<unsigned>(ordinals.size());
  STASIS_TRY_ASSIGN(auto shares,
                    share_ring(ring.chunk_bytes(), ring.chunks(), gpus, threads_for(gpus)));
  for (const int ordinal : ordinals) {
    STASIS_TRY(devices.at(ordinal).have_streams(2 * shares.threads + 1));
  }
  Buffers out{shares, {}};
  for (unsigned i = 0; i < 2 * shares.threads * gpus; ++i) {
    const auto chunk = ring.chunk(i / shares.buffers_per_chunk);
    out.all.push_back(
        chunk.subspan(i % shares.buffers_per_chunk * shares.buffer_bytes, shares.buffer_bytes));
  }
  return out;
}

bool Mover::State::leave_out(const std::vector<int>& ordinals, const std::vector<Mapping>& mappings,
                             const Buffers& buffers, const Contents& contents,
                             std::vector<std::vector<Stretch>>& stretches, Stop& stop) const {
  const unsigned each = 2 * buffers.shares.threads;
  std::vector<DigestPart> parts;
  for (std::size_t i = 0; i < ordinals.size(); ++i) {
    const Device& device = devices.at(ordinals[i]);
    const auto found = digest.find(ordinals[i]);
    parts.push_back({&device, found == digest.end() ? nullptr : &found->second, mappings[i].base(),
                     stretches[i], std::span(buffers.all).subspan(i * each, each),
                     device.stream(each)});
  }
  auto done = direct::leave_out(calls, parts, contents.digest_chunk,
                                buffers.shares.threads * static_cast<unsigned>(ordinals.size()),
                                contents.of, stop);
  stretches = std::move(done.left);
  return done.still_running;
}

std::vector<std::vector<Stretch>> Mover::State::fill_zeros(
    const std::vector<int>& ordinals, const std::vector<Mapping>& mappings, const Buffers& buffers,
    const Contents& contents, const std::vector<std::vector<Stretch>>& stretches,
    Stop& stop) const {
  const unsigned each = 2 * buffers.shares.threads;
  std::vector<ZeroPart> parts;
  for (std::size_t i = 0; i < ordinals.size(); ++i) {
    const Device& device = devices.at(ordinals[i]);
    parts.push_back({&device, mappings[i].base(), stretches[i], device.stream(each)});
  }
  // One for each thread.
  const auto threads = buffers.shares.threads * ordinals.size();
  return direct::fill_zeros(calls, parts, contents.zero_chunk,
                            std::span(buffers.all).first(threads), contents.of, stop);
}

void Mover::State::keep_early(std::vector<SpareRoom> room, const std::vector<int>& ordinals_of,
                              std::vector<Mapping>& mappings,
                              const std::vector<std::vector<Stretch>>& stretches) {
  std::vector<GpuUuid> gpus;
  for (const SpareRoom& one : room)
    gpus.push_back(one.gpu);
  const auto known = gpus.empty() ? Result<std::vector<int>>() : ordinals(gpus);
  if (!known) return;
  for (std::size_t i = 0; i < known->size(); ++i) {
    const auto at = std::find(ordinals_of.begin(), ordinals_of.end(), (*known)[i]);
    if (at == ordinals_of.end()) continue;
    const auto part = static_cast<std::size_t>(at - ordinals_of.begin());
    const auto kept = mappings[part].release_behind(room[i].bytes);
    if (!kept || *kept == 0) continue;
    early.emplace(*at, Early{std::move(mappings[part]), first_of(stretches[part], *kept), *kept});
  }
}

std::vector<int> Mover::State::reserve_early(const std::vector<PrefetchRequest>& requests,
                                             const std::vector<int>& ordinals_of) {
  std::vector<int> with_room;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const int ordinal = ordinals_of[i];
    std::vector<Stretch> stretches;
    std::uint64_t total = 0;
    for (const PrefetchRequest::Part& part : requests[i].parts) {
      append_stretch(stretches, {total, part.offset, part.bytes});
      total += part.bytes;
    }
    const std::uint64_t bytes = std::min(total, requests[i].room / kPage * kPage);
    if (bytes == 0 || early.contains(ordinal)) continue;
    auto memory = DeviceMemory::make(calls, devices.at(ordinal), bytes);
    if (!memory) continue;
    early.emplace(ordinal, Early{std::move(*memory), first_of(stretches, bytes), bytes});
    with_room.push_back(ordinal);
  }
  return with_room;
}

Mover::State::EarlyCopy Mover::State::copy_to_early(const std::vector<int>& ordinals,
                                                    const RingShares& shares) const {
  EarlyCopy copy;
  for (const int ordinal : ordinals) {
    const Early& one = early.at(ordinal);
    const std::uint64_t load = load_size(one.bytes, shares.threads, shares.buffer_bytes);
    auto loads = loads_of(one.stretches, load);
    auto& done = copy.done.emplace_back(loads.size());
    copy.parts.push_back({&devices.at(ordinal), one.base(), std::move(loads), std::span(done)});
  }
  return copy;
}

std::uint64_t Mover::State::count_early(const std::vector<int>& ordinals, const EarlyCopy& copy) {
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < ordinals.size(); ++i) {
    Early& one = early.at(ordinals[i]);
    one.bytes = 0;
    for (std::size_t j = 0; j < copy.done[i].size() && copy.done[i][j]; ++j)
      one.bytes += copy.parts[i].loads[j].bytes;
    one.stretches = first_of(one.stretches, one.bytes);
    bytes += one.bytes;
  }
  return bytes;
}

std::uint64_t Mover::State::early_bytes(int ordinal, const std::vector<Stretch>& stretches) const {
  const auto found = early.find(ordinal);
  if (found == early.end()) return 0;
  // Only for the very same places it is of use.
  return first_of(stretches, found->second.bytes) == found->second.stretches ? found->second.bytes
                                                                             : 0;
}

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
    STASIS_TRY_ASSIGN(auto imported, Imported::make(calls, std::move(segment)));
    out[imported.ordinal()].push_back(std::move(imported));
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

MoverOptions options_for(std::span<const GpuUuid> gpus, std::uint64_t ring_bytes,
                         std::uint64_t bytes) {
  // Two buffers for each thread, and a thread for each buffer that the content fills; the content
  // may have grown when it is copied.
  constexpr std::uint64_t kLittle = 4 * kLeastRing;
  MoverOptions options;
  const std::uint64_t most =
      gpus.empty() ? std::max(2 * ring_bytes, 16 * kLeastRing) : gpus.size() * ring_bytes;
  const std::uint64_t least = std::max(gpus.size(), std::size_t{1}) * kLittle;
  std::uint64_t all = most;
  if (bytes < most / 2) {
    const std::uint64_t pairs = bytes / options.buffer_bytes + 1;
    all = std::min(most, std::max(least, 2 * pairs * options.buffer_bytes));
  }
  const std::uint64_t share = std::min(ring_bytes, all / std::max(gpus.size(), std::size_t{1}));
  options.buffer_bytes *= std::bit_floor(std::max(share / options.ring_bytes, std::uint64_t{1}));
  options.ring_bytes = all;
  return options;
}

Result<Mover> Mover::start(const MoverOptions& options) {
  STASIS_TRY_ASSIGN(auto size, ring_size(options));
  STASIS_TRY_ASSIGN(auto calls, DeviceCalls::load());

  // The memory comes while the driver starts: the one takes 0.1 to 0.5 s, the other 0.3 s and more.
  const unsigned threads = options.threads != 0 ? options.threads : default_threads(1);
  std::optional<Result<Ring>> ring;
  const auto make_ring = [&] { ring.emplace(Ring::make(size.chunk_bytes, size.chunks, threads)); };
  Result<void> started;
  const auto start_driver = [&] {
    if (auto code = calls.init(0); code != cuda::CUDA_SUCCESS) {
      started = stasis::fail(calls.error(code, "cuInit", "start the driver"));
    }
  };
  if (on_threads(2, [&](unsigned i) { i == 0 ? start_driver() : make_ring(); }) < 2) make_ring();
  STASIS_TRY(std::move(started));
  if (!*ring) return stasis::fail(std::move(ring->error()));

  return Mover(std::make_unique<State>(options, calls, std::move(**ring)));
}

Result<void> Mover::open(std::span<const GpuUuid> gpus, const Interrupt& interrupt,
                         Clock::time_point deadline) {
  Stop stop(interrupt, deadline, "preparing to copy GPU memory");
  STASIS_TRY_ASSIGN(auto ordinals, state_->ordinals(gpus));
  STASIS_TRY(state_->open(ordinals, stop));
  Ring& ring = state_->ring;
  auto& devices = state_->devices;
  STASIS_TRY_ASSIGN(auto shares, share_ring(ring.chunk_bytes(), ring.chunks(),
                                            static_cast<unsigned>(devices.size()),
                                            state_->threads_for(devices.size())));
  for (auto& [ordinal, device] : devices) {
    STASIS_TRY(device.have_streams(2 * shares.threads));
  }
  const unsigned threads = state_->threads_for(1);
  return ring.pin(state_->calls, devices.begin()->second.context(), threads, stop);
}

Result<Mover> Mover::prepare(const MoverOptions& options, std::span<const GpuUuid> gpus,
                             const Interrupt& interrupt, Clock::time_point deadline) {
  STASIS_TRY_ASSIGN(auto mover, start(options));
  STASIS_TRY(mover.open(gpus, interrupt, deadline));
  return mover;
}

Result<CopyReport> Mover::copy_out(std::vector<Segment> segments, Content& content,
                                   const Interrupt& interrupt, Clock::time_point deadline) {
  return copy(Direction::kOut, std::move(segments), for_all_threads(content), interrupt, deadline);
}

Result<CopyReport> Mover::copy_in(std::vector<Segment> segments, Content& content,
                                  const Interrupt& interrupt, Clock::time_point deadline) {
  return copy(Direction::kIn, std::move(segments), for_all_threads(content), interrupt, deadline);
}

Result<CopyReport> Mover::prefetch(const std::vector<PrefetchRequest>& requests, Content& content,
                                   const Interrupt& interrupt, Clock::time_point deadline) {
  return prefetch(requests, for_all_threads(content), interrupt, deadline);
}

Result<void> Mover::prepare_digests(const Interrupt& interrupt, Clock::time_point deadline) {
  Stop stop(interrupt, deadline, "preparing digests on the GPU");
  for (const auto& [ordinal, device] : state_->devices) {
    if (state_->digest.contains(ordinal)) continue;
    STASIS_TRY_ASSIGN(auto loaded, GpuDigest::load(state_->calls, device, stop));
    state_->digest.emplace(ordinal, std::move(loaded));
  }
  return {};
}

void Mover::keep(std::vector<SpareRoom> room) { state_->keep = std::move(room); }

void Mover::hold(std::vector<UniqueFd> files) {
  for (UniqueFd& file : files)
    state_->files.push_back(std::move(file));
}

void Mover::drop_prefetched() {
  if (!state_->unusable) state_->early.clear();
}

// One copy of a mover, step by step. Parallel lists have an entry for each GPU.
class Mover::Copying {
 public:
  // The references outlive it.
  Copying(State& state, Direction direction, const Contents& contents, const Interrupt& interrupt,
          Clock::time_point deadline)
      : state_(state),
        direction_(direction),
        contents_(contents),
        interrupt_(interrupt),
        deadline_(deadline),
        stop_(interrupt, deadline,
              is_out() ? "copying GPU memory out" : "copying GPU memory back") {}

  Result<CopyReport> run(std::vector<Segment> segments, std::vector<SpareRoom> room) {
    if (auto sensible = sort_and_check(segments); !sensible)
      return stasis::fail(std::move(sensible.error()));
    if (segments.empty()) return std::move(report_);
    const auto start = Clock::now();
    STASIS_TRY(map(std::move(segments), is_out() && !room.empty()));
    report_.map_seconds = since(start);
    const auto copying = Clock::now();
    copy();
    report_.seconds = since(copying);
    if (still_copying_) {
      state_.unusable = true;
      for (Mapping& mapping : mappings_)
        mapping.abandon();
      return stasis::fail(never_ends(stop_));
    }
    const auto letting_go = Clock::now();
    if (!whole_.empty() && !stop_.stopped())
      state_.keep_early(std::move(room), ordinals_, mappings_, whole_);
    for (Mapping& mapping : mappings_)
      (void)stop_.ok(mapping.release());
    report_.map_seconds += since(letting_go);
    STASIS_TRY(stop_.result());
    return std::move(report_);
  }

 private:
  bool is_out() const { return direction_ == Direction::kOut; }

  // All memory on each GPU at one place, and the buffers that its content goes through.
  Result<void> map(std::vector<Segment> segments, bool keeps_whole) {
    STASIS_TRY_ASSIGN(auto imported, state_.import(std::move(segments), stop_));
    for (const auto& [ordinal, list] : imported)
      ordinals_.push_back(ordinal);
    STASIS_TRY_ASSIGN(buffers_, state_.buffers_for(ordinals_, stop_));
    for (auto& [ordinal, list] : imported) {
      std::vector<Stretch> stretches;
      std::uint64_t total = 0;
      for (const Imported& one : list) {
        const Segment& segment = one.segment();
        append_stretch(stretches, {total, segment.offset, segment.bytes});
        total += segment.bytes;
      }
      report_.bytes += total;
      STASIS_TRY_ASSIGN(auto mapping,
                        Mapping::make(state_.calls, state_.devices.at(ordinal), list, stop_));
      there_.push_back(is_out() ? 0 : state_.early_bytes(ordinal, stretches));
      rest_.push_back(rest_of(stretches, there_.back()));
      if (keeps_whole) whole_.push_back(std::move(stretches));
      mappings_.push_back(std::move(mapping));
    }
    imported.clear();
    const auto parts = static_cast<unsigned>(ordinals_.size());
    if (auto begun = contents_.begin(buffers_.shares.threads * parts); !begun)
      return stasis::fail(std::move(begun.error()));
    return {};
  }

  void copy() {
    if (is_out() && contents_.digest_chunk != 0) {
      Stop soon(interrupt_, digests_until(report_.bytes, deadline_),
                "computing digests on the GPU");
      still_copying_ = state_.leave_out(ordinals_, mappings_, buffers_, contents_, rest_, soon);
      (void)stop_.ok(soon.result());
    }
    const bool fills = !is_out() && contents_.zero_chunk != 0;
    if (fills) rest_ = state_.fill_zeros(ordinals_, mappings_, buffers_, contents_, rest_, stop_);
    const RingShares& shares = buffers_.shares;
    std::vector<DevicePart> parts;
    std::uint64_t moving = 0;
    for (std::size_t i = 0; i < ordinals_.size(); ++i) {
      const std::uint64_t left = bytes_of(rest_[i]);
      moving += left;
      const std::uint64_t load = load_size(left, shares.threads, shares.buffer_bytes);
      parts.push_back(
          {&state_.devices.at(ordinals_[i]), mappings_[i].base(), loads_of_each(rest_[i], load)});
    }
    report_.left_out = report_.bytes - moving;
    copy_prefetched(parts);
    const CopyJob job{.calls = &state_.calls,
                      .direction = direction_,
                      .parts = parts,
                      .threads_per_part = shares.threads,
                      .buffers = buffers_.all,
                      .content = contents_.of};
    if (!still_copying_) still_copying_ = run_copy(job, stop_).still_copying;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (there_[i] == 0 && !fills) continue;
      (void)stop_.ok(parts[i].device->make_current());
      if (!wait_for_stream(state_.calls, parts[i].device->stream(2 * shares.threads), stop_))
        still_copying_ = true;
    }
  }

  // What is on the GPU already goes to its place there.
  void copy_prefetched(const std::vector<DevicePart>& parts) {
    for (std::size_t i = 0; i < parts.size() && !stop_.stopped(); ++i) {
      if (there_[i] == 0 || !stop_.ok(parts[i].device->make_current())) continue;
      const auto code =
          state_.calls.copy_within(parts[i].base, state_.early.at(ordinals_[i]).base(), there_[i],
                                   parts[i].device->stream(2 * buffers_.shares.threads));
      if (code != cuda::CUDA_SUCCESS)
        stop_.fail(state_.calls.error(code, "cuMemcpyDtoDAsync", "copy within a GPU"));
    }
  }

  State& state_;
  const Direction direction_;
  const Contents& contents_;
  const Interrupt& interrupt_;
  const Clock::time_point deadline_;
  Stop stop_;
  CopyReport report_;
  std::vector<int> ordinals_;
  State::Buffers buffers_;
  std::vector<Mapping> mappings_;
  std::vector<std::uint64_t> there_;         // prefetched, from the beginning
  std::vector<std::vector<Stretch>> rest_;   // to be copied
  std::vector<std::vector<Stretch>> whole_;  // of a copy that leaves its content on the GPU
  bool still_copying_ = false;
};

Result<CopyReport> Mover::copy(Direction direction, std::vector<Segment> segments,
                               const Contents& contents, const Interrupt& interrupt,
                               Clock::time_point deadline) {
  if (state_->unusable) {
    return stasis::fail(ErrorCode::kNoAnswer, "the GPU has not ended the last copy");
  }
  // A copy that does not end goes on until this process has ended.
  const ScopeGuard let_go([&] {
    if (!state_->unusable) state_->files.clear();
  });
  if (direction == Direction::kOut) drop_prefetched();
  return Copying(*state_, direction, contents, interrupt, deadline)
      .run(std::move(segments), std::exchange(state_->keep, {}));
}

Result<CopyReport> Mover::prefetch(const std::vector<PrefetchRequest>& requests,
                                   const Contents& contents, const Interrupt& interrupt,
                                   Clock::time_point deadline) {
  if (state_->unusable) {
    return stasis::fail(ErrorCode::kNoAnswer, "the GPU has not ended the last copy");
  }
  drop_prefetched();
  Stop stop(interrupt, deadline, "prefetching GPU memory");
  std::vector<GpuUuid> gpus;
  for (const PrefetchRequest& one : requests)
    gpus.push_back(one.gpu);
  CopyReport report;
  if (gpus.empty()) return report;
  STASIS_TRY_ASSIGN(auto known, state_->ordinals(gpus));
  STASIS_TRY(state_->open(known, stop));

  const auto start = Clock::now();
  const std::vector<int> ordinals = state_->reserve_early(requests, known);
  if (ordinals.empty()) return report;
  auto buffers = state_->buffers_for(ordinals, stop);
  if (!buffers) {
    drop_prefetched();
    return stasis::fail(std::move(buffers.error()));
  }
  const RingShares& shares = buffers->shares;
  const State::EarlyCopy copy = state_->copy_to_early(ordinals, shares);
  if (auto begun = contents.begin(shares.threads * static_cast<unsigned>(ordinals.size()));
      !begun) {
    drop_prefetched();
    return stasis::fail(std::move(begun.error()));
  }
  report.map_seconds = since(start);
  const auto copying = Clock::now();
  const CopyJob job{.calls = &state_->calls,
                    .direction = Direction::kIn,
                    .parts = copy.parts,
                    .threads_per_part = shares.threads,
                    .buffers = buffers->all,
                    .content = contents.of};
  if (run_copy(job, stop).still_copying) {
    state_->unusable = true;
    return stasis::fail(never_ends(stop));
  }
  report.seconds = since(copying);
  report.bytes = state_->count_early(ordinals, copy);
  return report;
}

}  // namespace stasis::direct
