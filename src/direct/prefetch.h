// Content that a mover has on the GPUs before the processes have memory there, or keeps there for
// them: it comes back at the speed of the GPU's memory. One thread at a time.
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

// Where content may be brought before there is memory for it.
struct PrefetchRoom {
  std::map<GpuUuid, std::uint64_t> room;  // bytes that nothing needs until then
  std::vector<GpuPair> pairs;             // where what was on one GPU goes
  std::uint64_t host_bytes = 0;           // that will be taken meanwhile under our own limits
};

class Prefetch {
 public:
  Prefetch(MoverLease& mover, ContentSources& content) : mover_(mover), content_(content) {}

  // Before it is looked what is free on the GPUs. kInterrupted.
  Result<void> come_back(const Interrupt& interrupt) { return reservation_.come_back(interrupt); }
  // In the background: a mover, if the memory of one of these is away.
  void begin(const Environment& env, const std::vector<const Process*>& processes,
             std::span<const GpuPair> pairs);
  // In the background: a mover, and the content that the known images have of these, to the GPUs
  // for which there is room.
  void begin(const Environment& env, const std::vector<Pid>& pids, const PrefetchRoom& room);
  // Lets the mover keep on the GPUs what it is about to copy out, as far as there is room.
  void keep_on_gpus(Driver& driver, const Group& group);

  bool any() const { return stop_ != nullptr; }
  // What was begun is told to stop, and its mover is ours again.
  void collect();
  // Lets go of what is held on the GPUs. False: nothing was.
  bool release();
  // Lets go of it if it may not be there besides the processes' own memory.
  void reserve_both();
  // Lets go of it if others have taken so much since that not all of `needed` has room beside it.
  void make_room(Driver& driver, std::span<const GpuUse> needed, std::span<const GpuPair> pairs);
  // The mover has used it up, and let go of it.
  void used() { stop_.reset(); }
  // What is on the GPUs is all there is of it: see GpuReservation::leave().
  void leave() { reservation_.leave(); }

 private:
  void begin(const Environment& env, std::vector<direct::Ahead> ahead);

  MoverLease& mover_;
  ContentSources& content_;
  // Of what is brought there, or has stayed.
  std::shared_ptr<Interrupt> stop_;
  bool on_gpus_ = false;  // there is something, or to be brought
  GpuReservation reservation_;
};

}  // namespace stasis
