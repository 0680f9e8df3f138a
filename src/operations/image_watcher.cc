#include "operations/image_watcher.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>

#include "base/fd.h"
#include "base/trace.h"
#include "base/units.h"
#include "image/directory.h"

namespace stasis {

namespace {

constexpr std::chrono::milliseconds kSizePoll{50};
// Of so many times what a look takes: a tree of 200 processes has 2,500 files in the folder, and
// CRIU waits with each new one while the folder is listed.
constexpr int kRest = 20;
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
      Clock::duration pause = kSizePoll;
      while (!wake_.wait_for(lock, stop, pause, [] { return false; }) && !stop.stop_requested()) {
        const auto start = Clock::now();
        progress.update("write", probe(writer.criu_dir(), sync), 0);
        const auto looked = Clock::now() - start;
        writer.prefetch_digests(stop);
        pause = std::max<Clock::duration>(kSizePoll, looked * kRest);
      }
    });
  } catch (const std::system_error&) {
    // No thread is to be had: it goes without.
  }
}

}  // namespace stasis
