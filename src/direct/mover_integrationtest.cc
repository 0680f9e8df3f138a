// The mover on the simulated driver, with real processes: the target, the mover's, and this one,
// which never has a CUDA context.
// Long because all cases share the target, the mover's process and the files between them.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>

#include <gtest/gtest.h>

#include "direct/mover_process.h"
#include "direct/plan.h"
#include "direct/remote_memory.h"
#include "image/checksum.h"
#include "tests/fakes/address_space.h"
#include "tests/fakes/mover_target.h"

namespace stasis::direct {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A place in this process, which can refuse or do something else at the nth piece.
class Memory final : public Content {
 public:
  explicit Memory(std::uint64_t bytes, std::size_t chunk = 256U << 10)
      : bytes_(bytes), chunk_(chunk) {}
  Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    if (auto passed = pass(offset, bytes.size()); !passed) return passed;
    std::copy(bytes.begin(), bytes.end(), bytes_.begin() + static_cast<std::ptrdiff_t>(offset));
    return {};
  }
  Result<void> read(std::uint64_t offset, std::span<std::byte> bytes) override {
    if (auto passed = pass(offset, bytes.size()); !passed) return passed;
    const auto from = bytes_.begin() + static_cast<std::ptrdiff_t>(offset);
    std::copy(from, from + static_cast<std::ptrdiff_t>(bytes.size()), bytes.begin());
    return {};
  }
  void at_piece(int nth, std::function<Result<void>()> act) {
    const std::scoped_lock lock(mutex_);
    pieces_ = 0;
    nth_ = nth;
    act_ = std::move(act);
  }
  int pieces() const { return pieces_; }
  // When the last piece below and from `offset` on came by.
  std::pair<Clock::time_point, Clock::time_point> last_around(std::uint64_t offset) const {
    std::pair<Clock::time_point, Clock::time_point> last;
    for (const auto& [at, when] : times_) {
      auto& side = at < offset ? last.first : last.second;
      side = std::max(side, when);
    }
    return last;
  }
  void forget_times() { times_.clear(); }

  // What is in it now counts as there already, chunk by chunk.
  void keep() {
    there_.clear();
    for (std::size_t at = 0; at < bytes_.size(); at += chunk_)
      there_.push_back(xxh3(std::span(bytes_).subspan(at, std::min(chunk_, bytes_.size() - at))));
  }
  int asked() const { return asked_; }
  // Says of every third chunk that it is zeros, and has it be so.
  void clear_every_third() {
    clears_ = true;
    for (std::size_t at = 0; at + chunk_ <= bytes_.size(); at += 3 * chunk_)
      std::fill_n(bytes_.begin() + static_cast<std::ptrdiff_t>(at), chunk_, std::byte{0});
  }
  bool equals(const Memory& other) const { return bytes_ == other.bytes_; }
  std::uint64_t zero_chunk() const override { return clears_ ? chunk_ : 0; }
  Result<void> zeros(std::uint64_t offset, std::span<std::byte> flags) override {
    EXPECT_EQ(offset % chunk_, 0U);
    for (std::size_t i = 0; i < flags.size(); ++i)
      flags[i] = std::byte{(offset / chunk_ + i) % 3 == 0};
    return {};
  }
  std::uint64_t digest_chunk() const override { return there_.empty() ? 0 : chunk_; }
  Result<void> deduplicate(std::uint64_t offset, std::span<std::byte> digests) override {
    const std::scoped_lock lock(mutex_);
    EXPECT_EQ(offset % chunk_, 0U);
    for (std::size_t i = 0; i < digests.size(); i += sizeof(Digest)) {
      const auto digest = digests.subspan(i, sizeof(Digest));
      const auto& there = there_.at(offset / chunk_ + i / sizeof(Digest));
      digest[0] = std::byte{std::memcmp(there.data(), digest.data(), sizeof there) == 0};
      ++asked_;
    }
    return {};
  }

 private:
  Result<void> pass(std::uint64_t offset, std::uint64_t bytes) {
    EXPECT_LE(offset + bytes, bytes_.size());
    const std::scoped_lock lock(mutex_);
    times_.emplace_back(offset, Clock::now());
    if (++pieces_ == nth_ && act_) return act_();
    return {};
  }
  std::mutex mutex_;
  std::vector<std::byte> bytes_;
  std::size_t chunk_;
  std::vector<Digest> there_;
  bool clears_ = false;
  int asked_ = 0;
  int pieces_ = 0;
  int nth_ = 0;
  std::function<Result<void>()> act_;
  std::vector<std::pair<std::uint64_t, Clock::time_point>> times_;
};

