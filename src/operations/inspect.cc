#include <utility>

#include "image/image_reader.h"
#include "operations/common.h"
#include "operations/restore_checks.h"

namespace stasis {

Result<ImageReport> inspect(const Environment* env, const Error& no_driver,
                            const InspectOptions& options, Progress& progress,
                            const Interrupt& interrupt) {
  auto image = ImageReader::open(options.images_dir);
  if (!image) return fail(std::move(image.error()));
  ImageReport out;
  out.path = image->path();
  out.manifest = image->manifest();
  const auto enter = [&out](std::string_view id, Result<void> result) {
    out.checks.push_back({id, result ? std::optional<Error>() : std::move(result.error())});
  };

  auto content = options.verify ? image->verify(progress, interrupt) : image->verify_sizes();
  if (!content && content.error().code == ErrorCode::kInterrupted)
    return fail(std::move(content.error()));
  enter(options.verify ? "checksums" : "files", std::move(content));

  const auto criu = Criu::find(options.criu_path);
  enter("criu", criu ? Result<void>() : fail(criu.error()));
  if (env == nullptr) {
    enter("driver", fail(no_driver));
  } else {
    auto same = check_driver(env->driver, out.manifest);
    const bool known = same.has_value();
    enter("driver", std::move(same));
    if (known) {
      const auto old_gpus = gpus_of(out.manifest);
      if (!old_gpus) return fail(old_gpus.error());
      RestoreOptions restore;
      restore.gpu_map = options.gpu_map;
      const auto pairs = plan_gpus(*env, out.manifest, *old_gpus, restore);
      enter("gpus", pairs ? Result<void>() : fail(pairs.error()));
    }
  }
  enter("host-memory",
        check_host_memory(out.manifest, out.manifest.criu_options.cgroups == CgroupMode::kIgnore));
  enter("process-numbers", check_numbers(out.manifest));
  return out;
}

}  // namespace stasis
