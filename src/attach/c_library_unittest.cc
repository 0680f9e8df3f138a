#include "attach/c_library.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include <gtest/gtest.h>

#include "attach/inside_lot.h"
#include "attach/suitable.h"
#include "tests/fakes/child.h"

namespace stasis::attach {
namespace {

using fakes::Child;

thread_local int g_forty_two = 42;

struct Shared {
  std::atomic<std::uint64_t> thread_pointer;
  std::atomic<int> tid;
  std::uint64_t storage;  // of g_forty_two, below the thread pointer
};

// A process with two threads, of which the second tells where its descriptor lies.
class CLibraryTest : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer has threads and storage of its own";
#endif
    void* memory =
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    shared_ = new (memory) Shared();
    target_.emplace([this] {
      std::thread([this] {
        std::uint64_t self = 0;
        asm("mov %%fs:0, %0" : "=r"(self));
        shared_->storage = self - reinterpret_cast<std::uint64_t>(&g_forty_two);
        shared_->tid = static_cast<int>(::gettid());
        shared_->thread_pointer = self;
        ::pause();
      }).join();
    });
    for (int i = 0; i < 5000 && shared_->thread_pointer == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_NE(shared_->thread_pointer, 0U);
    space_.emplace(*proc::AddressSpace::open(target_->pid()));
    auto library = CLibrary::read(*space_, *proc::ProcFs().mappings(target_->pid()));
    ASSERT_TRUE(library) << library.error().to_string();
    library_.emplace(std::move(*library));
  }
  void TearDown() override {
    target_.reset();
    if (shared_ != nullptr) ::munmap(shared_, sizeof(Shared));
  }

  Shared* shared_ = nullptr;
  std::optional<Child> target_;
  std::optional<proc::AddressSpace> space_;
  std::optional<CLibrary> library_;
};

TEST_F(CLibraryTest, KnowsARealThread) {
  const auto real = library_->check(reader_of(*space_), shared_->thread_pointer, shared_->tid);
  ASSERT_TRUE(real) << real.error().to_string();
  EXPECT_GT(real->capacity, 0U);
  EXPECT_NE(real->pointer_guard, 0U);
  EXPECT_EQ(inner_number(target_->pid(), Tid{shared_->tid}), shared_->tid);
}

TEST_F(CLibraryTest, WhatIsNoThreadIsRefused) {
  const auto memory = reader_of(*space_);
  const std::uint64_t right = shared_->thread_pointer;
  EXPECT_FALSE(library_->check(memory, right, shared_->tid + 1)) << "another's number";
  for (const std::uint64_t at :
       {std::uint64_t{0}, right + 8, right + 64, right - 4096, kLastAddress, ~std::uint64_t{15}})
    EXPECT_FALSE(library_->check(memory, at, shared_->tid)) << at;
}

// Everything that the library has of a thread, forged one after the other.
TEST_F(CLibraryTest, AForgedThreadIsRefused) {
  const auto memory = reader_of(*space_);
  const std::uint64_t right = shared_->thread_pointer;
  for (const std::uint64_t field : {kTcbSelf, kTcbThread, kTcbThreadVector}) {
    for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{1}, kLastAddress,
                                      ~std::uint64_t{0}, std::uint64_t{0x10000}}) {
      const auto forged = [&](std::uint64_t at, void* data, std::size_t size) {
        if (!memory(at, data, size)) return false;
        if (at <= right + field && right + field + 8 <= at + size)
          std::memcpy(static_cast<char*>(data) + (right + field - at), &value, 8);
        return true;
      };
      EXPECT_FALSE(library_->check(forged, right, shared_->tid)) << field << " " << value;
    }
  }
}

// What our thread finds is what any other begins with.
TEST_F(CLibraryTest, AThreadOfOursHasTheStorageThatOthersBeginWith) {
  const auto real = library_->check(reader_of(*space_), shared_->thread_pointer, shared_->tid);
  ASSERT_TRUE(real);
  InsideLot lot;
  lot.data = 0x7000000000;
  lot.layout = InsideLayout::of(*library_, real->capacity + 10);
  const auto bytes = make_thread(*library_, *real, lot);
  const std::uint64_t thread = lot.layout.thread - lot.layout.storage;
  const auto word = [&](std::uint64_t at) {
    std::uint64_t out = 0;
    std::memcpy(&out, bytes.data() + at, sizeof out);
    return out;
  };
  EXPECT_EQ(word(thread + kTcbSelf), lot.data + lot.layout.thread);
  EXPECT_EQ(word(thread + kTcbThread), lot.data + lot.layout.thread);
  EXPECT_EQ(word(thread + kTcbStackGuard), real->stack_guard);
  const std::uint64_t vector = word(thread + kTcbThreadVector) - lot.data - lot.layout.storage;
  EXPECT_EQ(word(vector - 16), real->capacity + 10);
  EXPECT_EQ(word(vector), real->generation);
  EXPECT_EQ(word(vector + 16), kUnallocated);
  EXPECT_EQ(word(vector + 16 * (real->capacity + 10)), kUnallocated);
  // Of the program itself, which lies at a fixed distance.
  int value = 0;
  ASSERT_LT(shared_->storage, thread);
  std::memcpy(&value, bytes.data() + thread - shared_->storage, sizeof value);
  EXPECT_EQ(value, 42);
}

TEST(Suitable, AProcessThatIsStoppedOrDeadIsLeftAlone) {
  const Child stopped;
  ::kill(stopped.pid().value, SIGSTOP);
  const proc::ProcFs procfs;
  for (int i = 0; i < 5000 && procfs.process(stopped.pid())->state != 'T'; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto busy = check_process(stopped.pid(), *procfs.process(stopped.pid()));
  ASSERT_FALSE(busy);
  EXPECT_EQ(busy.error().code, ErrorCode::kBusy);
  const Child dead;
  dead.become_zombie();
  const auto zombie = check_process(dead.pid(), *procfs.process(dead.pid()));
  ASSERT_FALSE(zombie);
  EXPECT_EQ(zombie.error().code, ErrorCode::kZombie);
}

}  // namespace
}  // namespace stasis::attach
