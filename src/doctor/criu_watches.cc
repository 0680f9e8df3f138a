// Watches of folders that CRIU 4.2.1 loses without a word.
#include <fmt/format.h>

#include "doctor/criu_checks.h"
#include "proc/file_state.h"

namespace stasis::doctor {
namespace {

constexpr Kind kNotify{
    "dnotify", Severity::kYellow,
    "watches directories by dnotify (fcntl with F_NOTIFY); the kernel does not say which, and a "
    "restored process gets no more notifications",
    "use inotify, whose watches are kept, or let the program watch them anew"};

}  // namespace

void probe_folder_watches(const Processes& processes, Signs& out) {
  for (const proc::ProcessInfo& info : processes)
    for (const int descriptor : proc::watched_folders(info.pid))
      out.add(info.pid, kNotify, fmt::format("descriptor {}", descriptor));
}

}  // namespace stasis::doctor
