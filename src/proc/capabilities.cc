#include "proc/capabilities.h"

#include <array>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace stasis::proc {
namespace {

// linux/capability.h, by their numbers.
constexpr std::array kCapabilities = {"CHOWN",
                                      "DAC_OVERRIDE",
                                      "DAC_READ_SEARCH",
                                      "FOWNER",
                                      "FSETID",
                                      "KILL",
                                      "SETGID",
                                      "SETUID",
                                      "SETPCAP",
                                      "LINUX_IMMUTABLE",
                                      "NET_BIND_SERVICE",
                                      "NET_BROADCAST",
                                      "NET_ADMIN",
                                      "NET_RAW",
                                      "IPC_LOCK",
                                      "IPC_OWNER",
                                      "SYS_MODULE",
                                      "SYS_RAWIO",
                                      "SYS_CHROOT",
                                      "SYS_PTRACE",
                                      "SYS_PACCT",
                                      "SYS_ADMIN",
                                      "SYS_BOOT",
                                      "SYS_NICE",
                                      "SYS_RESOURCE",
                                      "SYS_TIME",
                                      "SYS_TTY_CONFIG",
                                      "MKNOD",
                                      "LEASE",
                                      "AUDIT_WRITE",
                                      "AUDIT_CONTROL",
                                      "SETFCAP",
                                      "MAC_OVERRIDE",
                                      "MAC_ADMIN",
                                      "SYSLOG",
                                      "WAKE_ALARM",
                                      "BLOCK_SUSPEND",
                                      "AUDIT_READ",
                                      "PERFMON",
                                      "BPF",
                                      "CHECKPOINT_RESTORE"};

}  // namespace

std::string capability_names(std::uint64_t bits) {
  std::vector<std::string> names;
  for (unsigned bit = 0; bit < 64; ++bit) {
    if ((bits >> bit & 1) == 0) continue;
    names.push_back(bit < kCapabilities.size() ? fmt::format("CAP_{}", kCapabilities[bit])
                                               : fmt::format("capability {}", bit));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace stasis::proc
