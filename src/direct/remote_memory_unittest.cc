#include "direct/remote_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <thread>

#include <gtest/gtest.h>

#include "image/checksum.h"
#include "tests/fakes/address_space.h"
#include "tests/fakes/child.h"

namespace stasis::direct {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// Memory that is mapped here and, copied by the fork, at the same address in a child.
class Region {
 public:
  explicit Region(std::size_t bytes, bool huge = false) : bytes_(bytes + 2 * kMiB) {
    start_ = static_cast<char*>(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    aligned_ = (address_of(start_) + 2 * kMiB - 1) / (2 * kMiB) * 2 * kMiB;
    ::madvise(start_, bytes_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  }
  ~Region() { ::munmap(start_, bytes_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  std::uint64_t address() const { return aligned_; }
  char* at(std::uint64_t offset) const { return reinterpret_cast<char*>(aligned_ + offset); }

 private:
  static std::uint64_t address_of(const void* p) { return reinterpret_cast<std::uint64_t>(p); }
  std::size_t bytes_;
  char* start_;
  std::uint64_t aligned_;
};

std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> out(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    out[i] = static_cast<std::byte>((i * 2654435761U + seed) >> 7);
  return out;
}

using fakes::space_of;

// Pages of the region that the process has for itself, by its own account.
std::size_t pages_present(Pid pid, std::uint64_t address, std::uint64_t bytes) {
  const UniqueFd map(
      ::open(("/proc/" + std::to_string(pid.value) + "/pagemap").c_str(), O_RDONLY | O_CLOEXEC));
  std::vector<std::uint64_t> entries((bytes + 4095) / 4096);
  EXPECT_GT(::pread(map.get(), entries.data(), entries.size() * 8,
                    static_cast<off_t>(address / 4096 * 8)),
            0);
  std::size_t count = 0;
  for (const std::uint64_t entry : entries)
    count += entry >> 63;
  return count;
}

TEST(RemoteMemory, ReadsBackWhatItWrote) {
  const Region region(8 * kMiB);
  const fakes::Child child;
  RemoteMemory memory(space_of(child.pid()), region.address(), 8 * kMiB);
  const auto written = pattern(5 * kMiB + 123, 1);
  ASSERT_TRUE(memory.write(kMiB + 7, written));
  std::vector<std::byte> got(written.size());
  ASSERT_TRUE(memory.read(kMiB + 7, got));
  EXPECT_EQ(got, written);
  EXPECT_EQ(*region.at(2 * kMiB), 0) << "it is the child's memory, not ours";
}

TEST(RemoteMemory, TakesManyThreads) {
  const Region region(16 * kMiB);
  const fakes::Child child;
  RemoteMemory memory(space_of(child.pid()), region.address(), 16 * kMiB);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (unsigned j = 0; j < 4; ++j)
        EXPECT_TRUE(memory.write((4 * j + i) * kMiB, pattern(kMiB, 4 * j + i)));
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  for (unsigned i = 0; i < 16; ++i) {
    std::vector<std::byte> got(kMiB);
    ASSERT_TRUE(memory.read(i * kMiB, got));
    EXPECT_EQ(got, pattern(kMiB, i));
  }
}

TEST(RemoteMemory, RefusesWhatIsBeyondItsRange) {
  const Region region(4 * kMiB);
  const fakes::Child child;
  RemoteMemory memory(space_of(child.pid()), region.address(), 2 * kMiB);
  std::vector<std::byte> bytes(kMiB);
  EXPECT_TRUE(memory.write(kMiB, bytes));
  for (const std::uint64_t offset : {kMiB + 1, 3 * kMiB, ~std::uint64_t{0}}) {
    const auto written = memory.write(offset, bytes);
    ASSERT_FALSE(written);
    EXPECT_EQ(written.error().code, ErrorCode::kUsage);
    EXPECT_FALSE(memory.read(offset, bytes));
  }
}

TEST(RemoteMemory, SaysWhereAHoleIs) {
  const Region region(4 * kMiB);
  const fakes::Child child([&] {
    ::munmap(region.at(kMiB), 4096);
    *region.at(0) = 'x';
    ::pause();
  });
  RemoteMemory memory(space_of(child.pid()), region.address(), 4 * kMiB);
  std::vector<std::byte> first(1);
  while (first[0] != std::byte{'x'})
    ASSERT_TRUE(memory.read(0, first));
  std::vector<std::byte> bytes(2 * kMiB);
  const std::uint64_t hole = region.address() + kMiB;
  char where[32];
  std::snprintf(where, sizeof where, "%#lx", static_cast<unsigned long>(hole));
  for (const auto& result :
       {memory.write(0, bytes), memory.read(0, bytes), memory.fault_in(2, Interrupt{})}) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kIo);
    EXPECT_NE(result.error().message.find(where), std::string::npos) << result.error().message;
    EXPECT_NE(result.error().message.find("Bad address"), std::string::npos);
  }
}

TEST(RemoteMemory, NoticesThatTheProcessIsGone) {
  const Region region(4 * kMiB);
  const fakes::Child child;
  RemoteMemory memory(space_of(child.pid()), region.address(), 4 * kMiB);
  child.become_zombie();
  std::vector<std::byte> bytes(kMiB);
  for (const auto& result :
       {memory.write(0, bytes), memory.read(0, bytes), memory.fault_in(2, Interrupt{})}) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kProcessGone);
  }
}

TEST(RemoteMemory, DiesInTheMiddleWithItsProcess) {
  const Region region(64 * kMiB);
  const fakes::Child child;
  RemoteMemory memory(space_of(child.pid()), region.address(), 64 * kMiB);
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ::kill(child.pid().value, SIGKILL);
  });
  const auto bytes = pattern(16 * kMiB, 1);
  Result<void> result;
  while (result)
    result = memory.write(0, bytes);
  killer.join();
  EXPECT_EQ(result.error().code, ErrorCode::kProcessGone) << result.error().to_string();
}