class MoverTest : public testing::Test {
 public:
  MoverTest() {
    std::string name = (std::filesystem::temp_directory_path() / "stasis-mover-XXXXXX").string();
    dir_ = ::mkdtemp(name.data());
    const std::string build =
        std::getenv("STASIS_BUILD") ? std::getenv("STASIS_BUILD") : "build/dev";
    ::setenv("STASIS_LIBCUDA", (build + "/lib/stasis/sim/libcuda.so.1").c_str(), 1);
    ::setenv("STASIS_SIM_DIR", dir_.c_str(), 1);
    ::setenv("STASIS_SIM_GPUS", "2x2G", 1);
    ::unsetenv("STASIS_SIM_FAULTS");
    ::unsetenv("CUDA_VISIBLE_DEVICES");
  }
  ~MoverTest() override { std::filesystem::remove_all(dir_); }

  static Clock::time_point in(milliseconds time) { return Clock::now() + time; }
  static MoverOptions small() {
    return {.threads = 3, .ring_bytes = 24 * kMiB, .buffer_bytes = 4 * kMiB};
  }
  // With faults of its own, which the target has not.
  static MoverProcess started(const char* faults = nullptr) {
    if (faults != nullptr) ::setenv("STASIS_SIM_FAULTS", faults, 1);
    auto mover = MoverProcess::start();
    EXPECT_TRUE(mover);
    return std::move(*mover);
  }
  MoverProcess prepared(const char* faults = nullptr) {
    MoverProcess mover = started(faults);
    const auto ready = mover.prepare(small(), {}, never_, in(seconds(30)));
    EXPECT_TRUE(ready) << ready.error().to_string();
    return mover;
  }
  Result<CopyReport> out(MemoryMover& mover, Target& target, Content& content,
                         milliseconds time = seconds(30)) {
    return mover.copy_out(target.exported(), content, never_, in(time));
  }
  Result<CopyReport> back(MemoryMover& mover, Target& target, Content& content,
                          milliseconds time = seconds(30)) {
    return mover.copy_in(target.exported(), content, never_, in(time));
  }
  // Out, freed, made again and back.
  void round_trip(MemoryMover& mover, Target& target, Content& content) {
    const auto moved = out(mover, target, content);
    ASSERT_TRUE(moved) << moved.error().to_string();
    EXPECT_EQ(moved->bytes, 64 * kMiB);
    EXPECT_EQ(target.release(), 0U) << "the mover still holds memory of the target";
    ASSERT_TRUE(target.make_again());
    EXPECT_FALSE(target.verify()) << "the check finds nothing";
    const auto returned = back(mover, target, content);
    ASSERT_TRUE(returned) << returned.error().to_string();
    EXPECT_TRUE(target.verify());
  }
  // After an error: nothing is held, and the target can be moved as if nothing had been.
  void expect_let_go(Target& target) {
    EXPECT_TRUE(target.verify()) << "copying out has changed what it copies";
    EXPECT_EQ(target.release(), 0U) << "the mover still holds memory of the target";
  }

  static bool maps_ring(const std::string& process) {
    std::ifstream maps("/proc/" + process + "/maps");
    const std::string all{std::istreambuf_iterator<char>(maps), {}};
    EXPECT_FALSE(all.empty());
    return all.find("stasis-ring") != std::string::npos;
  }

  std::string dir_;
  Interrupt never_;
};

TEST_F(MoverTest, MovesMemoryOfTwoGpusOutAndBack) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  round_trip(mover, target, content);
  // And once more, by the same mover.
  round_trip(mover, target, content);
}

// Each has threads and buffers of its own: none waits for the slowest.
TEST_F(MoverTest, CopiesEachGpuAtItsOwnSpeed) {
  constexpr std::uint64_t kEach = 32 * kMiB;
  Target target({{0, kEach, 0}, {1, kEach, kEach}});
  MoverProcess mover = prepared("transfer:delay=1500ms gpu=1");
  Memory content(2 * kEach);
  const auto took = [&](bool copies_out) {
    content.forget_times();
    const auto start = Clock::now();
    const auto moved = copies_out ? out(mover, target, content, seconds(60))
                                  : back(mover, target, content, seconds(60));
    EXPECT_TRUE(moved) << moved.error().to_string();
    const auto [quick, slow] = content.last_around(kEach);
    EXPECT_GE(slow - start, milliseconds(1000)) << "nothing was slow";
    EXPECT_LT(quick - start, (slow - start) / 2) << "the quick GPU has waited for the slow one";
  };
  took(true);
  EXPECT_EQ(target.release(), 0U);
  ASSERT_TRUE(target.make_again());
  took(false);
  EXPECT_TRUE(target.verify());
}

