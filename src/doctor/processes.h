// Whether this process tree can be suspended, dumped and restored, by what the driver, CRIU and
// /proc say of it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/interrupt.h"
#include "base/obstacle.h"
#include "checkpoint/process_tree.h"
#include "image/criu_options.h"
#include "proc/procfs.h"

namespace stasis {

// Every obstacle, green ones too. Changes nothing: it looks, and asks the agents of a program that
// runs; `tree` notes what it uses of the GPUs. `connected`: as find_undumpable() wants it.
// kInterrupted. kNotPermitted, kIo: could not look, which never counts as "fine".
Result<std::vector<Obstacle>> examine_processes(Driver& driver, const proc::ProcFs& procfs,
                                                ProcessTree& tree, const CriuOptions& options,
                                                const Interrupt& interrupt,
                                                std::span<const std::string> connected = {});

}  // namespace stasis
