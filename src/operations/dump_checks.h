// What a dump refuses before it touches anything, and how it will write. Private to src/operations.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/process_tree.h"
#include "direct/content_sources.h"
#include "image/content_base.h"
#include "image/image_writer.h"
#include "operations/operations.h"
#include "proc/held_files.h"

namespace stasis {

// What an image takes at most.
struct ImageNeeds {
  std::uint64_t bytes = 0;
  std::optional<ImageRoom> room = {};  // if there is no room for so much
};
// Refuses a dump that cannot fit. Counts private memory only: shared files may stay outside.
// `base` counts as if nothing had changed since: if it has, the dump fails in time all the same.
// `zeros_are_left_out`: GPU memory that does not fit is no reason to refuse it yet.
Result<ImageNeeds> check_disk_space(const ProcessTree& tree, const UniqueFd& dir,
                                    const std::string& path, const ContentBase* base,
                                    bool zeros_are_left_out);

// CRIU says so too, but only when the GPU's memory has been moved; or never, of what it loses. A
// user who insists is told what it is.
Result<void> refuse_undumpable(const Environment& env, const std::vector<TreeMember>& members,
                               const CriuOptions& criu, const DumpOptions& options);

// While the tree stands still: what `files` finds. kUndumpable.
Result<void> refuse_held(const Environment& env, const std::vector<TreeMember>& members,
                         proc::HeldFiles& files);

// CRIU would stop the tool that waits for it.
Result<void> refuse_from_within(Pid root);

// Whether there may be something to take over from the base.
bool may_deduplicate(const Environment& env, const DumpOptions& options);
// The base of GPU memory, and that of host memory. Nothing if all is to be written. Reads all of
// it, while the job runs. kInterrupted.
Result<std::shared_ptr<const ContentBase>> open_host_base(const Environment& env,
                                                          const DumpOptions& options);
Result<std::shared_ptr<const ContentBase>> open_base(const Environment& env,
                                                     const DumpOptions& options);

// Whether its files are written past the page cache.
bool past_the_cache(const DumpOptions& options);

// A tree that runs on waits neither for checksums nor for the disk: its image is completed, and
// goes there, when it runs again. Not where that image takes another's place: until it is safe the
// other must be there to fall back on.
SyncPolicy when_to_sync(const DumpOptions& options, const ImageWriter& writer);

}  // namespace stasis
