#include "attach/elf_image.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>

#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "attach/libraries.h"

namespace stasis::attach {
namespace {

// This process's own memory.
struct Own {
  proc::AddressSpace space = *proc::AddressSpace::open(Pid{static_cast<int>(::getpid())});
  MemoryReader memory = reader_of(space);
};

std::uint64_t base_of_c_library() {
  Dl_info info{};
  ::dladdr(reinterpret_cast<void*>(&::pthread_create), &info);
  // A sanitizer's function is another.
  link_map* map = nullptr;
  void* library = ::dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
  if (library != nullptr && ::dlinfo(library, RTLD_DI_LINKMAP, &map) == 0) return map->l_addr;
  return reinterpret_cast<std::uint64_t>(info.dli_fbase);
}

std::uint64_t in_c_library(const char* name) {
  void* library = ::dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<std::uint64_t>(::dlsym(library, name));
}

TEST(ElfImage, FindsWhatTheLoaderFinds) {
  const Own own;
  const auto image = ElfImage::read(own.memory, base_of_c_library());
  ASSERT_TRUE(image) << image.error().to_string();
  for (const char* name : {"pthread_create", "dlopen", "free", "pthread_attr_init"})
    EXPECT_EQ(image->function(name), in_c_library(name)) << name;
  EXPECT_EQ(image->object("__libc_single_threaded", 1), in_c_library("__libc_single_threaded"));
  EXPECT_TRUE(image->thread_image());
}

TEST(ElfImage, HasNoWhatIsNotThere) {
  const Own own;
  const auto image = ElfImage::read(own.memory, base_of_c_library());
  ASSERT_TRUE(image);
  EXPECT_FALSE(image->function("pthread_creat"));
  EXPECT_FALSE(image->function(""));
  EXPECT_FALSE(image->function("environ")) << "an object is no function";
  EXPECT_FALSE(image->object("pthread_create", 1)) << "a function is no object";
  EXPECT_FALSE(image->object("__libc_single_threaded", 4096)) << "it is smaller";
}

TEST(ElfImage, RefusesWhatIsNone) {
  const auto constant = [](int byte) {
    return [byte](std::uint64_t, void* data, std::size_t size) {
      std::memset(data, byte, size);
      return true;
    };
  };
  for (const int byte : {0, 1, 0x7f, 0xff})
    EXPECT_FALSE(ElfImage::read(constant(byte), 0x10000)) << byte;
  EXPECT_FALSE(ElfImage::read([](auto, auto*, auto) { return false; }, 0x10000));
  EXPECT_FALSE(ElfImage::read(constant(0), ~0ULL - 4096));
}

// A target may say anything: whatever is read ends, and within bounds.
TEST(ElfImage, ForgedOnesAreReadToAnEnd) {
  const Own own;
  const std::uint64_t base = base_of_c_library();
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    // In the middle of all reads, some words are others, the same at each round.
    const std::uint64_t salt = random();
    const unsigned every = 1U << (round % 7);
    const auto forged = [&](std::uint64_t at, void* data, std::size_t size) {
      if (!own.memory(at, data, size)) return false;
      auto* bytes = static_cast<unsigned char*>(data);
      for (std::size_t i = 0; i < size; ++i) {
        const std::uint64_t mix = ((at + i) ^ salt) * 0x9e3779b97f4a7c15;
        const bool spared = at + i < base + 64 && round % 2 == 0;  // the first bytes
        if ((mix >> 40) % (8 * every) == 0 && !spared) bytes[i] ^= static_cast<unsigned char>(mix);
      }
      return true;
    };
    const auto image = ElfImage::read(forged, base);
    if (!image) continue;
    (void)image->function("pthread_create");
    (void)image->object("__libc_single_threaded", 1);
    EXPECT_LT(image->end(), kLastAddress);
    if (image->thread_image()) {
      EXPECT_LE(image->thread_image()->memory_size, 1U << 20);
    }
  }
}

// Chains that never end, by their own words.
TEST(ElfImage, ATableWithoutAnEndHasAnEnd) {
  struct File {
    Elf64_Ehdr header{};
    Elf64_Phdr parts[2]{};
    Elf64_Dyn dynamic[6]{};
    std::uint32_t hash[8]{};
  };
  File file;
  std::memcpy(file.header.e_ident, ELFMAG, SELFMAG);
  file.header.e_ident[EI_CLASS] = ELFCLASS64;
  file.header.e_ident[EI_DATA] = ELFDATA2LSB;
  file.header.e_machine = EM_X86_64;
  file.header.e_phentsize = sizeof(Elf64_Phdr);
  file.header.e_phnum = 2;
  file.header.e_phoff = offsetof(File, parts);
  file.parts[0] = {PT_LOAD, 0, 0, 0, 0, 1 << 30, 1 << 30, 0};
  file.parts[1] = {PT_DYNAMIC,          0, 0, offsetof(File, dynamic), 0, sizeof file.dynamic,
                   sizeof file.dynamic, 0};
  file.dynamic[0] = {DT_SYMTAB, {offsetof(File, hash)}};
  file.dynamic[1] = {DT_STRTAB, {offsetof(File, hash)}};
  file.dynamic[2] = {DT_STRSZ, {1 << 20}};
  file.dynamic[3] = {DT_HASH, {offsetof(File, hash)}};
  // One bucket, and a chain in which the first is followed by the first.
  file.hash[0] = 1;
  file.hash[1] = 1 << 20;
  file.hash[2] = 1;
  file.hash[4] = 1;
  constexpr std::uint64_t kBase = 0x100000;
  std::uint64_t reads = 0;
  const auto memory = [&](std::uint64_t at, void* data, std::size_t size) {
    ++reads;
    std::memset(data, 0, size);
    if (at < kBase || at - kBase >= sizeof file) return true;
    std::memcpy(data, reinterpret_cast<const char*>(&file) + (at - kBase),
                std::min<std::size_t>(size, sizeof file - (at - kBase)));
    return true;
  };
  const auto image = ElfImage::read(memory, kBase);
  ASSERT_TRUE(image);
  EXPECT_FALSE(image->function("anything"));
  EXPECT_LT(reads, 20000U);
}

}  // namespace
}  // namespace stasis::attach
