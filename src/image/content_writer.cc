// Long because lanes, bases and the index are written under one state, which a failure gives up as
// a whole.
#include "image/content_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/units.h"
#include "image/content_format.h"
#include "image/content_lane.h"
#include "image/parallel.h"
#include "image/precopied_chunks.h"
#include "image/reused_chunks.h"

namespace stasis {

std::optional<ContentCompression> compression_from_name(std::string_view name) {
  if (name == "none") return ContentCompression::kNone;
  if (name == "lz4") return ContentCompression::kLz4;
  if (name == "zstd") return ContentCompression::kZstd;
  return std::nullopt;
}

namespace {

using namespace content_format;  // NOLINT(google-build-using-namespace): constants only

enum class SlotState : std::uint8_t { kEmpty, kZero, kStored, kDuplicate, kReused, kReusedAgain };

// A chunk while its image is being written. Only the thread that writes it touches it, but for the
// digest, which others compare once it is in the table.
struct Slot {
  BlockDigest digest{};
  // kDuplicate: the number of the slot that it equals; kReused: of the base's chunk.
  std::uint64_t position = 0;
  std::uint32_t stored = 0;
  ContentEncoding encoding = ContentEncoding::kZero;
  std::uint8_t file = 0;
  SlotState state = SlotState::kEmpty;
};
static_assert(sizeof(Slot) == 32);

// Finds equal chunks without a lock: a table of slot numbers that only ever fills.
class Known {
 public:
  // Forgets all. Room for twice as many keeps the ways short.
  void make_room(std::size_t slots) {
    table_ = std::vector<std::atomic<std::uint32_t>>(std::bit_ceil(2 * slots + 2));
  }

  // Enters slot `number`, whose digest stands; or returns the one entered with that digest before.
  std::optional<std::uint32_t> enter(const std::vector<Slot>& slots, std::uint32_t number) {
    std::uint64_t at = 0;
    std::memcpy(&at, slots[number].digest.data(), sizeof at);
    for (;; ++at) {
      std::atomic<std::uint32_t>& place = table_[at & (table_.size() - 1)];
      std::uint32_t entry = place.load(std::memory_order_acquire);
      if (entry == 0 &&
          place.compare_exchange_strong(entry, number + 1, std::memory_order_acq_rel)) {
        return std::nullopt;
      }
      if (slots[entry - 1].digest == slots[number].digest) return entry - 1;
    }
  }

 private:
  std::vector<std::atomic<std::uint32_t>> table_;
};

// Not by content_use(), which has to sort first: the job stands still.
void count(const Slot& slot, std::uint32_t bytes, ContentSummary& summary) {
  summary.use.bytes += bytes;
  summary.use.stored_bytes += slot.stored;
  summary.use.room_bytes += page_aligned(slot.stored);
  if (slot.state == SlotState::kZero) {
    ++summary.zero_chunks;
    summary.use.zero_bytes += bytes;
  } else if (slot.state == SlotState::kDuplicate || slot.state == SlotState::kReusedAgain) {
    ++summary.duplicate_chunks;
    summary.use.duplicate_bytes += bytes;
  } else if (slot.state == SlotState::kReused) {
    ++summary.reused_chunks;
    summary.use.reused_bytes += slot.stored;
  }
}

}  // namespace

struct ContentWriter::State {
  ContentOptions options;
  ContentEncoding encoding = ContentEncoding::kRaw;
  Clock::time_point start = Clock::now();
  UniqueFd folder;
  std::vector<ContentStream> streams;
  std::vector<std::uint32_t> first_slot;  // of each stream
  std::unordered_set<int> pids;
  std::vector<Slot> slots;
  Known known;
  bool finished = false;

  ContentLanes lanes;
  std::unique_ptr<ReusedChunks> reused;  // nothing: no base
  std::optional<Error> without_base;
  BlockDigest zeros{};  // of a chunk of zeros
  PrecopiedChunks precopied;
  UnwantedRoom unwanted;  // since end_files()

  std::mutex failing;
  std::atomic<bool> has_failed = false;
  std::optional<Error> failure;

