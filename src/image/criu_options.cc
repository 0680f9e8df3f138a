#include "image/criu_options.h"

#include <array>
#include <utility>

namespace stasis {
namespace {

constexpr std::array<std::pair<CgroupMode, std::string_view>, 6> kCgroupModes = {{
    {CgroupMode::kIgnore, "ignore"},
    {CgroupMode::kNone, "none"},
    {CgroupMode::kProps, "props"},
    {CgroupMode::kSoft, "soft"},
    {CgroupMode::kFull, "full"},
    {CgroupMode::kStrict, "strict"},
}};

constexpr std::array<std::pair<NetworkLock, std::string_view>, 3> kNetworkLocks = {{
    {NetworkLock::kIptables, "iptables"},
    {NetworkLock::kNftables, "nftables"},
    {NetworkLock::kSkip, "skip"},
}};

template <class Table, class Value>
std::string_view name_in(const Table& table, Value value) {
  for (const auto& [known, name] : table) {
    if (known == value) return name;
  }
  return "unknown";
}

template <class Table>
auto value_in(const Table& table, std::string_view name)
    -> std::optional<typename Table::value_type::first_type> {
  for (const auto& [value, known] : table) {
    if (known == name) return value;
  }
  return std::nullopt;
}

}  // namespace

std::string_view cgroup_mode_name(CgroupMode mode) { return name_in(kCgroupModes, mode); }

std::optional<CgroupMode> cgroup_mode_from_name(std::string_view name) {
  return value_in(kCgroupModes, name);
}

std::string_view network_lock_name(NetworkLock lock) { return name_in(kNetworkLocks, lock); }

std::optional<NetworkLock> network_lock_from_name(std::string_view name) {
  return value_in(kNetworkLocks, name);
}

}  // namespace stasis
