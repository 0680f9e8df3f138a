#include "operations/image_watcher.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <chrono>
#include <string>
#include <system_error>

#include "base/fd.h"
#include "base/trace.h"
#include "image/directory.h"

namespace stasis {

namespace {

constexpr std::chrono::milliseconds kSizePoll{50};
constexpr std::uint64_t kWorthWriting = 1ULL << 20;

// By the folder that is open: another user may own the one that it lies in, and give its name to
// something else meanwhile.
std::uint64_t probe(const UniqueFd& folder, SyncPolicy sync) {
  const auto names = list_directory(folder, "criu");
  if (!names) return 0;
  std::uint64_t sum = 0;
  for (const std::string& name : *names) {
    struct stat info {};
    if (::fstatat(folder.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !is_regular_file(info)) {
      continue;
    }
    const auto size = static_cast<std::uint64_t>(info.st_size);
    sum += size;
    if (sync != SyncPolicy::kDisk || size < kWorthWriting) continue;
    if (auto file = open_checked(folder.get(), name, O_RDONLY | O_NOFOLLOW, is_regular_file)) {
      (void)::sync_file_range(file->get(), 0, 0, SYNC_FILE_RANGE_WRITE);
    }
  }
  return sum;
}

}  // namespace

ImageWatcher::ImageWatcher(Progress& progress, ImageWriter& writer, SyncPolicy sync) {
  try {
    thread_ = std::jthread([this, &progress, &writer, sync](const std::stop_token& stop) {
      const Span span(TraceKind::kImage, "digest what is written");
      std::unique_lock lock(mutex_);
      while (!wake_.wait_for(lock, stop, kSizePoll, [] { return false; }) &&
             !stop.stop_requested()) {
        progress.update("write", probe(writer.criu_dir(), sync), 0);
        writer.prefetch_digests(stop);
      }
    });
  } catch (const std::system_error&) {
    // No thread is to be had: it goes without.
  }
}

}  // namespace stasis
