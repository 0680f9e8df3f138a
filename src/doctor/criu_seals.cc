// Memory that a program has sealed against any change of its mapping (mseal), which CRIU 4.2.1
// restores without the seal.
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include <fmt/format.h>

#include "doctor/criu_checks.h"

namespace stasis::doctor {
namespace {

constexpr Kind kSealed{"sealed-memory", Severity::kRed,
                       "has sealed memory (mseal), which a restore would leave without its seal",
                       "do without mseal() in the program"};

constexpr long kMseal = 462;  // SYS_mseal, newer than Debian 12's headers

// Sealing nothing succeeds. Without it (before Linux 6.10) no page table need be walked: the kernel
// looks at each page before it tells a mapping's flags (8 ms for a GiB of small ones).
bool kernel_seals() { return ::syscall(kMseal, 0, 0, 0) == 0; }

// The first sealed mapping, "7f0000000000-7f0000010000"; empty if there is none.
std::string first_sealed(Pid pid) {
  std::ifstream file(fmt::format("/proc/{}/smaps", pid.value));
  std::string mapping;
  for (std::string line; std::getline(file, line);) {
    // Those of a mapping begin with a capital letter, and its own with a number in hexadecimal.
    if (!line.empty() && (line.front() < 'A' || line.front() > 'Z'))
      mapping = line.substr(0, line.find(' '));
    if (line.starts_with("VmFlags:") && line.find(" sl") != std::string::npos) return mapping;
  }
  return {};
}

}  // namespace

void probe_seals(const Processes& processes, Signs& out) {
  static const bool sealing = kernel_seals();
  if (!sealing) return;
  for (const proc::ProcessInfo& info : processes) {
    if (const std::string mapping = first_sealed(info.pid); !mapping.empty())
      out.add(info.pid, kSealed, mapping);
  }
}

}  // namespace stasis::doctor