// A context that is left to the kernel may cost a program its GPU (mover_server.h).
TEST_F(MoverTest, ClosesItsContextsBeforeItEnds) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  round_trip(mover, target, content);
  EXPECT_TRUE(mover.end());
  // The simulated driver forgets who closes what it has, and else finds out later who has died.
  std::map<std::string, int> users;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir_)) {
    if (entry.path().filename().string().starts_with("owner-"))
      ++users[entry.path().parent_path().filename().string()];
  }
  EXPECT_EQ(users.size(), 2U);
  for (const auto& [gpu, count] : users)
    EXPECT_EQ(count, 1) << "a process besides the target has " << gpu;
}

// As of a program of the C interface's that forks workers.
TEST_F(MoverTest, EndsByItselfAlsoIfAnotherProcessHasACopyOfItsChannel) {
  MoverProcess mover = prepared();
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;)
      ::pause();
  }
  EXPECT_TRUE(mover.end());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST_F(MoverTest, MovesIntoPrivateMemoryOfTheTarget) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  RemoteMemory content(fakes::space_of(target.pid()), target.host_memory(),
                       content_size(target.shapes()));
  ASSERT_TRUE(content.fault_in(2, never_));
  round_trip(mover, target, content);
}

TEST_F(MoverTest, WorksInOneProcessToo) {
  Target target(mixed_shapes());
  fakes::Child one([&] {
    auto mover = Mover::prepare(small(), {}, never_, in(seconds(30)));
    if (!mover) ::_exit(2);
    Memory content(content_size(target.shapes()));
    round_trip(*mover, target, content);
    ::_exit(HasFailure() ? 1 : 0);
  });
  EXPECT_EQ(one.wait(), 0);
}

// What copy_in() will bring to each of the two GPUs.
std::vector<PrefetchRequest> prefetch_of(const Target& target, std::uint64_t room0,
                                         std::uint64_t room1) {
  std::vector<PrefetchRequest> out{{target.gpu(0), room0, {}}, {target.gpu(1), room1, {}}};
  for (const Shape& shape : target.shapes())
    out[static_cast<std::size_t>(shape.gpu)].parts.push_back({shape.offset, shape.bytes});
  return out;
}

TEST_F(MoverTest, LeavesOnTheGpuWhatTheContentHasByItsDigest) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  ASSERT_TRUE(out(mover, target, content));
  content.keep();
  ASSERT_TRUE(mover.prepare_digests(never_, in(seconds(30))));
  content.at_piece(0, {});
  const auto same = out(mover, target, content);
  ASSERT_TRUE(same) << same.error().to_string();
  EXPECT_EQ(same->bytes, 64 * kMiB);
  EXPECT_EQ(same->left_out, 64 * kMiB);
  EXPECT_EQ(content.asked(), 256);
  EXPECT_EQ(content.pieces(), 0);
  // Two chunks of different segments are others than they were: only those come, as they are now.
  const Shape& first = target.shapes()[1];
  const Shape& second = target.shapes()[3];
  const auto change = [&](std::uint64_t at) {
    std::vector<std::byte> other(256U << 10, std::byte{0x5a});
    ASSERT_TRUE(content.write(at, other));
  };
  change(first.offset + (512U << 10));
  change(second.offset);
  content.keep();
  content.at_piece(0, {});
  const auto little = out(mover, target, content);
  ASSERT_TRUE(little);
  EXPECT_EQ(little->left_out, 64 * kMiB - (512U << 10));
  EXPECT_EQ(content.pieces(), 2);
  // But for what each GPU needs to compute them.
  ASSERT_LE(target.release(), 4 * kMiB) << "the mover still holds memory of the target";
  ASSERT_TRUE(target.make_again());
  ASSERT_TRUE(back(mover, target, content));
  EXPECT_TRUE(target.verify());
}

TEST_F(MoverTest, HasTheGpuWriteWhatIsKnownToBeZeros) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  ASSERT_TRUE(out(mover, target, content));
  content.clear_every_third();
  ASSERT_EQ(target.release(), 0U);
  ASSERT_TRUE(target.make_again());
  const auto returned = back(mover, target, content);
  ASSERT_TRUE(returned) << returned.error().to_string();
  EXPECT_EQ(returned->bytes, 64 * kMiB);
  EXPECT_GT(returned->left_out, 20 * kMiB);
  EXPECT_LT(returned->left_out, 22 * kMiB);
  // What lies between the pieces belongs to none of them.
  Memory found(content_size(target.shapes()));
  ASSERT_TRUE(out(mover, target, found));
  Memory wanted(content_size(target.shapes()));
  for (const Shape& shape : target.shapes()) {
    std::vector<std::byte> bytes(shape.bytes);
    ASSERT_TRUE(content.read(shape.offset, bytes));
    ASSERT_TRUE(wanted.write(shape.offset, bytes));
  }
  EXPECT_TRUE(found.equals(wanted));
}

