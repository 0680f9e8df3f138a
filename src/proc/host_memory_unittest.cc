#include "proc/host_memory.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/fd.h"
#include "base/units.h"
#include "proc/procfs.h"
#include "tests/fakes/address_space.h"
#include "tests/fakes/child.h"

namespace stasis {
namespace {

using fakes::Child;
using fakes::space_of;

constexpr std::size_t kMemory = 32U << 20;

std::byte* filled_memory(std::size_t bytes, void* where = nullptr) {
  void* memory = ::mmap(where, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | (where != nullptr ? MAP_FIXED : 0), -1, 0);
  if (memory == MAP_FAILED) ::_exit(1);
  std::memset(memory, 1, bytes);
  return static_cast<std::byte*>(memory);
}

// `others`: the processes of its tree besides.
HostRanges found_in(const proc::AddressSpace& space, std::vector<Pid> others = {}) {
  others.push_back(space.pid());
  SharedObjects objects(std::move(others));
  return find_host_memory(space, objects);
}

std::vector<AddressRange> ranges_of(const proc::AddressSpace& space) {
  return found_in(space).ranges;
}

// Memory of a program that is busy for a while before it rests.
void fill_and_rest(std::chrono::milliseconds busy) {
  filled_memory(kMemory);
  const auto until = Clock::now() + busy;
  while (Clock::now() < until)
    continue;
  ::pause();
}

std::uint64_t bytes_of(const std::vector<AddressRange>& ranges) {
  std::uint64_t bytes = 0;
  for (const AddressRange& range : ranges)
    bytes += range.end - range.start;
  return bytes;
}

// Three pages in four; the others the program has never touched.
void fill_partly_and_rest() {
  void* memory =
      ::mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) ::_exit(1);
  for (std::size_t at = 0; at < kMemory; at += 4096)
    if (at / 4096 % 4 != 0) std::memset(static_cast<std::byte*>(memory) + at, 1, 4096);
  ::pause();
}

TEST(HostMemory, IsFoundAgainWhenItWasReadAndWhatIsNotThereReadsAsZeros) {
  const Child child([] { fill_partly_and_rest(); });
  ::usleep(300'000);
  const auto space = space_of(child.pid());
  const auto pagemap = open_pagemap(*space);
  ASSERT_TRUE(pagemap);
  const auto found = ranges_of(*space);
  EXPECT_GE(bytes_of(found), kMemory - (4U << 20));
  std::vector<std::byte> bytes(1U << 20);
  for (const AddressRange& range : found)
    for (std::uint64_t at = range.start; at + bytes.size() <= range.end; at += bytes.size()) {
      std::fill(bytes.begin(), bytes.end(), std::byte{2});
      ASSERT_TRUE(read_pages(*space, *pagemap, at, bytes));
      for (std::size_t page = 0; page < bytes.size(); page += 4096) {
        const bool there = bytes[page] == std::byte{1};
        EXPECT_EQ(bytes[page + 4095], there ? std::byte{1} : std::byte{0});
      }
      EXPECT_EQ(std::count(bytes.begin(), bytes.end(), std::byte{1}), bytes.size() / 4 * 3);
    }
  EXPECT_EQ(ranges_of(*space), found);
}

TEST(HostMemory, IsFoundOnceThreadsThatAreOnTheirWayToRestAreThere) {
  const Child child([] { fill_and_rest(std::chrono::milliseconds(300)); });
  // Long enough to have written its memory, and not to have come to its rest.
  ::usleep(150'000);
  EXPECT_GE(bytes_of(ranges_of(*space_of(child.pid()))), kMemory - (4U << 20));
}

TEST(HostMemory, BesideAStackIsFoundAndTheStackIsNot) {
  constexpr std::size_t kStack = 8U << 20;
  constexpr std::size_t kBefore = 32U << 20;
  std::byte* memory = filled_memory(4 * kBefore);
  const auto stack = reinterpret_cast<std::uintptr_t>(memory + kBefore);
  const Child child([&] {
    filled_memory(4 * kBefore, memory);  // of its own
    pthread_attr_t attributes;
    pthread_t thread{};
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setstack(&attributes, memory + kBefore, kStack);
    const auto rest = [](void*) -> void* {
      ::pause();
      return nullptr;
    };
    if (::pthread_create(&thread, &attributes, rest, nullptr) != 0) ::_exit(1);
    ::pause();
  });
  // Until it has both threads.
  while (proc::ProcFs().threads(child.pid()).size() < 2)
    ::usleep(1000);
  const auto found = ranges_of(*space_of(child.pid()));
  EXPECT_GE(bytes_of(found), 3 * kBefore);
  for (const AddressRange& range : found)
    EXPECT_FALSE(range.start < stack + kStack && stack + kStack - 4096 < range.end);
}

TEST(HostMemory, BehindAFileIsFoundButForItsFirstPart) {
  std::byte* memory = filled_memory(2 * kMemory);
  const Child child([&] {
    const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    filled_memory(2 * kMemory, memory);
    if (::mmap(memory, 4096, PROT_READ, MAP_PRIVATE | MAP_FIXED, file.get(), 0) == MAP_FAILED)
      ::_exit(1);
    ::pause();
  });
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const auto is_there = [&] {
    const auto found = ranges_of(*space_of(child.pid()));
    return !found.empty() && bytes_of(found) >= kMemory && found.front().start > begin + (8U << 20);
  };
  for (int i = 0; i < 1000 && !is_there(); ++i)
    ::usleep(1000);
  EXPECT_TRUE(is_there());
}

// As the arenas of malloc() lie, one behind another.
TEST(HostMemory, BehindWhatIsKeptFreeIsFoundWhole) {
  constexpr std::size_t kFree = 1U << 20;
  void* room = ::mmap(nullptr, kFree + kMemory, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(room, MAP_FAILED);
  const Child child([&] {
    std::byte* memory = static_cast<std::byte*>(room) + kFree;
    if (::mprotect(memory, kMemory, PROT_READ | PROT_WRITE) != 0) ::_exit(1);
    std::memset(memory, 1, kMemory);
    ::pause();
  });
  const auto is_there = [&] {
    return bytes_of(ranges_of(*space_of(child.pid()))) >= kMemory - (2U << 20);
  };
  for (int i = 0; i < 1000 && !is_there(); ++i)
    ::usleep(1000);
  EXPECT_TRUE(is_there());
  ::munmap(room, kFree + kMemory);
}

TEST(HostMemory, OfTheHeapIsFoundButForItsBeginning) {
  const Child child([] {
    void* const memory = ::sbrk(2 * kMemory);
    if (memory == reinterpret_cast<void*>(-1)) ::_exit(1);
    std::memset(memory, 1, 2 * kMemory);
    ::pause();
  });
  const auto heap = reinterpret_cast<std::uintptr_t>(::sbrk(0));
  const auto is_there = [&] {
    const auto found = ranges_of(*space_of(child.pid()));
    return !found.empty() && bytes_of(found) >= kMemory && found.front().start > heap &&
           found.front().end <= heap + 2 * kMemory;
  };
  for (int i = 0; i < 1000 && !is_there(); ++i)
    ::usleep(1000);
  EXPECT_TRUE(is_there());
}

// Memory that is shared with no process: of three blocks in four all pages but the first.
std::byte* shared_memory() {
  void* memory =
      ::mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) ::_exit(1);
  for (std::uint64_t block = 0; block < kMemory / kHostBlock; ++block)
    if (block % 4 != 0)
      std::memset(static_cast<std::byte*>(memory) + block * kHostBlock + 4096, 1,
                  kHostBlock - 4096);
  return static_cast<std::byte*>(memory);
}

// Says in `says` that it has come to its rest.
struct SharedWord {
  SharedWord() : file(::memfd_create("says", MFD_CLOEXEC)) {
    if (::ftruncate(file.get(), 4096) != 0) ::_exit(1);
    says = static_cast<volatile std::uint64_t*>(
        ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0));
  }
  std::uint64_t wait() const {
    for (int i = 0; i < 5000 && *says == 0; ++i)
      ::usleep(1000);
    return *says;
  }
  UniqueFd file;
  volatile std::uint64_t* says;
};

TEST(HostMemory, ThatNoOtherProcessSharesIsFoundAndReadThoughItIsMappedAsShared) {
  const SharedWord word;
  const Child child([&] {
    std::byte* memory = shared_memory();
    // Whether its own page tables have a page says nothing.
    ::madvise(memory, kMemory / 2, MADV_DONTNEED);
    *word.says = reinterpret_cast<std::uint64_t>(memory);
    ::pause();
  });
  const std::uint64_t start = word.wait();
  ASSERT_NE(start, 0U);
  const auto space = space_of(child.pid());
  const auto pagemap = open_pagemap(*space);
  ASSERT_TRUE(pagemap);
  const HostRanges found = found_in(*space);
  if (found.shared.empty()) GTEST_SKIP() << "not permitted to open what processes map";
  // But for blocks at its ends that are not whole.
  const std::uint64_t bytes = bytes_of(found.ranges);
  EXPECT_GE(bytes, kMemory / 2);
  EXPECT_LE(bytes, kMemory / 4 * 3 + kHostBlock);
  std::vector<std::byte> block(kHostBlock);
  for (const AddressRange& range : found.ranges)
    for (std::uint64_t at = range.start; at < range.end; at += kHostBlock) {
      ASSERT_TRUE(read_host_memory(*space, *pagemap, found, at, block));
      for (std::uint64_t page = 0; page < kHostBlock; page += 4096) {
        const std::uint64_t place = at + page - start;
        const bool there = place / kHostBlock % 4 != 0 && place % kHostBlock != 0;
        EXPECT_EQ(block[page], there ? std::byte{1} : std::byte{0}) << place;
      }
    }
  // Nothing has come to be there that was not.
  EXPECT_EQ(ranges_of(*space), found.ranges);
}

// A child and a process that it has forked, which touches its memory or not.
struct Forked {
  explicit Forked(bool touches)
      : child([this, touches] {
          std::byte* const memory = shared_memory();
          const pid_t process = ::fork();
          if (process < 0) ::_exit(1);
          if (process == 0) {
            if (touches) memory[kMemory / 2] = std::byte{1};
            *ready.says = 1;
            ::pause();
            ::_exit(0);
          }
          *word.says = static_cast<std::uint64_t>(process);
          ::pause();
        }),
        other{static_cast<int>(word.wait())} {
    ready.wait();
  }
  ~Forked() {
    if (other.value > 0) ::kill(other.value, SIGKILL);
  }
  Forked(const Forked&) = delete;
  Forked& operator=(const Forked&) = delete;

  SharedWord word;
  SharedWord ready;
  Child child;
  Pid other;
};

TEST(HostMemory, ThatAnotherProcessOfTheTreeUsesIsLeft) {
  const Forked two(true);
  ASSERT_GT(two.other.value, 0);
  if (found_in(*space_of(two.child.pid())).shared.empty())
    GTEST_SKIP() << "not permitted to open what processes map";
  EXPECT_TRUE(found_in(*space_of(two.child.pid()), {two.other}).shared.empty());
  EXPECT_TRUE(found_in(*space_of(two.other), {two.child.pid()}).shared.empty());
}

// As the workers of a loader have their parent's.
TEST(HostMemory, ThatAnotherProcessOfTheTreeHasInheritedAndNotTouchedIsFound) {
  const Forked two(false);
  ASSERT_GT(two.other.value, 0);
  const HostRanges found = found_in(*space_of(two.child.pid()));
  if (found.shared.empty()) GTEST_SKIP() << "not permitted to open what processes map";
  EXPECT_EQ(found_in(*space_of(two.child.pid()), {two.other}).ranges, found.ranges);
  EXPECT_TRUE(found_in(*space_of(two.other), {two.child.pid()}).shared.empty());
}

TEST(HostMemory, ThatADescriptorOfAnotherProcessIsOfIsLeft) {
  const UniqueFd file(::memfd_create("", MFD_CLOEXEC));
  const UniqueFd other(::memfd_create("", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), kMemory), 0);
  ASSERT_EQ(::ftruncate(other.get(), kMemory), 0);
  const SharedWord word;
  const Child child([&] {
    for (const UniqueFd* each : {&file, &other}) {
      void* memory = ::mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, each->get(), 0);
      if (memory == MAP_FAILED) ::_exit(1);
      std::memset(memory, 1, kMemory);
      ::close(each->get());
    }
    *word.says = 1;
    ::pause();
  });
  ASSERT_EQ(word.wait(), 1U);
  const auto space = space_of(child.pid());
  const auto alone = found_in(*space).shared.size();
  if (alone == 0) GTEST_SKIP() << "not permitted to open what processes map";
  EXPECT_EQ(alone, 2U);
  // This process has both.
  EXPECT_TRUE(found_in(*space, {Pid{::getpid()}}).shared.empty());
  const Child third([&] {
    ::close(other.get());
    *word.says = 2;
    ::pause();
  });
  for (int i = 0; i < 5000 && *word.says != 2; ++i)
    ::usleep(1000);
  EXPECT_EQ(found_in(*space, {third.pid()}).shared.size(), 1U);
}

