#include "operations/host_memory.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/trace.h"
#include "base/units.h"
#include "direct/gpu_precopy.h"
#include "direct/image_content.h"
#include "image/directory.h"
#include "image/parallel.h"
#include "image/removal.h"
#include "proc/host_memory.h"
#include "proc/parking.h"

namespace stasis {
namespace {

// Less takes as long as the calls that the processes have to make for it.
constexpr std::uint64_t kWorthIt = 64U << 20;
// What one thread does at a time: small enough to stay in the processor's cache.
constexpr std::uint64_t kHostPiece = 1U << 20;
static_assert(kHostPiece % kHostBlock == 0 && kHostBlock == kContentChunk &&
              kHostBlock == kHostUnit);

// Memory for a piece each, aligned for direct I/O, which threads borrow. Not of the threads
// themselves: glibc ends a process that has no memory left to note what a thread has to free.
class PieceBuffers {
 public:
  class Borrowed {
   public:
    Borrowed(PieceBuffers& owner, std::byte* memory) : owner_(&owner), memory_(memory) {}
    Borrowed(Borrowed&& other) noexcept
        : owner_(other.owner_), memory_(std::exchange(other.memory_, nullptr)) {}
    Borrowed& operator=(Borrowed&&) = delete;
    ~Borrowed() {
      if (memory_ != nullptr) owner_->give_back(memory_);
    }
    std::span<std::byte> first(std::uint64_t bytes) const {
      return std::span(memory_, kHostPiece).first(bytes);
    }

   private:
    PieceBuffers* owner_;
    std::byte* memory_;
  };

  PieceBuffers() = default;
  PieceBuffers(const PieceBuffers&) = delete;
  PieceBuffers& operator=(const PieceBuffers&) = delete;
  ~PieceBuffers() {
    while (free_ != nullptr)
      std::free(std::exchange(free_, free_->next));
  }

  // kOutOfHostMemory. From any thread.
  Result<Borrowed> borrow() {
    if (std::byte* memory = take_free()) return Borrowed(*this, memory);
    if (void* memory = std::aligned_alloc(4096, kHostPiece))
      return Borrowed(*this, static_cast<std::byte*>(memory));
    return fail(ErrorCode::kOutOfHostMemory, "no memory to copy through",
                "free some memory of this machine, or raise the limit of this cgroup");
  }

 private:
  // At the beginning of one that is free.
  struct Free {
    Free* next;
  };

  std::byte* take_free() {
    const std::lock_guard lock(mutex_);
    if (free_ == nullptr) return nullptr;
    return reinterpret_cast<std::byte*>(std::exchange(free_, free_->next));
  }

  void give_back(std::byte* memory) {
    const std::lock_guard lock(mutex_);
    free_ = new (memory) Free{free_};
  }

