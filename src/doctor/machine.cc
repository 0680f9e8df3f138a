#include "doctor/machine.h"

#include <charconv>
#include <functional>
#include <utility>

#include <fmt/format.h>

#include "doctor/machine_parts.h"
#include "doctor/trial.h"
#include "proc/procfs.h"

namespace stasis {
namespace doctor {

Obstacle green(ObstacleId id, std::string what) {
  return {id, Severity::kGreen, {}, std::move(what)};
}

Obstacle yellow(ObstacleId id, std::string what, std::string remedy) {
  return {id, Severity::kYellow, {}, std::move(what), std::move(remedy)};
}

Obstacle red(ObstacleId id, std::string what, std::string remedy) {
  return {id, Severity::kRed, {}, std::move(what), std::move(remedy)};
}

Obstacle from_error(Severity severity, ObstacleId id, const Error& error,
                    const std::string& remedy) {
  std::string what = error.to_string();
  if (error.driver && what.find(error.driver->name) == std::string::npos) {
    what += fmt::format(" (driver: {} {}, \"{}\")", error.driver->name, error.driver->number,
                        error.driver->text);
  }
  return {id, severity, {}, std::move(what), error.remedy.empty() ? remedy : error.remedy};
}

bool kernel_at_least(const std::string& release, int major, int minor) {
  const char* const end = release.data() + release.size();
  int ours = 0;
  int ours_minor = 0;
  const auto first = std::from_chars(release.data(), end, ours);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != '.') return false;
  if (std::from_chars(first.ptr + 1, end, ours_minor).ec != std::errc()) return false;
  return std::pair(ours, ours_minor) >= std::pair(major, minor);
}

}  // namespace doctor

std::vector<Obstacle> examine_machine(const Result<std::unique_ptr<Driver>>& driver,
                                      const MachineOptions& options, const Interrupt& interrupt) {
  using namespace doctor;  // NOLINT(google-build-using-namespace): our own parts
  const KernelFolders folders;
  Obstacles out;
  std::vector<Gpu> gpus;
  std::uint64_t gpu_bytes = 0;
  const std::vector<std::function<void()>> steps = {
      [&] {
        if (!driver) {
          out.push_back(from_error(Severity::kRed, "driver", driver.error()));
          return;
        }
        probe_driver(**driver, out);
        const auto found = (*driver)->gpus();
        probe_gpus(**driver, found, out);
        if (found) gpus = *found;
      },
      // Before anything that might initialise the driver here: a forked child would have no CUDA.
      [&] {
        if (options.trial && driver)
          try_gpus(**driver, gpus, interrupt, options.on_forked, out);
        else if (options.on_forked)
          options.on_forked();
        if (driver) gpu_bytes = gpu_memory_in_use(**driver, gpus);
      },
      [&] { probe_mps(folders, out); },
      [&] { probe_proc(out); },
      [&] { probe_permissions(folders, out); },
      [&] { probe_criu(options.criu_path, interrupt, out); },
      [&] { probe_plugin(plugin_directories(), out); },
      [&] { probe_kernel(folders, proc::kernel_release(), out); },
      [&] { probe_clock(folders, out); },
      [&] { probe_state_directory(out); },
      [&] {
        if (!options.images_dir.empty()) probe_disk(options.images_dir, gpu_bytes, interrupt, out);
      },
      [&] { probe_host_memory(folders, gpu_bytes, out); },
      [&] { probe_huge_pages(folders, gpu_bytes, out); },
      [&] { probe_shared_memory(folders, out); },
      [&] { probe_limits(folders, out); },
  };
  for (const auto& step : steps) {
    if (!interrupt.check()) break;
    step();
  }
  return out;
}

}  // namespace stasis
