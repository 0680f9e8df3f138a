// Names and limits of the record of kept files; docs/image-format.md.
#pragma once

#include <cstddef>

namespace stasis::kept_files_format {

inline constexpr const char* kIndex = "stasis-files.json";
inline constexpr const char* kContent = "stasis-files-content.img";
inline constexpr int kVersion = 1;
inline constexpr std::size_t kMostIndex = 64 << 20;
inline constexpr std::size_t kMostNames = 1024;  // of one file

}  // namespace stasis::kept_files_format