  std::mutex mutex_;
  Free* free_ = nullptr;
};

void add_pieces(std::size_t stream, std::uint64_t offset, const AddressRange& range,
                std::vector<HostPiece>& pieces) {
  for (std::uint64_t at = range.start; at < range.end;) {
    const std::uint64_t bytes = std::min(kHostPiece, range.end - at);
    pieces.push_back({stream, offset, bytes, at});
    at += bytes;
    offset += bytes;
  }
}

std::uint64_t total_of(const std::vector<AddressRange>& ranges) {
  std::uint64_t bytes = 0;
  for (const AddressRange& range : ranges)
    bytes += range.end - range.start;
  return bytes;
}

// Where the pieces of a stream belong, as problem_of_host() lets them be.
void add_stream(const ContentReader& content, std::size_t stream, std::vector<HostPiece>& pieces) {
  for (const ContentRange& range : content.streams()[stream].ranges)
    add_pieces(stream, range.offset, {range.address, range.address + range.bytes}, pieces);
}

bool is_zero(const ContentReader& content, const HostPiece& piece) {
  const ContentIndex& index = content.index();
  const std::uint64_t first =
      index.first_chunk[piece.stream] + piece.offset / content.chunk_bytes();
  const std::uint64_t count = piece.bytes / content.chunk_bytes();
  return std::all_of(
      index.chunks.begin() + static_cast<std::ptrdiff_t>(first),
      index.chunks.begin() + static_cast<std::ptrdiff_t>(first + count),
      [](const ContentChunk& chunk) { return chunk.encoding == ContentEncoding::kZero; });
}

using Spaces = std::map<std::size_t, const proc::AddressSpace*>;  // by stream

constexpr std::size_t kPageBytes = 4096;

bool is_zero_page(const std::byte* page) {
  static constexpr std::array<std::byte, kPageBytes> kZeroPage{};
  return std::memcmp(page, kZeroPage.data(), kPageBytes) == 0;
}

// But for pages of zeros, which read as zeros without being there.
Result<void> write_pages(const proc::AddressSpace& space, std::uint64_t address,
                         std::span<const std::byte> bytes) {
  for (std::size_t at = 0; at < bytes.size();) {
    std::size_t end = at;
    while (end < bytes.size() && !is_zero_page(bytes.data() + end))
      end += kPageBytes;
    if (end > at) STASIS_TRY(space.write(address + at, bytes.data() + at, end - at));
    at = end + kPageBytes;
  }
  return {};
}

Result<void> check_chunks(const ContentReader& content) {
  if (content.chunk_bytes() > kHostPiece || kHostPiece % content.chunk_bytes() != 0 ||
      kHostBlock % content.chunk_bytes() != 0) {
    return fail(ErrorCode::kNotSupported,
                fmt::format("host memory in chunks of {} bytes", content.chunk_bytes()),
                "use the stasis that has made the image");
  }
  return {};
}

std::uint64_t count_pages(std::span<const std::byte> bytes) {
  std::uint64_t count = 0;
  for (std::size_t at = 0; at < bytes.size(); at += kPageBytes)
    count += is_zero_page(bytes.data() + at) ? 0 : kPageBytes;
  return count;
}

Result<void> write_pieces(const Environment& env, const ContentReader& content,
                          const Spaces& spaces, const Interrupt& interrupt) {
  STASIS_TRY(check_chunks(content));
  std::vector<HostPiece> pieces;
  std::uint64_t total = 0;
  for (const auto& [stream, space] : spaces) {
    add_stream(content, stream, pieces);
    total += content.streams()[stream].bytes;
  }
  const Span span(TraceKind::kImage, "fill host memory", {}, total);
  PieceBuffers buffers;
  const auto write = [&](std::size_t i) -> Result<std::uint64_t> {
    const HostPiece& piece = pieces[i];
    // What was given up, or never was there, reads as zeros.
    if (is_zero(content, piece)) return piece.bytes;
    STASIS_TRY_ASSIGN(const auto buffer, buffers.borrow());
    const auto bytes = buffer.first(piece.bytes);
    STASIS_TRY(content.read(piece.stream, piece.offset, bytes));
    auto written = write_pages(*spaces.at(piece.stream), piece.address, bytes);
    if (written) return piece.bytes;
    // The process is as CRIU has made it: it has no such memory in the image either.
    if (written.error().code == ErrorCode::kIo) {
      return corrupt_image(content_index_path(ContentKind::kHost) + ": " + written.error().message);
    }
    // None of its threads runs: it did not end by itself.
    if (written.error().code == ErrorCode::kProcessGone) {
      written.error().remedy =
          "the kernel may have killed it for want of memory (`dmesg` tells): raise the memory "
          "limit "
          "of the control group that it is restored into, or free memory";
    }
    return fail(std::move(written.error()));
  };
  return run_parallel(pieces.size(), total, "host memory", env.progress, interrupt, write);
}

// As criu asks for it: the process's pages, or those of an object.
inside_criu::Range hidden_from_criu(std::uint64_t pid, const HostRanges& found,
                                    const AddressRange& range) {
  const SharedMapping* const mapping = found.shared_at(range.start);
  if (mapping == nullptr) return {pid, range.start, range.end};
  return {inside_criu::kObject | mapping->inode, mapping->offset_of(range.start),
          mapping->offset_of(range.end)};
}

bool will_be_still(const TreeMember& member) { return member.initial == CudaState::kRunning; }

// Also one that was suspended before, but not by a tool that lets its threads run.
bool is_still(const TreeMember& member) {
  return will_be_still(member) ||
         (member.initial == CudaState::kCheckpointed && member.process.is_kept_still());
}

}  // namespace

HostMemory::Chosen HostMemory::choose(const ProcessTree& tree,
                                      const std::function<bool(const TreeMember&)>& wanted) {
  Chosen chosen;
  for (const TreeMember& member : tree.members()) {
    if (!member.process.alive()) continue;
    chosen.all.push_back(member.process.pid());
    if (!wanted(member)) continue;
    auto space = proc::AddressSpace::open(member.process.pid());
    if (!space) continue;
    auto pagemap = open_pagemap(*space);
    if (!pagemap) continue;
    chosen.sources.push_back({member.process.id(), std::move(*space), std::move(*pagemap), {}});
  }
  return chosen;
}

std::uint64_t HostMemory::find(
    Chosen chosen, const std::function<HostRanges(const proc::AddressSpace&, SharedObjects&)>& find,
    std::vector<Source>& sources) {
  SharedObjects objects(std::move(chosen.all));
  std::uint64_t bytes = 0;
  for (Source& source : chosen.sources) {
    source.found = find(source.space, objects);
    if (source.found.ranges.empty() || !is_alive(source.process)) continue;
    bytes += total_of(source.found.ranges);
    sources.push_back(std::move(source));
  }
  return bytes;
}

void HostMemory::choose(const ProcessTree& tree) { chosen_ = choose(tree, is_still); }

bool HostMemory::find(bool always) {
  const Span span(TraceKind::kImage, "find host memory");
  bytes_ = find(std::exchange(chosen_, {}), find_host_memory, sources_);
  return !sources_.empty() && (always || bytes_ >= kWorthIt);
}

Result<void> HostMemory::create_writer(const UniqueFd& image_dir, ContentOptions options) {
  if (writer_) return {};
  options.kind = ContentKind::kHost;
  options.chunk_bytes = kHostBlock;
  STASIS_TRY_ASSIGN(auto writer, ContentWriter::create(image_dir, options));
  writer_.emplace(std::move(writer));
  return {};
}

// The bytes of `pieces`, as they are now, that `take` counts. What the program has given up counts
// as nothing, and so does what is not taken by the deadline.
Result<std::uint64_t> HostMemory::look(
    const Environment& env, const std::vector<Source>& sources,
    const std::vector<HostPiece>& pieces, Deadline deadline,
    const std::function<Result<std::uint64_t>(std::span<const std::byte>)>& take) {
  std::uint64_t total = 0;
  for (const HostPiece& piece : pieces)
    total += piece.bytes;
  const Span span(TraceKind::kImage, "pre-copy host memory", {}, total);
  std::atomic<std::uint64_t> counted = 0;
  PieceBuffers buffers;
  STASIS_TRY(run_parallel(pieces.size(), total, "pre-copy", env.progress, env.interrupt,
                          [&](std::size_t i) -> Result<std::uint64_t> {
                            const HostPiece& piece = pieces[i];
                            if (std::chrono::steady_clock::now() >= deadline) return piece.bytes;
                            STASIS_TRY_ASSIGN(const auto buffer, buffers.borrow());
                            const auto bytes = buffer.first(piece.bytes);
                            const Source& source = sources[piece.stream];
                            if (!source.read(piece.address, bytes)) return piece.bytes;
                            STASIS_TRY_ASSIGN(const auto more, take(bytes));
                            counted += more;
                            return piece.bytes;
                          }));
  return counted.load();
}

Result<void> HostMemory::precopy(const Environment& env, const ProcessTree& tree,
                                 const UniqueFd& image_dir, const ContentOptions& options,
                                 const PrecopyLimits& limits) {
  // What is left then is copied in the time that the stop takes anyhow.
  constexpr std::uint64_t kLittle = 64U << 20;
  constexpr int kMostLooks = 4;
  constexpr std::size_t kSample = 16;
  // A user or a scheduler may wait for the save.
  constexpr std::chrono::seconds kLongest{5};
  std::vector<Source> sources;
  const std::uint64_t bytes = find(choose(tree, will_be_still), guess_host_memory, sources);
  struct statvfs room {};
  if (sources.empty() || bytes < limits.least || ::fstatvfs(image_dir.get(), &room) != 0) return {};
  const std::uint64_t needed = std::max(limits.image_bytes, bytes) + bytes;
  if (room.f_bavail * room.f_frsize < needed) {
    env.tell(
        fmt::format("the host memory is copied while the job stands still: to pre-copy it takes "
                    "{} of room for the image, and {} are free",
                    format_bytes(needed), format_bytes(room.f_bavail * room.f_frsize)));
    return {};
  }
  STASIS_TRY(create_writer(image_dir, options));
  std::vector<HostPiece> pieces;
  for (std::size_t i = 0; i < sources.size(); ++i)
    for (const AddressRange& range : sources[i].found.ranges)
      add_pieces(i, 0, range, pieces);
  std::vector<HostPiece> sample;
  for (std::size_t i = 0; i < pieces.size(); i += kSample)
    sample.push_back(pieces[i]);
  const std::uint64_t sampled =
      std::accumulate(sample.begin(), sample.end(), std::uint64_t{0},
                      [](std::uint64_t sum, const HostPiece& piece) { return sum + piece.bytes; });
  const auto begun = std::chrono::steady_clock::now();
  const auto time = precopy_time(bytes);
  const auto deadline = begun + time;
  for (int looks = 1; looks <= kMostLooks; ++looks) {
    STASIS_TRY(look(env, sources, pieces, deadline,
                    [&](auto content) { return writer_->precopy(content); }));
    if (std::chrono::steady_clock::now() >= deadline) {
      env.tell(
          fmt::format("the host memory is not pre-copied after {:g} s: the rest is copied while "
                      "the job stands still",
                      Seconds(time).count()));
      break;
    }
    STASIS_TRY_ASSIGN(const auto lacking, look(env, sources, sample, deadline,
                                               [&](auto content) -> Result<std::uint64_t> {
                                                 return writer_->not_precopied(content);
                                               }));
    const double share = static_cast<double>(lacking) / static_cast<double>(sampled);
    const auto changed = static_cast<std::uint64_t>(share * static_cast<double>(bytes));
    if (changed <= std::max(kLittle, bytes / 16)) break;
    if (std::chrono::steady_clock::now() - begun > kLongest) break;
    // What changes so fast will have changed again when the job stands still.
    if (changed > bytes / 4) {
      env.tell(
          fmt::format("the job changes its host memory as fast as it is pre-copied (about "
                      "{} of {} meanwhile): that is copied while the job stands still",
                      format_bytes(changed), format_bytes(bytes)));
      break;
    }
  }
  return {};
}

Result<void> HostMemory::leave_to_criu(const UniqueFd& image_dir) {
  chosen_ = {};
  sources_.clear();
  if (!writer_) return {};
  writer_.reset();
  return remove_tree(image_dir, content_folder(ContentKind::kHost),
                     content_folder(ContentKind::kHost));
}

Result<void> HostMemory::save(const Environment& env, const UniqueFd& image_dir,
                              const ContentOptions& options) {
  STASIS_TRY(create_writer(image_dir, options));
  std::vector<HostPiece> pieces;
  for (std::size_t stream = 0; stream < sources_.size(); ++stream) {
    const Source& source = sources_[stream];
    std::vector<ContentRange> ranges;
    std::uint64_t offset = 0;
    for (const AddressRange& range : source.found.ranges) {
      const std::uint64_t bytes = range.end - range.start;
      ranges.push_back({offset, bytes, {}, range.start});
      add_pieces(stream, offset, range, pieces);
      offset += bytes;
    }
    STASIS_TRY(writer_->add_stream(source.space.pid(), offset, std::move(ranges)));
  }
  Span span(TraceKind::kImage, "save host memory", {}, bytes_);
  PieceBuffers buffers;
  STASIS_TRY(run_parallel(pieces.size(), bytes_, "host memory", env.progress, env.interrupt,
                          [&](std::size_t i) -> Result<std::uint64_t> {
                            const HostPiece& piece = pieces[i];
                            STASIS_TRY_ASSIGN(const auto buffer, buffers.borrow());
                            const auto bytes = buffer.first(piece.bytes);
                            const Source& source = sources_[piece.stream];
                            STASIS_TRY(source.read(piece.address, bytes));
                            STASIS_TRY(writer_->write(piece.stream, piece.offset, bytes));
                            return piece.bytes;
                          }));
  STASIS_TRY_ASSIGN(auto summary, writer_->finish(env.progress, env.interrupt));
  span.end();
  record_ = std::move(summary.record);
  reused_bytes_ = summary.use.reused_bytes;
  precopied_bytes_ = summary.precopied_bytes;
  unwanted_ = writer_->take_unwanted_room();
  writer_.reset();
  // An open object keeps its memory, whatever the job gives up or ends meanwhile.
  sources_.clear();
  return fault(FaultPoint::kHostSaved);
}

Result<bool> HostMemory::hide(InsideCriu& pages) {
  std::vector<inside_criu::Range> ranges;
  for (const Source& source : sources_) {
    const auto pid = static_cast<std::uint64_t>(source.space.pid().value);
    for (const AddressRange& range : source.found.ranges)
      ranges.push_back(hidden_from_criu(pid, source.found, range));
    STASIS_TRY_ASSIGN(const auto original, mark_host_memory_saved(source.space));
    ranges.push_back({pid, original.start, original.end});
  }
  if (!pages.hide(std::move(ranges))) return false;
  STASIS_TRY(fault(FaultPoint::kHostHidden));
  return true;
}

std::uint64_t most_filled(const ContentReader& content) {
  const ContentUse all = sum(content_use(content.index()));
  return all.bytes - all.zero_bytes;
}

Result<std::uint64_t> count_filled(const ContentReader& content,
                                   const std::function<bool(std::uint64_t)>& goes_on,
                                   Progress& progress, const Interrupt& interrupt) {
  // Read before it is asked whether to go on.
  constexpr std::size_t kAtATime = 512;
  STASIS_TRY(check_chunks(content));
  std::vector<HostPiece> pieces;
  for (std::size_t stream = 0; stream < content.streams().size(); ++stream)
    add_stream(content, stream, pieces);
  std::erase_if(pieces, [&](const HostPiece& piece) { return is_zero(content, piece); });
  std::atomic<std::uint64_t> counted = 0;
  PieceBuffers buffers;
  for (std::span<const HostPiece> left(pieces); !left.empty() && goes_on(counted);) {
    const auto now = left.first(std::min(kAtATime, left.size()));
    left = left.subspan(now.size());
    STASIS_TRY(run_parallel(now.size(), now.size() * kHostPiece, "host memory", progress, interrupt,
                            [&](std::size_t i) -> Result<std::uint64_t> {
                              const HostPiece& piece = now[i];
                              STASIS_TRY_ASSIGN(const auto buffer, buffers.borrow());
                              const auto bytes = buffer.first(piece.bytes);
                              STASIS_TRY(content.read(piece.stream, piece.offset, bytes));
                              counted += count_pages(bytes);
                              return piece.bytes;
                            }));
  }
  return counted.load();
}

Result<void> fill_host_memory(const Environment& env, const ContentReader& content,
                              const Interrupt& interrupt) {
  std::map<std::size_t, proc::AddressSpace> opened;
  Spaces spaces;
  for (std::size_t stream = 0; stream < content.streams().size(); ++stream) {
    auto space = proc::AddressSpace::open(content.streams()[stream].pid);
    if (!space && space.error().code == ErrorCode::kProcessGone) continue;
    if (!space) return fail(std::move(space.error()));
    spaces[stream] = &opened.emplace(stream, std::move(*space)).first->second;
  }
  STASIS_TRY(write_pieces(env, content, spaces, interrupt));
  fault_only(FaultPoint::kHostBack);
  for (const auto& [stream, space] : spaces)
    STASIS_TRY(mark_host_memory_there(*space));
  return {};
}

}  // namespace stasis
