#include "attach/c_library.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <new>
#include <thread>

#include <gtest/gtest.h>

#include "attach/inside_lot.h"
#include "attach/suitable.h"
#include "base/units.h"
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

// A library in one page: a header, and a dynamic section that names tables.
UniqueFd smallest_library(std::uint64_t size) {
  std::array<char, kPage> page{};
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_ident[EI_DATA] = ELFDATA2LSB;
  header.e_machine = EM_X86_64;
  header.e_phentsize = sizeof(Elf64_Phdr);
  header.e_phnum = 2;
  header.e_phoff = sizeof header;
  const std::array<Elf64_Phdr, 2> parts{
      Elf64_Phdr{PT_LOAD, PF_R | PF_X, 0, 0, 0, kPage, size, kPage},
      Elf64_Phdr{PT_DYNAMIC, PF_R, 512, 512, 512, 80, 80, 8}};
  const std::array<Elf64_Dyn, 5> dynamic{Elf64_Dyn{DT_SYMTAB, {1024}}, Elf64_Dyn{DT_STRTAB, {2048}},
                                         Elf64_Dyn{DT_STRSZ, {256}}, Elf64_Dyn{DT_GNU_HASH, {768}},
                                         Elf64_Dyn{DT_NULL, {0}}};
  std::memcpy(page.data(), &header, sizeof header);
  std::memcpy(page.data() + sizeof header, parts.data(), sizeof parts);
  std::memcpy(page.data() + 512, dynamic.data(), sizeof dynamic);
  UniqueFd file(::memfd_create("libc.so.6", MFD_CLOEXEC));
  EXPECT_EQ(::pwrite(file.get(), page.data(), page.size(), 0), static_cast<ssize_t>(page.size()));
  return file;
}

constexpr int kForged = 20000;

// So many of them one after the other; in the child, where the first one lies.
std::uint64_t map_many(const UniqueFd& file) {
  constexpr std::size_t kSize = kForged * kPage;
  void* const at = ::mmap(nullptr, kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) ::_exit(1);
  for (std::size_t i = 0; i < kForged; ++i) {
    const int rights = i % 2 == 0 ? PROT_READ | PROT_EXEC : PROT_READ;
    if (::mmap(static_cast<char*>(at) + i * kPage, kPage, rights, MAP_PRIVATE | MAP_FIXED,
               file.get(), 0) == MAP_FAILED)
      ::_exit(1);
  }
  return reinterpret_cast<std::uint64_t>(at);
}

// Runs what makes a child a forger, and waits until it has.
class Forger {
 public:
  explicit Forger(const std::function<void()>& forge)
      : child_([this, &forge] {
          forge();
          *ready_ = true;
          ::pause();
        }) {
    for (int i = 0; i < 5000 && !*ready_; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~Forger() { ::munmap(ready_, kPage); }
  Forger(const Forger&) = delete;
  Forger& operator=(const Forger&) = delete;

  bool is_ready() const { return *ready_; }
  Pid pid() const { return child_.pid(); }

 private:
  std::atomic<bool>* ready_ =
      new (::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
          std::atomic<bool>();
  Child child_;
};

// Each would have all that lie after it: 20 GB.
TEST(ForgedLibraries, ThousandsOfThemTakeNeitherMemoryNorTime) {
  const UniqueFd file = smallest_library(std::uint64_t{2} << 30);
  const Forger forger([&] { (void)map_many(file); });
  ASSERT_TRUE(forger.is_ready());
  const auto space = proc::AddressSpace::open(forger.pid());
  ASSERT_TRUE(space);
  const auto mappings = *proc::ProcFs().mappings(forger.pid());
  ASSERT_GT(mappings.size(), std::size_t{kForged});
  const auto found = find_libraries(
      *space, mappings, [](std::string_view name) { return name == "memfd:libc.so.6"; });
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, ErrorCode::kNotSupported);
}

// A list of libraries without an end, each of which is looked for among all of these: an hour.
TEST(ForgedLibraries, AListThatLeadsThroughThemIsGivenUp) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer has threads and storage of its own";
#endif
  const UniqueFd file = smallest_library(kPage);
  const Forger forger([&] {
    std::thread([] { ::pause(); }).detach();
    auto* const forged = new link_map();
    forged->l_next = forged;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an address among the forged
    forged->l_ld = reinterpret_cast<Elf64_Dyn*>(map_many(file) + (kForged - 1) * kPage);
    _r_debug.r_map = forged;
  });
  ASSERT_TRUE(forger.is_ready());
  const auto space = proc::AddressSpace::open(forger.pid());
  ASSERT_TRUE(space);
  const auto before = Clock::now();
  EXPECT_FALSE(CLibrary::read(*space, *proc::ProcFs().mappings(forger.pid())));
  EXPECT_LT(Clock::now() - before, std::chrono::seconds(20));
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
