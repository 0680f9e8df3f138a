#include "direct/content_sources.h"

#include <fmt/format.h>

namespace stasis {

Result<ContentSources::Found> ContentSources::content_of(const direct::AgentClient& agent) const {
  if (!agent.content_is_elsewhere()) return Found{};
  for (const auto& content : images_) {
    if (content->id() != agent.content_id()) continue;
    STASIS_TRY_ASSIGN(auto stream, content->stream_of(agent.pid(), agent.bytes()));
    return Found{content, stream};
  }
  return fail(ErrorCode::kWrongState,
              fmt::format("the content of process {}'s GPU memory is in an image that is not where "
                          "it was",
                          agent.pid().value),
              fmt::format("move the image back, then `stasis recover {0}`; or say where it is: "
                          "`stasis resume {0} --images-dir DIR`",
                          agent.pid().value));
}

Result<void> ContentSources::begin_image(const Environment& env, const IntoImage& image) {
  STASIS_TRY_ASSIGN(auto made, ImageContent::create(image.image_dir, image.options));
  into_ = std::move(made);
  if (const auto& why = into_->without_base())
    env.tell("all GPU memory is written, and nothing deduplicated: " + why->to_string());
  return {};
}

Result<void> ContentSources::end_image(const IntoImage* image) {
  if (!into_) return {};
  into_.reset();
  images_.clear();
  begin_composite();
  return discard_content(image->image_dir);
}

void ContentSources::commit_image() {
  if (!into_) return;
  images_.push_back(into_);
  needs_image_ = true;
}

std::uint64_t ContentSources::add_buffer(const direct::AgentClient& agent,
                                         BufferPages pages) const {
  return composite_->add_buffer(agent.address_space(), agent.buffer_address(), agent.bytes(),
                                pages);
}

}  // namespace stasis
