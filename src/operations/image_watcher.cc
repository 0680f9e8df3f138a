#include "operations/image_watcher.h"

#include <fcntl.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <system_error>

#include "base/fd.h"
#include "base/trace.h"

namespace stasis {

namespace {

constexpr std::chrono::milliseconds kSizePoll{50};
constexpr std::uint64_t kWorthWriting = 1ULL << 20;

std::uint64_t probe(const std::string& directory, SyncPolicy sync) {
  std::error_code ignored;
  std::uint64_t sum = 0;
  std::filesystem::directory_iterator entries(directory, ignored);
  for (; !ignored && entries != std::filesystem::directory_iterator(); entries.increment(ignored)) {
    const auto& entry = *entries;
    std::error_code gone;
    const auto size = entry.file_size(gone);
    if (gone) continue;
    sum += size;
    if (sync != SyncPolicy::kDisk || size < kWorthWriting) continue;
    if (auto file = open_file(AT_FDCWD, entry.path().string(), O_RDONLY | O_NOFOLLOW)) {
      (void)::sync_file_range(file->get(), 0, 0, SYNC_FILE_RANGE_WRITE);
    }
  }
  return sum;
}

}  // namespace

ImageWatcher::ImageWatcher(Progress& progress, ImageWriter& writer, SyncPolicy sync) {
  try {
    thread_ = std::jthread([this, &progress, &writer, sync](const std::stop_token& stop) {
      const std::string directory = writer.path() + "/criu";
      const Span span(TraceKind::kImage, "digest what is written");
      std::unique_lock lock(mutex_);
      while (!wake_.wait_for(lock, stop, kSizePoll, [] { return false; }) &&
             !stop.stop_requested()) {
        progress.update("write", probe(directory, sync), 0);
        writer.digest_ahead(stop);
      }
    });
  } catch (const std::system_error&) {
    // No thread is to be had: it goes without.
  }
}

}  // namespace stasis
