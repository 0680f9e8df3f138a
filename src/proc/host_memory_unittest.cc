#include "proc/host_memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
  const auto found = find_host_memory(*space);
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
  EXPECT_EQ(find_host_memory(*space), found);
}

TEST(HostMemory, IsFoundOnceThreadsThatAreOnTheirWayToRestAreThere) {
  const Child child([] { fill_and_rest(std::chrono::milliseconds(300)); });
  // Long enough to have written its memory, and not to have come to its rest.
  ::usleep(150'000);
  EXPECT_GE(bytes_of(find_host_memory(*space_of(child.pid()))), kMemory - (4U << 20));
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
  const auto found = find_host_memory(*space_of(child.pid()));
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
    const auto found = find_host_memory(*space_of(child.pid()));
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
    return bytes_of(find_host_memory(*space_of(child.pid()))) >= kMemory - (2U << 20);
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
    const auto found = find_host_memory(*space_of(child.pid()));
    return !found.empty() && bytes_of(found) >= kMemory && found.front().start > heap &&
           found.front().end <= heap + 2 * kMemory;
  };
  for (int i = 0; i < 1000 && !is_there(); ++i)
    ::usleep(1000);
  EXPECT_TRUE(is_there());
}

TEST(HostMemory, OfAProgramThatRunsIsNotFound) {
  const Child child([] { fill_and_rest(std::chrono::hours(1)); });
  EXPECT_TRUE(find_host_memory(*space_of(child.pid())).empty());
}

}  // namespace
}  // namespace stasis
