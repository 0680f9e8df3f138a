// What an image says of the tree that is dumped. Private to src/operations.
#pragma once

#include <span>
#include <vector>

#include "base/phases.h"
#include "base/trace.h"
#include "checkpoint/process_tree.h"
#include "criu/criu.h"
#include "image/manifest.h"
#include "operations/operations.h"

namespace stasis {

// Of the machine and the tools.
Manifest describe_dump(const Environment& env, const ProcessTree& tree, const Criu& criu,
                       const CriuOptions& options, std::span<const Gpu> gpus);

// What is in the image: the tree as it stands still now. Processes without CUDA ran on until CRIU
// stopped them, and may have come, gone or lost their parent since we looked last.
Result<std::vector<ProcessRecord>> take_stock(const ProcessTree& tree);

// What the driver, the agents, the mover, CRIU and the writer of the image did within the phases of
// a dump that began at `beginning`: the longest, in the order in which they began.
std::vector<PhaseRecord> beside_of(const std::vector<TraceEvent>& spans,
                                   Clock::time_point beginning);

// By its image: kBusy where something was being handed from one process to another that CRIU does
// not restore so (descriptor_under_way() of criu/criu_sockets.h).
Result<void> refuse_descriptors_under_way(const UniqueFd& criu_dir, const CriuOptions& options);

// CRIU 4.2.1 saves no tiles of AMX and takes them from the threads that had some. Seen afterwards,
// by its image, where criu could not be kept from it (InsideCriu): kCriuFailed, and the program is
// not as it was.
Result<void> refuse_lost_tiles(const UniqueFd& criu_dir,
                               const std::vector<ProcessRecord>& processes);
// restart_calls() of all of them.
Result<void> restart_calls_of(const UniqueFd& criu_dir,
                              const std::vector<ProcessRecord>& processes);

}  // namespace stasis
