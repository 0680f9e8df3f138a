// Who is at the other end of shared GPU memory, for messages: an agent is asked for memory on a
// socket with its number in its name (kShareSocket), and has a connection to each process that has
// some of it by CUDA IPC, or any by descriptors. Any process may make a socket with such a name.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/result.h"
#include "proc/procfs.h"

namespace stasis {

struct SharingProcess {
  Pid pid;
  std::string name;
};

// By the number by which they are asked.
using OwnersAsked = std::map<std::uint64_t, std::vector<SharingProcess>>;
// Those that are asked by these numbers in the network namespace of the process; without those that
// have ended, or cannot be seen. Looks at all processes once: a process may have memory of many.
OwnersAsked find_owners(Pid importer, const std::set<std::uint64_t>& services);

// Who has connections that agents have made to those owners, which may have ended.
struct Holders {
  std::size_t outside = 0;            // connections that none of the members has
  std::vector<SharingProcess> named;  // whose those are, as far as that is seen
};
// In the network namespace of `importer`; none if that has ended. Errors as of
// ProcFs::unix_sockets().
Result<Holders> find_holders(Pid importer, const std::set<std::uint64_t>& services,
                             const std::set<Pid>& members);

// The numbers by which the process is asked for memory; none if it has ended. Errors as of
// ProcFs::unix_sockets() and socket_inodes().
Result<std::set<std::uint64_t>> services_of(Pid pid);

// Processes besides the members that may own memory and that no socket tells of any more: their
// programs have closed one on which their agents listened. Without those that cannot be seen.
std::vector<SharingProcess> find_silent_owners(const std::set<Pid>& members);

// Those that are connected to the owner by that number; none where that is in another network
// namespace than this process.
std::vector<SharingProcess> find_users(Pid owner, std::uint64_t service);

}  // namespace stasis
