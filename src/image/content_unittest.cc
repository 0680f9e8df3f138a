// Long because writer, reader and damage are tried on the same content.
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>
#include <tuple>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "image/content_reader.h"
#include "image/content_writer.h"
#include "image/image_reader.h"
#include "image/image_test_support.h"

namespace stasis {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr std::uint32_t kChunk = kTestChunk;

// Words of eight letters, of which there are few.
void fill_text(std::span<std::byte> bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  constexpr std::array<std::string_view, 4> kWords = {"content ", "writes, ",
                                                      "reader: ", "chunks. "};
  for (std::size_t at = 0; at < bytes.size(); at += 8)
    std::memcpy(&bytes[at], kWords[random() % 4].data(),
                std::min<std::size_t>(8, bytes.size() - at));
}

GpuUuid gpu(std::uint8_t number) {
  GpuUuid uuid;
  uuid.bytes.fill(number);
  return uuid;
}

class ContentTest : public testing::Test {
 protected:
  Result<ContentWriter> writer(ContentOptions options = {}) {
    options.chunk_bytes = kChunk;
    return ContentWriter::create(open_directory(dir_.path()), options);
  }
  Result<ContentReader> reader(const ContentRecord& record, bool direct = false) {
    return ContentReader::open(open_directory(dir_.path()), record, {direct});
  }
  // One stream of random chunks, with the given numbers of them twice and zero.
  ContentSummary write_simple(std::span<const std::byte> bytes, ContentOptions options = {}) {
    auto writer = this->writer(std::move(options)).value();
    EXPECT_TRUE(writer.add_stream(Pid{7}, bytes.size(), {}));
    EXPECT_TRUE(writer.write(0, 0, bytes));
    return writer.finish(progress_, interrupt_).value();
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

// ---- What is written is what is read ----------------------------------------------------------

using Way = std::tuple<ContentCompression, bool, SyncPolicy>;
class ContentRoundTrip : public ContentTest, public testing::WithParamInterface<Way> {};

TEST_P(ContentRoundTrip, BringsBackWhatManyThreadsWrote) {
  const auto [compression, direct, sync] = GetParam();
  constexpr std::size_t kChunks = 20;
  constexpr std::size_t kStreams = 3;
  constexpr std::size_t kTail = 5000;
  std::vector<Memory> content;
  for (unsigned stream = 0; stream < kStreams; ++stream) {
    // The second one is not aligned, and has to be copied for direct I/O.
    Memory& memory = content.emplace_back(kChunks * kChunk + kTail, stream == 1 ? 64 : 0);
    for (unsigned i = 0; i <= kChunks; ++i) {
      if (i % 10 == 3) continue;                                       // zeros
      if (i % 10 == 4) fill_random(memory.chunk(i), 4);                // one and the same
      if (i % 10 == 5) fill_text(memory.chunk(i), 1000 * stream + i);  // worth compressing
      if (i % 10 == 5 || i % 10 == 4) continue;
      fill_random(memory.chunk(i), 1000 * stream + i);
    }
  }
  auto writer = this->writer({compression, direct, sync}).value();
  const std::vector<ContentRange> ranges = {{0, kChunk, gpu(1), 0x7f0000000000},
                                            {2 * kChunk, 100, gpu(2), 0x1000}};
  for (unsigned stream = 0; stream < kStreams; ++stream) {
    ASSERT_TRUE(writer.add_stream(Pid{static_cast<int>(100 + stream)},
                                  content[stream].bytes().size(),
                                  stream == 0 ? ranges : std::vector<ContentRange>()));
  }
  // Loads of one to three chunks, in no order.
  struct Load {
    std::size_t stream;
    std::size_t first;
    std::size_t count;
  };
  std::vector<Load> loads;
  for (std::size_t stream = 0; stream < kStreams; ++stream) {
    for (std::size_t at = 0; at <= kChunks;) {
      const std::size_t count = std::min(1 + (at + stream) % 3, kChunks + 1 - at);
      loads.push_back({stream, at, count});
      at += count;
    }
  }
  std::shuffle(loads.begin(), loads.end(), std::mt19937(1));
  const auto in_threads = [&](const auto& work) {
    std::atomic<std::size_t> next = 0;
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&] {
        for (std::size_t n = next++; n < loads.size(); n = next++) {
          const Load& load = loads[n];
          const std::size_t from = load.first * kChunk;
          const std::size_t size = std::min(load.count * kChunk, kChunks * kChunk + kTail - from);
          auto done = work(load.stream, from, size);
          EXPECT_TRUE(done) << done.error().to_string();
        }
      });
    }
  };
  in_threads([&](std::size_t stream, std::size_t from, std::size_t size) {
    return writer.write(stream, from, content[stream].bytes().subspan(from, size));
  });
  const auto summary = writer.finish(progress_, interrupt_);
  ASSERT_TRUE(summary) << summary.error().to_string();

