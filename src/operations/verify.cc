#include <utility>

#include "base/phases.h"
#include "base/units.h"
#include "image/image_reader.h"
#include "operations/image_report.h"
#include "operations/operations.h"

namespace stasis {

Result<VerifyReport> verify_image(const std::string& images_dir, Progress& progress,
                                  const Interrupt& interrupt) {
  const auto start = Clock::now();
  Phases phases;
  phases.begin("look");
  STASIS_TRY_ASSIGN(auto image, ImageReader::open(images_dir));
  phases.begin("verify");
  if (auto sound = image.verify(progress, interrupt); !sound) {
    return fail(std::move(sound.error()).within("verifying the image " + image.path()));
  }
  phases.begin("report");
  VerifyReport report;
  report.path = image.path();
  report.bytes = image.manifest().total_bytes;
  report.files = image.manifest().file_count();
  report.content = report_content(image, ContentKind::kGpu);
  report.host_content = report_content(image, ContentKind::kHost);
  report.seconds = since(start).count();
  return report;
}

}  // namespace stasis