TEST_F(MoverTest, CopiesAllWhereTheGpuComputesNoDigests) {
  for (const char* faults : {"module:error=221", "module:error=300@1"}) {
    Target target(mixed_shapes());
    MoverProcess mover = prepared(faults);
    Memory content(content_size(target.shapes()));
    ASSERT_TRUE(out(mover, target, content));
    content.keep();
    const auto ready = mover.prepare_digests(never_, in(seconds(30)));
    ASSERT_FALSE(ready);
    EXPECT_EQ(ready.error().code, ErrorCode::kNotSupported);
    const auto moved = out(mover, target, content);
    ASSERT_TRUE(moved) << moved.error().to_string();
    EXPECT_EQ(moved->left_out, 0U);
    EXPECT_EQ(content.asked(), 0);
    expect_let_go(target);
  }
}

// The second copy is the pattern's way to the GPU, the third the result's way back.
TEST_F(MoverTest, IsLostWhereTheGpuBreaksDownOverDigests) {
  for (const char* faults : {"module:die", "transfer:error=700@2", "transfer:die@3"}) {
    Target target(mixed_shapes());
    MoverProcess mover = prepared(faults);
    ASSERT_FALSE(mover.prepare_digests(never_, in(seconds(30))));
    EXPECT_TRUE(mover.is_lost()) << faults;
    expect_let_go(target);
  }
}

// However small the ring is, and the chunks.
TEST_F(MoverTest, AsksForEveryChunk) {
  Target target(mixed_shapes());
  fakes::Child one([&] {
    MoverOptions options = small();
    options.threads = 1;
    options.ring_bytes = 4 * kMiB;
    options.buffer_bytes = kMiB;
    auto mover = Mover::prepare(options, {}, never_, in(seconds(30)));
    if (!mover || !mover->prepare_digests(never_, in(seconds(30)))) ::_exit(2);
    Memory content(content_size(target.shapes()), 1024);
    if (!out(*mover, target, content)) ::_exit(3);
    content.keep();
    const auto moved = out(*mover, target, content);
    EXPECT_TRUE(moved);
    EXPECT_EQ(moved->left_out, 64 * kMiB);
    EXPECT_EQ(content.asked(), 64 << 10);
    ::_exit(HasFailure() ? 1 : 0);
  });
  EXPECT_EQ(one.wait(), 0);
}

TEST_F(MoverTest, PrefetchesContentAndTakesItFromTheGpuThen) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  ASSERT_TRUE(out(mover, target, content));
  ASSERT_EQ(target.release(), 0U);
  content.at_piece(0, {});
  // All that is for the one, and 12 of the 36 MiB for the other.
  const auto early =
      mover.prefetch(prefetch_of(target, 64 * kMiB, 12 * kMiB), content, never_, in(seconds(30)));
  ASSERT_TRUE(early) << early.error().to_string();
  std::uint64_t first = 0;
  for (const Shape& shape : target.shapes())
    first += shape.gpu == 0 ? shape.bytes : 0;
  EXPECT_EQ(early->bytes, first + 12 * kMiB);
  EXPECT_EQ(target.in_use(), early->bytes);
  ASSERT_TRUE(target.make_again());
  const int before = content.pieces();
  const auto moved = back(mover, target, content);
  ASSERT_TRUE(moved) << moved.error().to_string();
  EXPECT_EQ(moved->bytes, 64 * kMiB);
  EXPECT_TRUE(target.verify());
  // Of loads of 2 MiB and more, which may lie in two pieces of content.
  EXPECT_LT(content.pieces() - before, before);
  EXPECT_EQ(target.release(), 0U) << "the mover still holds memory";
}

TEST_F(MoverTest, KeepsWhatItWasAllowedToAndTakesItFromTheGpuThen) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  std::uint64_t first = 0;
  for (const Shape& shape : target.shapes())
    first += shape.gpu == 0 ? shape.bytes : 0;
  // Whole segments from the beginning: one of 6 MiB is followed by one of 20.
  const std::uint64_t kept = 6 * kMiB;
  mover.keep({{target.gpu(1), 13 * kMiB}, {target.gpu(0), 64 * kMiB}});
  ASSERT_TRUE(out(mover, target, content));
  EXPECT_EQ(target.release(), first + kept);
  ASSERT_TRUE(target.make_again());
  content.at_piece(0, {});
  const auto moved = back(mover, target, content);
  ASSERT_TRUE(moved) << moved.error().to_string();
  EXPECT_EQ(moved->bytes, 64 * kMiB);
  EXPECT_EQ(moved->left_out, first + kept);
  EXPECT_TRUE(target.verify());
  EXPECT_EQ(target.release(), 0U) << "the mover still holds memory";
  // Once only; and it can be told to let go.
  ASSERT_TRUE(target.make_again());
  ASSERT_TRUE(back(mover, target, content));
  ASSERT_TRUE(out(mover, target, content));
  EXPECT_EQ(target.release(), 0U);
  ASSERT_TRUE(target.make_again());
  ASSERT_TRUE(back(mover, target, content));
  mover.keep({{target.gpu(0), 64 * kMiB}});
  ASSERT_TRUE(out(mover, target, content));
  EXPECT_EQ(target.release(), first);
  ASSERT_TRUE(mover.prefetch({}, content, never_, in(seconds(30))));
  EXPECT_EQ(target.in_use(), 0U);
}

