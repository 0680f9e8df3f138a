#include "image/checksum.h"

#define XXH_INLINE_ALL
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "image/directory.h"
#include "image/parallel.h"
#include "image/xxh3_avx2.h"

namespace stasis {
namespace {

// Small enough to stay in the second-level cache between the copy from the page cache and the hash.
constexpr std::size_t kReadSize = 256U << 10;

// SSE2, which all processors have, hashes 8 to 10 GB/s on one of an EPYC; AVX2 33 from its cache.
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}

BlockDigest canonical(XXH128_hash_t hash) {
  XXH128_canonical_t form;
  XXH128_canonicalFromHash(&form, hash);
  BlockDigest digest;
  static_assert(sizeof form.digest == digest.size());
  std::copy(std::begin(form.digest), std::end(form.digest), digest.begin());
  return digest;
}

// pread and not mmap: a file that is cut short meanwhile is an error here and not a SIGBUS.
Result<BlockDigest> hash(const UniqueFd& file, const std::string& path, std::uint64_t offset,
                         std::uint64_t size) {
  const std::uint64_t end = offset + size;
  // Not of the thread: where there is no memory to note their destructors the C library aborts.
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(),
                                                                              XXH3_freeState);
  const auto buffer = std::make_unique_for_overwrite<char[]>(kReadSize);
  if (state == nullptr) return fail(ErrorCode::kOutOfHostMemory, "no memory for a checksum");
  XXH3_128bits_reset(state.get());
  while (size != 0) {
    const std::size_t want = static_cast<std::size_t>(std::min<std::uint64_t>(size, kReadSize));
    const ssize_t got =
        TEMP_FAILURE_RETRY(::pread(file.get(), buffer.get(), want, static_cast<off_t>(offset)));
    if (got < 0) return fail(read_error("cannot read " + path, errno));
    if (got == 0) {
      return fail(ErrorCode::kImageCorrupt,
                  fmt::format("{} ends after {} bytes, expected {}", path, offset, end));
    }
    if (has_avx2())
      xxh3_add_avx2(state.get(), buffer.get(), static_cast<std::size_t>(got));
    else
      XXH3_128bits_update(state.get(), buffer.get(), static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
    size -= static_cast<std::uint64_t>(got);
  }
  return canonical(XXH3_128bits_digest(state.get()));
}

}  // namespace

Result<BlockDigest> block_digest(const UniqueFd& file, const std::string& path,
                                 std::uint64_t offset) {
  return hash(file, path, offset, kChecksumBlock);
}

std::string to_hex(const BlockDigest& digest) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * digest.size());
  for (const unsigned char byte : digest) {
    text += kDigits[byte >> 4U];
    text += kDigits[byte & 0xFU];
  }
  return text;
}

BlockDigest xxh3(std::span<const std::byte> data) {
  if (!has_avx2()) return canonical(XXH3_128bits(data.data(), data.size()));
  BlockDigest digest;
  xxh3_avx2(data.data(), data.size(), digest.data());
  return digest;
}

std::string xxh3_hex(std::string_view data) {
  return to_hex(canonical(XXH3_128bits(data.data(), data.size())));
}

namespace {

struct Block {
  std::size_t job = 0;
  std::uint64_t offset = 0;
  std::uint64_t size = 0;  // 0: of a file without content
  bool known = false;
  bool last = false;
  BlockDigest digest{};
};

// The blocks of all files, one file after the other.
class Blocks {
 public:
  explicit Blocks(const std::vector<ChecksumJob>& jobs) : jobs_(jobs) {}

  // The next ones, as many as there are and `most`; none at the end.
  std::vector<Block> next(std::size_t most) {
    std::vector<Block> blocks;
    while (job_ < jobs_.size() && blocks.size() < most) {
      const ChecksumJob& job = jobs_[job_];
      const std::uint64_t number = offset_ / kChecksumBlock;
      Block block{job_, offset_, std::min(kChecksumBlock, job.size - offset_)};
      block.known = number < job.known.size();
      if (block.known) block.digest = job.known[number];
      offset_ += block.size;
      block.last = offset_ == job.size;
      if (block.last) {
        ++job_;
        offset_ = 0;
      }
      blocks.push_back(block);
    }
    return blocks;
  }

 private:
  const std::vector<ChecksumJob>& jobs_;
  std::size_t job_ = 0;
  std::uint64_t offset_ = 0;
};

// Of several steps one after the other.
class Further final : public Progress {
 public:
  explicit Further(Progress& progress) : progress_(progress) {}
  void update(std::string_view phase, std::uint64_t done, std::uint64_t total) override {
    progress_.update(phase, before_ + done, total);
  }
  void add(std::uint64_t bytes) { before_ += bytes; }

 private:
  Progress& progress_;
  std::uint64_t before_ = 0;
};

// So many are kept in mind at a time, which are those of a TiB: a sparse file can claim more than
// there is memory for what would be kept of it (8 PiB: 25 GB).
constexpr std::size_t kMostBlocks = 65536;

}  // namespace

Result<std::vector<std::string>> checksum_files(const std::vector<ChecksumJob>& jobs,
                                                const OpenJob& open_job, std::string_view phase,
                                                Progress& progress, const Interrupt& interrupt) {
  std::uint64_t total = 0;
  for (const ChecksumJob& job : jobs)
    total += job.size - std::min<std::uint64_t>(job.size, job.known.size() * kChecksumBlock);
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(),
                                                                              XXH3_freeState);
  if (state == nullptr) return fail(ErrorCode::kOutOfHostMemory, "no memory for a checksum");
  XXH3_128bits_reset(state.get());
  std::vector<std::string> checksums;
  checksums.reserve(jobs.size());
  Blocks all(jobs);
  Further further(progress);
  for (auto blocks = all.next(kMostBlocks); !blocks.empty(); blocks = all.next(kMostBlocks)) {
    auto hashed = run_parallel(blocks.size(), total, phase, further, interrupt,
                               [&](std::size_t i) -> Result<std::uint64_t> {
                                 Block& block = blocks[i];
                                 if (block.known || block.size == 0) return std::uint64_t{0};
                                 STASIS_TRY_ASSIGN(auto file, open_job(block.job));
                                 STASIS_TRY_ASSIGN(auto digest, hash(file, jobs[block.job].path,
                                                                     block.offset, block.size));
                                 block.digest = digest;
                                 return block.size;
                               });
    if (!hashed) return fail(std::move(hashed).error());
    for (const Block& block : blocks) {
      if (!block.known) further.add(block.size);
      if (block.size != 0)
        XXH3_128bits_update(state.get(), block.digest.data(), block.digest.size());
      if (!block.last) continue;
      checksums.push_back(to_hex(canonical(XXH3_128bits_digest(state.get()))));
      XXH3_128bits_reset(state.get());
    }
  }
  return checksums;
}

}  // namespace stasis
