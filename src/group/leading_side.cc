#include "group/leading_side.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "base/listing.h"
#include "base/printable.h"
#include "group/group_links.h"

namespace stasis {
namespace {

// Of a job.
bool is_start(const RecordedOperation& operation) {
  return operation == Operation::kStart || operation == Operation::kRestore;
}

}  // namespace

void LeadingSide::look() {
  const auto before = record_to_text(lead_);
  if (!is_last(decision_.verdict)) probe_parts();
  if (!is_last(decision_.verdict)) check_deadlines();
  lead_.decision = decision_;
  if (record_to_text(lead_) == before && Clock::now() - lead_told_ < kBeat) return;
  ++lead_.beat;
  if (rendezvous_.write(kLead, record_to_text(lead_))) lead_told_ = Clock::now();
}

std::vector<std::string> LeadingSide::busy_parts() const {
  std::vector<std::string> busy;
  for (const auto& [name, seen] : seen_)
    if (seen.is_there && seen.record.stage == PartStage::kComing) busy.push_back(name);
  return busy;
}

std::vector<std::string> LeadingSide::late_parts() const {
  std::vector<std::string> late;
  for (const auto& [name, seen] : seen_)
    if (!seen.was_held) late.push_back(name + quiet_text(seen.changed));
  return late;
}

void LeadingSide::probe_parts() {
  if (!lead_.complete) find_parts();
  for (auto& [name, seen] : seen_)
    probe_part(name, seen);
  if (is_last(decision_.verdict)) return;
  if (!lead_.complete) {
    complete_roster();
  } else if (!agrees(options_.operation) || decision_.verdict == Verdict::kStill) {
    if (!lead_.linked) check_links();
    check_outcome();
  } else {
    check_quiescence();
  }
}

void LeadingSide::find_parts() {
  const auto names = rendezvous_.names();
  if (!names) return;
  for (const std::string& file : *names) {
    const std::string name =
        file.starts_with(kPartPrefix) ? file.substr(kPartPrefix.size()) : std::string();
    if (is_part_name(name) && seen_.size() <= options_.parts) seen_.try_emplace(name);
  }
  if (seen_.size() <= options_.parts) return;
  std::vector<std::string> all;
  for (const auto& [name, seen] : seen_)
    all.push_back(name);
  want({ErrorCode::kUsage,
        fmt::format("more than {} parts have come: {}", options_.parts, listed(all, ", ")),
        "give all parts the same number (--parts), and start as many"});
}

void LeadingSide::probe_part(const std::string& name, Seen& seen) {
  const auto text = rendezvous_.read(part_file(name), kMostPartBytes);
  if (text && *text && **text != seen.text) {
    if (auto record = record_from_text<PartRecord>(**text)) {
      seen.record = std::move(*record);
      seen.text = **text;
      seen.changed = Clock::now();
      seen.is_there = true;
    }
  }
  if (is_last(decision_.verdict)) return;
  const PartRecord& record = seen.record;
  if (seen.is_there && record.operation != options_.operation && is_start(record.operation) &&
      is_start(options_.operation)) {
    const bool anew = record.operation == Operation::kStart;
    return want({ErrorCode::kUsage,
                 fmt::format("part {} goes on from an image, and part {} has none",
                             anew ? options_.name : name, anew ? name : options_.name),
                 "give each part the directory of its images; to begin anew, remove those of all "
                 "parts"});
  }
  if (seen.is_there && (record.parts != options_.parts || record.operation != options_.operation)) {
    return want({ErrorCode::kUsage,
                 fmt::format("part {} is one of {} of a {}, and part {} one of {} of a {}", name,
                             record.parts, printable(record.operation.name()), options_.name,
                             options_.parts, operation_name(options_.operation)),
                 "give all parts the same verb, and the same number (--parts)"});
  }
  // A part that cannot read its image has none, and says what is wrong with it.
  const bool have_images = !record.dump_id.empty() && !options_.dump_id.empty();
  if (seen.is_there && have_images && record.dump_id != options_.dump_id) {
    return want({ErrorCode::kUsage,
                 fmt::format("the images of part {} and of part {} are of different dumps", name,
                             options_.name),
                 "restore all parts from the images that one dump of the group has made (`stasis "
                 "inspect` says which)"});
  }
  if (!agrees(options_.operation)) return;
  // Until all have come, the part that has failed decides when it is told (group_part.cc).
  if (record.stage == PartStage::kFailed && name != options_.name && lead_.complete)
    return pass_on(name, record);
  if (Clock::now() - seen.changed > options_.silence) want(silent(name, options_.silence));
}

void LeadingSide::pass_on(const std::string& name, const PartRecord& record) {
  GroupDecision decision{Verdict::kGoOn, name, record.code, record.why};
  if (decision_.verdict != Verdict::kStill) make(kRest, decision);
  if (decision_.verdict != Verdict::kStill) return;
  decision.verdict = Verdict::kBack;
  make(kOutcome, decision);
}

void LeadingSide::complete_roster() {
  const bool all = seen_.size() == options_.parts &&
                   std::all_of(seen_.begin(), seen_.end(), [this](const auto& one) {
                     return one.second.is_there && (!agrees(options_.operation) ||
                                                    one.second.record.stage != PartStage::kComing);
                   });
  if (!all) return;
  const bool has_failed = std::any_of(seen_.begin(), seen_.end(), [](const auto& one) {
    return one.second.record.stage == PartStage::kFailed;
  });
  if (options_.operation == Operation::kRestore && !has_failed && !links_are_whole()) return;
  GroupRoster roster;
  for (const auto& [name, seen] : seen_)
    roster.names.push_back(name);
  if (!rendezvous_.write(kRoster, record_to_text(roster))) return;
  lead_.complete = true;
  lead_.asked.assign(seen_.size(), 0);
  rounds_.begin(Clock::now());
  (void)find_index();
}

void LeadingSide::check_quiescence() {
  std::size_t held = 0;
  std::size_t i = 0;
  for (auto& [name, seen] : seen_) {
    const std::uint64_t asked = lead_.asked[i++];
    const bool is_held = seen.record.stage == PartStage::kHeld && seen.record.round >= asked;
    if (is_held) ++held;
    if (is_held && !seen.was_held) rounds_.part_quiesced(Clock::now(), asked);
    seen.was_held = is_held;
  }
  if (held == seen_.size()) return make(kRest, {Verdict::kStill, options_.name, {}, {}});
  if (!quiesces(options_.operation) || !rounds_.is_due(Clock::now(), held)) return;
  lead_.moment = rounds_.moment();
  i = 0;
  for (auto& [name, seen] : seen_) {
    if (std::exchange(seen.was_held, false)) lead_.asked[i] = rounds_.round();
    ++i;
  }
}

void LeadingSide::check_links() {
  const bool all = std::all_of(seen_.begin(), seen_.end(), [](const auto& one) {
    return one.second.record.stage == PartStage::kLocked;
  });
  if (all && links_are_whole()) lead_.linked = true;
}

bool LeadingSide::links_are_whole() {
  std::map<std::string, GroupLinks> parts;
  for (const auto& [name, seen] : seen_) {
    const auto text = rendezvous_.read(links_file(name), kMostLinksBytes);
    auto links = text && *text ? record_from_text<GroupLinks>(**text) : std::optional<GroupLinks>();
    if (!links) return false;
    parts.emplace(name, std::move(*links));
  }
  const auto unmatched = find_unmatched_link(parts);
  if (!unmatched) return true;
  want(refusal(
      {"tcp-connection",
       Severity::kRed,
       {},
       fmt::format("a TCP connection of part {} ({}) leads to no other part, or to one that has "
                   "another address for it",
                   unmatched->part, printable(shortened(unmatched->link, kMostLinkText))),
       "try again if it was just being made; else dump with --tcp-established to keep it, or "
       "--tcp-close to drop all connections"},
      ErrorCode::kUndumpable));
  return false;
}

void LeadingSide::check_outcome() {
  std::vector<std::string> not_done;
  for (const auto& [name, seen] : seen_) {
    if (seen.record.stage == PartStage::kDone) continue;
    // Of one that has failed or says nothing, probe_part() makes all go back.
    if (agrees(options_.operation)) return;
    const bool failed = seen.record.stage == PartStage::kFailed;
    const bool gone = Clock::now() - seen.changed > options_.silence;
    if (!failed && !gone) return;
    not_done.push_back(
        fmt::format("part {} {}", name,
                    failed ? "failed: " + printable(seen.record.why)
                           : fmt::format("says nothing for {} ms", options_.silence.count())));
  }
  if (not_done.empty()) return make(kOutcome, {Verdict::kDone, options_.name, {}, {}});
  make(kOutcome,
       {Verdict::kPartly, options_.name, std::string(error_code_name(ErrorCode::kTimeout)),
        shortened(listed(not_done), kMostWhy)});
}

}  // namespace stasis