TEST_F(MoverTest, PrefetchesWhatThereIsTimeAndRoomFor) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  ASSERT_TRUE(out(mover, target, content));
  ASSERT_EQ(target.release(), 0U);
  const auto all = prefetch_of(target, 64 * kMiB, 64 * kMiB);

  Interrupt enough;
  content.at_piece(9, [&] {
    enough.request(SIGINT);
    return Result<void>();
  });
  const auto some = mover.prefetch(all, content, enough, in(seconds(30)));
  ASSERT_TRUE(some) << some.error().to_string();
  EXPECT_LT(some->bytes, 40 * kMiB);
  content.at_piece(0, {});
  ASSERT_TRUE(target.make_again());
  ASSERT_TRUE(back(mover, target, content));
  EXPECT_TRUE(target.verify());
  ASSERT_EQ(target.release(), 0U);

  content.at_piece(9, [] { return Result<void>(fail(ErrorCode::kImageCorrupt, "it is wrong")); });
  const auto refused = mover.prefetch(all, content, never_, in(seconds(30)));
  ASSERT_TRUE(refused);
  EXPECT_LT(refused->bytes, 40 * kMiB);
  content.at_piece(1, [] { return Result<void>(fail(ErrorCode::kImageCorrupt, "it is wrong")); });
  ASSERT_TRUE(target.make_again());
  const auto wrong = back(mover, target, content);
  ASSERT_FALSE(wrong) << "what was refused is asked for again";
  EXPECT_EQ(wrong.error().code, ErrorCode::kImageCorrupt);
  content.at_piece(0, {});
  ASSERT_EQ(target.release(), 0U);

  const auto none = mover.prefetch(prefetch_of(target, 0, 100), content, never_, in(seconds(30)));
  ASSERT_TRUE(none);
  EXPECT_EQ(none->bytes, 0U);
  EXPECT_EQ(target.in_use(), 0U);
  ASSERT_TRUE(target.make_again());
  ASSERT_TRUE(back(mover, target, content));
  EXPECT_TRUE(target.verify());
}

TEST_F(MoverTest, LetsGoWhatWasPrefetchedForOtherPlaces) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  ASSERT_TRUE(out(mover, target, content));
  ASSERT_EQ(target.release(), 0U);
  auto other = prefetch_of(target, 64 * kMiB, 64 * kMiB);
  other[0].parts[1].bytes += 2 * kMiB;
  std::swap(other[1].parts[0], other[1].parts[1]);
  ASSERT_TRUE(mover.prefetch(other, content, never_, in(seconds(30))));
  EXPECT_GT(target.in_use(), 0U);
  ASSERT_TRUE(target.make_again());
  ASSERT_TRUE(back(mover, target, content));
  EXPECT_TRUE(target.verify());
  EXPECT_EQ(target.release(), 0U);
  // And where the process wants its room back, before anything is copied in.
  ASSERT_TRUE(
      mover.prefetch(prefetch_of(target, 64 * kMiB, 64 * kMiB), content, never_, in(seconds(30))));
  EXPECT_EQ(target.in_use(), 64 * kMiB);
  ASSERT_TRUE(mover.prefetch({}, content, never_, in(seconds(30))));
  EXPECT_EQ(target.in_use(), 0U);
}

TEST_F(MoverTest, SeesGpusThatAreHiddenFromItsUser) {
  Target target(mixed_shapes());
  ::setenv("CUDA_VISIBLE_DEVICES", "1", 1);
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  round_trip(mover, target, content);
  EXPECT_STREQ(std::getenv("CUDA_VISIBLE_DEVICES"), "1");
}

