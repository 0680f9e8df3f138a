// A shared library as it lies in the memory of another process: its dynamic symbols and the image
// of its thread-local storage.
//
// All that is read may be forged: every number is bounded, and every loop ends. What an address is
// good for, the caller decides (libraries.h). Reads only; immutable; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>

#include "base/result.h"

namespace stasis::attach {

inline constexpr std::uint64_t kPage = 4096;
// No program has memory from here on.
inline constexpr std::uint64_t kLastAddress = std::uint64_t{1} << 47;

// All of `size` bytes at that address, or false.
using MemoryReader = std::function<bool(std::uint64_t address, void* data, std::size_t size)>;

class ElfImage {
 public:
  // What every thread begins with; the rest, up to `memory_size`, is zero.
  struct ThreadImage {
    std::uint64_t address = 0;
    std::uint64_t file_size = 0;
    std::uint64_t memory_size = 0;
  };

  // `base`: where its first page lies. kNotSupported if that is no 64-bit library of this machine
  // with a dynamic section.
  static Result<ElfImage> read(MemoryReader memory, std::uint64_t base);

  // Where a function, or an object of at least `size` bytes, of that name lies; nothing if there is
  // none, or none that the library itself defines. Of several versions, the default one.
  std::optional<std::uint64_t> function(std::string_view name) const;
  std::optional<std::uint64_t> object(std::string_view name, std::uint64_t size) const;

  // Reads an object of the type T.
  template <class T>
  std::optional<T> value(std::string_view name) const {
    T out{};
    const auto at = object(name, sizeof out);
    if (!at || !memory_(*at, &out, sizeof out)) return std::nullopt;
    return out;
  }

  std::uint64_t base() const { return base_; }
  std::uint64_t end() const { return end_; }  // of what is mapped of it
  const std::optional<ThreadImage>& thread_image() const { return thread_image_; }
  // Where its dynamic section lies.
  std::uint64_t dynamic() const { return dynamic_; }

 private:
  struct Tables {
    std::uint64_t symbols = 0;
    std::uint64_t strings = 0;
    std::uint64_t strings_size = 0;
    std::uint64_t versions = 0;   // 0: none
    std::uint64_t gnu_hash = 0;   // 0: none
    std::uint64_t sysv_hash = 0;  // 0: none
  };
  struct Symbol {
    std::uint64_t address = 0;
    std::uint64_t size = 0;
    unsigned type = 0;
  };

  ElfImage(MemoryReader memory, std::uint64_t base) : memory_(std::move(memory)), base_(base) {}
  bool read_headers();
  bool read_dynamic(std::uint64_t at, std::uint64_t size);
  // The addresses in a dynamic section are those of the file, or what the loader has made of them.
  std::uint64_t placed(std::uint64_t value) const;
  std::optional<Symbol> find(std::string_view name) const;
  template <class Visit>
  void for_each_named(std::string_view name, const Visit& visit) const;
  bool is_named(std::uint32_t index, std::string_view name) const;

  MemoryReader memory_;
  std::uint64_t base_ = 0;
  std::uint64_t bias_ = 0;  // between the file's addresses and those in memory
  std::uint64_t end_ = 0;
  std::uint64_t dynamic_ = 0;
  Tables tables_;
  std::optional<ThreadImage> thread_image_;
};

}  // namespace stasis::attach
