// What the parts of a group write for one another, a file each. They are read as what another user
// may have forged: within bounds, and for nothing but to stop the group or let it go on. Private to
// src/group.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_record.h"
#include "base/operation.h"
#include "group/group_part.h"
#include "group/group_rendezvous.h"

namespace stasis {

inline constexpr std::size_t kMostName = 64;
inline constexpr std::size_t kMostWhy = 400;
inline constexpr std::size_t kMostGroupId = 64;
inline constexpr std::size_t kMostPartBytes = 4096;
inline constexpr std::size_t kMostLeadBytes = 64 << 10;     // a number for each part
inline constexpr std::size_t kMostRosterBytes = 128 << 10;  // a name for each part

// Their names.
inline constexpr const char* kLead = "lead";
inline constexpr const char* kRoster = "roster";
inline constexpr const char* kRest = kFirstDecision;
inline constexpr const char* kOutcome = "outcome";  // the second
inline constexpr std::string_view kPartPrefix = "part.";
inline constexpr std::string_view kLinksPrefix = "links.";

inline std::string links_file(const std::string& name) { return std::string(kLinksPrefix) + name; }
inline std::string part_file(const std::string& name) { return std::string(kPartPrefix) + name; }

template <class Enum, std::size_t count>
std::optional<Enum> enum_from_name(const std::array<std::string_view, count>& names,
                                   std::string_view name) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return std::nullopt;
  return static_cast<Enum>(found - names.begin());
}

inline constexpr std::size_t kMostLinkText = 200;
inline constexpr std::size_t kMostLinksBytes = kMostGroupRecord;

enum class PartStage { kComing, kReady, kHeld, kLocked, kDone, kFailed };
inline constexpr std::array<std::string_view, 6> kPartStages = {"coming", "ready", "held",
                                                                "locked", "done",  "failed"};
enum class Verdict {
  kNone,
  kStill,   // all stand still: on to what takes long
  kGoOn,    // before that: all run
  kDone,    // all have done what was asked for
  kBack,    // after kStill: all go back
  kPartly,  // what needs no agreement was not done by all
};
inline constexpr std::array<std::string_view, 6> kVerdicts = {"",     "still", "go-on",
                                                              "done", "back",  "partly"};

inline bool is_against(Verdict verdict) {
  return verdict == Verdict::kGoOn || verdict == Verdict::kBack || verdict == Verdict::kPartly;
}
inline bool is_last(Verdict verdict) { return is_against(verdict) || verdict == Verdict::kDone; }

struct GroupDecision {
  Verdict verdict = Verdict::kNone;
  std::string by;    // the part that has decided
  std::string code;  // of an error; empty: none
  std::string why;
};
void fields(auto& io, Described<GroupDecision> auto& decision) {
  io.named(
      "verdict", decision.verdict, [](Verdict v) { return kVerdicts[static_cast<std::size_t>(v)]; },
      [](std::string_view name) { return enum_from_name<Verdict>(kVerdicts, name); });
  io("by", decision.by, Items{0, 64});
  io("code", decision.code, Items{0, 64});
  io("why", decision.why, Items{0, 4 * kMostWhy});
}

struct PartRecord {
  RecordedOperation operation;
  std::uint32_t parts = 0;
  PartStage stage = PartStage::kComing;
  std::uint64_t round = 0;  // held: since it was last let go on by this round
  std::uint64_t beat = 0;   // grows as long as it lives
  bool left = false;        // it has heard what was decided
  std::string dump_id;      // of the image that it restores
  std::string code;         // failed: of what
  std::string why;
};
void fields(auto& io, Described<PartRecord> auto& part) {
  io.named("operation", part.operation, &RecordedOperation::name, RecordedOperation::from_name,
           Items{0, 32});
  io("parts", part.parts, Within{1, kMostParts});
  io.named(
      "stage", part.stage, [](PartStage s) { return kPartStages[static_cast<std::size_t>(s)]; },
      [](std::string_view name) { return enum_from_name<PartStage>(kPartStages, name); });
  io("round", part.round);
  io("beat", part.beat);
  io("left", part.left);
  io("dump_id", part.dump_id, Items{0, kMostGroupId});
  io("code", part.code, Items{0, 64});
  io("why", part.why, Items{0, 4 * kMostWhy});
}

struct LeadRecord {
  std::string leader;
  std::string id;  // of the operation
  std::uint64_t beat = 0;
  bool complete = false;  // all have come, and the roster stands
  bool linked = false;    // the connections of all are locked, and lead from part to part
  // The round that each part, by the roster, was last let go on by; empty: none was.
  std::vector<std::uint64_t> asked;
  std::chrono::microseconds moment{0};  // for so long
  GroupDecision decision;
};
void fields(auto& io, Described<LeadRecord> auto& lead) {
  io("leader", lead.leader, Items{1, 64});
  io("id", lead.id, Items{1, kMostGroupId});
  io("beat", lead.beat);
  io("complete", lead.complete);
  io("linked", lead.linked);
  io("asked", lead.asked, Items{0, kMostParts});
  io("moment_us", lead.moment, Within{0, 1'000'000});
  io("decision", lead.decision);
}

void fields(auto& io, Described<GroupLinks> auto& links) {
  io("established", links.established, Items{0, kMostPartLinks});
  io("closing", links.closing, Items{0, kMostPartLinks});
  io("may_lead_out", links.may_lead_out);
}

struct GroupRoster {
  std::vector<std::string> names;
};
void fields(auto& io, Described<GroupRoster> auto& roster) {
  io("names", roster.names, Items{1, kMostParts});
}

}  // namespace stasis
