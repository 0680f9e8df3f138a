#include "job/choose_image.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "image/image_reader.h"
#include "job/streams.h"
#include "operations/image_report.h"

namespace stasis::job {

std::vector<std::string> as_written(const std::vector<std::string>& command) {
  using nlohmann::json;
  return json::parse(json(command).dump(-1, ' ', false, json::error_handler_t::replace))
      .get<std::vector<std::string>>();
}

bool is_damage(ErrorCode code) {
  return code == ErrorCode::kImageCorrupt || code == ErrorCode::kImageIncomplete;
}

Result<std::optional<int>> choose_image(Images& images, const std::vector<std::string>& command,
                                        const std::function<void(const std::string&)>& tell) {
  STASIS_TRY_ASSIGN(auto numbers, images.all());
  for (const int number : numbers) {
    const std::string path = images.path_of(number);
    auto image = ImageReader::open(path);
    if (!image && is_damage(image.error().code)) {
      images.damaged(number);
      tell(fmt::format("the image {} is damaged ({}); the one before is taken", path,
                       image.error().to_string()));
      continue;
    }
    if (!image) return fail(std::move(image.error()));
    const auto& job = image->manifest().job;
    if (!job || job->streams.size() != kStreams) {
      return fail(ErrorCode::kImageExists,
                  fmt::format("{} is an image that `stasis run` has not made", path),
                  "name a directory for this job alone, or use `stasis restore`");
    }
    if (job->command != as_written(command)) {
      return fail(
          ErrorCode::kUsage,
          fmt::format("{} is an image of another command: {}", path, fmt::join(job->command, " ")),
          "give the command as it was, another --images-dir for another job, or remove "
          "the images to start over");
    }
    return std::optional<int>(number);
  }
  if (images.any_damaged()) {
    return fail(ErrorCode::kImageCorrupt,
                fmt::format("none of the images in {} is sound", images.path()),
                "copy one again from where it was copied to, or remove them to start over");
  }
  return std::optional<int>();
}

std::optional<SavedJob> saved_job(const std::string& dir) {
  for (const std::string& path : images_of_job(dir)) {
    auto image = ImageReader::open(path);
    if (!image) continue;
    const Manifest& manifest = image->manifest();
    if (!manifest.job || !is_for_a_job(manifest)) return std::nullopt;
    std::string name = is_chosen(manifest.job_name) ? manifest.job_name : std::string();
    std::vector<std::string> saved = manifest.job->command;
    std::string line = line_of_job(manifest, path);
    return SavedJob{std::move(*image), std::move(name), std::move(saved), std::move(line)};
  }
  return std::nullopt;
}

}  // namespace stasis::job
