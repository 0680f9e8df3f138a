// Long because each case makes a base and an image with the same helpers.
#include "image/content_base.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fault_point.h"
#include "image/content_writer.h"
#include "image/image_reader.h"
#include "image/image_test_support.h"

namespace stasis {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct Made {
  ContentSummary summary;
  std::optional<Error> without_base;
};

class ContentBaseTest : public testing::Test {
 protected:
  static ContentOptions options(std::shared_ptr<const ContentBase> base = nullptr) {
    ContentOptions options;
    options.chunk_bytes = kTestChunk;
    options.base = std::move(base);
    return options;
  }
  Result<std::shared_ptr<const ContentBase>> open(const std::string& name) {
    return ContentBase::open(dir_ / name, progress_, interrupt_, kTestChunk);
  }
  // An image of one process, of which nothing is written yet.
  struct Begun {
    ImageWriter image;
    ContentWriter writer;
  };
  Begun begin(const std::string& name, std::size_t bytes,
              const std::shared_ptr<const ContentBase>& base) {
    auto image = ImageWriter::create(dir_ / name, true).value();
    write_text(image.path() + "/criu/core-100.img", "core");
    auto writer = ContentWriter::create(image.dir(), options(base)).value();
    EXPECT_TRUE(writer.add_stream(Pid{100}, bytes, {}));
    return {std::move(image), std::move(writer)};
  }
  // An image of one process with that content, as it is (piece by piece in an order of its own) or
  // in threads.
  Made make(const std::string& name, std::span<const std::byte> content,
            const std::shared_ptr<const ContentBase>& base = nullptr, int threads = 1,
            ContentCompression compression = ContentCompression::kNone) {
    auto image = ImageWriter::create(dir_ / name, true).value();
    write_text(image.path() + "/criu/core-100.img", "core");
    ContentOptions options = this->options(base);
    options.compression = compression;
    auto writer = ContentWriter::create(image.dir(), options).value();
    Made made;
    made.without_base = writer.without_base();
    EXPECT_TRUE(writer.add_stream(Pid{100}, content.size(), {}));
    {
      std::vector<std::jthread> all;
      for (int i = 0; i < threads; ++i) {
        all.emplace_back([&, i] {
          for (std::size_t at = static_cast<std::size_t>(i) * kTestChunk; at < content.size();
               at += static_cast<std::size_t>(threads) * kTestChunk)
            EXPECT_TRUE(writer.write(
                0, at,
                content.subspan(at, std::min<std::size_t>(kTestChunk, content.size() - at))));
        });
      }
    }
    auto summary = writer.finish(progress_, interrupt_);
    EXPECT_TRUE(summary) << summary.error().to_string();
    made.summary = std::move(*summary);
    Manifest manifest = sample_manifest();
    manifest.content = made.summary.record;
    auto sealed = image.seal(manifest, SyncPolicy::kDisk, progress_, interrupt_);
    EXPECT_TRUE(sealed) << sealed.error().to_string();
    EXPECT_TRUE(image.commit());
    return made;
  }
  // It is whole and holds what it should.
  void expect_holds(const std::string& name, std::span<const std::byte> content) {
    const auto image = ImageReader::open(dir_ / name).value();
    const auto verified = image.verify(progress_, interrupt_);
    EXPECT_TRUE(verified) << verified.error().to_string();
    Memory back(content.size());
    const auto reader = image.open_content().value();
    EXPECT_TRUE(reader.read(0, 0, back.bytes()));
    EXPECT_TRUE(std::ranges::equal(back.bytes(), content));
  }
  ContentUse use_of(const std::string& name) {
    const auto image = ImageReader::open(dir_ / name).value();
    return sum(content_use(image.open_content()->index(), image.manifest().content->reused_files));
  }
  std::set<std::string> names_in(const std::string& folder) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(dir_ / folder))
      names.insert(entry.path().filename());
    return names;
  }
  ino_t inode(const std::string& name) {
    struct stat info = {};
    EXPECT_EQ(::stat((dir_ / name).c_str(), &info), 0) << name;
    return info.st_ino;
  }
  void flip(const std::string& file, std::uint64_t at) {
    std::fstream stream(dir_ / file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(at));
    const int byte = stream.get();
    stream.seekp(static_cast<std::streamoff>(at));
    stream.put(static_cast<char>(byte ^ 0x10));
  }

  TemporaryDirectory dir_;
  NoProgress progress_;
  Interrupt interrupt_;
};