  EXPECT_EQ(summary->chunks, kStreams * (kChunks + 1));
  EXPECT_EQ(summary->zero_chunks, kStreams * 2);
  EXPECT_EQ(summary->duplicate_chunks, kStreams * 2 - 1);
  EXPECT_EQ(summary->use.bytes, kStreams * (kChunks * kChunk + kTail));
  EXPECT_EQ(summary->use.zero_bytes, summary->zero_chunks * kChunk);
  EXPECT_EQ(summary->use.duplicate_bytes, summary->duplicate_chunks * kChunk);
  const std::uint64_t rest =
      summary->use.bytes - summary->use.zero_bytes - summary->use.duplicate_bytes;
  if (compression == ContentCompression::kNone) {
    EXPECT_EQ(summary->use.stored_bytes, rest);
  } else {
    EXPECT_LT(summary->use.stored_bytes, rest - kStreams * 2 * kChunk / 4);
    EXPECT_GT(summary->use.stored_bytes, rest - kStreams * 2 * kChunk);
  }

  for (const bool direct_reader : {false, true}) {
    const auto reader = this->reader(summary->record, direct_reader);
    ASSERT_TRUE(reader) << reader.error().to_string();
    EXPECT_EQ(reader->streams().size(), kStreams);
    EXPECT_EQ(sum(content_use(reader->index())), summary->use);
    EXPECT_EQ(reader->streams()[0].ranges, ranges);
    EXPECT_EQ(reader->streams()[2].pid, Pid{102});
    in_threads([&](std::size_t stream, std::size_t from, std::size_t size) -> Result<void> {
      Memory back(size, stream == 2 ? 32 : 0);
      std::fill(back.bytes().begin(), back.bytes().end(), std::byte{0xee});
      auto read = reader->read(stream, from, back.bytes());
      if (read && !std::ranges::equal(back.bytes(), content[stream].bytes().subspan(from, size)))
        return fail(ErrorCode::kInternal, fmt::format("stream {} differs at {}", stream, from));
      return read;
    });
    const auto verified = reader->verify_all(progress_, interrupt_);
    EXPECT_TRUE(verified) << verified.error().to_string();
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, ContentRoundTrip,
                         testing::Combine(testing::Values(ContentCompression::kNone,
                                                          ContentCompression::kLz4,
                                                          ContentCompression::kZstd),
                                          testing::Bool(),
                                          testing::Values(SyncPolicy::kNone, SyncPolicy::kDisk)));

TEST_F(ContentTest, StoresOnceWhatManyThreadsWriteAtTheSameTime) {
  constexpr int kThreads = 8;
  constexpr std::size_t kChunks = 16;
  Memory content(kChunks * kChunk);
  fill_random(content.bytes(), 1);
  auto writer = this->writer().value();
  for (int i = 0; i < kThreads; ++i)
    ASSERT_TRUE(writer.add_stream(Pid{i + 1}, content.bytes().size(), {}));
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < kThreads; ++i)
      threads.emplace_back([&, i] { EXPECT_TRUE(writer.write(i, 0, content.bytes())); });
  }
  const auto summary = writer.finish(progress_, interrupt_).value();
  EXPECT_EQ(summary.duplicate_chunks, (kThreads - 1) * kChunks);
  EXPECT_EQ(summary.use.stored_bytes, content.bytes().size());
  const auto reader = this->reader(summary.record).value();
  const auto uses = content_use(reader.index());
  EXPECT_EQ(uses[0].stored_bytes, content.bytes().size());
  EXPECT_EQ(uses[7].duplicate_bytes, content.bytes().size());
  Memory back(content.bytes().size());
  for (std::size_t i = 0; i < kThreads; ++i) {
    ASSERT_TRUE(reader.read(i, 0, back.bytes()));
    EXPECT_TRUE(std::ranges::equal(back.bytes(), content.bytes()));
  }
}

