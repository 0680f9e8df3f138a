// The multicast groups that sockets have joined. The kernel lists them by interface, and says of
// one socket only whether it is a member of a group that is named (MCAST_MSFILTER).
//
// Functions only; any thread. Sources of a membership, and groups, are bounded.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "proc/socket_options.h"

namespace stasis::proc {

inline constexpr std::size_t kMaxSources = 64;

struct MulticastGroup {
  std::string interface;
  unsigned index = 0;
  std::string address;
  bool operator==(const MulticastGroup&) const = default;
};

struct Membership {
  std::string interface;
  std::string group;
  bool include = false;  // only from `sources`; otherwise from all but these
  std::vector<std::string> sources;
  bool operator==(const Membership&) const = default;
};

// Those of all interfaces of the process's network namespace, `most` at most.
std::vector<MulticastGroup> multicast_groups(Pid pid, std::size_t most);

// Whether a socket of this kind can be a member of a group.
bool joins_groups(const SocketKind& kind);
// Nothing if the socket is no member, or has more sources than kMaxSources.
std::optional<Membership> membership(const UniqueFd& socket, const SocketKind& kind,
                                     const MulticastGroup& group);
// Joins the group, unless the socket is a member already. 0, or errno.
int join(const UniqueFd& socket, const SocketKind& kind, const Membership& wanted);

}  // namespace stasis::proc
