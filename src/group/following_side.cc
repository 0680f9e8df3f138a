#include "group/following_side.h"

#include <optional>
#include <utility>

#include "base/printable.h"

namespace stasis {

void FollowingSide::look() {
  const auto text = rendezvous_.read(kLead, kMostLeadBytes);
  if (text && *text && **text != lead_text_) hear(**text);
  if (is_last(decision_.verdict)) return;
  if (Clock::now() - lead_changed_ > options_.silence) {
    want(silent(lead_.leader.empty() ? "that leads" : shortened(lead_.leader, kMostName),
                options_.silence));
  }
  check_deadlines();
}

std::vector<std::string> FollowingSide::busy_parts() const {
  const std::string quiet = quiet_text(lead_changed_);
  if (quiet.empty() || lead_.leader.empty()) return {};
  return {shortened(lead_.leader, kMostName) + quiet};
}

void FollowingSide::hear(const std::string& text) {
  auto lead = record_from_text<LeadRecord>(text);
  if (!lead) return;
  lead_text_ = text;
  lead_changed_ = Clock::now();
  // What this part has heard by itself is newer.
  const bool newer = decision_.verdict == Verdict::kNone ||
                     (decision_.verdict == Verdict::kStill && is_last(lead->decision.verdict));
  if (newer) decision_ = lead->decision;
  lead_ = std::move(*lead);
  if (!lead_.complete || find_index()) return;
  lead_.complete = false;
  lead_text_.clear();  // read again
}

}  // namespace stasis
