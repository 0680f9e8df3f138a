// What an operation needs from its caller, and by which way it moves GPU memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"
#include "direct/mover.h"
#include "direct/mover_request.h"
#include "driver/driver.h"

namespace stasis {

// What every operation needs from its caller. All referred to must outlive the call.
struct Environment {
  Driver& driver;
  const Interrupt& interrupt;
  // May be called from a thread of the operation's own, never from two at once.
  Progress& progress;
  // Things worth knowing that are no error ("--shell-job is set because ..."). May be empty.
  std::function<void(std::string)> note;
  // May be empty: then GPU memory goes through the driver alone.
  std::function<Result<std::shared_ptr<direct::MemoryMover>>(const MoverRequest&)> mover = {};
  // Takes it back, with all host memory that it has: the operation needs it no more. May be empty.
  std::function<void()> end_mover = {};
  // The share of its ring for each GPU.
  std::uint64_t ring_bytes = direct::MoverOptions().ring_bytes;
  // Its mover is used again, for other amounts than the first: the ring is made for any.
  bool any_amount = false;

  // The same, stopped by another interrupt.
  Environment with(const Interrupt& other) const {
    return {driver, other, progress, note, mover, end_mover, ring_bytes, any_amount};
  }
  Environment for_any_amount() const {
    Environment out = *this;
    out.any_amount = true;
    return out;
  }

  void tell(std::string text) const {
    if (note) note(std::move(text));
  }
};

// By whom GPU memory is moved.
enum class MemoryPath {
  kAutomatic,  // by us where the program has the agent, the rest by the driver
  kDriver,     // agents are left alone
  // What the agents cannot give away is a failure, kNotSupported, with the program as it was; the
  // driver still checkpoints what it always keeps, contexts and small allocations.
  kDirect,
};

}  // namespace stasis
