// Copies GPU memory into an image while its programs run (docs/adr/0054-pre-copy.md). When they
// stand still, GPUs and writer find by digests what is stored already.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "direct/agent_set.h"
#include "direct/content_sources.h"
#include "direct/environment.h"
#include "direct/image_content.h"
#include "direct/mover_lease.h"

namespace stasis {

// Whether GPU memory of that size is to be pre-copied; says why not if only the disk's room is
// short: what changes until the programs stand still takes room until the image is complete.
bool is_worth_precopying(const Environment& env, const IntoImage& image, std::uint64_t bytes);

// How long it may take to pre-copy `bytes`, of GPUs or of the host: five minutes, and 20 MB/s. What
// is not stored by then is copied when the job stands still. STASIS_PRECOPY_MS, in milliseconds, is
// for tests.
std::chrono::milliseconds precopy_time(std::uint64_t bytes);

// The memory of all these agents' programs, held for a moment so that the agents name all of it.
// While this lives, a program that frees GPU memory waits until the mover has let all of it go.
class GpuPrecopy {
 public:
  // With the gates closed. Nothing if an agent does not know how: one of an earlier version.
  static Result<std::optional<GpuPrecopy>> begin(AgentSet& agents);
  GpuPrecopy(GpuPrecopy&& other) noexcept;
  GpuPrecopy& operator=(GpuPrecopy&&) = delete;
  ~GpuPrecopy();

  // With the gates open again. Ends early, and well, when a program frees memory or ends, at its
  // deadline, and where the mover breaks down and another one can be had; and says so.
  // kInterrupted; else what MemoryMover::copy_out() says.
  Result<void> run(const Environment& env, MoverLease& mover, ImageContent& image);

 private:
  explicit GpuPrecopy(AgentSet& agents) : agents_(&agents) {}
  void end();

  AgentSet* agents_;
  std::vector<direct::Segment> segments_;
  std::uint64_t bytes_ = 0;
};

// When the image's content is complete: says so where nearly all that was pre-copied had changed.
void tell_of_changes(const Environment& env, const ImageContent& image);

}  // namespace stasis
