// The GPU content of an image (gpu/) as a place that a mover, or an agent, reads and writes.
//
// Each process has a stream, which begins at a multiple of kGap, so that several are one Content.
// Private to src/direct and src/operations. read() and write() from any number of threads at once.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "direct/agent_client.h"
#include "direct/content.h"
#include "image/content_reader.h"
#include "image/content_writer.h"

namespace stasis {

class ImageContent final : public direct::Content {
 public:
  static constexpr std::uint64_t kGap = std::uint64_t{1} << 40;

  // Makes gpu/ in the image that is being written in `image_dir`.
  static Result<std::shared_ptr<ImageContent>> create(const UniqueFd& image_dir,
                                                      const ContentOptions& options);
  // Of a complete image, whose manifest says `record` of it.
  static std::shared_ptr<ImageContent> of(ContentReader reader, ContentRecord record);
  // Also of an image that has no manifest yet, by what gpu/index says of itself.
  static Result<std::shared_ptr<ImageContent>> open(const std::string& image_dir);

  // Adds the content of a process, before anything is written. Returns its stream.
  Result<std::size_t> add(Pid pid, std::uint64_t bytes,
                          const std::vector<direct::SegmentPlace>& places);
  // Completes it, as durable as was asked for; it can be read then.
  Result<void> finish(Progress& progress, const Interrupt& interrupt);

  Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) override;
  Result<void> read(std::uint64_t offset, std::span<std::byte> bytes) override;

  // As ContentWriter::precopy(), before anything is added; and marks which digests that need not
  // store, as deduplicate() does.
  Result<void> precopy(std::span<const std::byte> bytes);
  void mark_known(std::span<std::byte> digests) const { writer_->mark_known(digests); }

  std::uint64_t digest_chunk() const override { return writer_ ? writer_->digest_chunk() : 0; }
  Result<void> deduplicate(std::uint64_t offset, std::span<std::byte> digests) override;
  std::uint64_t zero_chunk() const override { return reader_ ? reader_->chunk_bytes() : 0; }
  Result<void> zeros(std::uint64_t offset, std::span<std::byte> flags) override;

  // kImageCorrupt if there is none, or not of that size.
  Result<std::size_t> stream_of(Pid pid, std::uint64_t bytes) const;
  std::optional<std::size_t> stream_of(Pid pid) const;
  // Of what is complete: where the content of a stream was.
  const std::vector<ContentRange>& ranges_of(std::size_t stream) const {
    return reader_->streams()[stream].ranges;
  }
  // What agents call it, and what the manifest says of it.
  direct::ContentId id() const;
  const ContentRecord& record() const { return record_; }
  // Why the base that was given is not used, if it cannot be.
  const std::optional<Error>& without_base() const { return writer_->without_base(); }
  // Of what finish() has completed: bytes that an earlier image had already.
  std::uint64_t reused_bytes() const { return reused_bytes_; }
  // That precopy() had stored, and was wanted.
  std::uint64_t precopied_bytes() const { return precopied_bytes_; }
  // All that it had stored.
  std::uint64_t stored_before_bytes() const { return stored_before_bytes_; }
  // Of what it had stored in vain, once, when the programs run again.
  void give_back_room() { unwanted_.give_back(); }
  // All of it went past the page cache.
  bool direct_io() const { return direct_io_; }

 private:
  UniqueFd image_dir_;  // while it is written
  std::optional<ContentWriter> writer_;
  std::optional<ContentReader> reader_;
  ContentRecord record_;
  std::size_t streams_ = 0;
  std::uint64_t reused_bytes_ = 0;
  std::uint64_t precopied_bytes_ = 0;
  std::atomic<std::uint64_t> stored_before_bytes_ = 0;
  UnwantedRoom unwanted_;
  bool direct_io_ = false;
};

// What the index of an image that is not complete says of itself. kImageCorrupt, kIo.
Result<ContentRecord> content_record_in(const UniqueFd& image_dir, ContentKind kind);

// `path`, and what dumps to it that did not come to their end have left beside it.
std::vector<std::string> image_and_its_halves(const std::string& path);

// Removes gpu/ of an image that is being written.
Result<void> discard_content(const UniqueFd& image_dir);

// The images beside and at `path` that may have the content of what an operation on `path` moved.
// Those that another user has put there are passed over.
std::vector<std::shared_ptr<ImageContent>> find_content(const std::string& path);

// A process the content of whose memory is in the image at `image_dir`, finished or not, and
// nowhere else.
std::optional<Pid> who_needs(const std::string& image_dir);

}  // namespace stasis