TEST_F(ContentTest, TakesStreamsWithoutContentAndOfZeros) {
  auto writer = this->writer().value();
  Memory zeros(2 * kChunk + 1);
  ASSERT_TRUE(writer.add_stream(Pid{1}, 0, {}));
  ASSERT_TRUE(writer.add_stream(Pid{2}, zeros.bytes().size(), {}));
  ASSERT_TRUE(writer.write(0, 0, {}));
  ASSERT_TRUE(writer.write(1, 0, zeros.bytes()));
  const auto summary = writer.finish(progress_, interrupt_).value();
  EXPECT_EQ(summary.zero_chunks, 3U);
  EXPECT_EQ(summary.use.stored_bytes, 0U);
  const auto reader = this->reader(summary.record).value();
  Memory back(zeros.bytes().size());
  fill_random(back.bytes(), 1);
  ASSERT_TRUE(reader.read(1, 0, back.bytes()));
  EXPECT_TRUE(std::ranges::equal(back.bytes(), zeros.bytes()));
}

TEST_F(ContentTest, SaysWhichChunksAreZeros) {
  Memory content(5 * kChunk);
  fill_random(content.bytes().subspan(kChunk, kChunk), 1);
  fill_random(content.bytes().subspan(3 * kChunk, 2 * kChunk), 2);
  const auto reader = this->reader(write_simple(content.bytes()).record).value();
  std::array<std::byte, 5> flags{};
  ASSERT_TRUE(reader.zeros(0, 0, flags));
  EXPECT_THAT(flags, testing::ElementsAre(std::byte{1}, std::byte{0}, std::byte{1}, std::byte{0},
                                          std::byte{0}));
  ASSERT_TRUE(reader.zeros(0, 2 * kChunk, std::span(flags).first(2)));
  EXPECT_EQ(flags[0], std::byte{1});
  EXPECT_EQ(flags[1], std::byte{0});
  EXPECT_EQ(reader.zeros(0, 4 * kChunk, std::span(flags).first(2)).error().code, ErrorCode::kUsage);
  EXPECT_EQ(reader.zeros(0, 1, std::span(flags).first(1)).error().code, ErrorCode::kUsage);
  EXPECT_EQ(reader.zeros(1, 0, std::span(flags).first(1)).error().code, ErrorCode::kUsage);
}

// ---- What must not be asked for -----------------------------------------------------------------

TEST_F(ContentTest, RefusesWhatIsNoWholeChunk) {
  Memory content(2 * kChunk + 10);
  auto writer = this->writer().value();
  ASSERT_TRUE(writer.add_stream(Pid{1}, content.bytes().size(), {}));
  for (const auto& [offset, size] : {std::pair<std::uint64_t, std::size_t>{1, kChunk},
                                     {0, 10},
                                     {kChunk, kChunk + 9},
                                     {2 * kChunk, kChunk},
                                     {4 * kChunk, 0},
                                     {UINT64_MAX - kChunk + 1, kChunk}}) {
    const auto wrote = writer.write(0, offset, content.bytes().first(size));
    ASSERT_FALSE(wrote) << offset;
    EXPECT_EQ(wrote.error().code, ErrorCode::kUsage) << offset;
  }
  EXPECT_EQ(writer.write(1, 0, content.bytes()).error().code, ErrorCode::kUsage);
}

TEST_F(ContentTest, RefusesStreamsThatCannotBe) {
  auto writer = this->writer().value();
  ASSERT_TRUE(writer.add_stream(Pid{1}, kChunk, {}));
  EXPECT_EQ(writer.add_stream(Pid{1}, kChunk, {}).error().code, ErrorCode::kUsage);
  EXPECT_EQ(writer.add_stream(Pid{0}, kChunk, {}).error().code, ErrorCode::kUsage);
  EXPECT_EQ(writer.add_stream(Pid{2}, std::uint64_t{1} << 52, {}).error().code, ErrorCode::kUsage);
  EXPECT_EQ(writer.add_stream(Pid{3}, kChunk, {{0, kChunk + 1, {}, 0}}).error().code,
            ErrorCode::kUsage);
  EXPECT_EQ(writer.add_stream(Pid{4}, kChunk, {{0, 100, {}, 0}, {99, 100, {}, 0}}).error().code,
            ErrorCode::kUsage);
  ContentOptions odd;
  odd.chunk_bytes = 100000;
  EXPECT_EQ(ContentWriter::create(open_directory(dir_.path()), odd).error().code,
            ErrorCode::kUsage);
}

