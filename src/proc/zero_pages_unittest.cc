#include "proc/zero_pages.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "proc/parking.h"
#include "tests/fakes/address_space.h"
#include "tests/fakes/child.h"
#include "tests/fakes/parked_threads.h"

namespace stasis {
namespace {

using fakes::Child;
using fakes::count_parked_threads;
using fakes::space_of;
using proc::Mapping;
using Ranges = std::vector<AddressRange>;

constexpr std::uint64_t kPiece = 4096;
constexpr std::uint64_t kHuge = 2 << 20;

Mapping mapping(std::uint64_t start, std::uint64_t end, std::string permissions = "rw-p",
                std::uint64_t inode = 0, std::string path = "") {
  return {start, end, std::move(permissions), inode, std::move(path)};
}

TEST(NewMemory, IsWhatLiesWhereNothingWasBefore) {
  const std::vector<Mapping> before{mapping(100, 200), mapping(300, 400, "---p"),
                                    mapping(600, 700, "rw-s", 7, "/dev/nvidia0")};
  EXPECT_EQ(new_memory(before, before), Ranges{});
  // Beside the program's own memory, with which the kernel has joined it.
  EXPECT_EQ(new_memory(before, std::vector{mapping(50, 250)}), (Ranges{{50, 100}, {200, 250}}));
  // In the place of what was a reservation, or a device's.
  EXPECT_EQ(new_memory(before, std::vector{mapping(300, 400), mapping(600, 700)}), Ranges{});
  EXPECT_EQ(new_memory(before, std::vector{mapping(150, 650)}), (Ranges{{200, 300}, {400, 600}}));
  EXPECT_EQ(new_memory(before, std::vector{mapping(800, 900), mapping(900, 950)}),
            (Ranges{{800, 900}, {900, 950}}));
  EXPECT_EQ(new_memory({}, std::vector{mapping(10, 20)}), (Ranges{{10, 20}}));
}

TEST(NewMemory, IsPrivateWritableAndOfNoFileOrName) {
  const std::vector<Mapping> now{mapping(10, 20, "r--p"),
                                 mapping(20, 30, "---p"),
                                 mapping(30, 40, "rw-s"),
                                 mapping(40, 50, "rw-p", 9, "/tmp/file"),
                                 mapping(50, 60, "rw-p", 0, "[heap]"),
                                 mapping(60, 70, "rwxp"),
                                 mapping(70, 80)};
  EXPECT_EQ(new_memory({}, now), (Ranges{{70, 80}}));
}

// What the target has, in memory that it shares with the test.
struct Told {
  std::atomic<int> ready;
  std::atomic<std::uint64_t> rounds;
  std::atomic<bool> wrong;
  std::uint64_t base;
};

Told* make_told() {
  void* memory =
      ::mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return new (memory) Told();
}

bool wait_for(const std::function<bool()>& condition) {
  for (int i = 0; i < 60000 && !condition(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return condition();
}

// Memory that begins where a huge page would, and of small pages.
char* map_aligned(std::size_t size) {
  void* at =
      ::mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) ::_exit(2);
  char* start = static_cast<char*>(at);
  start += (kHuge - reinterpret_cast<std::uintptr_t>(start) % kHuge) % kHuge;
  (void)::madvise(start, size, MADV_NOHUGEPAGE);
  return start;
}

class ZeroPagesTest : public testing::Test {
 protected:
  void TearDown() override { ::munmap(told_, sizeof(Told)); }
  Told* told_ = make_told();
};

TEST_F(ZeroPagesTest, RunsOfThemAreFoundAndNothingElse) {
  constexpr std::size_t kSize = 5 * kHuge;
  Child target([this] {
    char* base = map_aligned(kSize);
    told_->base = reinterpret_cast<std::uintptr_t>(base);
    // The first block: zeros, with three pages that differ in their last byte only.
    std::memset(base, 0, kHuge);
    for (const std::size_t page : {100U, 110U, 511U})
      base[page * kPiece + kPiece - 1] = 1;
    // The second: zeros, but for pages that were never touched.
    std::memset(base + kHuge, 0, kHuge - 8 * kPiece);
    // The third: something everywhere but in the last eight pages. Too little to be read.
    std::memset(base + 2 * kHuge, 7, kHuge - 8 * kPiece);
    std::memset(base + 3 * kHuge - 8 * kPiece, 0, 8 * kPiece);
    // The fourth: untouched, but read. The fifth: zeros, and not asked for to its end.
    for (std::size_t page = 0; page < 512; ++page)
      (void)*static_cast<volatile char*>(base + 3 * kHuge + page * kPiece);
    std::memset(base + 4 * kHuge, 0, kHuge);
    told_->ready = 1;
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(wait_for([&] { return told_->ready == 1; }));
  const std::uint64_t base = told_->base;
  const auto run = [&](std::uint64_t from, std::uint64_t to, std::uint64_t there) {
    return ZeroRun{{base + from * kPiece, base + to * kPiece}, there * kPiece};
  };
  const std::array asked{AddressRange{base, base + 4 * kHuge + 100 * kPiece}};
  for (const unsigned threads : {1U, 4U}) {
    const auto found = find_zero_runs(*space_of(target.pid()), asked, threads);
    ASSERT_EQ(found.size(), 4U) << threads << " threads";
    EXPECT_EQ(found[0], run(0, 100, 100));
    EXPECT_EQ(found[1], run(111, 511, 400));  // the nine between two are not worth a call
    EXPECT_EQ(found[2], run(512, 1024, 504));
    EXPECT_EQ(found[3], run(4 * 512, 4 * 512 + 100, 100));
  }
}

TEST_F(ZeroPagesTest, NothingIsFoundWhereNoProcessIs) {
  const Child target;
  const auto space = space_of(target.pid());
  target.become_zombie();
  const std::array asked{AddressRange{kHuge, 2 * kHuge}};
  EXPECT_TRUE(find_zero_runs(*space, asked, 2).empty());
  EXPECT_EQ(drop_zero_pages(*space, {}, 2), 0U);
}

// Bytes of a process's memory that are there, from `start` on.
std::uint64_t resident(Pid pid, std::uint64_t start, std::uint64_t size) {
  std::vector<std::uint64_t> entries(size / kPiece);
  FILE* file = std::fopen(("/proc/" + std::to_string(pid.value) + "/pagemap").c_str(), "re");
  if (file == nullptr) return 0;
  (void)std::fseek(file, static_cast<long>(start / kPiece * 8), SEEK_SET);
  const std::size_t got = std::fread(entries.data(), 8, entries.size(), file);
  (void)std::fclose(file);
  return kPiece * static_cast<std::uint64_t>(std::count_if(
                      entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(got),
                      [](std::uint64_t entry) { return (entry >> 63) != 0; }));
}

// A program with zeros of its own, to which a "driver" adds some while all else is parked.
[[noreturn]] void live(Told& told, char* own, std::size_t size) {
  std::atomic<bool> add = false;
  std::thread([&] {
    while (told.ready < 2)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    char* made = map_aligned(size);
    std::memset(made, 0, size);
    made[size / 2] = 5;
    // What is locked has to stay: the last part of it. (mlock() does nothing under a sanitizer.)
    if (::syscall(SYS_mlock, made + size - kHuge, kHuge) != 0) ::_exit(3);
    told.base = reinterpret_cast<std::uintptr_t>(made);
    told.ready = 3;
    add = true;
    for (;;)
      ::pause();
  }).detach();
  const auto right = [&](const char* made) {
    for (std::size_t i = 0; i < size; i += kPiece)
      if (own[i] != 0 || (made != nullptr && made[i] != (i == size / 2 ? 5 : 0))) return false;
    return true;
  };
  told.ready = 1;
  for (;;) {
    if (!right(add ? reinterpret_cast<const char*>(told.base) : nullptr)) told.wrong = true;
    ++told.rounds;
  }
}

TEST_F(ZeroPagesTest, OnlyWhatIsNewIsDroppedAndTheProgramReadsTheSame) {
  constexpr std::size_t kSize = 4 * kHuge;
  char* own = map_aligned(kSize);
  Child target([&] {
    std::memset(own, 0, kSize);
    live(*told_, own, kSize);
  });
  ASSERT_TRUE(wait_for([&] { return told_->rounds > 0; }));
  // The thread that adds is the one that is not parked, as the driver's.
  Tid spared{};
  for (const Tid thread : proc::ProcFs().threads(target.pid()))
    if (thread.value != target.pid().value) spared = thread;
  const auto own_start = reinterpret_cast<std::uintptr_t>(own);
  ASSERT_EQ(resident(target.pid(), own_start, kSize), kSize);
  ASSERT_TRUE(park_threads(target.pid(), {spared}));
  const auto before = proc::ProcFs().mappings(target.pid());
  ASSERT_TRUE(before);
  told_->ready = 2;
  ASSERT_TRUE(wait_for([&] { return told_->ready == 3; }));
  ASSERT_EQ(resident(target.pid(), told_->base, kSize), kSize);

  EXPECT_EQ(drop_zero_pages(*space_of(target.pid()), *before, 4), kSize - kHuge - kPiece);
  EXPECT_EQ(resident(target.pid(), told_->base, kSize), kHuge + kPiece);
  EXPECT_EQ(resident(target.pid(), own_start, kSize), kSize);
  // Still parked, once it has had a processor to go back to where it waits; and once more is once
  // too often.
  EXPECT_TRUE(wait_for([&] { return count_parked_threads(target.pid()) == 1; }));
  EXPECT_EQ(drop_zero_pages(*space_of(target.pid()), *before, 4), 0U);

  const std::uint64_t rounds = told_->rounds;
  ASSERT_TRUE(unpark_threads(target.pid()));
  EXPECT_TRUE(wait_for([&] { return told_->rounds > rounds + 2; }));
  EXPECT_FALSE(told_->wrong);
  ::munmap(own, kSize);
}

TEST_F(ZeroPagesTest, WithoutAParkedThreadNothingIsDropped) {
  Child target([this] {
    char* base = map_aligned(kHuge);
    std::memset(base, 0, kHuge);
    told_->base = reinterpret_cast<std::uintptr_t>(base);
    told_->ready = 1;
    for (;;)
      ++told_->rounds;
  });
  ASSERT_TRUE(wait_for([&] { return told_->ready == 1; }));
  EXPECT_EQ(drop_zero_pages(*space_of(target.pid()), {}, 1), 0U);
  EXPECT_EQ(resident(target.pid(), told_->base, kHuge), kHuge);
  const std::uint64_t rounds = told_->rounds;
  EXPECT_TRUE(wait_for([&] { return told_->rounds > rounds; }));
}

}  // namespace
}  // namespace stasis
