// What the driver cannot restore, as the agent gives it up before a checkpoint and takes it again
// after it (docs/adr/0046-shared-memory.md): memory that other processes have made, and memory of
// the host's from cuMemCreate. Device memory of this process's own is in eviction.h.
//
// A piece whose owner has ended or has freed it has no process that could give it to the importers
// again. One of them inherits it: saves its content, makes it anew, and is its owner from then on.
//
// For the agent's thread, with the gate closed unless they say otherwise.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "abi/agent_protocol.h"
#include "eviction.h"
#include "eviction_internal.h"

namespace stasis::preload {

// Writes the number of pieces that this process has exported or imported, those of the host's, and
// those of managed memory.
// At any time.
void count_shared(std::uint32_t& count);
// One more.
void add_shared(std::uint32_t& count);

// A call by which this process gets such a piece. Counted from before the driver has made it until
// the tables have it: a thread may stand still in between for as long as the driver's lock is on,
// and the tool must not take the process for one that shares nothing.
class SharingCall {
 public:
  SharingCall();
  ~SharingCall();
  SharingCall(const SharingCall&) = delete;
  SharingCall& operator=(const SharingCall&) = delete;
};
// Those that are not there.
std::uint32_t detached_count();

// Objects of cuMulticastCreate, by this process or another. At any time.
std::uint32_t multicast_count();

struct Shared {
  direct::ShareId id{};
  std::uint64_t bytes = 0;
  direct::ShareRole role = direct::ShareRole::kOwner;
  std::uint32_t open = 0;  // as in AgentShare
  bool of_host = false;
};
std::vector<Shared> list_shared();

// Gives up all imported memory whose owner is known, and all memory of the host's, whose content
// this process keeps: none of it larger than `room`, in bytes, as the piece and its copy are there
// at the same time. `room` becomes what is left of it. What is given up when a call of the driver
// fails stays so, until it is taken again.
Outcome detach_all(std::uint64_t& room);
// Saves the content of what this process has imported under that id. detach_all() makes it the
// owner of that.
Outcome inherit(const direct::ShareId& id);
// With the gate about to open: the connections to owners have their names (ipc_broker.h).
void name_connections();
// The same: what was saved and is still there is not needed.
void forget_saved();
// Takes the host's and what was inherited again, with its content, at the same addresses.
Outcome retake_saved();
// A descriptor of this process's own piece. `closed`: the gate is, and all work has ended, so that
// a piece which the driver gives out no more may be replaced.
Outcome lend(const direct::ShareId& id, bool closed, int& fd);
// All that is not there of other processes', looked up once: a process may have thousands of
// pieces.
class MissingImports {
 public:
  MissingImports();
  // Imports from the descriptor all of that id, and maps it where it was.
  Outcome attach(const direct::ShareId& id, int fd);

 private:
  std::multimap<direct::ShareId, Physical*> missing_;
  std::map<const Physical*, std::vector<Mapping*>> mappings_;
};

}  // namespace stasis::preload
