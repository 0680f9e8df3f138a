// The tree that a restore has made, from the moment at which CRIU has it standing complete until it
// runs. No other tool knows of it yet, so it is ended on every path out on which it was not said to
// be well.
//
// Private to src/operations. Owns the processes; one thread at a time.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "checkpoint/journal.h"
#include "checkpoint/process.h"
#include "operations/operations.h"

namespace stasis {

class RestoredJob {
 public:
  // `manifest` must outlive the job.
  explicit RestoredJob(const Manifest& manifest) : manifest_(manifest) {}
  ~RestoredJob() { (void)end(); }
  RestoredJob(const RestoredJob&) = delete;
  RestoredJob& operator=(const RestoredJob&) = delete;

  // Takes hold of every process while all of them stand still: later, one that ends at once could
  // not be told from another with its number. Remembers what each had on the GPUs, for `stasis
  // resume`, and if `image` is not empty, that the content stays in there, without which none could
  // be resumed. Of several that stay suspended, which come back together, each is remembered with
  // the root. kImageCorrupt if one of the manifest's processes is not there; kNoSpace, kIo.
  Result<void> take_hold(Driver& driver, std::span<const Gpu> old_gpus, const std::string& image,
                         bool leave_suspended);
  // CRIU is done with it.
  void adopt(RestoredTree tree) { root_.emplace(std::move(tree)); }

  // For the journal: the CUDA processes, and where to bring them.
  std::vector<JournalTarget> targets(bool leave_suspended) const;

  // The targets that are to run. One that was suspended by the direct path is none of them: it has
  // its GPU memory in its own.
  std::vector<const Process*> to_run(std::span<const JournalTarget> targets) const;

  // Brings the GPU state of each target back, all at the same time; then, after `before_they_run`,
  // lets them go on, and verifies that.
  Result<void> bring_back(std::span<const JournalTarget> targets, std::span<const GpuPair> pairs,
                          Progress& progress, const std::function<void()>& before_they_run);

  // kProcessGone if one of its processes has ended.
  Result<void> check_alive() const;

  // Bytes of its memory that are there by now, as far as can be told.
  std::uint64_t resident_bytes() const;

  // All is well: hands it over. What was remembered for `stasis resume` is forgotten, but for
  // those that stay suspended.
  RestoredTree keep(bool leave_suspended);
  // In the order of the manifest; nothing for one that was a zombie at the dump.
  const std::vector<std::optional<Process>>& processes() const { return processes_; }

  // Kills all of it and waits. True if nothing of it is left, also if there was nothing.
  bool end();

 private:
  bool is_ours() const;
  const Manifest& manifest_;
  std::vector<std::optional<Process>> processes_;
  std::optional<RestoredTree> root_;
  std::optional<bool> over_;  // kept, or ended: whether nothing is left to be ended
};

}  // namespace stasis
