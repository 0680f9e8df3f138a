// The form of CRIU's images: a magic word for all, one for the kind, and messages of protobuf, each
// behind its length.
//
// Private to src/criu. They are untrusted: bounded, and wrong input is found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include <protozero/exception.hpp>
#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// criu/include/magic.h of CRIU 4.2.
inline constexpr std::uint32_t kAnyImageMagic = 0x54564319;
inline constexpr std::uint32_t kFilesMagic = 0x56303138;
inline constexpr std::uint32_t kDescriptorsMagic = 0x56213732;  // fdinfo-N.img
inline constexpr std::uint32_t kRemapMagic = 0x59133954;        // remap-fpath.img
inline constexpr std::uint32_t kTreeMagic = 0x50273030;         // pstree.img
inline constexpr const char* kFilesImage = "files.img";

inline constexpr std::size_t kMostOfImage = 64 << 20;  // bytes

// Empty if it is not there, is no regular file, or has more than `most` bytes.
std::string read_criu_image(const UniqueFd& dir, const std::string& name,
                            std::size_t most = kMostOfImage);
void append_message(std::string& image, std::string_view message);
// Writes another image in the place of the one that is there. kIo.
Result<void> replace_criu_image(const UniqueFd& criu_dir, const std::string& name,
                                const std::string& image);
Result<void> replace_files_image(const UniqueFd& criu_dir, const std::string& image);
// The field at which `message` stands, as it is, whether it is known or not.
void copy_field(protozero::pbf_reader& message, protozero::pbf_writer& writer);

// Calls `take` with each message of an image. False if it ends, or cannot be parsed, before that.
template <typename Take>
bool each_message(const std::string& image, std::uint32_t magic, const Take& take) {
  const auto word = [&](std::size_t at) {
    std::uint32_t value = 0;
    std::memcpy(&value, image.data() + at, sizeof value);
    return value;
  };
  constexpr std::size_t kHead = 8;
  if (image.size() < kHead || word(0) != kAnyImageMagic || word(4) != magic) return false;
  std::size_t at = kHead;
  while (image.size() - at >= 4) {
    const std::size_t size = word(at);
    at += 4;
    if (size > image.size() - at) return false;
    try {
      take(protozero::pbf_reader(image.data() + at, size));
    } catch (const protozero::exception&) {
      return false;  // criu says so, too
    }
    at += size;
  }
  return at == image.size();
}

}  // namespace stasis
