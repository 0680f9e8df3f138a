#include "help.h"

#include <fmt/format.h>

namespace stasis::compat {
namespace {

constexpr const char* kOperations = R"(
Operations:
--get-state --pid <pid>
	Print the CUDA state of process <pid>: running, locked, checkpointed or failed

--action lock | checkpoint | restore | unlock --pid <pid>{}
	Take process <pid> one step further:
	lock        running to locked: wait for submitted GPU work, hold back new calls
	checkpoint  locked to checkpointed: move GPU memory into host memory, release the GPUs
	restore     checkpointed to locked: take GPUs again and move the memory back
	unlock      locked to running: let the held calls go on

--toggle --pid <pid>
	Lock and checkpoint a running process; restore and unlock a checkpointed one.
	If a step fails, or on Ctrl-C, the process is brought back to the state it was in

--get-restore-tid --pid <pid>
	Print the id of the thread in process <pid> that carries out these steps
)";

constexpr const char* kLaunchJob = R"(
--launch-job|-j <program> [<argument> ...]
	Not possible with this program, which says why; use the cuda-checkpoint of your driver
)";

constexpr const char* kOptions = R"(
Options:
--pid|-p <pid>
	The process to act on. A thread's id is refused

--timeout|-t <ms>
	For the lock action: give up after so many milliseconds and leave the process running.
	0 and no --timeout wait for ever
)";

constexpr const char* kDeviceMap = R"(
--device-map|-d <oldUuid=newUuid,oldUuid=newUuid,...>
	For the restore action: the GPUs to restore to. Every GPU that the driver sees must be
	named once on each side, also those that the process does not use. A UUID has the form
	GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx (nvidia-smi -L prints it)
)";

constexpr const char* kHelp = R"(
--help|-h
	Print this text

Errors go to standard error: what happened on the first line, then the reason and what to do.
Exit status: 0 done, 1 not done, 129, 130 or 143 stopped by a signal and brought back.
)";

std::string version(const DriverInfo* driver) {
  if (driver == nullptr) return "unknown: no usable CUDA driver here";
  if (!driver->driver_version.empty()) return driver->driver_version;
  return fmt::format("unknown (CUDA {}.{})", driver->cuda_version / 1000,
                     driver->cuda_version % 1000 / 10);
}

}  // namespace

std::string help_text(const DriverInfo* driver) {
  const bool device_map = driver == nullptr || driver->has_device_map;
  const bool jobs = driver != nullptr && driver->has_jobs;
  std::string out = "CUDA checkpoint and restore utility.\n";
  out += fmt::format("Version {}. Stasis {}, a drop-in for NVIDIA's cuda-checkpoint.{}\n",
                     version(driver), STASIS_VERSION,
                     driver != nullptr && driver->simulated ? " On a simulated GPU." : "");
  out += fmt::format(fmt::runtime(kOperations),
                     device_map ? " [--timeout <ms>] [--device-map <uuids>]" : " [--timeout <ms>]");
  if (jobs) out += kLaunchJob;
  out += kOptions;
  if (device_map) out += kDeviceMap;
  out += kHelp;
  return out;
}

}  // namespace stasis::compat
