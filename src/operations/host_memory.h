// Large host memory of processes that stand still goes into an image by all processors, and not by
// CRIU, which moves 1.5 GiB/s: read, written to host/, given up by the processes, and after CRIU's
// restore written back. docs/adr/0047-host-memory.md. Private to src/operations.
//
// Only of a dump that ends its tree. From the moment it is given up until the tree has ended it is
// in the image alone: the journal and the processes say so (parking.h), no tool lets them run, and
// bring_back() undoes it.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "checkpoint/group.h"
#include "checkpoint/journal.h"
#include "direct/environment.h"
#include "image/content_reader.h"
#include "image/content_writer.h"
#include "proc/address_space.h"
#include "proc/zero_pages.h"

namespace stasis {

class HostMemory {
 public:
  // Saves what is there of the CUDA processes of `group`, whose threads are parked by it. Nothing
  // if that is less than is worth it, unless `always`. On an error the processes are untouched.
  Result<void> save(const Environment& env, const Group& group, const UniqueFd& image_dir,
                    ContentOptions options, bool always);
  // For the manifest, if anything was saved.
  const std::optional<ContentRecord>& record() const { return record_; }
  std::uint64_t bytes() const { return bytes_; }

  // Has the processes give up what was saved. On an error some may have gone.
  Result<void> drop(Journal& journal);
  // Whether the image must be kept for bring_back().
  bool is_away() const { return is_away_; }
  // Undoes drop(), if there was one. On an error the processes must not run.
  Result<void> bring_back(const Environment& env, Journal& journal, const UniqueFd& image_dir);

 private:
  struct Source {
    proc::AddressSpace space;
    std::vector<AddressRange> ranges;
  };
  std::vector<Source> sources_;  // of each stream
  std::optional<ContentRecord> record_;
  std::uint64_t bytes_ = 0;
  bool is_away_ = false;
};

// Writes all host memory of an image into its processes, which stand still, and says in them that
// it is there. Those that have ended are left out. kImageCorrupt; kInterrupted.
Result<void> fill_host_memory(const Environment& env, const ContentReader& content,
                              const Interrupt& interrupt);

// The same after a dump that was cut short, as far as its record says that anything is away.
// kImageIncomplete: it is not where it was.
Result<void> bring_host_memory_back(const Environment& env, const JournalRecord& record);

}  // namespace stasis
