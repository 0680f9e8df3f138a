#include <fcntl.h>

#include <cstring>
#include <optional>
#include <utility>

#include <gtest/gtest.h>

#include "image/content_writer.h"
#include "image/image_test_support.h"
#include "operations/host_memory.h"
#include "proc/host_memory.h"

namespace stasis {
namespace {

constexpr std::uint64_t kPage = 4096;

class HostMemoryCountTest : public testing::Test {
 protected:
  // Four chunks, saved with zstd: one of a single page, two that are the same, one of zeros.
  void SetUp() override {
    std::memset(memory_.bytes().data() + 5 * kPage, 1, kPage);
    std::memset(memory_.bytes().data() + kHostBlock, 2, 2 * kHostBlock);
    const auto dir = open_file(AT_FDCWD, directory_.path().string(), O_RDONLY | O_DIRECTORY);
    ASSERT_TRUE(dir);
    ContentOptions options;
    options.compression = ContentCompression::kZstd;
    options.chunk_bytes = kHostBlock;
    options.kind = ContentKind::kHost;
    auto writer = ContentWriter::create(*dir, options);
    ASSERT_TRUE(writer);
    ASSERT_TRUE(writer->add_stream(Pid{7}, 4 * kHostBlock, {{0, 4 * kHostBlock, {}, kHostBlock}}));
    ASSERT_TRUE(writer->write(0, 0, memory_.bytes()));
    auto summary = writer->finish(progress_, interrupt_);
    ASSERT_TRUE(summary);
    stored_ = summary->record.total_bytes();
    auto reader = ContentReader::open(*dir, summary->record, {false, ContentKind::kHost});
    ASSERT_TRUE(reader);
    reader_.emplace(std::move(*reader));
  }

  NoProgress progress_;
  Interrupt interrupt_;
  TemporaryDirectory directory_;
  Memory memory_{4 * kHostBlock};
  std::optional<ContentReader> reader_;
  std::uint64_t stored_ = 0;
};

TEST_F(HostMemoryCountTest, WhatIsFilledIsMoreThanWhatIsStored) {
  EXPECT_LT(stored_, kHostBlock);
  EXPECT_EQ(most_filled(*reader_), 3 * kHostBlock);
}

TEST_F(HostMemoryCountTest, PagesOfZerosDoNotCount) {
  const auto all = count_filled(
      *reader_, [](std::uint64_t) { return true; }, progress_, interrupt_);
  ASSERT_TRUE(all);
  EXPECT_EQ(*all, 2 * kHostBlock + kPage);
  const auto nothing = count_filled(
      *reader_, [](std::uint64_t) { return false; }, progress_, interrupt_);
  ASSERT_TRUE(nothing);
  EXPECT_EQ(*nothing, 0U);
}

}  // namespace
}  // namespace stasis