TEST_F(ContentBaseTest, WritesOnlyWhatIsNotInTheBase) {
  constexpr std::size_t kChunks = 40;
  constexpr std::size_t kTail = 5000;
  Memory content(kChunks * kTestChunk + kTail);
  fill_random(content.bytes(), 1);
  std::ranges::fill(content.chunk(7), std::byte{0});
  std::ranges::copy(content.chunk(1), content.chunk(2).begin());
  make("one", content.bytes());
  Memory changed(content.bytes().size());
  std::ranges::copy(content.bytes(), changed.bytes().begin());
  fill_random(changed.chunk(5), 2);
  fill_random(changed.chunk(30), 3);
  const auto made = make("two", changed.bytes(), open("one").value());
  EXPECT_FALSE(made.without_base);
  // Two chunks, and the last one, which is no whole one.
  EXPECT_EQ(made.summary.written_bytes, 2 * kTestChunk + 8192);
  EXPECT_EQ(made.summary.reused_chunks, kChunks - 4);
  EXPECT_EQ(made.summary.duplicate_chunks, 1U);
  EXPECT_EQ(made.summary.zero_chunks, 1U);
  EXPECT_EQ(made.summary.use.reused_bytes, (kChunks - 4) * kTestChunk);
  EXPECT_EQ(made.summary.record.reused_files, 1U);
  EXPECT_EQ(use_of("two"), made.summary.use);
  EXPECT_EQ(names_in("two/gpu"), (std::set<std::string>{"data-00", "data-01", "index"}));
  EXPECT_EQ(inode("two/gpu/data-01"), inode("one/gpu/data-00"));
  expect_holds("one", content.bytes());
  std::filesystem::remove_all(dir_ / "one");
  expect_holds("two", changed.bytes());
  const auto manifest = ImageReader::open(dir_ / "two")->manifest();
  EXPECT_EQ(manifest.content->reused_files, 1U);
  EXPECT_EQ(manifest.content->reused_bytes(), (kChunks - 2) * kTestChunk + 8192);
}

