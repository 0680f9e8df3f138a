// One operation on a job: saves it, restores it, or makes it run again. In a process of its own,
// which init forks in the job's namespaces for it, and which ends with it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "direct/mover.h"
#include "job/group.h"
#include "job/messages.h"
#include "job/streams.h"

namespace stasis::job {

inline constexpr const char* kAutomaticMap = "auto";

struct WorkerOptions {
  // The job's GPUs after a restore: kAutomaticMap, or as parse_gpu_map() takes it.
  std::string map = kAutomaticMap;
  // Variables that programs which the job starts after a restore see as they are then; "SLURM_*".
  std::vector<std::string> refreshed;
  std::uint64_t ring_bytes = direct::MoverOptions().ring_bytes;  // for each GPU
  std::string trace;         // where to write what the newest operation did; empty: nowhere
  std::string metrics = {};  // a directory for the sums of all operations; empty: none
  JobGroup group = {};
  std::chrono::milliseconds group_timeout{0};  // for the other parts to come to a start
  std::string name = {};                       // of the job, for its images; empty: it has none
  // A job that is connected with a process outside is saved with all of its connections closed.
  bool tcp_close = false;
};

// Before there are workers; makes the paths of trace and metrics some that they find. kUsage.
Result<void> check_worker_options(WorkerOptions& options);

// `streams` are those that the job has, or is to have. While this process has one thread.
WorkResult do_work(const WorkOrder& order, const StreamEnds& streams, const WorkerOptions& options);

}  // namespace stasis::job
