// Plain device memory: allocations of many sizes, all of it checked and changed in each round; with
// --still more of it that is checked and stays as it is.
#include <algorithm>
#include <string>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kMiB = 1u << 20;
constexpr std::uint64_t kMemorySize = 16 * kMiB;
constexpr std::uint64_t kSpanWords = 512;
constexpr int kSpansPerRound = 8;
constexpr std::uint64_t kLongestAlignment = 512;  // of a row
constexpr std::uint64_t kStillPiece = 1024 * kMiB;

// Small ones share the driver's slabs, those from 2 MiB on have pages of their own: sizes on both
// sides of each border.
constexpr std::uint64_t kSmallSizes[] = {8,        24,           4096,     4104,    65536,
                                         1 * kMiB, 2 * kMiB - 8, 2 * kMiB, 3 * kMiB};

// The small sizes, then half of the rest in one piece, and what is left in ever smaller ones.
std::vector<Buffer> allocate_all(const Gpu& gpu, std::uint64_t size) {
  std::vector<Buffer> buffers;
  bool row = false;  // every other one by the call for rows, if it is as long then as it is to be
  auto add = [&](std::uint64_t bytes) {
    row = !row && bytes % kLongestAlignment == 0;
    buffers.push_back(
        {"buffer " + std::to_string(buffers.size()) + " (" + std::to_string(bytes) + " bytes)",
         row ? gpu.allocate_row(bytes) : gpu.allocate(bytes), bytes / sizeof(std::uint64_t), 0});
    size -= std::min(size, bytes);
  };
  for (std::uint64_t bytes : kSmallSizes) {
    if (bytes <= size) add(bytes);
  }
  while (size >= sizeof(std::uint64_t)) {
    const std::uint64_t bytes = size > 8 * kMiB ? size / 2 : size;
    add(bytes / sizeof(std::uint64_t) * sizeof(std::uint64_t));
    if (size < sizeof(std::uint64_t)) break;
  }
  return buffers;
}

void allocate_still(const Gpu& gpu, std::uint64_t size, std::vector<Buffer>& buffers) {
  for (std::uint64_t left = size; left >= sizeof(std::uint64_t);) {
    const std::uint64_t words = std::min(left, kStillPiece) / sizeof(std::uint64_t);
    left -= words * sizeof(std::uint64_t);
    buffers.push_back({"still buffer " + std::to_string(buffers.size()),
                       gpu.allocate(words * sizeof(std::uint64_t)), words, 0});
  }
}

// The way back in: spoil a few words, and write the right ones from the CPU.
void rewrite_span(const Gpu& gpu, const Buffer& buffer, std::uint64_t first, std::uint64_t count) {
  const cuda::CUdeviceptr at = buffer.data + first * sizeof(std::uint64_t);
  std::vector<std::uint64_t> words(count);
  for (std::uint64_t i = 0; i < count; ++i)
    words[i] = word(first + i, buffer.seed);
  gpu.cuda().cuMemsetD8_v2(at, 0xa5, count * sizeof(std::uint64_t));
  gpu.cuda().cuMemcpyHtoD_v2(at, words.data(), count * sizeof(std::uint64_t));
}

// Memory that is zeros but for a page in its middle, as of a program that takes what it may need.
class Sparse {
 public:
  Sparse(const Gpu& gpu, std::uint64_t size)
      : gpu_(gpu), size_(size / kPiece * kPiece), data_(size_ > 0 ? gpu.allocate(size_) : 0) {
    if (size_ > 0) gpu.cuda().cuMemsetD8_v2(data_, 0, size_);
  }
  // The page, whose content others keep.
  void add(std::vector<Buffer>& buffers) const {
    if (size_ > 0)
      buffers.push_back({"page in the middle of zeros", page(), kPage / sizeof(std::uint64_t), 0});
  }
  // All of it, or where there is much, another eighth in each round.
  void verify(const Run& run) {
    const std::uint64_t pieces = size_ / kPiece;
    const std::uint64_t step = pieces > kMany ? 8 : 1;
    for (std::uint64_t i = run.round() % step; i < pieces; i += step) {
      const cuda::CUdeviceptr at = data_ + i * kPiece;
      content_.resize(kPiece);
      gpu_.cuda().cuMemcpyDtoH_v2(content_.data(), at, kPiece);
      if (page() >= at && page() < at + kPiece)
        std::fill_n(content_.begin() + static_cast<std::ptrdiff_t>(page() - at), kPage, '\0');
      const bool zero =
          content_[0] == 0 && std::equal(content_.begin() + 1, content_.end(), content_.begin());
      if (!zero) run.mismatch("memory that was zeros is not");
    }
  }

 private:
  static constexpr std::uint64_t kPiece = 16 * kMiB;
  static constexpr std::uint64_t kMany = 64;
  static constexpr std::uint64_t kPage = 4096;
  cuda::CUdeviceptr page() const { return data_ + size_ / 2 + kMiB; }

  const Gpu& gpu_;
  std::uint64_t size_;
  cuda::CUdeviceptr data_;
  std::string content_;
};

}  // namespace

void run_memory(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  std::vector<Buffer> buffers = allocate_all(gpu, run.size_or(kMemorySize));
  const std::size_t changing = buffers.size();
  allocate_still(gpu, run.options().still, buffers);
  Sparse sparse(gpu, run.options().zeros);
  sparse.add(buffers);
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    buffers[i].seed = run.seed(0, i);
    gpu.kernels().fill(nullptr, buffers[i].data, buffers[i].words, buffers[i].seed);
  }
  Checker checker(gpu, buffers.size());
  while (run.next()) {
    checker.begin(nullptr);
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      checker.advance(nullptr, buffers[i],
                      i < changing ? run.seed(run.round(), i) : buffers[i].seed);
    }
    checker.verify(nullptr, run);
    sparse.verify(run);
    for (int i = 0; i < kSpansPerRound; ++i) {
      const std::uint64_t random = run.seed(run.round(), 1000 + static_cast<std::uint64_t>(i));
      const Buffer& buffer = buffers[random % buffers.size()];
      const std::uint64_t count = std::min(buffer.words, kSpanWords);
      const std::uint64_t first = (random >> 16) % (buffer.words - count + 1);
      verify_span(gpu, run, buffer, first, count);
      if (i == 0) rewrite_span(gpu, buffer, first, count);
    }
    run.finish();
  }
}

}  // namespace stasis::workloads
