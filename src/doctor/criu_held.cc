// Files that another process may hold up CRIU with, and us.
#include <fmt/format.h>

#include "doctor/criu_checks.h"
#include "proc/held_files.h"

namespace stasis {
namespace doctor {
namespace {

constexpr Kind kHeld{
    "held-file", Severity::kRed,
    "has a file open whose lock in the kernel another process holds; CRIU would wait for ever",
    "end the process that writes or sends there from pages that do not come, as those of a FUSE "
    "file "
    "system that does not answer",
    Override::kNone};

}  // namespace

bool probe_held(Facts& facts, const Processes& processes, proc::HeldFiles& files, Signs& out) {
  std::vector<std::shared_ptr<const std::vector<proc::OpenFile>>> lists;
  std::vector<proc::FilesOf> asked;
  for (const proc::ProcessInfo& info : processes) {
    lists.push_back(facts.open_files(info.pid));
    if (lists.back()) asked.push_back({info.pid, lists.back().get()});
  }
  const auto held = files.find(asked, [&] { return facts.is_over(); });
  if (!held) return false;
  out.add(held->pid, kHeld,
          fmt::format("{} (descriptor {})", held->file.path, held->file.descriptor));
  return true;
}

}  // namespace doctor

std::vector<Obstacle> find_held_files(const proc::ProcFs& procfs,
                                      const std::vector<proc::ProcessInfo>& processes,
                                      proc::HeldFiles& files, const Interrupt& interrupt) {
  doctor::Facts facts(procfs, &interrupt);
  doctor::Signs signs;
  (void)doctor::probe_held(facts, processes, files, signs);
  return signs.obstacles(processes);
}

}  // namespace stasis
