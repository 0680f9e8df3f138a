#include "image/criu_options.h"

#include <array>
#include <utility>

namespace stasis {
namespace {

template <class Choice>
constexpr std::array<std::pair<Choice, std::string_view>, 0> kNames = {};

template <>
constexpr std::array<std::pair<CgroupMode, std::string_view>, 6> kNames<CgroupMode> = {{
    {CgroupMode::kIgnore, "ignore"},
    {CgroupMode::kNone, "none"},
    {CgroupMode::kProps, "props"},
    {CgroupMode::kSoft, "soft"},
    {CgroupMode::kFull, "full"},
    {CgroupMode::kStrict, "strict"},
}};

template <>
constexpr std::array<std::pair<NetworkLock, std::string_view>, 3> kNames<NetworkLock> = {{
    {NetworkLock::kIptables, "iptables"},
    {NetworkLock::kNftables, "nftables"},
    {NetworkLock::kSkip, "skip"},
}};

}  // namespace

std::string negated(std::string_view flag) {
  return "--no-" + std::string(flag.substr(std::string_view("--").size()));
}

template <class Choice>
std::string_view choice_name(Choice value) {
  for (const auto& [known, name] : kNames<Choice>) {
    if (known == value) return name;
  }
  return "unknown";
}

template <class Choice>
std::optional<Choice> choice_from_name(std::string_view name) {
  for (const auto& [value, known] : kNames<Choice>) {
    if (known == name) return value;
  }
  return std::nullopt;
}

template <class Choice>
std::vector<std::string> choice_names() {
  std::vector<std::string> names;
  for (const auto& [value, name] : kNames<Choice>)
    names.emplace_back(name);
  return names;
}

template std::string_view choice_name(CgroupMode value);
template std::string_view choice_name(NetworkLock value);
template std::optional<CgroupMode> choice_from_name(std::string_view name);
template std::optional<NetworkLock> choice_from_name(std::string_view name);
template std::vector<std::string> choice_names<CgroupMode>();
template std::vector<std::string> choice_names<NetworkLock>();

}  // namespace stasis