TEST_F(ContentTest, SaysWhatWasNeverWritten) {
  Memory content(4 * kChunk);
  fill_random(content.bytes(), 1);
  auto writer = this->writer().value();
  ASSERT_TRUE(writer.add_stream(Pid{17}, content.bytes().size(), {}));
  ASSERT_TRUE(writer.write(0, 0, content.chunk(0)));
  ASSERT_TRUE(writer.write(0, 2 * kChunk, content.chunk(2)));
  const auto summary = writer.finish(progress_, interrupt_);
  ASSERT_FALSE(summary);
  EXPECT_THAT(summary.error().message, HasSubstr("2 of the 4 chunks of process 17 were never "
                                                 "written, the first of them chunk 1"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "gpu/index"));
}

TEST_F(ContentTest, SaysWhatIsWrittenTwice) {
  Memory content(kChunk);
  auto writer = this->writer().value();
  ASSERT_TRUE(writer.add_stream(Pid{17}, kChunk, {}));
  ASSERT_TRUE(writer.write(0, 0, content.bytes()));
  EXPECT_THAT(writer.write(0, 0, content.bytes()).error().message,
              HasSubstr("chunk 0 of process 17 is written twice"));
}

// ---- Damage -------------------------------------------------------------------------------------

TEST_F(ContentTest, NamesTheChunkWithAFlippedBit) {
  Memory content(4 * kChunk);
  for (const auto compression :
       {ContentCompression::kNone, ContentCompression::kLz4, ContentCompression::kZstd}) {
    fill_text(content.bytes(), 3);
    std::filesystem::remove_all(dir_ / "gpu");
    const auto summary = write_simple(content.bytes(), {compression});
    const auto sound = this->reader(summary.record).value();
    const std::uint64_t at = sound.index().chunks[2].position;
    flip("gpu/data-00", at + 1000);
    const auto reader = this->reader(summary.record).value();
    const auto names_it = [&](const Result<void>& result) {
      ASSERT_FALSE(result);
      EXPECT_EQ(result.error().code, ErrorCode::kImageCorrupt);
      EXPECT_THAT(
          result.error().message,
          AllOf(HasSubstr("gpu/data-00: chunk 2 of process 7 ("),
                HasSubstr(fmt::format("in the file {} at {})", sound.index().chunks[2].stored, at)),
                HasSubstr("expected"), HasSubstr(to_hex(sound.index().chunks[2].digest))));
    };
    names_it(reader.verify_all(progress_, interrupt_));
    names_it(reader.read(0, 0, content.bytes()));
    EXPECT_TRUE(reader.read(0, 0, content.chunk(0)));
    EXPECT_TRUE(reader.read(0, 3 * kChunk, content.chunk(3)));
  }
}

TEST_F(ContentTest, NamesADataFileThatIsCutShort) {
  Memory content(4 * kChunk);
  fill_random(content.bytes(), 1);
  const auto summary = write_simple(content.bytes());
  const auto reader = this->reader(summary.record).value();
  std::filesystem::resize_file(dir_ / "gpu/data-00", 2 * kChunk + 4096);
  // It was whole when it was opened.
  for (const auto& result :
       {reader.read(0, 0, content.bytes()), reader.verify_all(progress_, interrupt_)}) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kImageCorrupt);
    EXPECT_THAT(result.error().message,
                AllOf(HasSubstr("gpu/data-00 ends after 135168 bytes, expected 262144"),
                      HasSubstr("of process 7")));
  }
  const auto again = this->reader(summary.record);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, ErrorCode::kImageCorrupt);
  EXPECT_THAT(again.error().message, "gpu/data-00 has 135168 bytes, expected 262144");
}

TEST_F(ContentTest, OpensNothingButItsOwnFiles) {
  Memory content(kChunk);
  fill_random(content.bytes(), 1);
  const auto summary = write_simple(content.bytes());
  const std::string data = dir_ / "gpu/data-00";
  std::filesystem::rename(data, dir_ / "elsewhere");
  EXPECT_EQ(this->reader(summary.record).error().code, ErrorCode::kImageCorrupt);
  std::filesystem::create_symlink(dir_ / "elsewhere", data);
  EXPECT_EQ(this->reader(summary.record).error().code, ErrorCode::kImageCorrupt);
  std::filesystem::remove(data);
  ASSERT_EQ(::mkfifo(data.c_str(), 0600), 0);
  EXPECT_THAT(this->reader(summary.record).error().message, HasSubstr("is no regular file"));
}