  Result<void> remember(Result<void> result) {
    if (result) return result;
    const std::lock_guard lock(failing);
    if (!failure) failure = result.error();
    has_failed = true;
    return result;
  }

  std::uint64_t chunks_of(std::uint64_t bytes) const {
    return (bytes + options.chunk_bytes - 1) / options.chunk_bytes;
  }

  class Placer;
  Result<void> take_base();
  bool is_there(std::uint32_t number, Slot& slot, LaneKind& kind);
  Result<void> check_place(std::size_t stream, std::uint64_t offset, std::size_t bytes) const;
  Result<void> write(std::size_t stream, std::uint64_t offset, std::span<const std::byte> bytes);
  bool has(const BlockDigest& digest) const {
    return (reused && reused->gives(digest)) || precopied.knows(digest);
  }
  Result<std::uint64_t> precopy(std::span<const std::byte> bytes);
  Result<void> written_twice(std::size_t stream, std::uint32_t number) const;
  Result<void> deduplicate(std::size_t stream, std::uint64_t offset, std::span<std::byte> digests);
  std::optional<bool> reuse_from_base(Slot& slot);
  bool take_stored(Slot& slot);
  void reuse_precopied(std::uint32_t number, Slot& slot);
  Result<void> check_all_written() const;
  Result<void> end_files(Progress& progress, const Interrupt& interrupt);
  ContentIndex make_index() const;
  Result<ContentRecord> write_index(const ContentIndex& index);
};

// A base that cannot be linked to does not serve: then all is written.
Result<void> ContentWriter::State::take_base() {
  zeros = xxh3(std::vector<std::byte>(options.chunk_bytes));
  if (options.base == nullptr) return {};
  STASIS_TRY(fault(FaultPoint::kContentLink));
  auto made = ReusedChunks::create(options.base, folder);
  if (!made && made.error().code == ErrorCode::kNoSpace) return fail(std::move(made.error()));
  if (!made) {
    without_base = std::move(made.error());
    return {};
  }
  reused = std::move(*made);
  return fault(FaultPoint::kContentLinked);
}

// Writes chunks of one call into a lane that it takes when there is one to be written.
class ContentWriter::State::Placer {
 public:
  explicit Placer(State& state) : state_(state) {}
  Placer(const Placer&) = delete;
  Placer& operator=(const Placer&) = delete;
  ~Placer() { release(); }

  Result<void> place(std::span<const std::byte> content, LaneKind kind, Slot& slot) {
    if (lane_ != nullptr && lane_->kind != kind) {
      STASIS_TRY(end());
    }
    if (lane_ == nullptr) {
      STASIS_TRY_ASSIGN(auto lane, state_.lanes.take(kind));
      lane_ = lane;
      batch_.emplace(*lane_, state_.encoding, state_.options.sync, state_.options.chunk_bytes);
    }
    STASIS_TRY_ASSIGN(const auto place, batch_->add(content));
    slot.position = place.position;
    slot.stored = place.stored;
    slot.encoding = place.encoding;
    slot.file = lane_->number;
    slot.state = SlotState::kStored;
    return {};
  }
  // To be called at the end, and if it fails the image is lost.
  Result<void> end() {
    auto flushed = batch_ ? batch_->flush() : Result<void>();
    release();
    return flushed;
  }

 private:
  void release() {
    batch_.reset();
    if (lane_ != nullptr) state_.lanes.give_back(*lane_);
    lane_ = nullptr;
  }

