// What is done to one chunk of GPU content in memory, and the memory for it.
//
// One thread at a time for each Workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/result.h"
#include "image/content.h"

namespace stasis {

// Made where it is first needed: a call that neither compresses nor copies needs none of it.
class Workspace {
 public:
  Workspace();
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;
  ~Workspace();

  // Memory of at least `bytes`, aligned for direct I/O; what was there may be lost. There are two,
  // for what is stored and what comes of it. kOutOfHostMemory.
  Result<std::span<std::byte>> stored(std::size_t bytes);
  Result<std::span<std::byte>> content(std::size_t bytes);

  // Compresses into `into`, which is as large as the result may be. Nothing if it does not fit, or
  // if a sample of 16 KiB says that it would not be worth it.
  std::optional<std::size_t> compress(ContentEncoding encoding, std::span<const std::byte> content,
                                      std::span<std::byte> into);
  // True if exactly `into` comes of it. `stored` is untrusted: reads and writes nothing beyond the
  // two.
  bool decompress(ContentEncoding encoding, std::span<const std::byte> stored,
                  std::span<std::byte> into);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// At the speed of memory; content that is not ends it after a few bytes.
bool all_zero(std::span<const std::byte> bytes);

}  // namespace stasis
