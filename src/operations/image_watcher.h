// What is written of an image while its job stands still. Private to src/operations.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "base/progress.h"
#include "image/image_writer.h"

namespace stasis {

// Watches what CRIU writes, from a thread of its own: tells how much it is, has the kernel begin to
// write it to the disk, so that the sync at the end finds little left (2.7 GB on an H100 machine:
// 1.3 s of sync after 1.0 s of writing to memory, one after the other), and digests it (50 ms at
// the end). Ends at once when destroyed: the job stands still meanwhile.
class ImageWatcher {
 public:
  ImageWatcher(Progress& progress, ImageWriter& writer, SyncPolicy sync);

 private:
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::jthread thread_;  // last: it uses the others
};

}  // namespace stasis
