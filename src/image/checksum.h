// The checksum of an image's files: XXH3-128 of the XXH3-128 digests of 16 MiB blocks, so that one
// huge pages-1.img keeps all processors busy. docs/image-format.md has the definition.
//
// Uses threads of its own and has joined them on return.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"

namespace stasis {

inline constexpr std::uint64_t kChecksumBlock = 16U << 20;
inline constexpr std::string_view kChecksumAlgorithm = "xxh3-128-blocks";

// XXH3-128 with seed 0 of `data`, as 32 lower-case hexadecimal digits.
std::string xxh3_hex(std::string_view data);

// In canonical form: big-endian.
using BlockDigest = std::array<unsigned char, 16>;

// XXH3-128 with seed 0 of `data`.
BlockDigest xxh3(std::span<const std::byte> data);
std::string to_hex(const BlockDigest& digest);

// A file to be checksummed, of exactly `size` bytes.
struct ChecksumJob {
  std::string path;  // for messages
  std::uint64_t size = 0;
  std::vector<BlockDigest> known;  // of its first blocks, which are not read again
};

// The digest of a block of kChecksumBlock bytes at `offset`. kImageCorrupt if the file ends before
// it does; kIo.
Result<BlockDigest> block_digest(const UniqueFd& file, const std::string& path,
                                 std::uint64_t offset);

// Opens the file of a job for reading. Called from several threads at once, once for each block, so
// that an image of thousands of files does not need as many descriptors.
using OpenJob = std::function<Result<UniqueFd>(std::size_t)>;

// The checksums of all files, in their order, as 32 hexadecimal digits each. A file that is shorter
// than its `size` is kImageCorrupt; kIo; kInterrupted. `phase` names the step to `progress`.
Result<std::vector<std::string>> checksum_files(const std::vector<ChecksumJob>& jobs,
                                                const OpenJob& open_job, std::string_view phase,
                                                Progress& progress, const Interrupt& interrupt);

}  // namespace stasis
