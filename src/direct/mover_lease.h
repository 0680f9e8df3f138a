// The mover of one operation: made in the background while programs run or the driver is at work,
// taken when it is needed, and kept over several copies. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/group.h"
#include "direct/environment.h"
#include "driver/gpu_map.h"

namespace stasis {

// Bytes of host memory that a mover takes.
std::uint64_t mover_memory(const Environment& env, std::span<const GpuUuid> gpus);

// Bytes that will be taken meanwhile in the memory cgroup of that directory.
using HostMemoryToCome = std::function<std::uint64_t(const std::string& directory)>;
// There is room for the mover under the limits of our own memory cgroups. Otherwise the kernel
// would kill a process, and the largest is the job: kNotSupported.
Result<void> check_mover_memory(const Environment& env, std::span<const GpuUuid> gpus,
                                const HostMemoryToCome& to_come);

// A mover that is lost, or not done in the time that we give it, says nothing of the program, which
// the driver may still hold. What it lacks, be it memory, a thread or a descriptor, the driver does
// without; but the files of an image, into which it copies, fail for both.
Error of_mover(Error error, bool into_image = false);

// A disk may be this much slower than memory at its worst: 20 MB/s.
inline constexpr int kSlowDisk = 10;

class MoverLease {
 public:
  using Made = Result<std::shared_ptr<direct::MemoryMover>>;

  // The GPUs on which it has contexts: those that the group uses; those where what is away of these
  // comes back, as far as it was written down.
  void use_gpus_of(const Group& group);
  void use_gpus_of(const std::vector<const Process*>& processes, std::span<const GpuPair> pairs);
  void use_no_gpus() { gpus_.clear(); }
  void add_gpu(const GpuUuid& gpu);
  const std::vector<GpuUuid>& gpus() const { return gpus_; }

  // The driver has restored one of the processes before: no context may be made while they run
  // (direct/mover_server.h).
  void wait_for_standstill() { contexts_at_standstill_ = true; }
  bool waits_for_standstill() const { return contexts_at_standstill_; }

  // In a thread of its own: as much of a mover as may be made while the programs run.
  void begin(const Environment& env);
  // The same with work of the caller's on it, which `stop` ends.
  void begin(std::function<Made()> work, std::shared_ptr<Interrupt> stop);
  bool begun() const { return coming_.valid(); }
  // Ends what was begun, and waits for it.
  void settle();
  // Waits for the mover that was begun, and does not take it: it is to be asked for once more.
  Result<void> join();
  // The mover that was begun, or another: contexts and all.
  Result<void> take(const Environment& env, const MoverRequest& request);
  // With what was begun ended, and `in_images` bytes to be read from images.
  Result<void> take_to_bring_back(const Environment& env, const std::vector<const Process*>& of,
                                  std::uint64_t in_images);
  // The mover that was begun, if it was made.
  void collect();
  // Ready to tell which chunks an earlier image has; with another mover if this one is lost.
  Result<void> prepare_digests(const Environment& env);

  direct::MemoryMover* operator->() const { return mover_.get(); }
  explicit operator bool() const { return mover_ != nullptr; }
  // Takes it back, and its host memory too: the driver needs that.
  void end(const Environment& env);

  // Copies out in a thread of its own, with this mover or, if there is none, one made there.
  void copy_beside(const Environment& env, std::vector<direct::Segment> segments,
                   std::shared_ptr<direct::Content> content, std::chrono::milliseconds time);
  bool copies_beside() const { return copying_.valid(); }
  // Waits for the end of that.
  void wait_for_copy();
  // What became of it; nothing if there was none.
  const std::optional<Result<void>>& copied() const { return copied_; }
  void forget_copy() { copied_.reset(); }

 private:
  Made take_begun(const Environment& env, const MoverRequest& request);

  std::vector<GpuUuid> gpus_;
  bool contexts_at_standstill_ = false;
  std::future<Made> coming_;
  std::shared_ptr<Interrupt> stop_;  // of what was begun
  std::shared_ptr<direct::MemoryMover> mover_;

  struct Copied {
    std::shared_ptr<direct::MemoryMover> mover;
    Result<void> done;
  };
  std::future<Copied> copying_;
  std::optional<Result<void>> copied_;
};

}  // namespace stasis
