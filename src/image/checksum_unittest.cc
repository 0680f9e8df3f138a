#include "image/checksum.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "image/image_test_support.h"
#include "image/parallel.h"
#include "image/xxh3_lanes.h"

namespace stasis {
namespace {

Result<std::vector<std::string>> checksums_of(const std::vector<std::string>& paths,
                                              const std::vector<std::uint64_t>& sizes) {
  std::vector<ChecksumJob> jobs;
  for (std::size_t i = 0; i < paths.size(); ++i)
    jobs.push_back({paths[i], sizes[i], {}});
  NoProgress progress;
  return checksum_files(
      jobs, [&](std::size_t i) { return open_file(AT_FDCWD, paths[i], O_RDONLY); }, "test",
      progress, Interrupt());
}

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// By whatever instructions this processor has; xxh3_hex takes those that all have.
TEST(Checksum, IsTheSameWithEveryKindOfInstruction) {
  std::string text(70000, ' ');
  for (std::size_t i = 0; i < text.size(); ++i)
    text[i] = static_cast<char>(i * i / 7);
  for (std::size_t size = 0; size <= text.size(); size += size < 2100 ? 1 : 6789) {
    const auto bytes = std::as_bytes(std::span(text)).first(size);
    ASSERT_EQ(to_hex(xxh3(bytes)), xxh3_hex(text.substr(0, size))) << size;
  }
}

TEST(Checksum, OfNoBytesIsTheOneInTheSpecification) {
  EXPECT_EQ(xxh3_hex(""), "99aa06d3014798d86001c324468d497f");
  const TemporaryDirectory dir;
  write_text(dir / "empty", "");
  auto checksums = checksums_of({dir / "empty"}, {0});
  ASSERT_TRUE(checksums);
  EXPECT_EQ(checksums->front(), "99aa06d3014798d86001c324468d497f");
}

TEST(Checksum, FollowsItsDefinitionForOneAndForSeveralBlocks) {
  const TemporaryDirectory dir;
  const std::string small = "hello";
  std::string large(2 * kChecksumBlock + 12345, '\0');
  for (std::size_t i = 0; i < large.size(); ++i)
    large[i] = static_cast<char>(i * 2654435761U >> 13);
  write_text(dir / "small", small);
  write_text(dir / "large", large);
  auto checksums =
      checksums_of({dir / "large", dir / "small", dir / "large"}, {large.size(), 5, large.size()});
  ASSERT_TRUE(checksums) << checksums.error().to_string();
  EXPECT_EQ((*checksums)[1], xxh3_hex(from_hex(xxh3_hex(small))));
  std::string digests;
  for (std::size_t offset = 0; offset < large.size(); offset += kChecksumBlock) {
    digests += from_hex(xxh3_hex(std::string_view(large).substr(offset, kChecksumBlock)));
  }
  EXPECT_EQ((*checksums)[0], xxh3_hex(digests));
  EXPECT_EQ((*checksums)[2], (*checksums)[0]);
}

TEST(Checksum, BlocksThatAreKnownAreNotReadAgain) {
  const TemporaryDirectory dir;
  std::string large(3 * kChecksumBlock + 5, 'a');
  write_text(dir / "large", large);
  const auto whole = checksums_of({dir / "large"}, {large.size()});
  ASSERT_TRUE(whole);
  auto file = open_file(AT_FDCWD, dir / "large", O_RDONLY);
  ASSERT_TRUE(file);
  std::vector<BlockDigest> known;
  for (std::uint64_t i = 0; i < 2; ++i) {
    auto digest = block_digest(*file, "large", i * kChecksumBlock);
    ASSERT_TRUE(digest);
    known.push_back(*digest);
  }
  EXPECT_EQ(block_digest(*file, "large", 3 * kChecksumBlock).error().code,
            ErrorCode::kImageCorrupt);
  write_text(dir / "large",
             std::string(2 * kChecksumBlock, 'b') + large.substr(2 * kChecksumBlock));
  NoProgress progress;
  for (std::ptrdiff_t count = 0; count <= 2; ++count) {
    const ChecksumJob job{"large", large.size(), {known.begin(), known.begin() + count}};
    const auto sums = checksum_files(
        {job}, [&](std::size_t) { return open_file(AT_FDCWD, dir / "large", O_RDONLY); }, "test",
        progress, Interrupt());
    ASSERT_TRUE(sums);
    EXPECT_EQ(sums->front() == whole->front(), count == 2) << count;
  }
}

// More blocks than are kept in mind at a time, of one file and of many.
TEST(Checksum, OfVeryManyBlocksFollowsItsDefinitionToo) {
  constexpr std::size_t kMany = 70000;
  constexpr std::size_t kRead = 100;  // the others are known
  const TemporaryDirectory dir;
  write_text(dir / "small", "hello");
  const BlockDigest hello = xxh3(std::as_bytes(std::span("hello", 5)));
  std::vector<ChecksumJob> jobs(kMany, {"small", 5, {hello}});
  for (std::size_t i = 0; i < kRead; ++i)
    jobs[i * (kMany / kRead)].known.clear();
  jobs.insert(jobs.begin() + 3, {"large", kMany * kChecksumBlock, {}});
  std::string digests;
  for (std::size_t i = 0; i < kMany; ++i) {
    BlockDigest digest{};
    digest[i % digest.size()] = static_cast<unsigned char>(i / 7);
    jobs[3].known.push_back(digest);
    digests.append(digest.begin(), digest.end());
  }
  struct Rising final : Progress {
    void update(std::string_view, std::uint64_t d, std::uint64_t t) override {
      EXPECT_GE(d, done);
      EXPECT_EQ(t, 5 * kRead);
      done = d;
    }
    std::uint64_t done = 0;
  } progress;
  const auto sums = checksum_files(
      jobs, [&](std::size_t) { return open_file(AT_FDCWD, dir / "small", O_RDONLY); }, "test",
      progress, Interrupt());
  ASSERT_TRUE(sums) << sums.error().to_string();
  ASSERT_EQ(sums->size(), kMany + 1);
  EXPECT_EQ((*sums)[3], xxh3_hex(digests));
  EXPECT_EQ((*sums)[2], xxh3_hex(from_hex(xxh3_hex("hello"))));
  EXPECT_EQ(sums->back(), (*sums)[2]);
  EXPECT_EQ(progress.done, 5 * kRead);
}

// A sparse file, of which an image may say so much: 64 million blocks.
TEST(Checksum, OfAFileThatClaimsAPebibyteTakesNoMoreMemoryThanAnother) {
  rusage before{};
  rusage after{};
  Interrupt interrupt;
  interrupt.request(2);
  NoProgress progress;
  ASSERT_EQ(::getrusage(RUSAGE_SELF, &before), 0);
  const auto sums = checksum_files(
      {{"large", std::uint64_t{1} << 50, {}}},
      [](std::size_t) -> Result<UniqueFd> { return fail(ErrorCode::kIo, "not to be opened"); },
      "test", progress, interrupt);
  ASSERT_EQ(::getrusage(RUSAGE_SELF, &after), 0);
  ASSERT_FALSE(sums);
  EXPECT_EQ(sums.error().code, ErrorCode::kInterrupted);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 256 << 10);  // KiB
}

// As from a bad sector: at address 0 of a process there is nothing, and the kernel says EIO.
TEST(Checksum, WhatTheDiskCannotGiveBackIsDamage) {
  auto checksums = checksums_of({"/proc/self/mem"}, {6});
  ASSERT_FALSE(checksums);
  EXPECT_EQ(checksums.error().code, ErrorCode::kImageCorrupt);
  EXPECT_NE(checksums.error().message.find("Input/output error"), std::string::npos);
}

TEST(Checksum, AFileThatBecameShorterIsNamed) {
  const TemporaryDirectory dir;
  write_text(dir / "short", "12345");
  auto checksums = checksums_of({dir / "short"}, {6});
  ASSERT_FALSE(checksums);
  EXPECT_EQ(checksums.error().code, ErrorCode::kImageCorrupt);
  EXPECT_NE(checksums.error().message.find("ends after 5 bytes, expected 6"), std::string::npos);
}

TEST(Parallel, DoesEachPieceOnceAndTellsTheTotal) {
  struct Last final : Progress {
    void update(std::string_view, std::uint64_t d, std::uint64_t t) override {
      EXPECT_LE(d, t);
      done = d;
    }
    std::uint64_t done = 0;
  } progress;
  std::vector<std::atomic<int>> times(1000);
  auto done = run_parallel(1000, 2000, "test", progress, Interrupt(),
                           [&](std::size_t i) -> Result<std::uint64_t> {
                             ++times[i];
                             return std::uint64_t{2};
                           });
  ASSERT_TRUE(done);
  for (const auto& count : times)
    EXPECT_EQ(count.load(), 1);
  EXPECT_EQ(progress.done, 2000U);
}

// As src/direct/gpu_digest.cu does it, one lane after the other.
TEST(Checksum, LanesComputedElsewhereGiveTheSameDigest) {
  for (const std::size_t bytes : {1024U, 2048U, 65536U, 262144U}) {
    std::vector<std::uint64_t> words(bytes / 8);
    std::uint64_t next = bytes;
    for (auto& word : words)
      word = next = next * 6364136223846793005 + 1442695040888963407;
    Xxh3Lanes lanes{};
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
      const Xxh3LaneKeys& keys = xxh3_lane_keys()[lane];
      std::uint64_t sum = keys.start;
      for (std::size_t stripe = 0; stripe < words.size() / 8; ++stripe) {
        const std::uint64_t own = words[stripe * 8 + lane];
        const bool last = stripe + 1 == words.size() / 8;
        const std::uint64_t mixed = own ^ (last ? keys.last : keys.stripes[stripe % 16]);
        sum += words[stripe * 8 + (lane ^ 1)] + (mixed & 0xffffffff) * (mixed >> 32);
        if (stripe % 16 == 15 && !last) sum = ((sum ^ (sum >> 47)) ^ keys.scramble) * 0x9E3779B1;
      }
      lanes[lane] = sum;
    }
    EXPECT_EQ(xxh3_of_lanes(lanes, bytes), xxh3(std::as_bytes(std::span(words)))) << bytes;
  }
}

TEST(Parallel, StopsAtTheFirstErrorAndAtAnInterrupt) {
  NoProgress progress;
  std::atomic<std::size_t> begun{0};
  auto failed = run_parallel(100000, 0, "test", progress, Interrupt(),
                             [&](std::size_t i) -> Result<std::uint64_t> {
                               ++begun;
                               if (i == 10) return fail(ErrorCode::kIo, "piece 10");
                               // Not all is done before the tenth has had a processor.
                               std::this_thread::sleep_for(std::chrono::milliseconds(1));
                               return std::uint64_t{0};
                             });
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().message, "piece 10");
  EXPECT_LT(begun.load(), 100000U);

  Interrupt interrupt;
  interrupt.request(2);
  auto stopped =
      run_parallel(10, 0, "test", progress, interrupt,
                   [](std::size_t) -> Result<std::uint64_t> { return std::uint64_t{0}; });
  ASSERT_FALSE(stopped);
  EXPECT_EQ(stopped.error().code, ErrorCode::kInterrupted);
}

}  // namespace
}  // namespace stasis
