// Names and limits of manifest.json that its writer and its reader share; docs/image-format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace stasis::manifest_format {

inline constexpr const char* kName = "manifest.json";
inline constexpr std::size_t kMaxText = 64U << 20;
inline constexpr int kMaxDepth = 8;
// Values and keys. In memory each takes up to 130 bytes, in the text as few as three ("{},"): 60
// MiB of those took 2.2 GB. What the writer makes has one in 30 bytes.
inline constexpr std::size_t kMaxValues = 2U << 20;
inline constexpr std::size_t kMaxString = 65536;
inline constexpr std::uint64_t kMaxInteger = (std::uint64_t{1} << 53) - 1;
inline constexpr std::uint64_t kMaxPid = 4194304;  // the kernel's PID_MAX_LIMIT on 64 bits
inline constexpr std::size_t kMaxRequires = 64;
inline constexpr std::size_t kMaxGpus = 1024;
inline constexpr std::size_t kMaxProcesses = 65536;
inline constexpr std::size_t kMaxThreads = 65536;     // of one process
inline constexpr std::size_t kMaxTimers = 65536;      // of one process
inline constexpr std::size_t kMaxFileStates = 65536;  // of one process
inline constexpr std::size_t kMaxLocked = 65536;      // of one process
inline constexpr std::size_t kMaxListeners = 1024;    // of one process
inline constexpr std::uint64_t kMaxFutexSlots = 1U << 20;
inline constexpr std::size_t kMaxPolicy = 4096;
inline constexpr std::uint64_t kStateBits = 64;
inline constexpr int kNiceOffset = 20;           // numbers are not negative
inline constexpr std::size_t kMaxPorts = 65535;  // of one process
inline constexpr std::size_t kMaxArguments = 4096;
inline constexpr std::size_t kMaxStreams = 3;
inline constexpr std::size_t kMaxSockets = 16384;
inline constexpr std::size_t kMaxSocketOptions = 256;    // of one socket
inline constexpr std::size_t kMaxSocketValue = 64;       // bytes
inline constexpr std::size_t kMaxMemberships = 1024;     // of one socket
inline constexpr std::size_t kMaxMulticastSources = 64;  // of one membership
inline constexpr std::size_t kMaxAddresses = 1024;
inline constexpr std::size_t kMaxLost = 64;
inline constexpr std::size_t kMaxGroupName = 64;
inline constexpr std::uint64_t kMaxParts = 1024;
inline constexpr std::size_t kMaxExternal = 4096;
inline constexpr std::size_t kMaxPhases = 256;
inline constexpr std::size_t kMaxFiles = 1048576;
inline constexpr std::size_t kMaxDataFiles = 64;
inline constexpr std::size_t kChecksumDigits = 32;

// The end of the text: kTrailerHead, kChecksumDigits digits, kTrailerTail.
inline constexpr std::string_view kTrailerHead = "  \"manifest_xxh3\": \"";
inline constexpr std::string_view kTrailerTail = "\"\n}\n";
inline constexpr std::size_t kTrailerSize =
    kTrailerHead.size() + kChecksumDigits + kTrailerTail.size();

// The word in `requires` for an image with GPU content of its own.
inline constexpr std::string_view kNeedsContent = "gpu-content";
// The same of host memory.
inline constexpr std::string_view kNeedsHostContent = "host-memory";
// The same of connections that come back locked.
inline constexpr std::string_view kNeedsGroup = "group-links";

// The folder of an image that holds CRIU's files.
inline constexpr std::string_view kCriuFolder = "criu";
inline constexpr const char* kLogFolder = "log";

// What a job of `stasis run` had in its own /dev/shm; beside CRIU's files.
inline constexpr std::string_view kSharedMemoryIndex = "criu/stasis-shm-index.json";

// True for "criu/<name>" with a name that cannot lead anywhere else.
constexpr bool valid_file_path(std::string_view path) {
  if (!path.starts_with(kCriuFolder) || path.size() <= kCriuFolder.size() + 1 ||
      path[kCriuFolder.size()] != '/') {
    return false;
  }
  const std::string_view name = path.substr(kCriuFolder.size() + 1);
  if (name == "." || name == ".." || name.size() > 255) return false;
  for (const char c : name) {
    if (c == '/' || static_cast<unsigned char>(c) < 0x20) return false;
  }
  return true;
}

}  // namespace stasis::manifest_format
