// Where the content of evicted GPU memory is: in the processes' own buffers, in images that are
// known, and in the image that is being written. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "direct/agent_client.h"
#include "direct/composite_content.h"
#include "direct/environment.h"
#include "direct/image_content.h"

namespace stasis {

// What of an image to pre-copy while the programs run.
struct GpuPrecopyLimits {
  std::uint64_t least = 0;        // bytes of GPU memory from which on it is worth it
  std::uint64_t image_bytes = 0;  // that the image may have, about
};

// Of an image for whose file system all of the GPU memory is too much, though not what else there
// is: it fits if enough of that memory is zeros, which an image does not have.
struct ImageRoom {
  std::uint64_t gpu_bytes = 0;  // of all processes, as the driver counts
  std::uint64_t bytes = 0;      // that there is room for
  Error refusal;                // if that is too little
};

// An image that is being written, as the place for what the mover copies.
struct IntoImage {
  const UniqueFd& image_dir;
  ContentOptions options;
  std::optional<GpuPrecopyLimits> precopy = {};  // nothing: none
  std::optional<ImageRoom> room = {};            // nothing: there is enough for all
};

class ContentSources {
 public:
  // Adds an image with content that is not in the processes' own memory.
  void add_image(std::shared_ptr<ImageContent> content) { images_.push_back(std::move(content)); }
  const std::vector<std::shared_ptr<ImageContent>>& images() const { return images_; }

  // The content of one process, if that is in an image. kWrongState: in one that is not known;
  // kImageCorrupt.
  struct Found {
    std::shared_ptr<ImageContent> image;  // nothing: it is in the process's own memory
    std::size_t stream = 0;
  };
  Result<Found> content_of(const direct::AgentClient& agent) const;

  // Makes gpu/ in the image; removes it where nothing goes there.
  Result<void> begin_image(const Environment& env, const IntoImage& image);
  Result<void> end_image(const IntoImage* image);
  // Nothing if none is being written.
  const std::shared_ptr<ImageContent>& into() const { return into_; }
  // From now on the content is in that image and nowhere else.
  void commit_image();
  // A process's memory is in an image and nowhere else.
  bool needs_image() const { return needs_image_; }
  void need_image(bool needs) { needs_image_ = needs; }

  // What a mover reads and writes, all sources in one.
  const std::shared_ptr<CompositeContent>& composite() const { return composite_; }
  void begin_composite() { composite_ = std::make_shared<CompositeContent>(); }
  // Fresh, if the agent has made it since its program ran last.
  std::uint64_t add_buffer(const direct::AgentClient& agent, BufferPages pages) const;

 private:
  std::vector<std::shared_ptr<ImageContent>> images_;
  std::shared_ptr<ImageContent> into_;
  std::shared_ptr<CompositeContent> composite_ = std::make_shared<CompositeContent>();
  bool needs_image_ = false;
};

}  // namespace stasis
