// Memory's part for checkpoint and restore. Runs on the restore thread alone; see memory.h.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <ctime>

#include "sim/gate.h"
#include "sim/memory.h"

namespace stasis::sim {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

constexpr std::uint64_t kChunk = std::uint64_t{8} << 20;

// Of what driver 580.159.04 saves of an empty context on an H100, 527 MiB, 98 to 99 % of the pages
// hold zeros. Here 12 of 1024 hold a mark: the first eight, and some with more and more between
// them.
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kMark = 0x434f4e5445585401;
bool is_marked(std::uint64_t offset) {
  const std::uint64_t page = offset / kPage % 1024;
  return offset % kPage == 0 &&
         (page < 8 || (page >= 32 && page <= 256 && std::has_single_bit(page)));
}

// Moves bytes in chunks, no faster than asked for.
class Mover {
 public:
  Mover(const Pace& pace, std::uint64_t total) : pace_(pace), total_(total), start_(now_ns()) {}

  bool read(int fd, char* to, std::uint64_t offset, std::uint64_t size) {
    return move(size, [&](std::uint64_t at, std::uint64_t n) {
      return ::pread(fd, to + at, n, static_cast<off_t>(offset + at));
    });
  }
  bool write(int fd, const char* from, std::uint64_t offset, std::uint64_t size) {
    return move(size, [&](std::uint64_t at, std::uint64_t n) {
      return ::pwrite(fd, from + at, n, static_cast<off_t>(offset + at));
    });
  }
  // Memory that was never touched takes its time all the same: a GPU does not know it.
  void skip(std::uint64_t size) { account(size); }

 private:
  template <class F>
  bool move(std::uint64_t size, F&& step) {
    for (std::uint64_t at = 0; at < size;) {
      const auto n = step(at, std::min(kChunk, size - at));
      if (n <= 0) return false;
      at += static_cast<std::uint64_t>(n);
      account(static_cast<std::uint64_t>(n));
    }
    return true;
  }

  void account(std::uint64_t n) {
    const bool was_below = done_ * 2 < total_;
    done_ += n;
    if (was_below && done_ * 2 >= total_ && pace_.at_half) pace_.at_half();
    if (!pace_.bytes_per_second) return;
    const auto due =
        start_ + static_cast<std::int64_t>(static_cast<double>(done_) * 1e9 /
                                           static_cast<double>(pace_.bytes_per_second));
    while (now_ns() < due) {
      const auto left = due - now_ns();
      timespec t{left / 1'000'000'000, left % 1'000'000'000};
      if (left > 0) ::nanosleep(&t, nullptr);
    }
  }

  const Pace& pace_;
  std::uint64_t total_;
  std::uint64_t done_ = 0;
  std::int64_t start_;
};

}  // namespace

CUresult Memory::save(const Pace& pace) {
  image_size_ = 0;
  for (auto* object : objects_) {
    object->image_offset = image_size_;
    image_size_ += object->size;
  }
  contexts_at_ = image_size_;
  for (const Slot& s : slots_)
    image_size_ += static_cast<std::uint64_t>(s.holds) * context_bytes_;
  if (image_size_ == 0) return CUDA_SUCCESS;
  // As the driver does, which touches all of it at once; but a simulated GPU may be larger than the
  // host's memory.
  constexpr std::uint64_t kAffordable = std::uint64_t{16} << 20;
  const int how = image_size_ <= kAffordable ? MAP_POPULATE : MAP_NORESERVE;
  void* got = ::mmap(nullptr, image_size_, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | how, -1, 0);
  if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  image_ = static_cast<char*>(got);

  save_contexts();

  Mover mover(pace, contexts_at_);
  for (auto* object : objects_) {
    object->extents.clear();
    const auto file = slot(object->gpu).holding->reopen(object->id);
    if (!file) return CUDA_ERROR_UNKNOWN;
    for (std::uint64_t at = 0; at < object->size;) {
      const off_t data = ::lseek(file.get(), static_cast<off_t>(at), SEEK_DATA);
      const auto from =
          data < 0 ? object->size : std::min(object->size, static_cast<std::uint64_t>(data));
      mover.skip(from - at);
      if (from == object->size) break;
      const auto hole = ::lseek(file.get(), data, SEEK_HOLE);
      const auto to = std::min(object->size, static_cast<std::uint64_t>(hole));
      object->extents.emplace_back(from, to - from);
      if (!mover.read(file.get(), image_ + object->image_offset + from, from, to - from)) {
        return CUDA_ERROR_UNKNOWN;
      }
      at = to;
    }
  }
  return CUDA_SUCCESS;
}

