// The side of the part that leads: it reads what all say, lets those go on for a moment that stand
// still, and says what is decided. Private to src/group.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "group/group_rounds.h"
#include "group/group_side.h"

namespace stasis {

class LeadingSide final : public GroupSide {
 public:
  // `lead`: the record by which it has become the one that leads.
  LeadingSide(GroupRendezvous& rendezvous, const GroupPartOptions& options, Clock::time_point start,
              LeadRecord lead)
      : GroupSide(rendezvous, options, start) {
    lead_ = std::move(lead);
  }
  bool leads() const override { return true; }

 private:
  // What it knows of a part.
  struct Seen {
    PartRecord record;
    std::string text;
    Clock::time_point changed = Clock::now();
    bool is_there = false;
    bool was_held = false;
  };

  void look() override;
  std::vector<std::string> busy_parts() const override;
  std::vector<std::string> late_parts() const override;

  void probe_parts();
  void find_parts();
  void probe_part(const std::string& name, Seen& seen);
  // It may have died before it could decide.
  void pass_on(const std::string& name, const PartRecord& record);
  void complete_roster();
  void check_quiescence();
  void check_links();
  // Whether each connection of a part is one of another part's, from its other end. Gives the group
  // up if one is not. False also where it cannot be known yet.
  bool links_are_whole();
  // All have done it; or, where that needs no agreement, those that can.
  void check_outcome();

  std::map<std::string, Seen> seen_;
  GroupRounds rounds_;
  Clock::time_point lead_told_;
};

}  // namespace stasis
