#include "operations/machine_checks.h"

#include <optional>
#include <utility>

#include "operations/host_memory.h"
#include "operations/restore_checks.h"
#include "operations/tcp_ports.h"

namespace stasis {

namespace {

// Refused is only what is counted: a chunk of the host memory that is not zeros may have pages that
// are, which take no memory.
Result<void> check_memory(const MachineCheckInput& input) {
  const auto check = [&input](std::uint64_t filled) {
    return check_host_memory(input.image.manifest(), input.elsewhere, input.in_our_cgroup,
                             input.ours, filled);
  };
  if (!input.image.manifest().host_content) return check(0);
  std::optional<ContentReader> own;
  if (input.host == nullptr) {
    STASIS_TRY_ASSIGN(auto opened, input.image.open_content({false, ContentKind::kHost}));
    own.emplace(std::move(opened));
  }
  const ContentReader& host = own ? *own : *input.host;
  if (check(most_filled(host))) return {};
  const auto fits = [&](std::uint64_t filled) { return check(filled).has_value(); };
  STASIS_TRY_ASSIGN(const auto filled, count_filled(host, fits, input.progress, input.interrupt));
  return check(filled);
}

}  // namespace

const std::array<MachineCheck, 6> kMachineChecks{{
    {"host-memory", check_memory},
    {"permissions", [](const MachineCheckInput& input) { return check_rights(input.image); }},
    {"process-numbers", [](const MachineCheckInput& input) { return check_numbers(input.image); }},
    {"addresses",
     [](const MachineCheckInput& input) {
       return check_addresses(input.image.manifest(), input.tcp_close, input.addresses);
     }},
    {"tcp-ports",
     [](const MachineCheckInput& input) -> Result<void> {
       if (input.waits) STASIS_TRY(wait_for_ports(*input.waits, input.image, input.addresses));
       return check_ports(input.image, input.addresses);
     }},
    {"open-files", [](const MachineCheckInput& input) { return check_files(input.image); }},
}};

}  // namespace stasis