TEST(HostMemory, OfOneObjectIsFoundOnceHoweverOftenItIsMapped) {
  constexpr std::uint64_t kHalf = kMemory / 2;
  const SharedWord word;
  const Child child([&] {
    std::byte* memory = shared_memory();
    // Its second half elsewhere, and all of it once more.
    void* const half = ::mremap(memory + kHalf, 0, kHalf, MREMAP_MAYMOVE);
    void* const all = ::mremap(memory, 0, kMemory, MREMAP_MAYMOVE);
    if (half == MAP_FAILED || all == MAP_FAILED || ::munmap(memory + kHalf, kHalf) != 0) ::_exit(1);
    *word.says = 1;
    ::pause();
  });
  ASSERT_EQ(word.wait(), 1U);
  const auto space = space_of(child.pid());
  const HostRanges found = found_in(*space);
  if (found.shared.empty()) GTEST_SKIP() << "not permitted to open what processes map";
  std::uint64_t mapped = 0;
  for (const SharedMapping& mapping : found.shared) {
    mapped += mapping.at.end - mapping.at.start;
    EXPECT_EQ(found.shared_at(mapping.at.start), &mapping);
    EXPECT_EQ(found.shared_at(mapping.at.end - 1), &mapping);
    for (const SharedMapping& other : found.shared)
      EXPECT_TRUE(&other == &mapping || other.offset >= mapping.offset_of(mapping.at.end) ||
                  mapping.offset >= other.offset_of(other.at.end));
  }
  EXPECT_EQ(mapped, kMemory);
  EXPECT_EQ(found.shared_at(0), nullptr);
  EXPECT_EQ(found.shared_at(~std::uint64_t{0}), nullptr);
}