TEST_F(ContentTest, BelievesOnlyTheIndexThatTheManifestTellsOf) {
  Memory content(kChunk);
  fill_random(content.bytes(), 1);
  const ContentRecord right = write_simple(content.bytes()).record;
  ASSERT_TRUE(this->reader(right));
  ContentRecord wrong = right;
  wrong.index_checksum.back() = wrong.index_checksum.back() == '0' ? '1' : '0';
  EXPECT_THAT(this->reader(wrong).error().message,
              AllOf(HasSubstr(right.index_checksum), HasSubstr(wrong.index_checksum)));
  wrong = right;
  ++wrong.index_size;
  EXPECT_THAT(this->reader(wrong).error().message, HasSubstr("gpu/index has "));
  wrong = right;
  wrong.data_sizes.push_back(4096);
  EXPECT_THAT(this->reader(wrong).error().message, HasSubstr("do not agree"));
}

// ---- The index ----------------------------------------------------------------------------------

ContentIndex sample_index() {
  ContentIndex index;
  index.chunk_bytes = kChunk;
  index.file_sizes = {kChunk + 4096, 4096};
  index.streams = {{Pid{1}, 3 * kChunk + 5, {{0, 4096, gpu(1), 0x1000}, {4096, 1, gpu(2), 0}}},
                   {Pid{2}, 0, {}},
                   {Pid{3}, kChunk, {}}};
  index.first_chunk = {0, 4, 4};
  index.chunks = {{{1, 2, 3}, 0, kChunk, ContentEncoding::kRaw, 0},
                  {},
                  {{4}, kChunk, 100, ContentEncoding::kZstd, 0},
                  {{5}, 0, 5, ContentEncoding::kRaw, 1},
                  {{6}, 0, 77, ContentEncoding::kLz4, 1}};
  return index;
}

TEST(ContentIndex, ComesBackAsItWas) {
  const auto back = parse_content_index(serialize_content_index(sample_index()));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(*back, sample_index());
}

TEST(ContentIndex, IgnoresWhatALaterWriterMayAddBehindTheTables) {
  auto bytes = serialize_content_index(sample_index());
  bytes.resize(bytes.size() - 16 + 100);
  const auto back = parse_content_index(close_content_index(bytes));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(*back, sample_index());
}

TEST(ContentIndex, NoticesEveryFlippedBit) {
  auto bytes = serialize_content_index(sample_index());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
    const auto parsed = parse_content_index(bytes);
    ASSERT_FALSE(parsed) << bit;
    EXPECT_EQ(parsed.error().code, ErrorCode::kImageCorrupt);
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
  }
}

TEST(ContentIndex, NoticesThatItIsCutShort) {
  const auto bytes = serialize_content_index(sample_index());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const auto parsed = parse_content_index(std::span(bytes).first(size));
    ASSERT_FALSE(parsed) << size;
    EXPECT_EQ(parsed.error().code, ErrorCode::kImageCorrupt);
  }
}

// With a right checksum: what is taken is in its bounds, and says what the bytes say.
TEST(ContentIndex, TakesNoNumberThatCannotBe) {
  const auto whole = serialize_content_index(sample_index());
  int refused = 0;
  for (std::size_t at = 0; at < whole.size() - 16; ++at) {
    for (const unsigned value : {0x00U, 0x01U, 0x7fU, 0x80U, 0xffU}) {
      auto bytes = whole;
      bytes[at] = static_cast<std::byte>(value);
      bytes.resize(bytes.size() - 16);
      const auto parsed = parse_content_index(close_content_index(bytes));
      if (!parsed) {
        ++refused;
        continue;
      }
      for (std::size_t i = 0; i < parsed->streams.size(); ++i) {
        ASSERT_LE(parsed->first_chunk[i] + parsed->chunks_of(i), parsed->chunks.size());
      }
      for (const ContentChunk& chunk : parsed->chunks) {
        if (chunk.encoding == ContentEncoding::kZero) continue;
        ASSERT_LE(chunk.position + chunk.stored, parsed->file_sizes.at(chunk.file));
        ASSERT_LE(chunk.stored, parsed->chunk_bytes);
      }
    }
  }
  EXPECT_GT(refused, 500);
}

template <class Change>
Result<ContentIndex> parse_changed(const Change& change) {
  ContentIndex index = sample_index();
  change(index);
  return parse_content_index(serialize_content_index(index));
}

