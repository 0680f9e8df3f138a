// GPU memory that processes share and whose owner has ended or has freed it. The driver lets those
// who have imported it keep it, and none of them can give it to another; so before it is given up
// one of them, the heir, saves its content, and is its owner from then on
// (docs/adr/0046-shared-memory.md). What the processes say of it may be forged. One thread at a
// time.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "checkpoint/process.h"
#include "direct/agent_set.h"

namespace stasis {

// What one process shares.
struct ProcessShares {
  Pid pid;
  unsigned uid = 0;
  std::vector<direct::Share> shares;
};

// Of each piece, which of the processes has made it.
using Owners = std::map<direct::ShareId, std::size_t>;
// Of each piece that has no owner any more, which of the processes inherits it.
using Heirs = std::map<direct::ShareId, std::size_t>;

// One that still has it. Leaves out pieces whose owner may live and is not among the processes, and
// those that processes of several users have.
Heirs find_heirs(const std::vector<ProcessShares>& processes, const Owners& owners);

// kNotSupported if a process that is not among these has memory, too, that one of these inherits,
// has inherited before, or has made and is not asked for any more, and would be left with another
// copy of it: seen by its connection to the first owner, in the network namespace in which that one
// is. Also if a process that is not among these may be an owner that seems to have ended, because
// its program has closed the sockets of its agent.
Result<void> check_sole_heirs(const Heirs& heirs, const std::vector<ProcessShares>& processes);

// Whether others have memory of this process's that its agent does not count as open: what it has
// inherited, and what it has made if its program has closed the socket of its agent.
Result<bool> is_held_uncounted(Pid pid, const std::vector<direct::Share>& shares);

// With all gates closed: the heirs save what they inherit. Before that the agents of all that have
// it are told to keep their gates closed without a tool: when a tool is killed later, no process
// runs with the memory of before beside one that runs with the heir's. kOutOfHostMemory, and what
// AgentClient::finish() says.
Result<void> let_inherit(AgentSet& agents, const std::vector<ProcessShares>& processes,
                         const Heirs& heirs);

// In bytes: what the process may take of the host's memory. With it gone, the kernel ends programs.
// At least 1.
std::uint64_t room_on_host(Pid pid);

}  // namespace stasis
