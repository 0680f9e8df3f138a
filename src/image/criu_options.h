// The choices that CRIU was given at the dump and must be given again at the restore. They stand
// in the manifest, which is why they are defined here and not in src/criu.
//
// Plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace stasis {

// What to do with the control groups of the tree; CRIU's --manage-cgroups modes.
enum class CgroupMode { kIgnore, kNone, kProps, kSoft, kFull, kStrict };
std::string_view cgroup_mode_name(CgroupMode mode);
std::optional<CgroupMode> cgroup_mode_from_name(std::string_view name);

// How packets are kept away from dumped TCP connections; only used with tcp_established.
enum class NetworkLock { kIptables, kNftables, kSkip };
std::string_view network_lock_name(NetworkLock lock);
std::optional<NetworkLock> network_lock_from_name(std::string_view name);

struct CriuOptions {
  bool shell_job = false;        // the tree has a terminal or a session from outside
  bool tcp_established = false;  // keep open TCP connections
  bool tcp_close = false;        // close open TCP connections at restore
  bool file_locks = false;       // the tree holds file locks
  bool link_remap = true;        // give deleted-but-linked files a temporary name
  bool ext_unix_sk = false;      // connections of unix sockets to outside may be cut
  bool unprivileged = false;     // run with fewer capabilities than root has
  // Bytes; deleted files that are still open are saved up to this size. CRIU's own default of 1 MiB
  // is too small for ML programs (criu#2980). A CRIU option is 32 bits wide.
  std::uint32_t ghost_limit = 256U << 20;
  std::vector<std::string> external;  // CRIU's --external strings
  CgroupMode cgroups = CgroupMode::kIgnore;
  // nftables needs no helper program, unlike iptables, which CRIU would call through a shell.
  NetworkLock network_lock = NetworkLock::kNftables;
  std::string lsm_profile;  // empty: as dumped
  bool operator==(const CriuOptions&) const = default;
};

}  // namespace stasis
