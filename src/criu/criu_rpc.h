// The part of CRIU's RPC that Stasis speaks, as plain values, and its form on the wire (protobuf).
// The names and numbers are CRIU's interface (its images/rpc.proto, 4.0 to
// 4.2). What is not set is not sent, and CRIU's own default holds; fields that are not known here
// are passed over.
//
// Private to src/criu. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace stasis::criu_rpc {

// Of an answer, whatever number stands there.
enum class Type : std::int32_t { kEmpty = 0, kDump = 1, kRestore = 2, kNotify = 6, kVersion = 10 };

enum class CgroupMode : std::int32_t {
  kIgnore = 0,
  kNone = 1,
  kProps = 2,
  kSoft = 3,
  kFull = 4,
  kStrict = 5
};

enum class NetworkLock : std::int32_t { kIptables = 1, kNftables = 2, kSkip = 3 };

// The descriptor's number is one of criu's own process.
struct InheritFd {
  std::string key;
  std::int32_t fd = -1;
};

// Descriptors are numbers of the requesting process: CRIU opens them through its /proc entry.
struct Options {
  std::int32_t images_dir_fd = -1;
  std::optional<std::int32_t> pid;
  std::optional<bool> leave_running;
  std::optional<bool> ext_unix_sk;
  std::optional<bool> tcp_established;
  std::optional<bool> shell_job;
  std::optional<bool> file_locks;
  std::optional<std::int32_t> log_level;
  std::optional<std::string> log_file;
  std::optional<bool> notify_scripts;
  std::optional<std::int32_t> work_dir_fd;
  std::optional<bool> link_remap;
  std::optional<bool> rst_sibling;
  std::vector<InheritFd> inherit_fd;
  std::optional<CgroupMode> manage_cgroups_mode;
  std::optional<std::uint32_t> ghost_limit;
  std::vector<std::string> external;
  std::optional<bool> tcp_close;
  std::optional<std::string> lsm_profile;
  std::optional<NetworkLock> network_lock;
  std::optional<bool> unprivileged;
};

struct Request {
  Type type = Type::kEmpty;
  std::optional<Options> opts;
  std::optional<bool> notify_success;
};

struct Notification {
  std::string script;
  std::int32_t pid = 0;  // 0: none was named
};

struct Version {
  std::int32_t major_number = 0;
  std::int32_t minor_number = 0;
  std::int32_t sublevel = 0;
};

struct Response {
  Type type = Type::kEmpty;
  bool success = false;
  std::optional<std::int32_t> restored_pid;
  Notification notify;
  std::optional<std::int32_t> cr_errno;
  std::string cr_errmsg;
  std::optional<Version> version;
};

std::string to_wire(const Request& request);
// Nothing if it is no such message, or one that lacks what it must have.
std::optional<Response> response_from_wire(std::string_view wire);

}  // namespace stasis::criu_rpc
