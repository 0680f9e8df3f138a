// The mover: copies device memory that another process has exported out of GPUs, and back into
// them, with many threads and through pinned buffers of fixed size.
//
// Mover does so in this process, which then has CUDA contexts; MoverProcess (mover_process.h) is
// the same in a process of its own, where a driver that hangs or crashes does no harm. Neither
// holds anything of the other process's memory but during a copy. Not thread-safe; they use
// threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/cuda_state.h"
#include "base/fd.h"
#include "base/interrupt.h"
#include "base/units.h"
#include "direct/content.h"
#include "direct/ring.h"

namespace stasis::direct {

struct MoverOptions {
  unsigned threads = 0;  // for each GPU; 0: the processors' share of it, at most 16
  // Pinned host memory, for all GPUs together: two buffers for each thread.
  std::uint64_t ring_bytes = std::uint64_t{64} << 20;
  // Small enough for the processor's cache, between the bus and where the content goes: 16 threads
  // move 16 GiB of an H100 out at 43.2 and in at 46.2 GB/s through buffers of 2 MiB, at 39.9 and
  // 49.5 through 4 MiB, at 35.0 and 41.1 through 32 MiB (docs/results/2026-11-22-direct-path.md).
  std::uint64_t buffer_bytes = std::uint64_t{2} << 20;
  // MoverProcess: how long a copy may ask for no piece of content, while all that were asked for
  // are served, until the GPU or its driver is taken to hang. Zero: for ever.
  std::chrono::milliseconds silence{60000};
};
// What one GPU's share of the ring may be.
inline constexpr std::uint64_t kLeastRing = std::uint64_t{2} << 20;  // a thread with two buffers
inline constexpr std::uint64_t kMostRing = std::uint64_t{2} << 30;   // 16 with two of 64 MiB
// How much a mover is to copy, where that is not known beforehand.
inline constexpr std::uint64_t kAnyAmount = ~std::uint64_t{0};
// With a share of `ring_bytes` for each of `gpus`, or less where twice the `bytes` that are to be
// copied are less: of little, fewer threads copy; of more than the default, larger buffers are
// made. Which GPUs are needed is not always known beforehand (none named): two are commoner than
// eight, and there is enough for sixteen.
MoverOptions options_for(std::span<const GpuUuid> gpus,
                         std::uint64_t ring_bytes = MoverOptions().ring_bytes,
                         std::uint64_t bytes = kAnyAmount);

struct CopyReport {
  std::uint64_t bytes = 0;
  Seconds seconds{0};      // copying alone
  Seconds map_seconds{0};  // importing, mapping, and letting go again
  // Of `bytes`: what the content had already; copying in, what the GPUs had.
  std::uint64_t left_out = 0;
};

// Bytes of a GPU that no operation needs for now.
struct SpareRoom {
  GpuUuid gpu;
  std::uint64_t bytes = 0;
};

// What copy_in() is going to copy to a GPU: all of it, in the order of its content.
struct PrefetchRequest {
  GpuUuid gpu;
  std::uint64_t room = 0;  // bytes of the GPU that may be taken for it until then
  struct Part {
    std::uint64_t offset = 0;  // of the content
    std::uint64_t bytes = 0;
  };
  std::vector<Part> parts;
};

class MemoryMover {
 public:
  virtual ~MemoryMover() = default;

  // Takes the segments' content to, or from, the places in `content` that they name. The
  // descriptors are closed and the memory is let go with any result, so that the owner's release
  // frees it. kInterrupted and kTimeout within a load's time (some 10 ms) unless the driver hangs;
  // kUsage for segments that make no sense; kNotSupported where the driver does not import them;
  // kOutOfGpuMemory; kNoAnswer where the GPU does not end a copy; else what `content` says. After
  // an error the content, or what the segments hold, is good for nothing.
  virtual Result<CopyReport> copy_out(std::vector<Segment> segments, Content& content,
                                      const Interrupt& interrupt, Clock::time_point deadline) = 0;
  virtual Result<CopyReport> copy_in(std::vector<Segment> segments, Content& content,
                                     const Interrupt& interrupt, Clock::time_point deadline) = 0;