TEST_F(ContentBaseTest, WithNothingChangedNothingIsWritten) {
  Memory content(10 * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  const auto made = make("two", content.bytes(), open("one").value());
  EXPECT_EQ(made.summary.written_bytes, 0U);
  EXPECT_EQ(names_in("two/gpu"), (std::set<std::string>{"data-00", "index"}));
  expect_holds("two", content.bytes());
}

TEST_F(ContentBaseTest, WhatIsThereByItsDigestNeedNotBeWritten) {
  constexpr std::size_t kChunks = 10;
  Memory content(kChunks * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  fill_random(content.chunk(4), 2);
  std::ranges::fill(content.chunk(6), std::byte{0});

  auto [image, writer] = begin("two", content.bytes().size(), open("one").value());
  EXPECT_EQ(writer.digest_chunk(), kTestChunk);
  std::vector<std::byte> digests;
  for (std::size_t i = 0; i < kChunks; ++i) {
    const auto digest = xxh3(content.chunk(i));
    const auto bytes = std::as_bytes(std::span(digest));
    digests.insert(digests.end(), bytes.begin(), bytes.end());
  }
  // Not the last one, of which nothing is said.
  constexpr std::size_t kSize = sizeof(BlockDigest);
  ASSERT_TRUE(writer.deduplicate(0, 0, std::span(digests).first(kSize)));
  ASSERT_TRUE(
      writer.deduplicate(0, kTestChunk, std::span(digests).subspan(kSize, (kChunks - 2) * kSize)));
  EXPECT_EQ(writer.deduplicate(0, kTestChunk, digests).error().code, ErrorCode::kUsage)
      << "beyond the end";
  for (std::size_t i = 0; i + 1 < kChunks; ++i)
    EXPECT_EQ(digests[i * kSize], i == 4 ? std::byte{0} : std::byte{1}) << i;
}

TEST_F(ContentBaseTest, WhatIsReusedByItsDigestIsInTheImage) {
  constexpr std::size_t kChunks = 6;
  Memory content(kChunks * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  fill_random(content.chunk(4), 2);
  std::ranges::fill(content.chunk(2), std::byte{0});
  auto [image, writer] = begin("two", content.bytes().size(), open("one").value());
  std::array<BlockDigest, kChunks> digests;
  for (std::size_t i = 0; i < kChunks; ++i)
    digests[i] = xxh3(content.chunk(i));
  ASSERT_TRUE(writer.deduplicate(0, 0, std::as_writable_bytes(std::span(digests))));
  for (std::size_t i = 0; i < kChunks; ++i) {
    if (digests[i][0] != 0) continue;
    ASSERT_TRUE(writer.write(0, i * kTestChunk, content.chunk(i)));
  }
  const auto summary = writer.finish(progress_, interrupt_).value();
  EXPECT_EQ(summary.reused_chunks, kChunks - 2);
  EXPECT_EQ(summary.zero_chunks, 1U);
  EXPECT_EQ(summary.written_bytes, kTestChunk);
  Manifest manifest = sample_manifest();
  manifest.content = summary.record;
  ASSERT_TRUE(image.seal(manifest, SyncPolicy::kDisk, progress_, interrupt_));
  ASSERT_TRUE(image.commit());
  std::filesystem::remove_all(dir_ / "one");
  expect_holds("two", content.bytes());
}

TEST_F(ContentBaseTest, WithAllChangedNothingIsReused) {
  Memory content(10 * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  const auto base = open("one").value();
  fill_random(content.bytes(), 2);
  const auto made = make("two", content.bytes(), base);
  EXPECT_EQ(made.summary.record.reused_files, 0U);
  EXPECT_EQ(names_in("two/gpu"), (std::set<std::string>{"data-00", "index"}));
  EXPECT_NE(inode("two/gpu/data-00"), inode("one/gpu/data-00"));
  expect_holds("two", content.bytes());
  EXPECT_EQ(read_text(dir_ / "two/manifest.json").find("taken_files"), std::string::npos);
}

TEST_F(ContentBaseTest, TakesCompressedChunksAsTheyAre) {
  Memory content(8 * kTestChunk);
  for (std::size_t at = 0; at < content.bytes().size(); ++at)
    content.bytes()[at] = static_cast<std::byte>((at / kTestChunk + 1) * (at % 97));
  make("one", content.bytes(), nullptr, 1, ContentCompression::kZstd);
  fill_random(content.chunk(3), 1);
  const auto made = make("two", content.bytes(), open("one").value());
  EXPECT_EQ(made.summary.reused_chunks, 7U);
  EXPECT_EQ(made.summary.written_bytes, kTestChunk);
  expect_holds("two", content.bytes());
}

// Forty images, of which each changes another part: each is what it should be with all before it
// gone, writes little more than has changed, and does not become larger and larger.
TEST_F(ContentBaseTest, AChainOfImagesStaysSmall) {
  constexpr std::size_t kChunks = 320;
  constexpr std::size_t kOften = 16;  // chunks that change each time; of the others one in 40
  Memory content(kChunks * kTestChunk);
  fill_random(content.bytes(), 1);
  make("image-0", content.bytes(), nullptr, 4);
  std::uint64_t written = 0;
  std::uint64_t changed = 0;
  std::uint64_t most = 0;
  std::size_t files = 0;
  for (unsigned i = 1; i <= 40; ++i) {
    for (unsigned n = 0; n < kOften; ++n)
      fill_random(content.chunk(n * kChunks / kOften), 1000 * i + n);
    for (unsigned n = 0; n < 8; ++n)
      fill_random(content.chunk((i * 53 + n * 37) % kChunks), 1000 * i + 100 + n);
    changed += (kOften + 8) * kTestChunk;
    const auto made = make(fmt::format("image-{}", i), content.bytes(),
                           open(fmt::format("image-{}", i - 1)).value(), 4);
    ASSERT_FALSE(made.without_base);
    std::filesystem::remove_all(dir_ / fmt::format("image-{}", i - 1));
    written += made.summary.written_bytes;
    std::uint64_t size = 0;
    for (const std::uint64_t one : made.summary.record.data_sizes)
      size += one;
    most = std::max(most, size);
    files = std::max(files, made.summary.record.data_sizes.size());
    ASSERT_LE(made.summary.written_bytes, kChunks * kTestChunk / 2) << i;
  }
  expect_holds("image-40", content.bytes());
  EXPECT_LE(most, 2 * kChunks * kTestChunk + (kOften + 8) * kTestChunk);
  EXPECT_LE(files, 64U);
  EXPECT_LE(written, 2 * changed);
  RecordProperty("written", static_cast<int>(written / kTestChunk));
  RecordProperty("most", static_cast<int>(most / kTestChunk));
  RecordProperty("files", static_cast<int>(files));
  RecordProperty("changed", static_cast<int>(changed / kTestChunk));
}

TEST_F(ContentBaseTest, AFileIsNotKeptForAlmostNothing) {
  constexpr std::size_t kChunks = 128;
  Memory content(kChunks * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  Memory other(content.bytes().size());
  fill_random(other.bytes(), 2);
  for (const std::size_t stays : {std::size_t{3}, std::size_t{90}})
    std::ranges::copy(content.chunk(stays), other.chunk(stays).begin());
  const auto made = make("two", other.bytes(), open("one").value());
  EXPECT_EQ(made.summary.record.reused_files, 0U);
  EXPECT_EQ(made.summary.reused_chunks, 2U);
  EXPECT_EQ(made.summary.written_bytes, kChunks * kTestChunk);
  // What has stood still lies apart from what is new.
  EXPECT_EQ(made.summary.record.data_sizes,
            (std::vector<std::uint64_t>{(kChunks - 2) * kTestChunk, 2 * kTestChunk}));
  expect_holds("two", other.bytes());
}

TEST_F(ContentBaseTest, TheEmptiestFilesGiveNothing) {
  Memory content(100 * kTestChunk);
  fill_random(content.bytes(), 1);
  unsigned seed = 100;
  const auto change = [&](std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i)
      fill_random(content.chunk(i), ++seed);
  };
  using Sizes = std::vector<std::uint64_t>;
  make("one", content.bytes());
  change(0, 60);
  const auto two = make("two", content.bytes(), open("one").value());
  EXPECT_EQ(two.summary.record.data_sizes, (Sizes{60 * kTestChunk, 100 * kTestChunk}));
  change(0, 45);
  const auto three = make("three", content.bytes(), open("two").value());
  EXPECT_EQ(three.summary.record.data_sizes,
            (Sizes{45 * kTestChunk, 60 * kTestChunk, 100 * kTestChunk}));
  // By now 45 chunks of 60 are useless, and 60 of 100: more than are in use, so the first of these
  // files gives nothing. Its 15 chunks lie apart from those that are new.
  const auto base = open("three").value();
  EXPECT_TRUE(base->gives(0));
  EXPECT_FALSE(base->gives(1));
  EXPECT_TRUE(base->gives(2));
  change(0, 10);
  const auto four = make("four", content.bytes(), base);
  EXPECT_EQ(four.summary.record.data_sizes,
            (Sizes{10 * kTestChunk, 15 * kTestChunk, 45 * kTestChunk, 100 * kTestChunk}));
  EXPECT_EQ(four.summary.use.reused_bytes, (35 + 40) * kTestChunk);
  expect_holds("four", content.bytes());
}

TEST_F(ContentBaseTest, OfTooManyFilesTheSmallestGiveNothing) {
  constexpr std::size_t kChunks = 200;
  Memory content(kChunks * kTestChunk);
  fill_random(content.bytes(), 1);
  make("image-0", content.bytes());
  // Each adds a file, until there are as many as may be reused, and more.
  for (unsigned i = 1; i <= 50; ++i) {
    fill_random(content.chunk(3 * i), 1000 + i);
    const auto base = open(fmt::format("image-{}", i - 1)).value();
    const auto made = make(fmt::format("image-{}", i), content.bytes(), base);
    // A few of one chunk each are moved, and never the large one.
    ASSERT_LE(made.summary.written_bytes, 8 * kTestChunk) << i;
    std::filesystem::remove_all(dir_ / fmt::format("image-{}", i - 1));
  }
  expect_holds("image-50", content.bytes());
}

// ---- What cannot be a base --------------------------------------------------------------------

TEST_F(ContentBaseTest, DamageIsFoundBeforeItIsReliedOn) {
  Memory content(64 * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes(), nullptr, 4);
  const std::size_t files = names_in("one/gpu").size() - 1;
  flip("one/gpu/data-00", 100);
  const auto base = open("one").value();
  ASSERT_EQ(base->damage().size(), 1U);
  EXPECT_THAT(base->damage()[0].message, HasSubstr("gpu/data-00: chunk"));
  EXPECT_FALSE(base->gives(0));
  const auto made = make("two", content.bytes(), base);
  EXPECT_EQ(made.summary.record.reused_files, files - 1);
  EXPECT_GT(made.summary.written_bytes, 0U);
  expect_holds("two", content.bytes());
}

TEST_F(ContentBaseTest, OfADamagedFileOnlyWhatWasOfUseIsMissing) {
  Memory content(8 * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  for (unsigned i = 0; i < 3; ++i)
    fill_random(content.chunk(i), 2 + i);
  make("two", content.bytes(), open("one").value());
  EXPECT_EQ(open("two").value()->usable_bytes(), 8 * kTestChunk);
  flip("one/gpu/data-00", 5 * kTestChunk);  // the second file of "two", with 5 chunks of use
  const auto base = open("two").value();
  ASSERT_EQ(base->damage().size(), 1U);
  EXPECT_EQ(base->usable_bytes(), 3 * kTestChunk);
}

TEST_F(ContentBaseTest, IndexAndManifestHaveToBeSound) {
  Memory content(4 * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  EXPECT_EQ(open("none").error().code, ErrorCode::kImageIncomplete);
  EXPECT_EQ(ContentBase::open(dir_ / "one", progress_, interrupt_).error().code,
            ErrorCode::kNotSupported);  // the chunks are of another size
  flip("one/gpu/index", 100);
  EXPECT_EQ(open("one").error().code, ErrorCode::kImageCorrupt);
  flip("one/gpu/index", 100);
  flip("one/manifest.json", 100);
  EXPECT_EQ(open("one").error().code, ErrorCode::kImageCorrupt);
  flip("one/manifest.json", 100);
  std::filesystem::resize_file(dir_ / "one/gpu/data-00", kTestChunk);
  EXPECT_EQ(open("one").error().code, ErrorCode::kImageCorrupt);
  interrupt_.request(SIGINT);
  std::filesystem::resize_file(dir_ / "one/gpu/data-00", 4 * kTestChunk);
  EXPECT_EQ(open("one").error().code, ErrorCode::kInterrupted);
}

TEST_F(ContentBaseTest, WhatOthersMayWriteToIsNotLinkedTo) {
  Memory content(4 * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  ::chmod((dir_ / "one/gpu/data-00").c_str(), 0620);
  const auto made = make("two", content.bytes(), open("one").value());
  ASSERT_TRUE(made.without_base);
  EXPECT_EQ(made.without_base->code, ErrorCode::kNotPermitted);
  EXPECT_EQ(made.summary.written_bytes, 4 * kTestChunk);
  expect_holds("two", content.bytes());
  if (::geteuid() != 0) return;
  ::chmod((dir_ / "one/gpu/data-00").c_str(), 0600);
  ASSERT_EQ(::chown((dir_ / "one/gpu/data-00").c_str(), 12345, 12345), 0);
  EXPECT_TRUE(make("two", content.bytes(), open("one").value()).without_base);
}

TEST_F(ContentBaseTest, WhatHasTakenTheNameOfADataFileIsNotReused) {
  Memory content(4 * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  const auto base = open("one").value();
  const std::string data = dir_ / "one/gpu/data-00";
  std::filesystem::rename(data, dir_ / "elsewhere");
  std::filesystem::create_symlink(dir_ / "elsewhere", data);
  EXPECT_TRUE(make("two", content.bytes(), base).without_base);
  std::filesystem::remove(data);
  EXPECT_TRUE(make("two", content.bytes(), base).without_base);
  write_text(data, "something else");
  const auto made = make("two", content.bytes(), base);
  ASSERT_TRUE(made.without_base);
  EXPECT_THAT(made.without_base->message, HasSubstr("is not the file that its index"));
  write_text(dir_ / "zeros", std::string(content.bytes().size(), '\0'));
  ::chmod((dir_ / "zeros").c_str(), 0600);
  std::filesystem::rename(dir_ / "zeros", data);
  const auto again = make("two", content.bytes(), base);
  ASSERT_TRUE(again.without_base);
  EXPECT_THAT(again.without_base->message, HasSubstr("is not the file that was verified"));
  expect_holds("two", content.bytes());
}

TEST_F(ContentBaseTest, OnAnotherFileSystemAllIsWritten) {
  std::filesystem::create_directory(dir_ / "disk");
  if (::mount("tmpfs", (dir_ / "disk").c_str(), "tmpfs", 0, "size=8m") != 0)
    GTEST_SKIP() << "no tmpfs can be mounted here";
  Memory content(4 * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  const auto made = make("disk/two", content.bytes(), open("one").value());
  ASSERT_TRUE(made.without_base);
  EXPECT_THAT(made.without_base->message,
              AllOf(HasSubstr("cannot make a hard link to"), HasSubstr("one/gpu/data-00")));
  EXPECT_EQ(made.summary.written_bytes, 4 * kTestChunk);
  expect_holds("disk/two", content.bytes());
  EXPECT_EQ(::umount((dir_ / "disk").c_str()), 0);
}

// The base may go as soon as the writer is there.
TEST_F(ContentBaseTest, TheBaseMayBeRemovedMeanwhile) {
  Memory content(4 * kTestChunk);
  fill_random(content.bytes(), 1);
  make("one", content.bytes());
  std::filesystem::create_directory(dir_ / "two");
  auto writer =
      ContentWriter::create(open_directory(dir_ / "two"), options(open("one").value())).value();
  std::filesystem::remove_all(dir_ / "one");
  ASSERT_TRUE(writer.add_stream(Pid{100}, content.bytes().size(), {}));
  ASSERT_TRUE(writer.write(0, 0, content.bytes()));
  const auto summary = writer.finish(progress_, interrupt_).value();
  EXPECT_EQ(summary.written_bytes, 0U);
  const auto reader = ContentReader::open(open_directory(dir_ / "two"), summary.record).value();
  EXPECT_TRUE(reader.verify_all(progress_, interrupt_));
}

// The environment is read once, so each runs in a program of its own: this one, anew.
TEST_F(ContentBaseTest, EveryStepCanFail) {
#ifndef STASIS_FAULT_POINTS
  GTEST_SKIP() << "built without fault points";
#endif
  Memory content(4 * kTestChunk);
  fill_random(content.bytes(), 1);
  if (std::getenv("STASIS_FAULT") == nullptr) {
    make("one", content.bytes());
    int points = 0;
    for (const FaultPointInfo& info : fault_points()) {
      if (!info.name.starts_with("content.")) continue;
      ++points;
      const pid_t child = ::fork();
      if (child == 0) {
        ::setenv("STASIS_FAULT", fmt::format("{}:error", info.name).c_str(), 1);
        ::setenv("STASIS_TEST_BASE", (dir_ / "one").c_str(), 1);
        ::execl("/proc/self/exe", "content_base_unittest",
                "--gtest_filter=ContentBaseTest.EveryStepCanFail", nullptr);
        ::_exit(127);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0) << info.name;
    }
    EXPECT_EQ(points, 10);
    return;
  }
  const auto base =
      ContentBase::open(std::getenv("STASIS_TEST_BASE"), progress_, interrupt_, kTestChunk);
  ASSERT_TRUE(base) << base.error().to_string();
  fill_random(content.chunk(1), 2);
  const auto all = [&]() -> Result<ContentSummary> {
    auto writer = ContentWriter::create(open_directory(dir_.path()), options(*base));
    if (!writer) return fail(writer.error());
    auto wrote = writer->add_stream(Pid{7}, content.bytes().size(), {});
    BlockDigest first = xxh3(content.chunk(0));
    if (wrote) wrote = writer->deduplicate(0, 0, std::as_writable_bytes(std::span(first)));
    if (wrote) wrote = writer->write(0, kTestChunk, content.bytes().subspan(kTestChunk));
    if (!wrote) return fail(wrote.error());
    return writer->finish(progress_, interrupt_);
  };
  const auto summary = all();
  ASSERT_FALSE(summary);
  EXPECT_THAT(summary.error().message, HasSubstr("content."));
}

}  // namespace
}  // namespace stasis