TEST(ContentIndex, SaysWhatIsWrong) {
  using Index = ContentIndex;
  const auto message = [](const auto& change) {
    const auto parsed = parse_changed(change);
    return parsed ? "taken" : parsed.error().message;
  };
  EXPECT_THAT(message([](Index& i) { i.chunk_bytes = 12345; }),
              HasSubstr("12345 bytes is no size"));
  EXPECT_THAT(message([](Index& i) { i.streams.clear(); }), HasSubstr("0 streams"));
  EXPECT_THAT(message([](Index& i) { i.streams[2].pid = Pid{1}; }), HasSubstr("process 1 stands"));
  EXPECT_THAT(message([](Index& i) { i.streams[0].pid = Pid{0}; }), HasSubstr("0 is no process"));
  EXPECT_THAT(message([](Index& i) { i.streams[1].bytes = 1; }), HasSubstr("its streams 2 and 6"));
  EXPECT_THAT(message([](Index& i) { i.chunks.pop_back(); }),
              HasSubstr("and 4 chunks, its streams"));
  EXPECT_THAT(message([](Index& i) { i.file_sizes[0] = 1; }), HasSubstr("no size of a data file"));
  EXPECT_THAT(message([](Index& i) { i.file_sizes.pop_back(); }), HasSubstr("data file 1 of 1"));
  EXPECT_THAT(message([](Index& i) { i.streams[0].ranges[1].offset = 4095; }),
              HasSubstr("a range of process 1"));
  EXPECT_THAT(message([](Index& i) { i.chunks[0].position = 512; }), HasSubstr("cannot be at 512"));
  EXPECT_THAT(
      message([](Index& i) { i.chunks[0].position = 8192; }),
      HasSubstr("chunk 0 of process 1 of 65536 bytes cannot be at 8192 of a file of 69632"));
  EXPECT_THAT(message([](Index& i) { i.chunks[0].stored = 4096; }),
              HasSubstr("cannot be stored in 4096"));
  EXPECT_THAT(message([](Index& i) { i.chunks[4].stored = kChunk; }),
              HasSubstr("cannot be stored in 65536"));
  EXPECT_THAT(message([](Index& i) { i.chunks[1].stored = 1; }), HasSubstr("is of zeros"));
  EXPECT_THAT(message([](Index& i) { i.chunks[4].encoding = static_cast<ContentEncoding>(4); }),
              HasSubstr("encoding 4, which does not exist"));
}

TEST(ContentIndex, SaysWhichFileIsWrong) {
  const std::vector<std::byte> none;
  EXPECT_THAT(parse_content_index(none).error().message, testing::StartsWith("gpu/index: "));
  EXPECT_THAT(parse_content_index(none, ContentKind::kHost).error().message,
              testing::StartsWith("host/index: "));
}

TEST(ContentIndex, HostMemoryBelongsToPlacesOfItsOwnInWholeUnits) {
  const auto problem = [](const auto& change) {
    ContentStream stream{
        Pid{7},
        3 * kHostUnit,
        {{0, kHostUnit, {}, 0x7f0000100000}, {kHostUnit, 2 * kHostUnit, {}, 0x7f0000000000}}};
    change(stream);
    return problem_of_host(stream);
  };
  using testing::HasSubstr;
  EXPECT_EQ(problem([](ContentStream&) {}), "");
  const auto nowhere = HasSubstr("belong to no place");
  EXPECT_THAT(problem([](auto& s) { s.ranges[1].address += 4096; }), nowhere);
  EXPECT_THAT(problem([](auto& s) { s.ranges[1].address = 0 - kHostUnit; }), nowhere);
  EXPECT_THAT(problem([](auto& s) { s.ranges[1].offset += kHostUnit; }), nowhere);
  EXPECT_THAT(problem([](auto& s) { s.ranges[0].bytes -= 4096; }), nowhere);
  EXPECT_THAT(problem([](auto& s) { s.ranges[0].bytes = 0; }), nowhere);
  EXPECT_THAT(problem([](auto& s) { s.ranges[0].gpu.bytes[3] = 1; }), nowhere);
  EXPECT_THAT(problem([](auto& s) { s.bytes += kHostUnit; }), HasSubstr("cover"));
  EXPECT_THAT(problem([](auto& s) { s.ranges.pop_back(); }), HasSubstr("cover"));
  const auto same = HasSubstr("the same place");
  EXPECT_THAT(problem([](auto& s) { s.ranges[1].address += kHostUnit * 3; }), same);
  EXPECT_THAT(problem([](auto& s) { s.ranges[0].address = s.ranges[1].address; }), same);
}