TEST_F(MoverTest, MovesMoreSegmentsThanOneMessageTakes) {
  std::vector<Shape> shapes;
  for (std::uint64_t i = 0; i < 300; ++i)
    shapes.push_back({0, 2 * kMiB, i * 2 * kMiB});
  Target target(shapes);
  MoverProcess mover = prepared();
  // Sees all of it, and keeps nothing.
  struct Check final : Content {
    Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) override {
      for (std::size_t at = 0; at < bytes.size(); at += 2 * kMiB) {
        std::uint64_t got = 0;
        std::memcpy(&got, bytes.data() + at, sizeof got);
        const std::uint64_t place = offset + at;
        const std::uint64_t segment = place / (2 * kMiB);
        const std::uint64_t word = place % (2 * kMiB) / 8;
        wrong += got != (segment + 1) * 0x9e3779b97f4a7c15 + word * 0xbf58476d1ce4e5b9;
      }
      seen += bytes.size();
      ++pieces;
      return {};
    }
    Result<void> read(std::uint64_t, std::span<std::byte>) override { return {}; }
    std::atomic<std::uint64_t> seen{0};
    std::atomic<int> wrong{0};
    std::atomic<int> pieces{0};
  } check;
  const auto moved = out(mover, target, check);
  ASSERT_TRUE(moved) << moved.error().to_string();
  EXPECT_EQ(check.seen, 600 * kMiB);
  EXPECT_EQ(check.wrong, 0);
  EXPECT_EQ(check.pieces, 150) << "two segments for each buffer of 4 MiB";
  expect_let_go(target);
}

TEST_F(MoverTest, StopsWhenInterruptedAndCanGoOnAfterwards) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  Interrupt interrupt;
  content.at_piece(5, [&] {
    interrupt.request(SIGINT);
    return Result<void>();
  });
  const auto moved = mover.copy_out(target.exported(), content, interrupt, in(seconds(30)));
  ASSERT_FALSE(moved);
  EXPECT_EQ(moved.error().code, ErrorCode::kInterrupted);
  EXPECT_LT(content.pieces(), 16);
  expect_let_go(target);
  ASSERT_TRUE(target.make_again());
  target.scramble();
  content.at_piece(0, {});
  ASSERT_TRUE(out(mover, target, content));
}

TEST_F(MoverTest, KeepsItsDeadlineAndCanGoOnAfterwards) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared("transfer:delay=150ms");
  Memory content(content_size(target.shapes()));
  const auto start = Clock::now();
  const auto late = out(mover, target, content, milliseconds(300));
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::kTimeout);
  EXPECT_LT(since(start), seconds(15));
  expect_let_go(target);
  ASSERT_TRUE(target.make_again());
  EXPECT_TRUE(out(mover, target, content));
}

TEST_F(MoverTest, SaysThatTheTargetDiedInTheMiddle) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  struct Killing final : Content {
    Killing(Target& t, RemoteMemory& m) : target(&t), memory(&m) {}
    Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) override {
      if (++pieces != 4) return memory->write(offset, bytes);
      target->kill();
      // Its memory lives as long as another thread writes there.
      const auto end = Clock::now() + seconds(10);
      auto done = memory->write(offset, bytes);
      while (done && Clock::now() < end)
        done = memory->write(offset, bytes);
      return done;
    }
    Result<void> read(std::uint64_t, std::span<std::byte>) override { return {}; }
    Target* target;
    RemoteMemory* memory;
    std::atomic<int> pieces{0};
  };
  RemoteMemory memory(fakes::space_of(target.pid()), target.host_memory(),
                      content_size(target.shapes()));
  Killing killing(target, memory);
  const auto moved = out(mover, target, killing);
  ASSERT_FALSE(moved);
  EXPECT_EQ(moved.error().code, ErrorCode::kProcessGone) << moved.error().to_string();
  // Its memory is free: the next target of the same size would see what is held.
  Target next(mixed_shapes());
  EXPECT_EQ(next.release(), 0U);
}

TEST_F(MoverTest, SaysWhatTheContentSays) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  const auto full = [] { return Result<void>(fail(ErrorCode::kNoSpace, "the disk is full")); };
  content.at_piece(7, full);
  const auto moved = out(mover, target, content);
  ASSERT_FALSE(moved);
  EXPECT_EQ(moved.error().code, ErrorCode::kNoSpace);
  EXPECT_EQ(moved.error().message, "the disk is full");
  content.at_piece(0, {});
  round_trip(mover, target, content);
  content.at_piece(3, full);
  const auto returned = back(mover, target, content);
  ASSERT_FALSE(returned);
  EXPECT_EQ(returned.error().message, "the disk is full");
  EXPECT_EQ(target.release(), 0U);
}

TEST_F(MoverTest, SaysThatAGpuHasNoRoomForItsContext) {
  MoverProcess mover = started("context:oom@2");
  const auto ready = mover.prepare(small(), {}, never_, in(seconds(30)));
  ASSERT_FALSE(ready);
  EXPECT_EQ(ready.error().code, ErrorCode::kOutOfGpuMemory);
  ASSERT_TRUE(ready.error().driver);
  EXPECT_EQ(ready.error().driver->name, "CUDA_ERROR_OUT_OF_MEMORY");
  EXPECT_NE(ready.error().message.find("cuDevicePrimaryCtxRetain"), std::string::npos);
  EXPECT_NE(ready.error().remedy.find("500 MB"), std::string::npos);
}

