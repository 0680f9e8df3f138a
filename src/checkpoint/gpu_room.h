// Room on GPUs, from the look at what is free until the driver, and then the agents, have taken it.
// The driver gives a process up that it finds no room for (NVIDIA/cuda-checkpoint#44), and two
// operations that look at the same moment would both find the room of one.
//
// A lock file for each GPU beside the journal. Where there can be none, as in a read-only
// directory, nothing is held. Moves. One thread at a time.
#pragma once

#include <chrono>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/interrupt.h"
#include "base/result.h"
#include "driver/driver.h"

namespace stasis {

class GpuRoom {
 public:
  // How one waits for the operations that hold one of the GPUs.
  struct Wait {
    const Interrupt& interrupt;
    // Told once, if it takes over a second. May be empty.
    std::function<void(std::string)> tell = {};
    // Others may stand in line before it.
    std::chrono::milliseconds longest = std::chrono::minutes(10);
  };

  // Nothing is held.
  GpuRoom() = default;
  GpuRoom(GpuRoom&&) = default;
  GpuRoom& operator=(GpuRoom&& other) noexcept {
    std::swap(locks_, other.locks_);
    return *this;
  }
  GpuRoom(const GpuRoom&) = delete;
  GpuRoom& operator=(const GpuRoom&) = delete;
  ~GpuRoom() { leave(); }
  // Until leave(). kInterrupted; kTimeout after the longest wait.
  static Result<GpuRoom> hold(const std::set<GpuUuid>& gpus, const Wait& wait);
  // hold() for where this comes back, and a look: kOutOfGpuMemory, with the figures. Where the
  // driver does not tell what is free, all fits.
  static Result<GpuRoom> find(Driver& driver, std::span<const GpuUse> needed,
                              std::span<const GpuPair> pairs, const Wait& wait);
  // The memory is taken, or is not asked for.
  void leave();

 private:
  std::vector<UniqueFd> locks_;
};

}  // namespace stasis
