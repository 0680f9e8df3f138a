// The libraries that a process has loaded, as its mappings show them.
//
// A snapshot; the address space must outlive it. Reads only; thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attach/elf_image.h"
#include "proc/address_space.h"
#include "proc/procfs.h"

namespace stasis::attach {

MemoryReader reader_of(const proc::AddressSpace& space);

// The last part of a mapping's path, without what the kernel says of a deleted file.
std::string_view file_name(const proc::Mapping& mapping);

class Library {
 public:
  struct Range {
    std::uint64_t start = 0;
    std::uint64_t end = 0;
    bool operator==(const Range&) const = default;
  };
  Library(ElfImage image, std::string path, std::vector<Range> code)
      : image_(std::move(image)), path_(std::move(path)), code_(std::move(code)) {}

  const ElfImage& image() const { return image_; }
  const std::string& path() const { return path_; }

  // The same as the image says, if it lies in code of this library's own file.
  std::optional<std::uint64_t> function(std::string_view name) const;
  // kNotSupported with its name if it has none.
  Result<std::uint64_t> need_function(std::string_view name) const;

 private:
  ElfImage image_;
  std::string path_;
  std::vector<Range> code_;  // of its file
};

// What a program may map of files with such names, each from its first page on.
inline constexpr std::size_t kMostImages = 64;

// Those whose file's name is accepted. kNotSupported if there are more than kMostImages.
Result<std::vector<Library>> find_libraries(
    const proc::AddressSpace& space, const std::vector<proc::Mapping>& mappings,
    const std::function<bool(std::string_view file_name)>& wanted);

}  // namespace stasis::attach
