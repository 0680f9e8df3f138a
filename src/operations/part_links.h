// TCP connections that lead from the part of a job on this node to parts on others, and the lock
// that keeps them as they are while the parts are dumped one by one, and restored one by one.
//
// The lock of a connection is a filter of its socket that drops whatever comes in, so that the
// socket neither answers nor is reset. CRIU saves a socket's filter with the socket: a restored one
// has it again, until every part stands complete. docs/adr/0058-jobs-of-several-nodes.md.
//
// Private to src/operations. Functions only; one thread at a time.
#pragma once

#include <string>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "criu/criu_addresses.h"

namespace stasis {

// Each as "LOCAL REMOTE", with a third word where it leads to another program of this machine's own
// network (loopback). Sorted.
struct PartLinks {
  std::vector<std::string> established;
  std::vector<std::string> closing;  // being opened or closed: the other end may have gone
};

// Those of the tree that lead out of it. kNotPermitted, kNotSupported if there are too many.
Result<PartLinks> find_links(Pid root);

// Locks them. Those that are locked already stay so. kNotSupported for a socket that has a filter
// of its own, naming the process. What was locked before an error stays so: let_links_go().
Result<PartLinks> lock_links(Pid root);

// Unlocks what lock_links() has locked in these processes, as the tool before or CRIU has left it.
// What cannot be unlocked, for people.
std::vector<std::string> let_links_go(const std::vector<Pid>& processes);

// Lets those that are locked vanish with the processes, which are about to be killed. They would
// hold their addresses and ports for minutes, which the next restore needs, and wait for an answer
// that their lock drops.
void end_links_with_processes(const std::vector<Pid>& processes);

// With the addresses that a restore gives the sockets.
std::vector<std::string> mapped_links(std::vector<std::string> links,
                                      const std::vector<AddressPair>& pairs);

}  // namespace stasis
