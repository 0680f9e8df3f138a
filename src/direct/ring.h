// Pinned host memory through which content passes, in equal chunks.
//
// Owns the memory and its pinning. Each chunk is pinned by itself, so that threads can do so side
// by side; a copy must not cross from one to the next. Not thread-safe but for chunk().
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/fd.h"
#include "direct/content.h"
#include "direct/device_calls.h"
#include "direct/stop.h"

namespace stasis::direct {

// Memory that is mapped until its end.
class HostMapping {
 public:
  HostMapping() = default;
  // `file` invalid: private and anonymous. All pages are there afterwards.
  static Result<HostMapping> make(const UniqueFd& file, std::size_t bytes, unsigned threads);
  HostMapping(HostMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  HostMapping& operator=(HostMapping&& other) noexcept;
  ~HostMapping();

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  explicit HostMapping(std::span<std::byte> bytes) : bytes_(bytes) {}
  std::span<std::byte> bytes_;
};

class Ring {
 public:
  Ring() = default;
  // A memory file that another process can map as well, without the driver. kOutOfHostMemory.
  static Result<Ring> make(std::size_t chunk_bytes, unsigned chunks, unsigned threads);
  Ring(Ring&&) noexcept = default;  // which leaves the other without chunks
  Ring& operator=(Ring&&) = delete;
  ~Ring() { unpin(); }

  // For all contexts. `context` has to stay until unpin(). After an error nothing is pinned.
  Result<void> pin(const DeviceCalls& calls, cuda::CUcontext context, unsigned threads, Stop& stop);
  void unpin();

  std::span<std::byte> chunk(std::size_t index) const { return chunks_[index]; }
  unsigned chunks() const { return count_; }
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  // Where `at`, in one of the chunks, lies in file().
  std::size_t offset_of(const std::byte* at) const {
    return static_cast<std::size_t>(at - memory_.bytes().data());
  }
  const UniqueFd& file() const { return file_; }

 private:
  std::size_t chunk_bytes_ = 0;
  unsigned count_ = 0;
  UniqueFd file_;
  HostMapping memory_;
  std::vector<std::span<std::byte>> chunks_;  // those that are pinned
  const DeviceCalls* calls_ = nullptr;
  cuda::CUcontext context_ = nullptr;
};

}  // namespace stasis::direct
