// Large host memory of processes that stand still goes into an image by all processors, and not by
// CRIU, which moves 1.5 GiB/s: read, written to host/, given up by the processes, and after CRIU's
// restore written back. docs/adr/0047-host-memory.md. Private to src/operations.
//
// From the moment it is given up it is in the image alone, until the tree has ended or, if that
// goes on, bring_back() has put it back: the journal and the processes say so (parking.h), and no
// tool lets them run.
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
  // What there is of the CUDA processes of `group`, whose threads are parked by it. False if that
  // is less than is worth it, unless `always`.
  bool find(const Group& group, bool always);
  // Saves it. On an error the processes are untouched.
  Result<void> save(const Environment& env, const UniqueFd& image_dir, ContentOptions options);
  // For the manifest, if anything was saved.
  const std::optional<ContentRecord>& record() const { return record_; }
  // What the base had of it.
  std::uint64_t reused_bytes() const { return reused_bytes_; }

  // Has the processes give up what was saved. On an error some may have gone.
  Result<void> drop(Journal& journal);
  // Whether the image must be kept for bring_back().
  bool is_away() const { return is_away_; }
  // Undoes drop(), if there was one. On an error the processes must not run.
  Result<void> bring_back(const Environment& env, Journal& journal);

 private:
  struct Source {
    proc::AddressSpace space;
    std::vector<AddressRange> ranges;
  };
  std::vector<Source> sources_;  // of each stream
  std::optional<ContentRecord> record_;
  std::optional<ContentReader> content_;
  std::uint64_t bytes_ = 0;
  std::uint64_t reused_bytes_ = 0;
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
