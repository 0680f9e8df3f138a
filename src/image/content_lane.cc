#include "image/content_lane.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/units.h"
#include "image/content_format.h"

namespace stasis {
namespace {

using namespace content_format;  // NOLINT(google-build-using-namespace): constants only

constexpr std::size_t kGatherBytes = 1U << 20;
// Of one system call to the page cache: while what is hashed is still in the processor's. The disk
// itself wants it in larger pieces and gets all that there is.
constexpr std::size_t kWriteBytes = 64U << 10;
// The kernel is told to begin writing to the disk what is in the page cache, so that the sync at
// the end finds little left.
constexpr std::uint64_t kWriteBack = 8U << 20;

Result<void> cannot_write(const ContentLane& lane, std::uint64_t at, int number) {
  Error error = errno_error(fmt::format("cannot write {} at {}", lane.path, at), number);
  struct statvfs info = {};
  if (error.code == ErrorCode::kNoSpace && ::fstatvfs(lane.file.get(), &info) == 0) {
    error.message +=
        fmt::format(" ({} free)", format_bytes(std::uint64_t{info.f_bavail} * info.f_frsize));
  }
  return fail(std::move(error));
}

Result<void> write_at(ContentLane& lane, std::span<const std::byte> bytes, std::uint64_t at) {
  STASIS_TRY(fault(FaultPoint::kContentWrite));
  while (!bytes.empty()) {
    const ssize_t done = TEMP_FAILURE_RETRY(
        ::pwrite(lane.file.get(), bytes.data(), bytes.size(), static_cast<off_t>(at)));
    // What this file system wants is more than 4096, or the rest of a short write is odd.
    if (done < 0 && errno == EINVAL && lane.direct) {
      lane.direct = false;
      if (::fcntl(lane.file.get(), F_SETFL, 0) == 0) continue;
    }
    if (done < 0) return cannot_write(lane, at, errno);
    if (done == 0) return cannot_write(lane, at, EIO);
    at += static_cast<std::uint64_t>(done);
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
  return {};
}

// Beside a base an image has n + 1 data files only when it has written n * n times so much: little
// that has changed makes few files, of which there may be 64 in all, and what is much waits for a
// file in its first 256 MiB alone.
constexpr std::uint64_t kEnoughForAFile = 1U << 20;

bool page_aligned_memory(std::span<const std::byte> bytes) {
  return reinterpret_cast<std::uintptr_t>(bytes.data()) % kPage == 0;
}

}  // namespace

ContentBatch::ContentBatch(ContentLane& lane, ContentEncoding encoding, SyncPolicy sync,
                           std::size_t chunk_bytes)
    : lane_(lane), encoding_(encoding), sync_(sync), gather_(std::max(kGatherBytes, chunk_bytes)) {}

Result<ContentBatch::Place> ContentBatch::add(std::span<const std::byte> content) {
  std::span<const std::byte> bytes = content;
  Place place;
  if (encoding_ != ContentEncoding::kRaw) {
    STASIS_TRY_ASSIGN(auto room, gathered(content.size()));
    // A chunk that saves less than a sixteenth is not worth the time of the reader.
    const std::size_t most = content.size() - content.size() / 16;
    if (auto size = lane_.workspace.compress(encoding_, content, room.first(most))) {
      place.encoding = encoding_;
      bytes = pad(room, *size);
      place.stored = static_cast<std::uint32_t>(*size);
    }
  }
  if (place.encoding == ContentEncoding::kRaw) {
    place.stored = static_cast<std::uint32_t>(content.size());
    if (content.size() % kPage != 0 || (lane_.direct && !page_aligned_memory(content))) {
      STASIS_TRY_ASSIGN(auto room, gathered(content.size()));
      std::copy(content.begin(), content.end(), room.begin());
      bytes = pad(room, content.size());
    }
  }
  place.position = lane_.end;
  STASIS_TRY(append(bytes, bytes.data() != content.data()));
  return place;
}

Result<void> ContentBatch::flush() {
  if (waiting_.empty()) return {};
  const std::uint64_t at = lane_.end - waiting_.size();
  auto done = write_at(lane_, std::exchange(waiting_, {}), at);
  if (done && sync_ == SyncPolicy::kDisk && !lane_.direct &&
      lane_.end - lane_.written_back >= kWriteBack) {
    (void)::sync_file_range(lane_.file.get(), static_cast<off_t>(lane_.written_back),
                            static_cast<off_t>(lane_.end - lane_.written_back),
                            SYNC_FILE_RANGE_WRITE);
    lane_.written_back = lane_.end;
  }
  return done;
}

// Where the next chunk may be put together, behind those that wait there.
Result<std::span<std::byte>> ContentBatch::gathered(std::size_t bytes) {
  if (gathered_ + page_aligned(bytes) > gather_) {
    STASIS_TRY(flush());
    gathered_ = 0;
  }
  STASIS_TRY_ASSIGN(auto memory, lane_.workspace.stored(gather_));
  return memory.subspan(gathered_);
}

std::span<const std::byte> ContentBatch::pad(std::span<std::byte> room, std::size_t size) {
  const std::size_t padded = page_aligned(size);
  std::fill(room.begin() + static_cast<std::ptrdiff_t>(size),
            room.begin() + static_cast<std::ptrdiff_t>(padded), std::byte{0});
  gathered_ += padded;
  return room.first(padded);
}

Result<void> ContentBatch::append(std::span<const std::byte> bytes, bool is_gathered) {
  if (!waiting_.empty() && waiting_.data() + waiting_.size() != bytes.data()) {
    STASIS_TRY(flush());
    if (!is_gathered) gathered_ = 0;
  }
  waiting_ = waiting_.empty() ? bytes : std::span(waiting_.data(), waiting_.size() + bytes.size());
  lane_.end += bytes.size();
  if (lane_.direct || waiting_.size() < kWriteBytes) return {};
  auto flushed = flush();
  gathered_ = 0;
  return flushed;
}

void ContentLanes::open(const UniqueFd& folder, ContentKind kind, bool direct_io,
                        bool beside_base) {
  folder_ = &folder;
  kind_ = kind;
  direct_io_ = direct_io;
  beside_base_ = beside_base;
}

bool ContentLanes::may_grow(LaneKind kind) const {
  if (!beside_base_) return count_ < lanes_.size();
  const OfKind& own = kinds_.at(static_cast<std::size_t>(kind));
  return own.count < (kind == LaneKind::kNew ? kNewFiles : kMovedFiles) &&
         own.count * own.count * kEnoughForAFile <= own.bytes;
}

// Nothing if there may be no more.
Result<ContentLane*> ContentLanes::make(LaneKind kind) {
  const std::lock_guard lock(growing_);
  if (!may_grow(kind)) return nullptr;
  const std::size_t number = count_;
  auto lane = std::make_unique<ContentLane>();
  lane->path = content_data_path(kind_, number);
  lane->number = static_cast<std::uint8_t>(number);
  lane->kind = kind;
  const std::string name = lane->path.substr(lane->path.find('/') + 1);
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW;
  Result<UniqueFd> file = fail(ErrorCode::kInternal, "");
  if (direct_io_) {
    file = open_file(folder_->get(), name, flags | O_DIRECT, 0600);
    lane->direct = file.has_value();
    // A file system without it may have made the file all the same (open(2)).
    if (!file) ::unlinkat(folder_->get(), name.c_str(), 0);
  }
  if (!file) file = open_file(folder_->get(), name, flags, 0600);
  if (!file) return fail(std::move(file.error()));
  lane->file = std::move(*file);
  lanes_.at(number) = std::move(lane);
  ++kinds_.at(static_cast<std::size_t>(kind)).count;
  count_ = number + 1;
  return lanes_.at(number).get();
}

Result<ContentLane*> ContentLanes::take(LaneKind kind) {
  static std::atomic<std::size_t> next_thread = 0;
  // A thread begins with the same one each time, which its processor still knows.
  thread_local const std::size_t own = next_thread++;
  const std::size_t count = count_;
  for (std::size_t i = 0; i < count; ++i) {
    ContentLane* lane = lanes_.at((own + i) % count).get();
    if (lane->kind == kind && !lane->busy.exchange(true)) return lane;
  }
  auto lane = make(kind);
  if (!lane || *lane != nullptr) return lane;
  return wait_for(kind, own);
}

// There is one: otherwise it would have been made.
ContentLane* ContentLanes::wait_for(LaneKind kind, std::size_t own) {
  const std::size_t count = count_;
  ContentLane* lane = nullptr;
  for (std::size_t i = 0; lane == nullptr; ++i) {
    ContentLane* one = lanes_.at((own + i) % count).get();
    if (one->kind == kind) lane = one;
  }
  while (lane->busy.exchange(true))
    lane->busy.wait(true);
  return lane;
}

void ContentLanes::give_back(ContentLane& lane) {
  OfKind& kind = kinds_.at(static_cast<std::size_t>(lane.kind));
  kind.bytes += lane.end - std::exchange(lane.counted, lane.end);
  lane.busy = false;
  lane.busy.notify_one();
}

}  // namespace stasis
