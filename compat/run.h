// What cuda-checkpoint does once its command line is understood.
//
// Standard output carries nothing but the answer (a state, a thread id, the help). A failure is one
// line in the words of NVIDIA's utility, with the driver's text in quotes, then lines of ours that
// begin with "reason: " and "hint: ".
#pragma once

#include <cstdio>

#include "base/interrupt.h"
#include "driver/driver.h"
#include "options.h"

namespace stasis::compat {

// Where a program writes to.
struct Streams {
  std::FILE* out;
  std::FILE* err;
};

// Carries out any operation but kHelp. Returns the exit status: 0, 1, or 128 plus the number of the
// signal that stopped it. `interrupt` may be set by a signal handler meanwhile.
int carry_out(const Options& options, Driver& driver, const Interrupt& interrupt, Streams streams);

// The whole program.
int run(int argc, char** argv);

}  // namespace stasis::compat
