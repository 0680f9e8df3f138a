// A tool's part in an operation on a job of several nodes: each node's tool acts on its own tree,
// and they agree through records that all see (docs/adr/0058-jobs-of-several-nodes.md).
//
// One part leads: it reads what all say, lets those go on for a moment that stand still, as a round
// of one node does (quiesce_round.h), and says what is decided. A decision is a record that only
// one can make, so a part that hears nothing can decide by itself, and all obey the one that was
// first.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/interrupt.h"
#include "base/operation.h"
#include "base/result.h"
#include "group/group_rendezvous.h"

namespace stasis {

inline constexpr std::uint32_t kMostParts = 1024;
inline constexpr std::size_t kMostPartLinks = 16384;  // of one part
// The file in the directory that is there when no part can join any more.
inline constexpr const char* kFirstDecision = "rest";

// Letters, digits, '.', '_' and '-', 64 at most.
bool is_part_name(const std::string& name);
// Of this host and process.
std::string default_part_name();

// TCP connections of a part with what is outside of it, each "OWN OTHER", or with a third word that
// both ends have: the other end is to be one of another part.
struct GroupLinks {
  std::vector<std::string> established;
  // Those whose other end may have gone; another part's may name them.
  std::vector<std::string> closing = {};
  // The user has consented to connections that lead out of the group.
  bool may_lead_out = false;
};

struct GroupPartOptions {
  Operation operation = Operation::kNone;
  std::uint32_t parts = 1;
  std::string name;
  // Until all have come, and again until all stand still; zero: no deadline. Of a restore, until
  // all have come.
  std::chrono::milliseconds timeout{10000};
  // Of a restore: the dump that has made its image. All parts have to have the same.
  std::string dump_id = {};
  GroupLinks links = {};  // that the image has
  // After which a part of which nothing is heard is given up.
  std::chrono::milliseconds silence{10000};
};

// A thread of its own tells the others that this part lives, and hears them; it never holds the
// caller up, whatever becomes of the rendezvous. One thread at a time calls.
class GroupPart {
 public:
  // Where the place was used by an operation that is ending, waits for that. kBusy if it does not
  // end, or another part has that name; kInterrupted; kUsage; what the rendezvous says.
  // `interrupt` must outlive the part.
  static Result<std::unique_ptr<GroupPart>> join(std::unique_ptr<GroupRendezvous> rendezvous,
                                                 GroupPartOptions options,
                                                 const Interrupt& interrupt);
  GroupPart(const GroupPart&) = delete;
  GroupPart& operator=(const GroupPart&) = delete;
  // leave()
  ~GroupPart();

  const GroupPartOptions& options() const;
  // Once all have come: of this operation, the same for all parts, and of no other operation.
  std::string id() const;

  // Asks to stop also when the group has decided that all go on, and when this part wants that and
  // can tell no other.
  const Interrupt& interrupt() const;

  // Waits until all have come here; the programs run. Its errors, and those of the calls below, are
  // the group's: what a part has failed of, with its name; kTimeout.
  Result<void> wait_for_all();
  // For the local processes, until a little after the deadline; zero: none. At least a millisecond
  // otherwise.
  std::chrono::milliseconds left() const;
  // Called with all local processes quiesced, or restored: waits until all parts are. Nothing: it
  // is decided,
  // and they stay so. A time: let them go on for so long, quiesce them and call again. Others wait
  // for these.
  Result<std::optional<std::chrono::microseconds>> wait_until_quiesced();
  bool is_quiesced() const;
  // Of a dump, after wait_until_quiesced(): the connections of this part are locked. Waits until
  // those of all parts are, and each is known to both of its ends.
  Result<void> agree_on_links(const GroupLinks& links);
  // Called when the local part is done: waits until all are, or it is decided that all go back.
  Result<void> finish();
  // This part has failed, and tells the others, before it is rolled back. The error to report: if
  // it is only what another part's failure has come to, that.
  Error give_up(Error why);
  // Whether it was decided, and this part has heard so, what becomes of all.
  bool knows_outcome() const;
  // Says that this part has heard what was decided; the last one removes what is left. Once.
  // kTimeout: this part has done it as all were to, and others, which the error names, have not
  // said that they have heard so. They may have gone back.
  Result<void> leave();

 private:
  class Herald;
  explicit GroupPart(std::shared_ptr<Herald> herald) : herald_(std::move(herald)) {}

  std::shared_ptr<Herald> herald_;  // its thread's, too
};

// For operations of which `part` may be null: those of one node.
//
// A failure of this node's: the others are told, if there are any, before this one is rolled back.
Error told(GroupPart* part, Error why);
// The part's interrupt, or the caller's own.
const Interrupt& interrupt_of(const GroupPart* part, const Interrupt& own);

}  // namespace stasis