TEST(ContentIndex, OfANewerWriterIsOfAnotherVersion) {
  for (const std::size_t at : {8U, 12U}) {  // version, features
    auto bytes = serialize_content_index(sample_index());
    bytes.resize(bytes.size() - 16);
    bytes[at] = std::byte{2};
    bytes[16] = std::byte{1};  // nothing else in it is judged
    const auto parsed = parse_content_index(close_content_index(bytes));
    ASSERT_FALSE(parsed);
    EXPECT_EQ(parsed.error().code, ErrorCode::kImageVersion);
  }
}

// ---- What goes wrong while it is written --------------------------------------------------------

TEST_F(ContentTest, AFileThatMayNotGrowIsAnErrorThatStays) {
  Memory content(4 * kChunk);
  fill_random(content.bytes(), 1);
  auto writer = this->writer().value();
  ASSERT_TRUE(writer.add_stream(Pid{1}, content.bytes().size(), {}));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{2 * kChunk + 10000, before.rlim_max};  // the third write is cut short first
  const auto old = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto wrote = writer.write(0, 0, content.bytes());
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old);
  ASSERT_FALSE(wrote);
  EXPECT_THAT(wrote.error().message,
              HasSubstr("cannot write gpu/data-00 at 141072: File too large"));
  EXPECT_EQ(writer.write(0, 0, content.bytes()).error().message, wrote.error().message);
  EXPECT_EQ(writer.finish(progress_, interrupt_).error().message, wrote.error().message);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "gpu/index"));
}

TEST_F(ContentTest, AFullDiskIsToldAsSuch) {
  const std::string disk = dir_ / "disk";
  std::filesystem::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=512k") != 0)
    GTEST_SKIP() << "no tmpfs can be mounted here";
  Memory content(64 * kChunk);
  fill_random(content.bytes(), 1);
  {
    ContentOptions options;
    options.chunk_bytes = kChunk;
    auto writer = ContentWriter::create(open_directory(disk), options).value();
    EXPECT_TRUE(writer.add_stream(Pid{1}, content.bytes().size(), {}));
    const auto wrote = writer.write(0, 0, content.bytes());
    EXPECT_FALSE(wrote);
    EXPECT_EQ(wrote ? ErrorCode::kInternal : wrote.error().code, ErrorCode::kNoSpace);
    EXPECT_THAT(wrote ? "" : wrote.error().message,
                HasSubstr("No space left on device (0 B free)"));
    EXPECT_FALSE(writer.finish(progress_, interrupt_));
  }
  EXPECT_EQ(::umount(disk.c_str()), 0);
}

TEST_F(ContentTest, StopsWhenItIsAsked) {
  Memory content(4 * kChunk);
  fill_random(content.bytes(), 1);
  const auto summary = write_simple(content.bytes());
  const auto reader = this->reader(summary.record).value();
  std::filesystem::rename(dir_ / "gpu", dir_ / "old");
  auto writer = this->writer().value();
  ASSERT_TRUE(writer.add_stream(Pid{7}, content.bytes().size(), {}));
  ASSERT_TRUE(writer.write(0, 0, content.bytes()));
  interrupt_.request(SIGINT);
  EXPECT_EQ(reader.verify_all(progress_, interrupt_).error().code, ErrorCode::kInterrupted);
  EXPECT_EQ(writer.finish(progress_, interrupt_).error().code, ErrorCode::kInterrupted);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "gpu/index"));
}

// ---- As part of an image ------------------------------------------------------------------------

class ContentImageTest : public ContentTest {
 protected:
  ContentImageTest() : content_(3 * kChunk) { fill_random(content_.bytes(), 9); }

  Result<Manifest> make_image(bool tell = true, int pid = 100) {
    auto image = ImageWriter::create(dir_ / "image", true).value();
    write_text(image.path() + "/criu/core-100.img", "core");
    ContentOptions options;
    options.chunk_bytes = kChunk;
    auto writer = ContentWriter::create(image.dir(), options).value();
    EXPECT_TRUE(writer.add_stream(Pid{pid}, content_.bytes().size(), {}));
    EXPECT_TRUE(writer.write(0, 0, content_.bytes()));
    Manifest manifest = sample_manifest();
    manifest.content = writer.finish(progress_, interrupt_).value().record;
    if (!tell) manifest.content.reset();
    if (change_) change_(image.path());
    auto sealed = image.seal(manifest, SyncPolicy::kDisk, progress_, interrupt_);
    EXPECT_EQ(sealed.has_value(), image.commit().has_value());
    return sealed;
  }
  ErrorCode verify_code(ImageReader::Part part = ImageReader::Part::kAll) {
    auto image = ImageReader::open(dir_ / "image");
    if (!image) return image.error().code;
    const auto verified = image->verify(progress_, interrupt_, part);
    return verified ? ErrorCode::kInternal : verified.error().code;
  }