TEST_F(MoverTest, SaysThatAnImportIsRefused) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared("import:error=801@4");
  Memory content(content_size(target.shapes()));
  const auto moved = out(mover, target, content);
  ASSERT_FALSE(moved);
  EXPECT_EQ(moved.error().code, ErrorCode::kNotSupported);
  EXPECT_NE(moved.error().message.find("cuMemImportFromShareableHandle"), std::string::npos);
  EXPECT_EQ(content.pieces(), 0);
  expect_let_go(target);
}

TEST_F(MoverTest, RefusesWhatIsNoDeviceMemory) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared();
  Memory content(content_size(target.shapes()));
  auto segments = target.exported();
  segments[3].handle = UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto nothing = mover.copy_out(std::move(segments), content, never_, in(seconds(30)));
  ASSERT_FALSE(nothing);
  EXPECT_EQ(nothing.error().code, ErrorCode::kNotSupported);
  segments = target.exported();
  segments.back().bytes += 2 * kMiB;
  const auto too_long = mover.copy_out(std::move(segments), content, never_, in(seconds(30)));
  ASSERT_FALSE(too_long);
  EXPECT_NE(too_long.error().message.find("cuMemMap"), std::string::npos);
  segments = target.exported();
  segments[1].offset = segments[0].offset;
  EXPECT_EQ(mover.copy_out(std::move(segments), content, never_, in(seconds(30))).error().code,
            ErrorCode::kUsage);
  expect_let_go(target);
  const auto none = mover.copy_out({}, content, never_, in(seconds(30)));
  ASSERT_TRUE(none);
  EXPECT_EQ(none->bytes, 0U);
}

TEST_F(MoverTest, OutlivesADriverThatCrashes) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared("transfer:die@6");
  Memory content(content_size(target.shapes()));
  for (int again = 0; again < 2; ++again) {
    const auto moved = out(mover, target, content);
    ASSERT_FALSE(moved);
    EXPECT_EQ(moved.error().code, ErrorCode::kNoAnswer);
    EXPECT_NE(moved.error().message.find("was killed by signal 9"), std::string::npos)
        << moved.error().message;
  }
  expect_let_go(target);
}

TEST_F(MoverTest, GivesUpADriverThatHangsWhileItPrepares) {
  MoverProcess mover = started("context:hang");
  const auto start = Clock::now();
  const auto ready = mover.prepare(small(), {}, never_, in(milliseconds(400)));
  ASSERT_FALSE(ready);
  EXPECT_EQ(ready.error().code, ErrorCode::kTimeout);
  EXPECT_LT(since(start), seconds(30));
  EXPECT_EQ(mover.pid().value, 0) << "it is still there";
}

TEST_F(MoverTest, GivesUpADriverThatHangsInACall) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared("import:hang@3");
  Memory content(content_size(target.shapes()));
  const auto moved = out(mover, target, content, milliseconds(8000));
  ASSERT_FALSE(moved);
  EXPECT_EQ(moved.error().code, ErrorCode::kNoAnswer);
  EXPECT_NE(moved.error().message.find("deadline"), std::string::npos) << moved.error().message;
  expect_let_go(target);
}

TEST_F(MoverTest, SaysThatTheGpuDoesNotEndACopy) {
  Target target(mixed_shapes());
  MoverProcess mover = prepared("transfer:hang@4");
  Memory content(content_size(target.shapes()));
  const auto moved = out(mover, target, content, milliseconds(8000));
  ASSERT_FALSE(moved);
  EXPECT_EQ(moved.error().code, ErrorCode::kNoAnswer);
  EXPECT_NE(moved.error().message.find("does not end a copy"), std::string::npos)
      << moved.error().message;
  expect_let_go(target);
}

// Beside a long kernel of a restored program this is all that may be (mover_server.h).
TEST_F(MoverTest, StartsWithoutAContext) {
  MoverProcess mover = started("context:hang");
  const auto driver = mover.start_driver(small(), never_, in(seconds(30)));
  ASSERT_TRUE(driver) << driver.error().to_string();
  Memory content(kMiB);
  const auto copied = mover.copy_out({}, content, never_, in(seconds(30)));
  ASSERT_FALSE(copied);
  EXPECT_EQ(copied.error().code, ErrorCode::kInternal);
  const auto ready = mover.prepare(small(), {}, never_, in(milliseconds(400)));
  ASSERT_FALSE(ready);
  EXPECT_EQ(ready.error().code, ErrorCode::kTimeout);
}

