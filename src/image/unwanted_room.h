// Room in data files for what was pre-copied and is in no index: it goes back to the file system
// when the job runs again, because that takes 0.4 s for each GiB. docs/adr/0054-pre-copy.md.
#pragma once

#include <utility>
#include <vector>

#include "base/fd.h"
#include "image/precopied_chunks.h"

namespace stasis {

class UnwantedRoom {
 public:
  // Keeps the file open.
  void add(const UniqueFd& file, PrecopiedChunks::Ranges ranges);
  // Once. On a file system without holes nothing happens: the room goes with the image.
  void give_back();

 private:
  std::vector<std::pair<UniqueFd, PrecopiedChunks::Ranges>> files_;
};

}  // namespace stasis
