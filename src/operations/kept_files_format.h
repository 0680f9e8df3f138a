// Names and limits of the record of kept files; docs/image-format.md.
#pragma once

#include <cstddef>

namespace stasis::kept_files_format {

inline constexpr const char* kIndex = "stasis-files.json";
inline constexpr const char* kContent = "stasis-files-content.img";
inline constexpr int kVersion = 1;
inline constexpr std::size_t kMostIndex = 8 << 20;
// Values in it, of all kinds: more is no record of ours, and is refused before it is in memory.
inline constexpr std::size_t kMostValues = 1 << 19;
inline constexpr std::size_t kMostNames = 1024;  // of one file

}  // namespace stasis::kept_files_format