// Writes the zeros too, as the real driver does.
void Memory::save_contexts() {
  std::fill(image_ + contexts_at_, image_ + image_size_, 0);
  for (auto at = contexts_at_; at < image_size_; at += kPage) {
    if (is_marked(at - contexts_at_)) *reinterpret_cast<std::uint64_t*>(image_ + at) = kMark ^ at;
  }
}

bool Memory::contexts_are_whole() const {
  for (auto at = contexts_at_; at < image_size_; at += sizeof kMark) {
    const std::uint64_t expected = is_marked(at - contexts_at_) ? kMark ^ at : 0;
    if (*reinterpret_cast<const std::uint64_t*>(image_ + at) != expected) return false;
  }
  return true;
}

void Memory::discard_image() {
  if (image_) ::munmap(image_, image_size_);
  image_ = nullptr;
  image_size_ = 0;
  contexts_at_ = 0;
}

void Memory::let_go() {
  for (const auto& [at, placement] : placements_)
    clear(at, placement.size);
  for (auto& s : slots_)
    s.holding.reset();
  ::mprotect(const_cast<char*>(device_page_), 4096, PROT_NONE);
}

CUresult Memory::bring_back(const std::string& dir, const std::vector<GpuSpec>& target,
                            const Pace& pace) {
  if (!contexts_are_whole()) return CUDA_ERROR_UNKNOWN;
  // A copy of this process may live on (a dump that left it running): it must not share our name.
  renew_nonce();
  std::vector<std::unique_ptr<Holding>> holdings(slots_.size());
  auto holding = [&](int index) -> Holding* {
    auto& h = holdings[static_cast<std::size_t>(index)];
    if (!h) {
      h = std::make_unique<Holding>(dir, target[static_cast<std::size_t>(index)]);
      if (!h->open()) return nullptr;
    }
    return h.get();
  };
  for (int i = 0; i < gpus(); ++i) {
    if (slot(i).holds > 0 && !holding(i)) return CUDA_ERROR_UNKNOWN;
  }
  // All the room first, so that a GPU that is too full is noticed before anything is copied.
  std::vector<std::pair<Object*, ObjectId>> created;
  for (auto* object : objects_) {
    auto* h = holding(object->gpu);
    if (!h) return CUDA_ERROR_UNKNOWN;
    ObjectId id;
    Fd file;
    switch (h->create(object->size, object->kind, id, file)) {
      case Holding::Outcome::kOk:
        break;
      case Holding::Outcome::kFull:
        return CUDA_ERROR_OUT_OF_MEMORY;
      case Holding::Outcome::kFailed:
        return CUDA_ERROR_UNKNOWN;
    }
    created.emplace_back(object, id);
  }
  Mover mover(pace, contexts_at_);
  for (const auto& [object, id] : created) {
    const auto file = holding(object->gpu)->reopen(id);
    if (!file) return CUDA_ERROR_UNKNOWN;
    std::uint64_t at = 0;
    for (const auto& [offset, length] : object->extents) {
      mover.skip(offset - at);
      if (!mover.write(file.get(), image_ + object->image_offset + offset, offset, length)) {
        return errno == ENOSPC ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
      }
      at = offset + length;
    }
    mover.skip(object->size - at);
  }
  for (const auto& [object, id] : created)
    object->id = id;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].holding = std::move(holdings[i]);
    slots_[i].spec = target[i];
  }
  dir_ = dir;
  for (const auto& [at, placement] : placements_) {
    if (place(at, placement)) continue;
    let_go();
    return CUDA_ERROR_UNKNOWN;
  }
  ::mprotect(const_cast<char*>(device_page_), 4096, PROT_READ);
  discard_image();
  for (auto* object : objects_) {
    object->extents.clear();
    object->restored = true;
  }
  return CUDA_SUCCESS;
}

}  // namespace stasis::sim
