// CRIU's logs of an image: those of its dump and of restores from it.
//
// No link is followed and no pipe waited for: the directory may come from an untrusted source.
// Functions only; any thread.
#pragma once

#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "criu/criu_log.h"

namespace stasis {

struct ImageLog {
  std::string folder;
  std::string name;
  timespec changed{};
  std::uint64_t bytes = 0;

  std::string path() const { return folder + "/" + name; }
};

// Those in an image, those that stand beside it, and those of dumps to that name that did not come
// to their end; of several images each log once. The path of a log stands for that one. The newest
// first, at most 100. Empty if there are none. kNotPermitted, kIo, kUsage.
Result<std::vector<ImageLog>> find_image_logs(const std::vector<std::string>& images_dirs);

// A regular file. kIo, kNotPermitted.
Result<UniqueFd> open_image_log(const ImageLog& log);
Result<CriuLog> read_image_log(const ImageLog& log);

// "2026-11-21T09:30:00Z".
std::string utc_text(const timespec& moment);

}  // namespace stasis