TEST(HostMemory, OfAnObjectWhoseLockAnotherProcessKeepsIsFoundAllTheSame) {
  const UniqueFd file(::memfd_create("", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), kMemory), 0);
  const SharedWord word;
  const Child child([&] {
    void* memory = ::mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (memory == MAP_FAILED) ::_exit(1);
    std::memset(memory, 1, kMemory);
    ::close(file.get());
    *word.says = 1;
    ::pause();
  });
  ASSERT_EQ(word.wait(), 1U);
  const auto space = space_of(child.pid());
  if (found_in(*space).shared.empty()) GTEST_SKIP() << "not permitted to open what processes map";
  const SharedWord keeps;
  const Child keeper([&] {
    void* page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const int fd = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC));
    uffdio_api api{.api = UFFD_API, .features = 0, .ioctls = 0};
    uffdio_register all{
        {reinterpret_cast<std::uintptr_t>(page), 4096}, UFFDIO_REGISTER_MODE_MISSING, 0};
    const bool done =
        fd >= 0 && ::ioctl(fd, UFFDIO_API, &api) == 0 && ::ioctl(fd, UFFDIO_REGISTER, &all) == 0;
    *keeps.says = done ? 1 : 2;
    (void)::pwrite(file.get(), page, 4096, 0);
    ::pause();
  });
  if (keeps.wait() != 1) GTEST_SKIP() << "no userfaultfd here";
  ::usleep(100'000);
  const SharedWord finds;
  const Child looks([&] {
    *finds.says = found_in(*space).ranges.empty() ? 1 : 2;
    ::pause();
  });
  EXPECT_EQ(finds.wait(), 2U);
  ::kill(keeper.pid().value, SIGKILL);  // else what waits for the lock could not be ended
}

