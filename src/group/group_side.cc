#include "group/group_side.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/listing.h"
#include "base/printable.h"

namespace stasis {
namespace {

using std::chrono::milliseconds;

// After which a message says so.
constexpr milliseconds kQuiet{2000};
// Between the starts of the tools of one group, where one has failed.
constexpr milliseconds kMostSkew{3000};

}  // namespace

Error silent(const std::string& name, milliseconds silence) {
  return {ErrorCode::kTimeout,
          fmt::format("nothing was heard of part {} for {} ms", name, silence.count()),
          "see whether its node and its tool live (`stasis recover` there, if it was killed), then "
          "try again with all of them"};
}

std::optional<PartRecord> read_part(GroupRendezvous& rendezvous, const std::string& file) {
  const auto text = rendezvous.read(file, kMostPartBytes);
  return text && *text ? record_from_text<PartRecord>(**text) : std::optional<PartRecord>();
}

std::string quiet_text(Clock::time_point since_when) {
  const auto quiet = std::chrono::floor<milliseconds>(Clock::now() - since_when);
  if (quiet < kQuiet) return {};
  return fmt::format(" (of which nothing is heard for {} ms)", quiet.count());
}

void GroupSide::step(bool is_late) {
  is_late_ = is_late;
  look();
  if (lead_.complete && complete_at_ == Clock::time_point()) complete_at_ = Clock::now();
}

void GroupSide::decide_against(const Error& why) {
  GroupDecision decision{Verdict::kPartly, options_.name, std::string(error_code_name(why.code)),
                         shortened(why.message, kMostWhy)};
  if (agrees(options_.operation) && decision_.verdict != Verdict::kStill) {
    decision.verdict = Verdict::kGoOn;
    make(kRest, decision);
  }
  if (!agrees(options_.operation) || decision_.verdict == Verdict::kStill) {
    decision.verdict = agrees(options_.operation) ? Verdict::kBack : Verdict::kPartly;
    make(kOutcome, decision);
  }
}

bool GroupSide::waits_for_others(Clock::time_point failed_at) const {
  if (!agrees(options_.operation) || lead_.complete || since(failed_at) >= kMostSkew) return false;
  const bool early = options_.timeout.count() == 0 || since(start_) < options_.timeout / 2;
  return early && !all_have_joined();
}

bool GroupSide::all_have_joined() const {
  const auto names = rendezvous_.names();
  if (!names) return false;
  std::size_t joined = 0;
  for (const std::string& name : *names) {
    if (!name.starts_with(kPartPrefix)) continue;
    const auto record = read_part(rendezvous_, name);
    if (record && record->beat > 0) ++joined;
  }
  return joined >= options_.parts;
}

void GroupSide::make(const char* name, const GroupDecision& decision) {
  const auto made = rendezvous_.claim(name, options_.name, record_to_text(decision));
  if (!made) return;
  if (*made) {
    decision_ = decision;
    return;
  }
  const auto text = rendezvous_.read(name, kMostPartBytes);
  if (!text || !*text) return;
  auto other = record_from_text<GroupDecision>(**text);
  const bool fits =
      other && (name == std::string_view(kRest)
                    ? other->verdict == Verdict::kStill || other->verdict == Verdict::kGoOn
                    : is_last(other->verdict) && other->verdict != Verdict::kGoOn);
  // Damaged or forged: this part goes by itself, and that is back.
  if (!fits) {
    decision_ = decision;
    if (!is_against(decision.verdict)) decision_.verdict = Verdict::kBack;
    decision_.why = fmt::format("{}/{} is damaged", rendezvous_.place(), name);
    return;
  }
  decision_ = std::move(*other);
}

bool GroupSide::find_index() {
  if (has_index_) return true;
  const auto text = rendezvous_.read(kRoster, kMostRosterBytes);
  const auto roster =
      text && *text ? record_from_text<GroupRoster>(**text) : std::optional<GroupRoster>();
  if (!roster) return false;
  const auto found = std::find(roster->names.begin(), roster->names.end(), options_.name);
  index_ = static_cast<std::size_t>(found - roster->names.begin());
  has_index_ = found != roster->names.end();
  if (!has_index_) {
    refused_ = {ErrorCode::kUsage,
                fmt::format("the group in {} is complete without part {}", rendezvous_.place(),
                            options_.name),
                "give all parts the same number (--parts), and start as many"};
  }
  return has_index_;
}

void GroupSide::want(const Error& why) {
  if (refused_) return;
  if (!wanted_) wanted_ = why;
  decide_against(why);
}

void GroupSide::check_deadlines() {
  if (options_.timeout.count() == 0 || is_last(decision_.verdict)) return;
  if (!lead_.complete && (is_late_ || since(start_) > options_.timeout)) {
    const auto names = rendezvous_.names();
    std::vector<std::string> there;
    for (const std::string& name : names ? *names : std::vector<std::string>())
      if (name.starts_with(kPartPrefix))
        there.push_back(printable(name.substr(kPartPrefix.size())));
    std::sort(there.begin(), there.end());
    if (there.size() >= options_.parts && !is_soon_ready() && !is_late_) return;
    const auto busy = busy_parts();
    want({ErrorCode::kTimeout,
          there.size() < options_.parts
              ? fmt::format("{} of {} parts have come within {} ms{}{}", there.size(),
                            options_.parts, options_.timeout.count(), there.empty() ? "" : ": ",
                            listed(there, ", "))
              : fmt::format("not all parts were ready within {} ms: {}", options_.timeout.count(),
                            listed(busy.empty() ? there : busy, ", ")),
          "see why the others did not come, or give them more time (--timeout; a "
          "job, --grace)"});
  }
  const bool rests =
      quiesces(options_.operation) && decision_.verdict == Verdict::kNone && lead_.complete;
  const auto limit = options_.timeout + (leads() ? milliseconds(0) : kGrace);
  if (!rests || complete_at_ == Clock::time_point() || Clock::now() - complete_at_ <= limit) return;
  auto late = late_parts();
  // Only that part sees all.
  if (late.empty()) {
    late.push_back(fmt::format("{}{}, which leads, or another,", shortened(lead_.leader, kMostName),
                               quiet_text(lead_changed_)));
  }
  want({ErrorCode::kTimeout,
        fmt::format("the GPU work of part {} was not quiesced within {} ms", listed(late, ", "),
                    options_.timeout.count()),
        "give it more time (--timeout), or try when fewer kernels are in flight"});
}

}  // namespace stasis
