#include "operations/machine_checks.h"

#include "operations/restore_checks.h"
#include "operations/tcp_ports.h"

namespace stasis {

const std::array<MachineCheck, 6> kMachineChecks{{
    {"host-memory",
     [](const MachineCheckInput& input) {
       return check_host_memory(input.image.manifest(), input.elsewhere, input.in_our_cgroup,
                                input.ours);
     }},
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