TEST(HostMemory, OfManyObjectsLeavesDescriptorsForAllElse) {
  constexpr std::size_t kObjects = 60;
  constexpr std::uint64_t kEach = 17U << 20;
  const SharedWord word;
  const Child child([&] {
    for (std::size_t i = 0; i < kObjects; ++i) {
      void* memory = ::mmap(nullptr, kEach, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) ::_exit(1);
      std::memset(memory, 1, 6 * kHostBlock);
    }
    *word.says = 1;
    ::pause();
  });
  ASSERT_EQ(word.wait(), 1U);
  const auto space = space_of(child.pid());
  if (found_in(*space).shared.size() != kObjects)
    GTEST_SKIP() << "not permitted to open what processes map";
  for (const bool may_be_raised : {true, false}) {
    const pid_t looks = ::fork();
    if (looks == 0) {
      rlimit limit{};
      ::getrlimit(RLIMIT_NOFILE, &limit);
      limit.rlim_cur = 70;
      if (!may_be_raised) limit.rlim_max = 70;
      if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) ::_exit(2);
      const HostRanges found = found_in(*space);
      for (int i = 0; i < 40; ++i)
        if (::dup(0) < 0) ::_exit(3);
      ::_exit(found.shared.size() == (may_be_raised ? kObjects : 0) ? 0 : 4);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(looks, &status, 0), looks);
    EXPECT_EQ(status, 0) << may_be_raised;
  }
}

