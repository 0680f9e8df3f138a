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

#include "checkpoint/process_tree.h"
#include "direct/environment.h"
#include "driver/gpu_map.h"

namespace stasis {

// Bytes of host memory that a mover takes which is to copy `bytes`.
std::uint64_t mover_memory(const Environment& env, std::span<const GpuUuid> gpus,
                           std::uint64_t bytes);

// Bytes that other work will take meanwhile in the memory cgroup of that directory.
using HostMemoryToCome = std::function<std::uint64_t(const std::string& directory)>;
// Checks that there is room for the mover under the limits of the tool's own memory cgroups.
// Without it the kernel would kill a process, and the largest is the job: kNotSupported.
Result<void> check_mover_memory(const Environment& env, std::span<const GpuUuid> gpus,
                                std::uint64_t bytes, const HostMemoryToCome& to_come);

// The error of a mover as an error of the operation. A mover that is lost, or not done in its time,
// says nothing of the program, which the driver may still hold. The driver does without what the
// mover lacks, be it memory, a thread or a descriptor; but the files of an image, into which it
// copies, fail for both.
Error of_mover(Error error, bool into_image = false);

// A disk may be this much slower than memory at its worst: 20 MB/s.
inline constexpr int kSlowDisk = 10;

class MoverLease {
 public:
  using Made = Result<std::shared_ptr<direct::MemoryMover>>;

  // The GPUs on which the mover has contexts: those that the tree uses; those on which the evicted
  // memory of these processes comes back, as far as it was written down, and how much that is.
  void use_gpus_of(const ProcessTree& tree);
  void use_gpus_of(const std::vector<const Process*>& processes, std::span<const GpuPair> pairs);
  void use_no_gpus() { gpus_.clear(); }
  void add_gpu(const GpuUuid& gpu);
  const std::vector<GpuUuid>& gpus() const { return gpus_; }
  // How much it is to copy. Of a mover that was begun before, the ring stays as it is.
  void expect(std::uint64_t bytes) { bytes_ = bytes; }
  std::uint64_t expected(const Environment& env) const {
    return env.any_amount ? direct::kAnyAmount : bytes_;
  }

  // The driver has restored one of the processes before: no context may be made while they run
  // (direct/mover_server.h).
  void wait_until_quiesced() { contexts_when_quiesced_ = true; }

  // Makes, in a thread of its own, as much of a mover as may be made while the programs run.
  void begin(const Environment& env);
  // The same with work of the caller's on that mover, which `stop` ends.
  void begin(std::function<Made()> work, std::shared_ptr<Interrupt> stop);
  bool begun() const { return coming_.valid(); }
  // Tells what was begun to stop, and waits for it.
  void settle();
  // Waits for the mover that was begun, and does not take it: the caller asks for it once more.
  Result<void> join();
  // The mover that was begun, or another: contexts and all.
  Result<void> take(const Environment& env, const MoverRequest& request);
  // The same for `bytes` of memory that come back, `in_images` of them from images.
  Result<void> take_to_bring_back(const Environment& env, const std::vector<const Process*>& of,
                                  std::uint64_t bytes, std::uint64_t in_images);
  // Takes the mover that was begun, if it was made.
  void collect();
  // Gets the mover ready to tell which chunks an earlier image has; makes another if this one is
  // lost.
  Result<void> prepare_digests(const Environment& env);
  // Another one, in the place of one that copies nothing any more.
  Result<void> replace(const Environment& env);
  // Whether this mover leaves out what its content has.
  bool has_digests() const { return mover_ != nullptr && has_digests_; }

  direct::MemoryMover* operator->() const { return mover_.get(); }
  explicit operator bool() const { return mover_ != nullptr; }
  // Gives the mover back, and its host memory too: the driver needs that.
  void end(const Environment& env);

  // Copies out in a thread of its own, with this mover or, if there is none, with one made there.
  // `digests`: one that is made there gets ready for them.
  void copy_beside(const Environment& env, std::vector<direct::Segment> segments,
                   std::shared_ptr<direct::Content> content, std::chrono::milliseconds time,
                   bool digests);
  bool copies_beside() const { return copying_.valid(); }
  // Waits for the end of that copy.
  void wait_for_copy();
  // Its result; nothing if there was no copy.
  const std::optional<Result<void>>& copied() const { return copied_; }
  // Whether it has found that less than half was zeros.
  bool found_few_zeros() const { return few_zeros_; }
  void forget_copy() { copied_.reset(); }

 private:
  Made take_begun(const Environment& env, const MoverRequest& request);

  std::vector<GpuUuid> gpus_;
  std::uint64_t bytes_ = direct::kAnyAmount;
  bool contexts_when_quiesced_ = false;
  std::future<Made> coming_;
  std::shared_ptr<Interrupt> stop_;  // of what was begun
  std::shared_ptr<direct::MemoryMover> mover_;
  bool has_digests_ = false;

  struct Copied {
    std::shared_ptr<direct::MemoryMover> mover;
    Result<direct::CopyReport> done;
    bool digests = false;
  };
  std::future<Copied> copying_;
  std::optional<Result<void>> copied_;
  bool few_zeros_ = false;
};

}  // namespace stasis
