#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "image/content_reader.h"
#include "image/content_writer.h"
#include "image/image_test_support.h"

namespace stasis {
namespace {

constexpr std::size_t kPrecopied = 40;

class Precopy : public testing::TestWithParam<ContentCompression> {
 protected:
  Precopy() : content_(kPrecopied * kTestChunk) {
    fill_random(content_.bytes(), 3);
    std::memset(content_.chunk(5).data(), 0, kTestChunk);
    // What compresses, twice.
    for (const std::size_t number : {std::size_t{6}, std::size_t{7}})
      std::memset(content_.chunk(number).data(), 'x', kTestChunk);
  }

  ContentWriter make() {
    ContentOptions options;
    options.chunk_bytes = kTestChunk;
    options.compression = GetParam();
    options.sync = SyncPolicy::kNone;
    return ContentWriter::create(open_directory(dir_.path()), options).value();
  }
  ContentSummary write_all(ContentWriter& writer) {
    EXPECT_TRUE(writer.add_stream(Pid{7}, content_.bytes().size(), {}));
    // Each chunk by another thread, all at a time.
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < kPrecopied; ++i)
      threads.emplace_back(
          [&, i] { EXPECT_TRUE(writer.write(0, i * kTestChunk, content_.chunk(i))); });
    for (std::thread& thread : threads)
      thread.join();
    auto summary = writer.finish(progress_, interrupt_).value();
    writer.take_unwanted_room().give_back();
    return summary;
  }
  void expect_it_reads(const ContentSummary& summary) {
    const auto reader =
        ContentReader::open(open_directory(dir_.path()), summary.record, {false}).value();
    Memory read(content_.bytes().size());
    const auto done = reader.read(0, 0, read.bytes());
    ASSERT_TRUE(done) << done.error().to_string();
    EXPECT_EQ(std::memcmp(read.bytes().data(), content_.bytes().data(), read.bytes().size()), 0);
  }
  std::uint64_t room() const {
    std::uint64_t blocks = 0;
    for (const auto& entry : std::filesystem::directory_iterator(dir_ / "gpu")) {
      struct stat info {};
      EXPECT_EQ(::stat(entry.path().c_str(), &info), 0);
      if (entry.path().filename() != "index") blocks += static_cast<std::uint64_t>(info.st_blocks);
    }
    return blocks * 512;
  }

  TemporaryDirectory dir_;
  Memory content_;
  NoProgress progress_;
  Interrupt interrupt_;
};

// As a mover asks whose GPUs compute digests.
TEST_P(Precopy, WhatIsKnownByItsDigestAloneNeedNotBeWritten) {
  const auto digests = [&] {
    std::vector<std::byte> all;
    for (std::size_t i = 0; i < kPrecopied; ++i) {
      const BlockDigest digest = xxh3(content_.chunk(i));
      const auto bytes = std::as_bytes(std::span(digest));
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  };
  const auto marked = [](const std::vector<std::byte>& all, std::size_t number) {
    return all[number * sizeof(BlockDigest)] == std::byte{1};
  };
  auto writer = make();
  auto known = digests();
  writer.mark_known(known);
  for (std::size_t i = 0; i < kPrecopied; ++i)
    EXPECT_EQ(marked(known, i), i == 5) << i;
  ASSERT_TRUE(writer.precopy(content_.bytes()));
  known = digests();
  writer.mark_known(known);
  for (std::size_t i = 0; i < kPrecopied; ++i)
    EXPECT_TRUE(marked(known, i)) << i;
  // It changes before it stands still.
  fill_random(content_.chunk(3), 9);
  ASSERT_TRUE(writer.add_stream(Pid{7}, content_.bytes().size(), {}));
  auto taken = digests();
  ASSERT_TRUE(writer.deduplicate(0, 0, taken));
  for (std::size_t i = 0; i < kPrecopied; ++i)
    EXPECT_EQ(marked(taken, i), i != 3) << i;
  ASSERT_TRUE(writer.write(0, 3 * kTestChunk, content_.chunk(3)));
  const auto summary = writer.finish(progress_, interrupt_).value();
  expect_it_reads(summary);
  EXPECT_EQ(summary.duplicate_chunks, 1U);
  EXPECT_GT(summary.precopied_bytes, 0U);
}

TEST_P(Precopy, WhatHasNotChangedIsNotStoredAgain) {
  auto writer = make();
  EXPECT_EQ(writer.not_precopied(content_.bytes()), (kPrecopied - 1) * kTestChunk);
  std::vector<std::thread> threads;
  std::atomic<std::uint64_t> stored = 0;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] { stored += writer.precopy(content_.bytes()).value(); });
  for (std::thread& thread : threads)
    thread.join();
  EXPECT_GT(stored, (kPrecopied - 3) * kTestChunk);
  EXPECT_LE(stored, (kPrecopied - 2) * kTestChunk);
  EXPECT_EQ(writer.not_precopied(content_.bytes()), 0U);
  const auto summary = write_all(writer);
  EXPECT_EQ(summary.precopied_bytes, stored);
  EXPECT_LE(summary.written_bytes, (kPrecopied - 1) * kTestChunk);
  EXPECT_EQ(summary.zero_chunks, 1U);
  EXPECT_EQ(summary.duplicate_chunks, 1U);
  expect_it_reads(summary);
}

TEST_P(Precopy, WhatHasChangedIsAsItIsNowAndTheOldTakesNoRoom) {
  auto writer = make();
  EXPECT_TRUE(writer.precopy(content_.bytes()));
  for (std::size_t i = 10; i < 20; ++i)
    content_.chunk(i)[i] ^= std::byte{1};
  EXPECT_EQ(writer.not_precopied(content_.bytes()), 10 * kTestChunk);
  const auto summary = write_all(writer);
  EXPECT_LE(summary.precopied_bytes, (kPrecopied - 12) * kTestChunk);
  EXPECT_GT(summary.written_bytes, (kPrecopied + 6) * kTestChunk);
  EXPECT_LE(room(), (kPrecopied - 1) * kTestChunk);
  expect_it_reads(summary);
}

TEST_P(Precopy, WhatIsNotWantedAtAllTakesNoRoom) {
  auto writer = make();
  EXPECT_TRUE(writer.precopy(content_.bytes()));
  fill_random(content_.bytes(), 4);
  const auto summary = write_all(writer);
  EXPECT_EQ(summary.precopied_bytes, 0U);
  EXPECT_LE(room(), kPrecopied * kTestChunk);
  expect_it_reads(summary);
}

TEST_P(Precopy, PartsOfChunksAreRefused) {
  auto writer = make();
  EXPECT_EQ(writer.precopy(content_.bytes().first(kTestChunk + 4096)).error().code,
            ErrorCode::kUsage);
}

INSTANTIATE_TEST_SUITE_P(Ways, Precopy,
                         testing::Values(ContentCompression::kNone, ContentCompression::kLz4));

}  // namespace
}  // namespace stasis