TEST(SharedMapping, IsToldFromAllElseThatIsMapped) {
  const auto has = [](const char* rest) {
    return shared_mapping_of(std::string("7f1256000000-7f1266000000 ") + rest).has_value();
  };
  EXPECT_TRUE(has("rw-s 00000000 00:01 2053                       /dev/zero (deleted)"));
  EXPECT_TRUE(has("rw-s 00001000 00:01 2053 /memfd: (deleted)"));
  EXPECT_TRUE(has("rw-s 00000000 00:01 2053 /memfd:/dev/zero (deleted)"));
  EXPECT_FALSE(has("r--s 00000000 00:01 2053 /dev/zero (deleted)"));
  EXPECT_FALSE(has("rw-p 00000000 00:01 2053 /dev/zero (deleted)"));
  EXPECT_FALSE(has("rw-s 00000000 00:06 142 /dev/nvidiactl"));
  EXPECT_FALSE(has("rw-s 00000000 00:01 2053 /memfd:name (deleted)"));
  EXPECT_FALSE(has("rw-s 00000000 00:01 2053 /SYSV00000000 (deleted)"));
  EXPECT_FALSE(has("rw-s ffffffffffffffff 00:01 2053 /dev/zero (deleted)"));
  EXPECT_FALSE(shared_mapping_of("Size: 4 kB"));
  EXPECT_FALSE(shared_mapping_of(""));
  const auto found =
      shared_mapping_of("7f1256000000-7f1266000000 rw-s 00002000 00:01 2053 /dev/zero (deleted)");
  ASSERT_TRUE(found);
  EXPECT_EQ(found->at, (AddressRange{0x7f1256000000, 0x7f1266000000}));
  EXPECT_EQ(found->inode, 2053U);
  EXPECT_EQ(found->offset_of(0x7f1256001000), 0x3000U);
}

TEST(HostMemory, OfAProgramThatRunsIsNotFound) {
  const Child child([] { fill_and_rest(std::chrono::hours(1)); });
  EXPECT_TRUE(ranges_of(*space_of(child.pid())).empty());
}

}  // namespace
}  // namespace stasis
