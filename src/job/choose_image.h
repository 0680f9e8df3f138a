// Which image a job goes on from.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "image/image_reader.h"
#include "job/images.h"

namespace stasis::job {

// The command as it comes back from a manifest: bytes that are no UTF-8 are replaced.
std::vector<std::string> as_written(const std::vector<std::string>& command);

// The image's files are not what they were: another one may be sound.
bool is_damage(ErrorCode code);

// The number of the newest image that can be read, or none where there are no images. What is
// damaged is told, and counts as no image from now on. kImageExists, kUsage if the newest is none
// of this command's; kImageCorrupt if all are damaged.
Result<std::optional<int>> choose_image(Images& images, const std::vector<std::string>& command,
                                        const std::function<void(const std::string&)>& tell);

// What `stasis run` goes on with in a directory.
struct SavedJob {
  ImageReader image;
  std::string name;  // empty: it was given none
  std::vector<std::string> command;
  std::string line;  // for people: that goes on with it
};
// As the newest image there that can be read says; nothing where that is no job's.
std::optional<SavedJob> saved_job(const std::string& dir);

}  // namespace stasis::job
