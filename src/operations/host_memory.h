// Large host memory of processes that stand still goes into an image by all processors, and not by
// CRIU, which moves 1.5 GiB/s: read, and written to host/, while criu does not see it
// (InsideCriu). After CRIU's restore it is written into the processes.
// docs/adr/0047-host-memory.md. Private to src/operations.
//
// The dumped processes keep their memory: nothing has to be undone.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "checkpoint/process_tree.h"
#include "criu/inside_criu.h"
#include "direct/environment.h"
#include "image/content_reader.h"
#include "image/content_writer.h"
#include "proc/address_space.h"
#include "proc/host_memory.h"
#include "proc/zero_pages.h"

namespace stasis {

// A part of a stream, in one of the process's ranges.
struct HostPiece {
  std::size_t stream = 0;
  std::uint64_t offset = 0;  // in the stream
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;
};

class HostMemory {
 public:
  // The CUDA processes of `tree` whose threads are parked by it, or were when they were suspended;
  // nothing of it is kept.
  void choose(const ProcessTree& tree);
  // What memory those have, while they stay parked; also beside a criu that stops them. False if
  // that is less than is worth it, unless `always`.
  bool find(bool always);
  // Stores, while the processes run, what save() may find; again where much has changed meanwhile,
  // but not for longer than precopy_time(). save() then stores only what is new. Nothing is done if
  // there is less than that, or no room for it beside the image. docs/adr/0054-pre-copy.md. Errors
  // of ContentWriter.
  struct PrecopyLimits {
    std::uint64_t least = 0;        // bytes of memory
    std::uint64_t image_bytes = 0;  // about what the whole image takes, that memory too
  };
  Result<void> precopy(const Environment& env, const ProcessTree& tree, const UniqueFd& image_dir,
                       const ContentOptions& options, const PrecopyLimits& limits);
  // CRIU saves all: lets go of what find() has opened, and nothing is left in the image of what
  // precopy() has stored.
  Result<void> leave_to_criu(const UniqueFd& image_dir);
  // Keeps it from criu, and has the processes say so (parking.h): what CRIU restores of them lacks
  // it until fill_host_memory(). False if there is more than can be kept from it; then CRIU saves
  // all.
  Result<bool> hide(InsideCriu& pages);
  // Saves it, and lets go of what has it.
  Result<void> save(const Environment& env, const UniqueFd& image_dir,
                    const ContentOptions& options);
  // For the manifest, if anything was saved.
  const std::optional<ContentRecord>& record() const { return record_; }
  // What the base had of it.
  std::uint64_t reused_bytes() const { return reused_bytes_; }
  // What precopy() had stored of it.
  std::uint64_t precopied_bytes() const { return precopied_bytes_; }
  // The image's room for what that had stored in vain is free again. When the job runs.
  void give_back_room() { unwanted_.give_back(); }

 private:
  struct Source {
    ProcessId process;
    proc::AddressSpace space;
    UniqueFd pagemap;
    HostRanges found;
    Result<void> read(std::uint64_t address, std::span<std::byte> bytes) const {
      return read_host_memory(space, pagemap, found, address, bytes);
    }
  };
  // Processes of a tree, and those of them whose memory is looked for.
  struct Chosen {
    std::vector<Pid> all;
    std::vector<Source> sources;
  };
  static Chosen choose(const ProcessTree& tree,
                       const std::function<bool(const TreeMember&)>& wanted);
  // Those that have memory, as `find` sees it, and how much that is.
  static std::uint64_t find(
      Chosen chosen,
      const std::function<HostRanges(const proc::AddressSpace&, SharedObjects&)>& find,
      std::vector<Source>& sources);
  Result<void> create_writer(const UniqueFd& image_dir, ContentOptions options);
  using Deadline = std::chrono::steady_clock::time_point;
  static Result<std::uint64_t> look(
      const Environment& env, const std::vector<Source>& sources,
      const std::vector<HostPiece>& pieces, Deadline deadline,
      const std::function<Result<std::uint64_t>(std::span<const std::byte>)>& take);

  Chosen chosen_;                // until find() has looked at them
  std::vector<Source> sources_;  // of each stream, until all is saved
  std::optional<ContentWriter> writer_;
  std::uint64_t precopied_bytes_ = 0;
  UnwantedRoom unwanted_;
  std::optional<ContentRecord> record_;
  std::uint64_t bytes_ = 0;
  std::uint64_t reused_bytes_ = 0;
};

// No more of an image's host memory takes memory when it is filled: its chunks that are not zeros.
std::uint64_t most_filled(const ContentReader& content);
// How much does: pages of zeros do not. Reads the content, as long as `goes_on` says of what was
// counted. kImageCorrupt; kInterrupted.
Result<std::uint64_t> count_filled(const ContentReader& content,
                                   const std::function<bool(std::uint64_t)>& goes_on,
                                   Progress& progress, const Interrupt& interrupt);
// Writes all host memory of an image into its processes, which stand still, and says in them that
// it is there. Those that have ended are left out. kImageCorrupt; kInterrupted.
Result<void> fill_host_memory(const Environment& env, const ContentReader& content,
                              const Interrupt& interrupt);

}  // namespace stasis
