// Content that the mover prefetches to the GPUs before the processes have memory there, or keeps
// there for them: it is copied in at the speed of the GPU's memory. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "checkpoint/gpu_reservation.h"
#include "direct/content_sources.h"
#include "direct/mover_lease.h"

namespace stasis {

// Where the mover may prefetch content to.
struct PrefetchRoom {
  std::map<GpuUuid, std::uint64_t> room;  // bytes that no process needs until then
  std::vector<GpuPair> pairs;             // to which GPU the content of each goes
  std::uint64_t host_bytes = 0;           // taken meanwhile under the tool's limits
};

class Prefetch {
 public:
  Prefetch(MoverLease& mover, ContentSources& content) : mover_(mover), content_(content) {}

  // Called before the operation looks what is free on the GPUs. kInterrupted.
  Result<void> come_back(const Interrupt& interrupt) { return reservation_.come_back(interrupt); }
  // Makes a mover in the background, if the memory of one of these is away.
  void begin(const Environment& env, const std::vector<const Process*>& processes,
             std::span<const GpuPair> pairs);
  // Makes a mover in the background, which prefetches the content that the known images have of
  // these processes to the GPUs for which there is room.
  void begin(const Environment& env, const std::vector<Pid>& pids, const PrefetchRoom& room);
  // Lets the mover keep on the GPUs what it is about to copy out, as far as there is room.
  void keep_on_gpus(Driver& driver, const ProcessTree& tree);

  bool any() const { return stop_ != nullptr; }
  // Tells what was begun to stop, and takes its mover back.
  void collect();
  // Lets go of what the mover holds on the GPUs. False: it held nothing.
  bool release();
  // Lets go of it if another operation is about to restore: then it may not be there besides the
  // processes' own memory.
  void reserve_both();
  // Lets go of it if other programs have taken so much since that `needed` has no room beside it.
  void make_room(Driver& driver, std::span<const GpuUse> needed, std::span<const GpuPair> pairs);
  // The mover has used it up, and let go of it.
  void used() { stop_.reset(); }
  // What is on the GPUs is all there is of it: see GpuReservation::leave().
  void leave() { reservation_.leave(); }

 private:
  void begin(const Environment& env, std::vector<direct::PrefetchRequest> requests);

  MoverLease& mover_;
  ContentSources& content_;
  // Stops what was begun; null if nothing is.
  std::shared_ptr<Interrupt> stop_;
  bool on_gpus_ = false;  // there is something, or to be brought
  GpuReservation reservation_;
};

}  // namespace stasis
