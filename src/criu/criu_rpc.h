// The part of CRIU's RPC that Stasis uses, as plain values, and its form on the wire (protobuf).
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

#include "image/criu_options.h"

namespace stasis::criu_rpc {

// Of an answer, whatever number stands there.
enum class Type : std::int32_t { kEmpty = 0, kDump = 1, kRestore = 2, kNotify = 6, kVersion = 10 };

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
  std::optional<std::int32_t> log_level;
  std::optional<std::string> log_file;
  std::optional<bool> notify_scripts;
  std::optional<std::int32_t> work_dir_fd;
  std::optional<bool> rst_sibling;
  std::vector<InheritFd> inherit_fd;
  std::optional<CriuOptions> criu;
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