  State& state_;
  ContentLane* lane_ = nullptr;
  std::optional<ContentBatch> batch_;
};

Result<void> ContentWriter::State::check_place(std::size_t stream, std::uint64_t offset,
                                               std::size_t bytes) const {
  const std::uint64_t chunk = options.chunk_bytes;
  if (stream < streams.size()) {
    const std::uint64_t size = streams[stream].bytes;
    const bool inside = offset <= size && bytes <= size - offset;
    if (inside && offset % chunk == 0 && (bytes % chunk == 0 || offset + bytes == size)) return {};
  }
  return fail(ErrorCode::kUsage,
              fmt::format("{} bytes at {} are no whole chunks of {} in stream {}", bytes, offset,
                          chunk, stream));
}

Result<void> ContentWriter::State::written_twice(std::size_t stream, std::uint32_t number) const {
  return fail(ErrorCode::kInternal,
              fmt::format("chunk {} of process {} is written twice", number - first_slot[stream],
                          streams[stream].pid.value));
}

Result<void> ContentWriter::State::write(std::size_t stream, std::uint64_t offset,
                                         std::span<const std::byte> bytes) {
  STASIS_TRY(check_place(stream, offset, bytes.size()));
  if (has_failed) {
    const std::lock_guard lock(failing);
    return fail(*failure);
  }
  Placer placer(*this);
  auto number = static_cast<std::uint32_t>(first_slot[stream] + offset / options.chunk_bytes);
  for (; !bytes.empty(); ++number) {
    const auto content = bytes.first(std::min<std::size_t>(bytes.size(), options.chunk_bytes));
    bytes = bytes.subspan(content.size());
    Slot& slot = slots[number];
    if (slot.state != SlotState::kEmpty) return written_twice(stream, number);
    if (all_zero(content)) {
      slot.state = SlotState::kZero;
      continue;
    }
    slot.digest = xxh3(content);
    LaneKind kind = LaneKind::kNew;
    // Only whole ones, so that what has one digest has one size.
    if (content.size() == options.chunk_bytes && is_there(number, slot, kind)) continue;
    STASIS_TRY(placer.place(content, kind, slot));
  }
  return placer.end();
}

Result<std::uint64_t> ContentWriter::State::precopy(std::span<const std::byte> bytes) {
  if (bytes.size() % options.chunk_bytes != 0)
    return fail(ErrorCode::kUsage, fmt::format("{} bytes are no whole chunks", bytes.size()));
  Placer placer(*this);
  std::vector<ContentChunk> stored;
  std::uint64_t sum_of_stored = 0;
  for (; !bytes.empty(); bytes = bytes.subspan(options.chunk_bytes)) {
    const auto content = bytes.first(options.chunk_bytes);
    if (all_zero(content)) continue;
    Slot slot;
    slot.digest = xxh3(content);
    if ((reused && reused->gives(slot.digest)) || !precopied.reserve(slot.digest)) continue;
    STASIS_TRY(placer.place(content, LaneKind::kNew, slot));
    stored.push_back({slot.digest, slot.position, slot.stored, slot.encoding, slot.file});
    sum_of_stored += slot.stored;
  }
  STASIS_TRY(placer.end());
  for (const ContentChunk& chunk : stored)
    precopied.add(chunk);
  return sum_of_stored;
}

Result<void> ContentWriter::State::deduplicate(std::size_t stream, std::uint64_t offset,
                                               std::span<std::byte> digests) {
  const std::uint64_t chunk = options.chunk_bytes;
  const std::size_t count = digests.size() / sizeof(BlockDigest);
  STASIS_TRY(fault(FaultPoint::kContentTake));
  STASIS_TRY(check_place(stream, offset, count * chunk));
  auto number = static_cast<std::uint32_t>(first_slot[stream] + offset / chunk);
  for (std::size_t i = 0; i < count; ++i, ++number) {
    Slot& slot = slots[number];
    if (slot.state != SlotState::kEmpty) return written_twice(stream, number);
    const auto digest = digests.subspan(i * sizeof(BlockDigest), sizeof(BlockDigest));
    std::memcpy(slot.digest.data(), digest.data(), digest.size());
    if (slot.digest == zeros)
      slot.state = SlotState::kZero;
    else if (!reuse_from_base(slot))
      reuse_precopied(number, slot);
    digest[0] = slot.state == SlotState::kEmpty ? std::byte{0} : std::byte{1};
  }
  return {};
}

// What the base says of its digest, and whether it is reused herewith.
std::optional<bool> ContentWriter::State::reuse_from_base(Slot& slot) {
  const auto found = reused ? reused->find(slot.digest) : std::nullopt;
  if (!found) return std::nullopt;
  if (!found->gives) return false;
  slot.position = found->number;
  slot.stored = found->first ? found->stored : 0;
  slot.state = found->first ? SlotState::kReused : SlotState::kReusedAgain;
  return true;
}

// Whether it is in the base or in this image already. `kind`: where it belongs if not.
bool ContentWriter::State::is_there(std::uint32_t number, Slot& slot, LaneKind& kind) {
  if (const auto took = reuse_from_base(slot)) {
    if (*took) return true;
    kind = LaneKind::kMoved;
  }
  if (const auto equal = known.enter(slots, number)) {
    slot.position = *equal;
    slot.state = SlotState::kDuplicate;
    return true;
  }
  return take_stored(slot);
}

// Where nothing else has its digest yet.
bool ContentWriter::State::take_stored(Slot& slot) {
  const auto stored = precopied.use(slot.digest);
  if (!stored) return false;
  slot.position = stored->position;
  slot.stored = stored->stored;
  slot.encoding = stored->encoding;
  slot.file = stored->file;
  slot.state = SlotState::kStored;
  return true;
}

// Of one that the caller knows by its digest alone.
void ContentWriter::State::reuse_precopied(std::uint32_t number, Slot& slot) {
  if (!precopied.has_stored(slot.digest)) return;
  if (const auto equal = known.enter(slots, number)) {
    slot.position = *equal;
    slot.state = SlotState::kDuplicate;
  } else {
    (void)take_stored(slot);
  }
}

Result<void> ContentWriter::State::check_all_written() const {
  for (std::size_t i = 0; i < streams.size(); ++i) {
    const auto begin = slots.begin() + first_slot[i];
    const auto end = begin + static_cast<std::ptrdiff_t>(chunks_of(streams[i].bytes));
    const auto empty = [](const Slot& slot) { return slot.state == SlotState::kEmpty; };
    const auto first = std::find_if(begin, end, empty);
    if (first == end) continue;
    return fail(ErrorCode::kInternal,
                fmt::format("{} of the {} chunks of process {} were never written, the first of "
                            "them chunk {}",
                            std::count_if(begin, end, empty), end - begin, streams[i].pid.value,
                            first - begin));
  }
  return {};
}

// Brings the data files to the disk and closes those that were written. Those of the base are on it
// already, unless it was made without.
Result<void> ContentWriter::State::end_files(Progress& progress, const Interrupt& interrupt) {
  const auto others = reused ? reused->files() : std::vector<ReusedChunks::File>();
  for (auto& [number, ranges] : precopied.unused())
    for (std::size_t i = 0; i < lanes.count(); ++i)
      if (lanes[i].number == number) unwanted.add(lanes[i].file, ranges);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < lanes.count(); ++i)
    total += lanes[i].end;
  const auto sync = [&](const UniqueFd& file, const std::string& path) -> Result<void> {
    if (options.sync == SyncPolicy::kDisk && ::fsync(file.get()) != 0)
      return fail(errno_error("cannot sync " + path, errno));
    return {};
  };
  return run_parallel(lanes.count() + others.size(), total, "sync content", progress, interrupt,
                      [&](std::size_t i) -> Result<std::uint64_t> {
                        if (i >= lanes.count()) {
                          const ReusedChunks::File& other = others[i - lanes.count()];
                          STASIS_TRY(sync(*other.file, other.path));
                          return 0;
                        }
                        ContentLane& lane = lanes[i];
                        STASIS_TRY(sync(lane.file, lane.path));
                        STASIS_TRY(lane.file.close(lane.path));
                        return lane.end;
                      });
}