TEST(RemoteMemory, FaultsInEverySmallPage) {
  const Region region(16 * kMiB, false);
  *region.at(3 * kMiB) = 'k';  // one is there, shared with the child after the fork
  const fakes::Child child;
  // Neither end lies at a huge page's.
  const std::uint64_t begin = region.address() + 5 * 4096;
  const std::uint64_t bytes = 13 * kMiB;
  RemoteMemory memory(space_of(child.pid()), begin, bytes);
  EXPECT_LE(pages_present(child.pid(), begin, bytes), 1U);
  ASSERT_TRUE(memory.fault_in(3, Interrupt{}));
  EXPECT_EQ(pages_present(child.pid(), begin, bytes), bytes / 4096);
  EXPECT_EQ(pages_present(child.pid(), region.address(), 5 * 4096), 0U) << "not what is in front";
  EXPECT_EQ(pages_present(child.pid(), begin + bytes, kMiB), 0U) << "nor what is behind";
}

TEST(RemoteMemory, FaultsInPagesThatWereOnlyRead) {
  const Region region(4 * kMiB, false);
  const fakes::Child child([&] {
    volatile char sum = 0;
    for (std::uint64_t at = 0; at < 4 * kMiB; at += 4096)
      sum = static_cast<char>(sum + *region.at(at));
    *region.at(0) = 'r';
    ::pause();
  });
  RemoteMemory memory(space_of(child.pid()), region.address(), 4 * kMiB);
  std::vector<std::byte> first(1);
  while (first[0] != std::byte{'r'})
    ASSERT_TRUE(memory.read(0, first));
  // All are present as the page of zeros. After a fault they count as the process's own memory.
  const auto anonymous = [&] {
    std::ifstream file("/proc/" + std::to_string(child.pid().value) + "/status");
    for (std::string word; file >> word;) {
      if (word == "RssAnon:" && file >> word) return std::stoul(word);
    }
    return 0UL;
  };
  const auto before = anonymous();
  ASSERT_TRUE(memory.fault_in(2, Interrupt{}));
  EXPECT_GT(anonymous(), before + 3500);
}

TEST(RemoteMemory, FaultsInHugePagesToo) {
  const Region region(32 * kMiB, true);
  const fakes::Child child;
  RemoteMemory memory(space_of(child.pid()), region.address() + 4096, 24 * kMiB);
  ASSERT_TRUE(memory.fault_in(3, Interrupt{}));
  EXPECT_EQ(pages_present(child.pid(), region.address() + 4096, 24 * kMiB), 24 * kMiB / 4096);
}

TEST(RemoteMemory, StopsFaultingInWhenInterrupted) {
  const Region region(32 * kMiB, false);
  const fakes::Child child;
  RemoteMemory memory(space_of(child.pid()), region.address(), 32 * kMiB);
  Interrupt interrupt;
  interrupt.request(SIGINT);
  const auto result = memory.fault_in(4, interrupt);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kInterrupted);
}

TEST(RemoteMemory, KnowsWhatWasNeverTouched) {
  constexpr std::uint64_t kChunk = RemoteMemory::kChunk;
  for (const bool huge : {false, true}) {
    const Region region(5 * kChunk, huge);
    const fakes::Child child;
    RemoteMemory memory(space_of(child.pid()), region.address(), 4 * kChunk);
    const std::vector<std::byte> one(1, std::byte{7});
    ASSERT_TRUE(memory.write(kChunk + 4095, one));
    ASSERT_TRUE(memory.write(4 * kChunk - 1, one));
    std::vector<std::byte> flags(4, std::byte{9});
    ASSERT_TRUE(memory.zeros(0, flags));
    EXPECT_EQ(flags, (std::vector{std::byte{1}, std::byte{0}, std::byte{1}, std::byte{0}}));
    EXPECT_EQ(memory.zeros(kChunk, flags).error().code, ErrorCode::kUsage);
  }
}

TEST(RemoteMemory, LeavesZerosAloneOnlyWhereNothingWasWritten) {
  const Region region(4 * RemoteMemory::kChunk);
  const fakes::Child child;
  const auto zero = xxh3(std::vector<std::byte>(RemoteMemory::kChunk));
  const auto other = xxh3(std::vector<std::byte>(RemoteMemory::kChunk, std::byte{1}));
  const auto asked = [&](RemoteMemory& memory) {
    std::vector<std::byte> digests(2 * sizeof zero);
    std::memcpy(digests.data(), zero.data(), sizeof zero);
    std::memcpy(digests.data() + sizeof zero, other.data(), sizeof other);
    EXPECT_TRUE(memory.deduplicate(RemoteMemory::kChunk, digests));
    return std::pair(digests[0], digests[sizeof zero]);
  };
  RemoteMemory memory(space_of(child.pid()), region.address(), 4 * RemoteMemory::kChunk);
  EXPECT_EQ(memory.digest_chunk(), 0);
  EXPECT_EQ(asked(memory), std::pair(std::byte{0}, std::byte{0}));
  memory.set_fresh();
  EXPECT_EQ(memory.digest_chunk(), RemoteMemory::kChunk);
  EXPECT_EQ(asked(memory), std::pair(std::byte{1}, std::byte{0}));
}

}  // namespace
}  // namespace stasis::direct
