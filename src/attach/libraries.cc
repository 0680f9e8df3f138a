#include "attach/libraries.h"

#include <algorithm>

#include <fmt/format.h>

namespace stasis::attach {

MemoryReader reader_of(const proc::AddressSpace& space) {
  return [&space](std::uint64_t address, void* data, std::size_t size) {
    return space.read(address, data, size).has_value();
  };
}

std::string_view file_name(const proc::Mapping& mapping) {
  constexpr std::string_view kDeleted = " (deleted)";
  std::string_view path = mapping.path;
  if (path.ends_with(kDeleted)) path.remove_suffix(kDeleted.size());
  return path.substr(path.rfind('/') + 1);
}

std::optional<std::uint64_t> Library::function(std::string_view name) const {
  const auto at = image_.function(name);
  const bool is_code = at && std::any_of(code_.begin(), code_.end(), [&](const Range& range) {
                         return range.start <= *at && *at < range.end;
                       });
  return is_code ? at : std::nullopt;
}

Result<std::uint64_t> Library::need_function(std::string_view name) const {
  if (const auto at = function(name)) return *at;
  return fail(ErrorCode::kNotSupported, fmt::format("{} has no function {}", path_, name));
}

Result<std::vector<Library>> find_libraries(
    const proc::AddressSpace& space, const std::vector<proc::Mapping>& mappings,
    const std::function<bool(std::string_view file_name)>& wanted) {
  std::vector<Library> out;
  std::size_t images = 0;
  for (const proc::Mapping& first : mappings) {
    if (first.inode == 0 || first.path.empty() || first.path[0] != '/' || !wanted(file_name(first)))
      continue;
    auto image = ElfImage::read(reader_of(space), first.start);
    if (!image) continue;  // another part of it
    if (++images > kMostImages) {
      return fail(ErrorCode::kNotSupported,
                  fmt::format("it maps more than {} files that are called {}", kMostImages,
                              file_name(first)));
    }
    std::vector<Library::Range> code;
    for (const proc::Mapping& mapping : mappings) {
      if (mapping.inode == first.inode && mapping.device == first.device &&
          mapping.permissions == "r-xp" && mapping.start >= first.start &&
          mapping.end <= image->end() + 4096)
        code.push_back({mapping.start, mapping.end});
    }
    // One that a program has mapped to read it has no code.
    if (code.empty()) continue;
    out.emplace_back(std::move(*image), first.path, std::move(code));
  }
  return out;
}

}  // namespace stasis::attach
