// Reads the content of GPU or host memory of an image, gpu/ or host/, and verifies it on the way.
//
// Owns a descriptor for each data file, and some memory for each thread that reads what cannot be
// read to where it belongs: what is compressed, and with direct I/O what is not aligned. Moves,
// never copies. read() from any number of threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/fd.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"
#include "image/content.h"
#include "image/manifest.h"

namespace stasis {

struct ContentReadOptions {
  // Past the page cache, where the file system can: for content that is not in it and will not be
  // needed again.
  bool direct_io = false;
  ContentKind kind = ContentKind::kGpu;
};

class ContentReader {
 public:
  // Reads and checks the whole index, and that the data files have their sizes; their content is
  // verified when it is read. `expected` is what the manifest says; ImageReader::open_content()
  // gives it. kImageCorrupt, kImageVersion, kNotPermitted, kIo.
  static Result<ContentReader> open(const UniqueFd& image_dir, const ContentRecord& expected,
                                    const ContentReadOptions& options = {});

  ContentReader(ContentReader&&) noexcept;
  ContentReader& operator=(ContentReader&&) noexcept;
  ~ContentReader();

  ContentKind kind() const;
  const ContentIndex& index() const;
  const std::vector<ContentStream>& streams() const { return index().streams; }
  std::uint32_t chunk_bytes() const { return index().chunk_bytes; }

  // Whether that is the data file which is read here, and not one that has taken its name since.
  bool reads_from(std::size_t number, const UniqueFd& file) const;

  // Fills `bytes` with what was written at `offset`: both are multiples of chunk_bytes(), but for
  // the size at the stream's end; kUsage otherwise. kImageCorrupt names the file, the chunk, and
  // what was expected and found; the memory then holds anything. kIo.
  Result<void> read(std::size_t stream, std::uint64_t offset, std::span<std::byte> bytes) const;

  // Which of the chunks from `offset` on, a multiple of chunk_bytes(), are all zeros: 1 in their
  // flag, else 0. kUsage beyond the stream.
  Result<void> zeros(std::size_t stream, std::uint64_t offset, std::span<std::byte> flags) const;

  // Everything that is stored, each once, in the order of the disk. The first thing wrong, as with
  // read(); kInterrupted.
  Result<void> verify_all(Progress& progress, const Interrupt& interrupt) const;

  // The same for the data files that are `chosen`, to the end: those that are damaged or cannot be
  // read, each with the first thing wrong. kInterrupted.
  Result<std::map<std::size_t, Error>> find_damage(const std::vector<bool>& chosen,
                                                   Progress& progress,
                                                   const Interrupt& interrupt) const;

 private:
  struct State;
  explicit ContentReader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace stasis