ContentIndex ContentWriter::State::make_index() const {
  ContentIndex index;
  index.chunk_bytes = options.chunk_bytes;
  index.streams = streams;
  index.first_chunk.assign(first_slot.begin(), first_slot.end());
  for (std::size_t i = 0; i < lanes.count(); ++i)
    index.file_sizes.push_back(lanes[i].end);
  if (reused) {
    for (const ReusedChunks::File& file : reused->files())
      index.file_sizes.push_back(file.bytes);
  }
  index.chunks.reserve(slots.size());
  for (const Slot& slot : slots) {
    // What one of several equal chunks refers to has been stored: a duplicate is of no duplicate.
    const Slot& from = slot.state == SlotState::kDuplicate ? slots[slot.position] : slot;
    if (slot.state == SlotState::kReused || slot.state == SlotState::kReusedAgain) {
      index.chunks.push_back(reused->place_of(static_cast<std::uint32_t>(slot.position)));
      continue;
    }
    index.chunks.push_back(
        slot.state == SlotState::kZero
            ? ContentChunk()
            : ContentChunk{from.digest, from.position, from.stored, from.encoding, from.file});
  }
  return index;
}

Result<ContentRecord> ContentWriter::State::write_index(const ContentIndex& index) {
  const std::vector<std::byte> bytes = serialize_content_index(index);
  // The writer must not write an index that cannot be read back.
  if (auto readable = parse_content_index(bytes, options.kind); !readable) {
    Error error = std::move(readable.error());
    error.code = ErrorCode::kInternal;
    error.remedy.clear();
    return fail(std::move(error).within("checking the index that was to be written"));
  }
  const std::string path = content_index_path(options.kind);
  STASIS_TRY_ASSIGN(auto file, open_file(folder.get(), kIndexName,
                                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  STASIS_TRY(fault(FaultPoint::kContentIndex));
  STASIS_TRY(
      write_all(file.get(), reinterpret_cast<const char*>(bytes.data()), bytes.size(), path));
  if (options.sync == SyncPolicy::kDisk) {
    if (::fsync(file.get()) != 0) return fail(errno_error("cannot sync " + path, errno));
    if (::fsync(folder.get()) != 0)
      return fail(errno_error("cannot sync the folder of " + path, errno));
  }
  STASIS_TRY(file.close(path));
  ContentRecord record;
  record.index_size = bytes.size();
  BlockDigest digest{};
  std::memcpy(digest.data(), bytes.data() + bytes.size() - digest.size(), digest.size());
  record.index_checksum = to_hex(digest);
  record.data_sizes = index.file_sizes;
  record.reused_files = index.file_sizes.size() - lanes.count();
  return record;
}

ContentWriter::ContentWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
ContentWriter::ContentWriter(ContentWriter&&) noexcept = default;
ContentWriter& ContentWriter::operator=(ContentWriter&&) noexcept = default;
ContentWriter::~ContentWriter() = default;

std::uint32_t ContentWriter::chunk_bytes() const { return state_->options.chunk_bytes; }

const std::optional<Error>& ContentWriter::without_base() const { return state_->without_base; }

Result<ContentWriter> ContentWriter::create(const UniqueFd& image_dir,
                                            const ContentOptions& options) {
  if (!valid_chunk_bytes(options.chunk_bytes)) {
    return fail(ErrorCode::kUsage,
                fmt::format("{} bytes is no size of a chunk", options.chunk_bytes),
                "a power of two from 64 KiB to 16 MiB");
  }
  auto state = std::make_unique<State>();
  state->options = options;
  if (options.compression == ContentCompression::kLz4) state->encoding = ContentEncoding::kLz4;
  if (options.compression == ContentCompression::kZstd) state->encoding = ContentEncoding::kZstd;
  STASIS_TRY(fault(FaultPoint::kContentCreate));
  const char* name = content_folder(options.kind);
  if (::mkdirat(image_dir.get(), name, 0700) != 0)
    return fail(errno_error(fmt::format("cannot create {} in the image", name), errno));
  STASIS_TRY_ASSIGN(auto folder,
                    open_file(image_dir.get(), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  state->folder = std::move(folder);
  STASIS_TRY(state->take_base());
  state->lanes.open(state->folder, options.kind, options.direct_io, state->reused != nullptr);
  return ContentWriter(std::move(state));
}

Result<void> ContentWriter::add_stream(Pid pid, std::uint64_t bytes,
                                       std::vector<ContentRange> ranges) {
  ContentStream stream{pid, bytes, std::move(ranges)};
  if (pid.value <= 0 || !state_->pids.insert(pid.value).second) {
    return fail(ErrorCode::kUsage,
                fmt::format("process {} cannot have one more stream", pid.value));
  }
  if (std::string problem = problem_of(stream); !problem.empty()) {
    return fail(ErrorCode::kUsage, std::move(problem));
  }
  // As many as an index can have; it has some more room than for its chunks alone.
  constexpr std::uint64_t kMost = (kMaxIndex - (kMaxIndex >> 3)) / kChunkSize;
  const std::uint64_t first = state_->slots.size();
  if (bytes > kMaxBytes || first + state_->chunks_of(bytes) > kMost) {
    return fail(ErrorCode::kUsage,
                fmt::format("{} of content are too many chunks of {} bytes", format_bytes(bytes),
                            state_->options.chunk_bytes),
                "take larger chunks");
  }
  state_->first_slot.push_back(static_cast<std::uint32_t>(first));
  state_->slots.resize(first + state_->chunks_of(bytes));
  state_->known.make_room(state_->slots.size());
  state_->streams.push_back(std::move(stream));
  return {};
}

Result<void> ContentWriter::write(std::size_t stream, std::uint64_t offset,
                                  std::span<const std::byte> bytes) {
  return state_->remember(state_->write(stream, offset, bytes));
}

Result<std::uint64_t> ContentWriter::precopy(std::span<const std::byte> bytes) {
  auto stored = state_->precopy(bytes);
  if (!stored) (void)state_->remember(fail(stored.error()));
  return stored;
}

std::uint64_t ContentWriter::not_precopied(std::span<const std::byte> bytes) const {
  const std::uint64_t chunk = state_->options.chunk_bytes;
  std::uint64_t lacking = 0;
  for (; bytes.size() >= chunk; bytes = bytes.subspan(chunk)) {
    const auto content = bytes.first(chunk);
    if (!all_zero(content) && !state_->has(xxh3(content))) lacking += chunk;
  }
  return lacking;
}

void ContentWriter::mark_known(std::span<std::byte> digests) const {
  for (; !digests.empty(); digests = digests.subspan(sizeof(BlockDigest))) {
    BlockDigest digest{};
    std::memcpy(digest.data(), digests.data(), digest.size());
    digests[0] = std::byte{digest == state_->zeros || state_->has(digest)};
  }
}

UnwantedRoom ContentWriter::take_unwanted_room() { return std::move(state_->unwanted); }

std::uint64_t ContentWriter::digest_chunk() const { return state_->options.chunk_bytes; }

Result<void> ContentWriter::deduplicate(std::size_t stream, std::uint64_t offset,
                                        std::span<std::byte> digests) {
  return state_->remember(state_->deduplicate(stream, offset, digests));
}

Result<ContentSummary> ContentWriter::finish(Progress& progress, const Interrupt& interrupt) {
  State& state = *state_;
  if (std::exchange(state.finished, true)) {
    return fail(ErrorCode::kInternal, "content can be finished only once");
  }
  if (state.failure) return fail(*state.failure);
  STASIS_TRY(state.check_all_written());
  ContentSummary summary;
  summary.direct_io = state.options.direct_io;
  STASIS_TRY(fault(FaultPoint::kContentWritten));
  if (state.reused) {
    STASIS_TRY(state.reused->settle(state.lanes, state.options.sync, progress, interrupt));
  }
  for (std::size_t i = 0; i < state.lanes.count(); ++i) {
    summary.direct_io = summary.direct_io && state.lanes[i].direct;
    summary.written_bytes += state.lanes[i].end;
  }
  summary.precopied_bytes = state.precopied.used_bytes();
  auto ended = state.end_files(progress, interrupt);
  if (ended) ended = fault(FaultPoint::kContentSynced);
  STASIS_TRY(std::move(ended));
  const ContentIndex index = state.make_index();
  STASIS_TRY_ASSIGN(auto record, state.write_index(index));
  STASIS_TRY(fault(FaultPoint::kContentIndexWritten));
  summary.record = std::move(record);
  summary.chunks = state.slots.size();
  for (std::size_t i = 0; i < state.streams.size(); ++i) {
    for (std::uint64_t n = 0; n < index.chunks_of(i); ++n)
      count(state.slots[state.first_slot[i] + n], index.bytes_of(i, n), summary);
  }
  summary.seconds = since(state.start).count();
  return summary;
}

}  // namespace stasis
