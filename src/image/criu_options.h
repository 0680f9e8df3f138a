// The choices that CRIU was given at the dump and must be given again at the restore. They stand
// in the manifest, which is why they are defined here and not in src/criu. criu_options.inc lists
// them; manifest, RPC, command line, reports and the C interface go through that list.
//
// Plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace stasis {

// What to do with the control groups of the tree; CRIU's --manage-cgroups modes. The numbers are
// those of CRIU's images/rpc.proto.
enum class CgroupMode : std::int32_t {
  kIgnore = 0,
  kNone = 1,
  kProps = 2,
  kSoft = 3,
  kFull = 4,
  kStrict = 5
};

// How packets are kept away from dumped TCP connections; only used with tcp_established. CRIU's
// numbers.
enum class NetworkLock : std::int32_t { kIptables = 1, kNftables = 2, kSkip = 3 };

// The names that CRIU gives to the values of CgroupMode and NetworkLock.
template <class Choice>
std::string_view choice_name(Choice value);
template <class Choice>
std::optional<Choice> choice_from_name(std::string_view name);
template <class Choice>
std::vector<std::string> choice_names();

struct CriuOptions {
#define STASIS_CRIU_OPTION(field, type, initial, number, member, flag, help) type field = initial;
#define STASIS_CRIU_OPTION_KEPT(field, type, initial, number, flag) type field = initial;
#include "image/criu_options.inc"
  bool operator==(const CriuOptions&) const = default;
};

// One row of criu_options.inc.
template <class T>
struct CriuOption {
  T CriuOptions::*field;
  const char* key;       // in the manifest
  std::uint32_t number;  // in CRIU's criu_opts
  const char* flag;      // of CRIU and of `stasis dump`
  const char* help;      // nullptr: a user does not choose it
};

// "--no-link-remap" of "--link-remap".
std::string negated(std::string_view flag);

// Calls `visit` with each CriuOption, in the manifest's order.
template <class Visit>
void for_each_criu_option(Visit&& visit) {
#define STASIS_CRIU_OPTION(field, type, initial, number, member, flag, help) \
  visit(CriuOption<type>{&CriuOptions::field, #field, number, flag, help});
#define STASIS_CRIU_OPTION_KEPT(field, type, initial, number, flag) \
  visit(CriuOption<type>{&CriuOptions::field, #field, number, flag, nullptr});
#include "image/criu_options.inc"
}

}  // namespace stasis
