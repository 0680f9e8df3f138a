// What CRIU 4.2.1 loses of open sockets, and says nothing of: some hundred options, and multicast
// groups. A dump notes them from outside (pidfd_getfd) while all stands still, a restore sets them
// again while none of the processes runs yet. docs/adr/0039-sockets.md.
//
// Private to src/operations. Functions only; one thread at a time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/process.h"
#include "operations/operations.h"

namespace stasis {

// Notes the sockets of the manifest's processes, which stand still, in the manifest, with what an
// image cannot hold of them and of other descriptors: unread datagrams, events, kinds of counters.
// What cannot be examined counts as lost. kInterrupted. kBusy for what CRIU has left out of the
// middle of a stream or a queue, which a program could not make out; with `ignore_undumpable` that
// counts as lost, too.
// `lost`: what else it does not hold, which goes first.
Result<void> note_sockets(const Environment& env, const UniqueFd& criu_dir, Manifest& manifest,
                          std::vector<std::string>& lost, bool ignore_undumpable);

// Whether CRIU is to bind sockets of IPv4 to addresses that may not be here (IP_FREEBIND,
// IP_TRANSPARENT); of IPv6 it does so by itself. They are no part of the manifest's addresses.
bool binds_anywhere(const Manifest& manifest);

// Puts back what the image has of them. `processes`: in the manifest's order, and none of them may
// run. What could not be put back, for people.
std::vector<std::string> put_sockets_back(const Manifest& manifest,
                                          const std::vector<std::optional<Process>>& processes);

// Tells of what was lost, of the first few in full.
void tell_of_lost(const Environment& env, const std::vector<std::string>& lost,
                  const std::string& what);

}  // namespace stasis