TEST_F(MoverTest, CopiesWhenItsContextsComeLater) {
  Target target(mixed_shapes());
  MoverProcess mover = started();
  ASSERT_TRUE(mover.start_driver(small(), never_, in(seconds(30))));
  ASSERT_TRUE(mover.prepare(small(), {}, never_, in(seconds(30))));
  Memory content(content_size(target.shapes()));
  round_trip(mover, target, content);
}

TEST_F(MoverTest, RefusesGpusAndRingsThatDoNotExist) {
  MoverProcess mover = started();
  const GpuUuid none{};
  const auto gpu = mover.prepare(small(), std::span(&none, 1), never_, in(seconds(30)));
  ASSERT_FALSE(gpu);
  EXPECT_EQ(gpu.error().code, ErrorCode::kGpuMismatch);
  MoverOptions tiny = small();
  tiny.ring_bytes = kMiB / 16;
  const auto ring = mover.prepare(tiny, {}, never_, in(seconds(30)));
  ASSERT_FALSE(ring);
  EXPECT_EQ(ring.error().code, ErrorCode::kUsage);
  EXPECT_TRUE(mover.prepare(small(), {}, never_, in(seconds(30)))) << "a third try is fine";
}

TEST_F(MoverTest, KeepsNoMemoryForContextsThatItDoesNotGet) {
  MoverProcess mover = started("context:error=2@2");
  ASSERT_TRUE(mover.start_driver(small(), never_, in(seconds(30))));
  EXPECT_TRUE(maps_ring("self"));
  EXPECT_TRUE(maps_ring(std::to_string(mover.pid().value)));
  ASSERT_FALSE(mover.prepare(small(), {}, never_, in(seconds(30))));
  EXPECT_FALSE(maps_ring("self"));
  EXPECT_FALSE(maps_ring(std::to_string(mover.pid().value)));
}

TEST(MoverOptionsTest, EachShareOfTheRingIsEnoughForItsGpus) {
  for (const std::uint64_t bytes : {kLeastRing, 64 * kMiB, 100 * kMiB, kMostRing}) {
    for (const std::size_t gpus : {0U, 1U, 8U, 16U}) {  // none: any 16
      const MoverOptions options = options_for(std::vector<GpuUuid>(gpus), bytes);
      const auto chunks = static_cast<unsigned>(options.ring_bytes / options.buffer_bytes);
      const auto shares = share_ring(options.buffer_bytes, chunks,
                                     gpus == 0 ? 16 : static_cast<unsigned>(gpus), 16);
      ASSERT_TRUE(shares) << bytes << " for " << gpus;
      EXPECT_LE(chunks, 4096U);
      EXPECT_LE(shares->buffer_bytes, 64 * kMiB);
      EXPECT_TRUE(gpus == 0 || options.ring_bytes == gpus * bytes);
    }
  }
}

TEST(MoverOptionsTest, LittleContentTakesALittleRing) {
  const std::vector<GpuUuid> one(1);
  EXPECT_EQ(options_for(one, 64 * kMiB, 0).ring_bytes, 8 * kMiB);
  EXPECT_EQ(options_for(one, 64 * kMiB, 20 * kMiB).ring_bytes, 44 * kMiB);
  EXPECT_EQ(options_for(one, 64 * kMiB, 32 * kMiB).ring_bytes, 64 * kMiB);
  EXPECT_EQ(options_for(one, 4 * kMiB, 0).ring_bytes, 4 * kMiB) << "no more than was asked for";
  EXPECT_EQ(options_for({}, 64 * kMiB, 0).ring_bytes, 8 * kMiB) << "any GPUs";
  EXPECT_EQ(options_for(one, kMostRing, 0).ring_bytes, 8 * kMiB);
  for (const std::uint64_t ring : {kLeastRing, 64 * kMiB, 100 * kMiB, kMostRing}) {
    for (const std::size_t gpus : {0U, 1U, 3U, 8U}) {
      for (const std::uint64_t bytes : {0UL, 1UL, 3 * kMiB, 50 * kMiB, 1UL << 40}) {
        const MoverOptions options = options_for(std::vector<GpuUuid>(gpus), ring, bytes);
        EXPECT_LE(options.ring_bytes, options_for(std::vector<GpuUuid>(gpus), ring).ring_bytes);
        const auto chunks = static_cast<unsigned>(options.ring_bytes / options.buffer_bytes);
        EXPECT_TRUE(share_ring(options.buffer_bytes, chunks,
                               gpus == 0 ? 16 : static_cast<unsigned>(gpus), 16))
            << bytes << " for " << gpus << " through " << ring;
      }
    }
  }
}

}  // namespace
}  // namespace stasis::direct
