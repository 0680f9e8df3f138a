// Tries whether suspend and resume work on this machine, on processes of the doctor's own, one on
// each GPU.
#pragma once

#include <functional>
#include <vector>

#include "base/interrupt.h"
#include "base/obstacle.h"
#include "driver/driver.h"

namespace stasis::doctor {

// An obstacle for each GPU, green with the times if it went well. Each process takes the memory of
// a context and 4 MiB, and is killed and reaped on every path out, also when the doctor is killed.
// Some 30 s for each GPU at the most. To be called while this process has one thread and has not
// initialised CUDA; when `on_forked` is called, which may be empty, it may have more. An interrupt
// ends it without one.
void try_gpus(Driver& driver, const std::vector<Gpu>& gpus, const Interrupt& interrupt,
              const std::function<void()>& on_forked, std::vector<Obstacle>& out);

}  // namespace stasis::doctor
