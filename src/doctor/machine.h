// Is this machine fit for checkpoints? The driver, the GPUs, CRIU, the kernel, permissions, limits
// and room. Changes nothing; the trial acts on a process of the doctor's own.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/interrupt.h"
#include "base/obstacle.h"
#include "driver/driver.h"

namespace stasis {

struct MachineOptions {
  std::optional<std::string> criu_path;  // as Criu::find() takes it
  std::string images_dir;                // whose disk is looked at; empty: none
  bool trial = true;  // suspend and resume a process of the doctor's own on each GPU
  // Called once when this process may have more threads than one. May be empty.
  std::function<void()> on_forked = {};
};

// Every obstacle, green ones too, in the order in which one would mend them. `driver` is what
// load_driver() gave. An interrupt ends it early, with what is known by then. To be called while
// this process has one thread: the trial forks.
std::vector<Obstacle> examine_machine(const Result<std::unique_ptr<Driver>>& driver,
                                      const MachineOptions& options, const Interrupt& interrupt);

}  // namespace stasis
