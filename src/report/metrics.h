// Sums of what operations did and took, in a file that Prometheus reads by the textfile collector
// of its node_exporter: DIR/stasis.prom, of a user other than root DIR/stasis-UID.prom. Each
// operation adds its own; the file is replaced as a whole. docs/operators.md lists what is in it.
//
// Functions without state; several processes may add at the same time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "base/phases.h"
#include "base/result.h"
#include "base/units.h"
#include "operations/operations.h"

namespace stasis {

// What an operation that succeeded did. In seconds and bytes.
struct OperationFigures {
  Seconds total{0};
  std::optional<Seconds> downtime;
  std::vector<PhaseRecord> phases;
  std::uint64_t gpu_bytes = 0;      // of the processes, before
  std::uint64_t direct_bytes = 0;   // of those, what the mover has copied
  std::uint64_t image_bytes = 0;    // of an image's files
  std::uint64_t written_bytes = 0;  // of those, what no earlier image had
};
OperationFigures figures_of(const Report& report);
OperationFigures figures_of(const DumpReport& report);
OperationFigures figures_of(const RestoreReport& report);

// The directory, which has to be there: before anything is done. kUsage.
Result<UniqueFd> open_metrics(const std::string& directory);
// Adds an operation that succeeded, with its figures if it has any, or one that failed. kIo,
// kNoSpace, kNotPermitted; kBusy if others hold the directory's lock for a second.
Result<void> add_metrics(const UniqueFd& directory, const std::string& verb,
                         const std::optional<OperationFigures>& figures);
Result<void> add_metrics(const UniqueFd& directory, const std::string& verb, const Error& error);

}  // namespace stasis