  static constexpr ErrorCode kSound = ErrorCode::kInternal;
  Memory content_;
  std::function<void(const std::string&)> change_;
};

TEST_F(ContentImageTest, IsInTheManifestAndVerified) {
  const auto manifest = make_image();
  ASSERT_TRUE(manifest) << manifest.error().to_string();
  EXPECT_EQ(manifest->content->data_sizes, std::vector<std::uint64_t>{3 * kChunk});
  EXPECT_EQ(manifest->total_bytes, 4 + 3 * kChunk + manifest->content->index_size);
  const std::string text = read_text(dir_ / "image/manifest.json");
  EXPECT_THAT(text, HasSubstr("\"gpu-content\""));
  const auto image = ImageReader::open(dir_ / "image").value();
  EXPECT_EQ(image.manifest(), *manifest);
  const auto reader = image.open_content();
  ASSERT_TRUE(reader) << reader.error().to_string();
  Memory back(content_.bytes().size());
  ASSERT_TRUE(reader->read(0, 0, back.bytes()));
  EXPECT_TRUE(std::ranges::equal(back.bytes(), content_.bytes()));
  EXPECT_EQ(verify_code(), kSound);
}

TEST_F(ContentImageTest, IsReplacedAsAWhole) {
  ASSERT_TRUE(make_image());
  fill_random(content_.bytes(), 10);
  ASSERT_TRUE(make_image());
  EXPECT_EQ(verify_code(), kSound);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir_.path()),
                          std::filesystem::directory_iterator()),
            1);
}

TEST_F(ContentImageTest, DamageIsFound) {
  ASSERT_TRUE(make_image());
  flip("image/gpu/data-00", kChunk + 1);
  EXPECT_EQ(verify_code(ImageReader::Part::kAllButPages), kSound);  // a reader of it will tell
  EXPECT_EQ(verify_code(), ErrorCode::kImageCorrupt);
  flip("image/gpu/data-00", kChunk + 1);
  EXPECT_EQ(verify_code(), kSound);
  flip("image/gpu/index", 70);
  EXPECT_EQ(verify_code(ImageReader::Part::kAllButPages), ErrorCode::kImageCorrupt);
  flip("image/gpu/index", 70);
  write_text(dir_ / "image/gpu/data-01", "");
  EXPECT_EQ(verify_code(ImageReader::Part::kAllButPages), ErrorCode::kImageCorrupt);
  std::filesystem::remove(dir_ / "image/gpu/data-01");
  std::filesystem::remove(dir_ / "image/gpu/data-00");
  EXPECT_EQ(verify_code(ImageReader::Part::kAllButPages), ErrorCode::kImageCorrupt);
}

TEST_F(ContentImageTest, OfAProcessThatIsNotInTheImageIsRefused) {
  ASSERT_TRUE(make_image(true, 555));
  const auto content = ImageReader::open(dir_ / "image")->open_content();
  ASSERT_FALSE(content);
  EXPECT_THAT(content.error().message, HasSubstr("process 555"));
}

TEST_F(ContentImageTest, OfAProcessWithoutCudaIsRefused) {
  ASSERT_TRUE(make_image(true, 101));
  const auto content = ImageReader::open(dir_ / "image")->open_content();
  ASSERT_FALSE(content);
  EXPECT_THAT(content.error().message, HasSubstr("process 101, which does not use CUDA"));
}

TEST_F(ContentImageTest, MustBeWhatTheManifestSays) {
  EXPECT_THAT(make_image(false).error().message, HasSubstr("does not know of it"));
  change_ = [](const std::string& path) { write_text(path + "/gpu/more", ""); };
  EXPECT_THAT(make_image().error().message, HasSubstr("there are 3 files, expected 2"));
  change_ = [](const std::string& path) { std::filesystem::resize_file(path + "/gpu/data-00", 1); };
  EXPECT_THAT(make_image().error().message, HasSubstr("gpu/data-00 differs"));
  change_ = [](const std::string& path) { std::filesystem::remove_all(path + "/gpu"); };
  EXPECT_THAT(make_image().error().message, HasSubstr("there is none"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "image"));
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
}

}  // namespace
}  // namespace stasis
