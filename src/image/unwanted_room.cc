#include "image/unwanted_room.h"

#include <fcntl.h>

namespace stasis {

void UnwantedRoom::add(const UniqueFd& file, PrecopiedChunks::Ranges ranges) {
  UniqueFd kept(::fcntl(file.get(), F_DUPFD_CLOEXEC, 0));
  if (kept.valid()) files_.emplace_back(std::move(kept), std::move(ranges));
}

void UnwantedRoom::give_back() {
  for (const auto& [file, ranges] : std::exchange(files_, {}))
    for (const auto& [position, bytes] : ranges)
      (void)::fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                        static_cast<off_t>(position), static_cast<off_t>(bytes));
}

}  // namespace stasis