  // Gets the GPUs ready to tell which chunks a content has already, while the target still runs:
  // the next copy_out() to a content with a digest_chunk() leaves those where they are. After
  // kNotSupported or kOutOfGpuMemory the mover copies all; after any other error this mover must
  // copy nothing.
  virtual Result<void> prepare_digests(const Interrupt& interrupt, Clock::time_point deadline) = 0;

  // How many bytes of each GPU the next copy_out() may keep, from the beginning of its content: the
  // owner's release does not free them. As with what prefetch() brings, the next copy_in() of the
  // same places takes it from there.
  virtual void keep(std::vector<SpareRoom> room) = 0;

  // Files that stay open until the next copy_in() has ended, also when this process has died and
  // the mover goes on: by their locks other tools know that the copy is under way.
  virtual void hold(std::vector<UniqueFd> files) = 0;

  // Prefetches the beginning of each GPU's content into memory of the mover's own, before the
  // process has memory there: as much as there is room for, and time until the interrupt. The next
  // copy_in() of the same places takes it from there, at the speed of the GPU's memory, and lets it
  // go; so do the next copy_out() and prefetch(). An error of the content, a GPU without room or
  // a deadline only ends it early; the report says how many bytes have come.
  virtual Result<CopyReport> prefetch(const std::vector<PrefetchRequest>& requests,
                                      Content& content, const Interrupt& interrupt,
                                      Clock::time_point deadline) = 0;

  // It was given up because it did nothing for too long: another mover with the same work would be,
  // too.
  virtual bool was_silent() const { return false; }
};

// Lets this process see every GPU, also those that CUDA_VISIBLE_DEVICES hides from its user: the
// target may have others. Before the first call of the driver, with one thread.
void see_every_gpu();

class Mover final : public MemoryMover {
 public:
  // The driver and the ring's memory, without a context on any GPU. kOutOfHostMemory, kUsage for a
  // ring that is too small.
  static Result<Mover> start(const MoverOptions& options);
  // Contexts on `gpus` (none: on every GPU that this process sees), and the ring pinned: with that,
  // all that takes time and can be done while the target runs. Once, before the first copy. A GPU
  // that is not named costs its context at the first copy. kOutOfGpuMemory, kOutOfHostMemory,
  // kGpuMismatch for a GPU that the driver does not show; then only its end is left.
  Result<void> open(std::span<const GpuUuid> gpus, const Interrupt& interrupt,
                    Clock::time_point deadline);
  // Both.
  static Result<Mover> prepare(const MoverOptions& options, std::span<const GpuUuid> gpus,
                               const Interrupt& interrupt, Clock::time_point deadline);
  Mover(Mover&&) noexcept;
  Mover& operator=(Mover&&) = delete;
  ~Mover() override;

  Result<CopyReport> copy_out(std::vector<Segment> segments, Content& content,
                              const Interrupt& interrupt, Clock::time_point deadline) override;
  Result<CopyReport> copy_in(std::vector<Segment> segments, Content& content,
                             const Interrupt& interrupt, Clock::time_point deadline) override;
  Result<void> prepare_digests(const Interrupt& interrupt, Clock::time_point deadline) override;
  void keep(std::vector<SpareRoom> room) override;
  void hold(std::vector<UniqueFd> files) override;
  Result<CopyReport> prefetch(const std::vector<PrefetchRequest>& requests, Content& content,
                              const Interrupt& interrupt, Clock::time_point deadline) override;

  // The same with a Content for each copying thread: `begin` is told once how many there are,
  // before `of` is asked for any.
  struct Contents {
    std::function<Result<void>(unsigned threads)> begin;
    std::function<Content&(unsigned thread)> of;
    std::uint64_t digest_chunk = 0;  // as the content says
    std::uint64_t zero_chunk = 0;
  };
  Result<CopyReport> copy(Direction direction, std::vector<Segment> segments,
                          const Contents& contents, const Interrupt& interrupt,
                          Clock::time_point deadline);
  Result<CopyReport> prefetch(const std::vector<PrefetchRequest>& requests,
                              const Contents& contents, const Interrupt& interrupt,
                              Clock::time_point deadline);
  // What prefetch() holds or a copy_out() has kept; a copy_in() that has used it leaves this to
  // its caller.
  void drop_prefetched();

  const Ring& ring() const;

 private:
  struct State;
  class Copying;
  explicit Mover(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace stasis::direct
