// Where a program wants single mappings to lie (mbind), which CRIU 4.2.1 does not save: it restores
// them as its threads want all memory to lie.
#include <fcntl.h>

#include <algorithm>
#include <sstream>

#include "base/fd.h"
#include "doctor/criu_checks.h"
#include "proc/process_file.h"

namespace stasis::doctor {
namespace {

constexpr Kind kPlaced{"numa-policy", Severity::kYellow,
                       "has memory with a NUMA policy of its own (mbind), which a restore places "
                       "as the policy of its threads says",
                       "let the program call mbind() anew, or use set_mempolicy() (numactl)"};

// The kernel looks at each page before it tells a mapping's policy (8 ms for a GiB of small ones):
// not where all memory lies in one place.
bool has_several_nodes() {
  constexpr std::size_t kMost = 4096;
  const auto nodes = read_file(AT_FDCWD, "/sys/devices/system/node/online", kMost);
  return nodes && nodes->find_first_of("-,") != std::string::npos;
}

}  // namespace

std::string placed_memory(std::istream& numa_maps) {
  std::string of_threads = "default";
  std::vector<std::pair<std::string, std::string>> placed;  // address, policy: the first of each
  for (std::string line; std::getline(numa_maps, line);) {
    std::istringstream words(line);
    std::string address;
    std::string policy;
    words >> address >> policy;
    // A mapping without one of its own is shown with that of the first thread, as its stack is.
    if (line.ends_with(" stack") || line.find(" stack ") != std::string::npos) of_threads = policy;
    const auto is_known = [&](const auto& one) { return one.second == policy; };
    if (std::none_of(placed.begin(), placed.end(), is_known)) placed.emplace_back(address, policy);
  }
  for (const auto& [address, policy] : placed)
    if (policy != of_threads) return address + " " + policy;
  return {};
}

void probe_numa(const Processes& processes, Signs& out) {
  if (!has_several_nodes()) return;
  for (const proc::ProcessInfo& info : processes) {
    proc::ProcessText file(info.pid, "numa_maps");
    if (auto placed = placed_memory(file); !placed.empty()) out.add(info.pid, kPlaced, placed);
  }
}

}  // namespace stasis::doctor
