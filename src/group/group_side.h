// What a part's thread does in the agreement of a group: it reads what the others say and what was
// decided, and decides where this part wants the group to be given up. One part leads
// (leading_side.h), the others follow (following_side.h).
//
// Private to src/group. Of the herald's thread alone (group_part.cc), which tells the caller
// what has come of a step.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/operation.h"
#include "base/units.h"
#include "group/group_part.h"
#include "group/group_records.h"
#include "group/group_rendezvous.h"

namespace stasis {

// How often a part says that it lives.
inline constexpr std::chrono::milliseconds kBeat{500};
// Those that follow leave it to the one that leads to say which part is late.
inline constexpr std::chrono::milliseconds kGrace{1000};

// All do it, or all go back.
inline bool agrees(Operation operation) {
  return operation != Operation::kResume && operation != Operation::kStart;
}
// Its programs run until they rest: that has a deadline, and needs moments. Those that are
// restored stand still as soon as they are there, which takes as long as their images are large.
inline bool quiesces(Operation operation) {
  return agrees(operation) && operation != Operation::kRestore;
}

class GroupSide {
 public:
  // `start`: when the part began to join. The references outlive it.
  GroupSide(GroupRendezvous& rendezvous, const GroupPartOptions& options, Clock::time_point start)
      : rendezvous_(rendezvous), options_(options), start_(start) {}
  GroupSide(const GroupSide&) = delete;
  GroupSide& operator=(const GroupSide&) = delete;
  virtual ~GroupSide() = default;

  // Looks at the records once, and does what follows. `is_late`: the caller's time is over.
  void step(bool is_late);
  // This part has failed, or was asked to stop.
  void decide_against(const Error& why);

  // Of a part that has failed: whether others have still to come, and it is early enough that it
  // decides when they are there. One that came later would wait for it, and not hear why.
  bool waits_for_others(Clock::time_point failed_at) const;

  const GroupDecision& decision() const { return decision_; }
  // What the part that leads says.
  const LeadRecord& lead() const { return lead_; }
  virtual bool leads() const = 0;
  // When it first said that all have come.
  Clock::time_point complete_at() const { return complete_at_; }
  // This part's place in the roster, if all have come.
  std::size_t index() const { return index_; }
  // Why this side wants the group to be given up. The first reason.
  const std::optional<Error>& wanted() const { return wanted_; }
  // This part is none of the group.
  const std::optional<Error>& refused() const { return refused_; }

 protected:
  virtual void look() = 0;
  // Of the part that leads, which alone sees all: those that have come and are not ready, and those
  // that are not quiesced.
  virtual std::vector<std::string> busy_parts() const { return {}; }
  virtual std::vector<std::string> late_parts() const { return {}; }

  // Makes the decision, or hears the one that another part has made. A file system that fails is
  // asked again.
  void make(const char* name, const GroupDecision& decision);
  // This side itself wants the group to be given up.
  void want(const Error& why);
  // False: not known yet, or this part is none of them.
  bool find_index();
  // The deadlines, as this part knows them.
  void check_deadlines();

  GroupRendezvous& rendezvous_;
  const GroupPartOptions& options_;
  GroupDecision decision_;
  LeadRecord lead_;
  // When the record of the part that leads last was another one.
  Clock::time_point lead_changed_ = Clock::now();

 private:
  // As many parts as the group has are past their join: they hear what is decided now.
  bool all_have_joined() const;
  // Before a dump comes what a part may do while its programs run.
  bool is_soon_ready() const {
    return !agrees(options_.operation) || options_.operation == Operation::kSuspend;
  }

  const Clock::time_point start_;
  Clock::time_point complete_at_;
  bool is_late_ = false;
  bool has_index_ = false;
  std::size_t index_ = 0;
  std::optional<Error> wanted_;
  std::optional<Error> refused_;
};

// What the part of that file says; nothing where there is none, or a damaged one.
std::optional<PartRecord> read_part(GroupRendezvous& rendezvous, const std::string& file);
// Of a part that says nothing.
Error silent(const std::string& name, std::chrono::milliseconds silence);
// " (of which nothing is heard for 3000 ms)", if it is that long.
std::string quiet_text(Clock::time_point since_when);

}  // namespace stasis
