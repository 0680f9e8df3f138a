// Long because the two sides of one agreement, the part that leads and those that follow, are read
// together.
#include "checkpoint/group_part.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <map>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/host_name.h"
#include "base/listing.h"
#include "base/printable.h"
#include "base/threads.h"
#include "base/units.h"
#include "checkpoint/group_links.h"
#include "checkpoint/group_records.h"
#include "checkpoint/group_rounds.h"

namespace stasis {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How often a part says that it lives.
constexpr milliseconds kBeat{500};
// After which a message says so.
constexpr milliseconds kQuiet{2000};
// How often the directory is read: while programs stand still, and otherwise; the one that leads
// reads a file for each part.
constexpr microseconds kPollHeld{2000};
constexpr microseconds kPollOther{20000};
constexpr microseconds kPollEach{20};
// Those that follow leave it to the one that leads to say which part is late.
constexpr milliseconds kGrace{1000};
// How long this part tries to say that it leaves.
constexpr milliseconds kMostFarewell{4000};
// For a file system that does not answer, when there is something to be told.
constexpr milliseconds kMostAnswer{5000};
constexpr milliseconds kLookAgain{20};

// The error of a decision that another part has made. A code that says something of the caller, or
// that no catalogue has, counts as "try again".
Error error_of(const GroupDecision& decision) {
  ErrorCode code = ErrorCode::kTimeout;
  for (const ErrorInfo& info : error_catalogue())
    if (info.name == decision.code) code = info.code;
  if (code == ErrorCode::kInterrupted || code == ErrorCode::kInternal ||
      code == ErrorCode::kNotRolledBack || code == ErrorCode::kNoSuchProcess) {
    code = ErrorCode::kTimeout;
  }
  return {code,
          fmt::format("the group was given up by part {}: {}", shortened(decision.by, kMostName),
                      shortened(decision.why, kMostWhy)),
          "see what that part says, then try again with all of them"};
}

// Of a job.
bool is_start(const RecordedOperation& operation) {
  return operation == Operation::kStart || operation == Operation::kRestore;
}

Error silent(const std::string& name, milliseconds silence) {
  return {ErrorCode::kTimeout,
          fmt::format("nothing was heard of part {} for {} ms", name, silence.count()),
          "see whether its node and its tool live (`stasis recover` there, if it was killed), then "
          "try again with all of them"};
}

// 128 random bits.
std::string random_id() {
  std::random_device device;
  std::string text;
  for (int i = 0; i < 4; ++i)
    text += fmt::format("{:08x}", static_cast<std::uint32_t>(device()));
  return text;
}

std::string quiet_text(Clock::time_point since_when) {
  const auto quiet = std::chrono::floor<milliseconds>(Clock::now() - since_when);
  if (quiet < kQuiet) return {};
  return fmt::format(" (of which nothing is heard for {} ms)", quiet.count());
}

}  // namespace

bool is_part_name(const std::string& name) {
  constexpr std::string_view kKnown =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !name.empty() && name.size() <= kMostName &&
         name.find_first_not_of(kKnown) == std::string::npos;
}

std::string default_part_name() {
  const std::string number = fmt::format("-{}", ::getpid());
  std::string host = host_name().substr(0, kMostName - number.size());
  for (char& c : host)
    if (!is_part_name(std::string(1, c))) c = '_';
  return host + number;
}

// Reads and writes the records, in a thread of its own, which a dead file system may hold for ever:
// so no caller waits for it without an end, and it outlives the part then.
class GroupPart::Herald : public std::enable_shared_from_this<Herald> {
 public:
  Herald(std::unique_ptr<GroupRendezvous> rendezvous, GroupPartOptions options,
         const Interrupt& interrupt)
      : rendezvous_(std::move(rendezvous)),
        options_(std::move(options)),
        outer_(interrupt),
        stop_(interrupt) {
    own_.operation = options_.operation;
    own_.parts = options_.parts;
    own_.dump_id = options_.dump_id;
    if (options_.operation == Operation::kRestore) links_ = record_to_text(options_.links);
  }

  const GroupPartOptions& options() const { return options_; }

  std::string id() const {
    const std::lock_guard lock(mutex_);
    return view_.id;
  }

  const Interrupt& interrupt() const { return stop_; }

  Result<void> join() {
    for (;;) {
      auto joined = try_to_join();
      if (joined && *joined) break;
      if (!joined && joined.error().code == ErrorCode::kNotPermitted)
        return fail(std::move(joined.error()));
      // Removed by the last part of the operation before.
      auto renewed = rendezvous_->renew();
      if (!renewed && renewed.error().code == ErrorCode::kNotPermitted)
        return fail(std::move(renewed.error()));
      STASIS_TRY(outer_.check());
      if (options_.timeout.count() == 0 || since(start_) < options_.timeout) {
        std::this_thread::sleep_for(kLookAgain);
        continue;
      }
      if (!joined) return fail(std::move(joined.error()));
      return fail(ErrorCode::kBusy,
                  fmt::format("{} is in use by another operation, or another part is called {}",
                              rendezvous_->place(), options_.name),
                  rendezvous_->when_in_use());
    }
    heard_ = lead_changed_ = Clock::now();
    STASIS_TRY(rendezvous_->joined());
    try {
      std::thread([self = shared_from_this()] { self->run(); }).detach();
    } catch (const std::system_error& error) {
      rendezvous_->remove({part_file(options_.name)});
      return fail(no_thread(error));
    }
    return {};
  }

  Result<void> leave() {
    std::unique_lock lock(mutex_);
    if (!own_.left) {
      own_.left = true;
      left_at_ = Clock::now();
      dirty_ = true;
    }
    to_herald_.notify_all();
    to_caller_.wait_for(lock, kMostAnswer + longest_stay(), [this] { return ended_; });
    const auto unheard = std::exchange(unheard_, {});
    if (unheard.empty()) return {};
    return fail(
        ErrorCode::kTimeout,
        fmt::format("all parts have done it, and part {} has not said that it has heard so: "
                    "it may have gone back",
                    listed(unheard, ", ")),
        "see there what has become of it (`stasis ps`, and what its tool has said)");
  }

  bool knows_outcome() const {
    const std::lock_guard lock(mutex_);
    return is_last(view_.decision.verdict);
  }

  // Of the caller. Waits until `is_so`, which is asked with the view guarded.
  template <class IsSo>
  Result<void> wait(const IsSo& is_so) {
    std::unique_lock lock(mutex_);
    for (;;) {
      const GroupDecision& decision = view_.decision;
      if (refused_) return fail(Error(*refused_));
      if (is_against(decision.verdict)) return fail(decided_error());
      if (is_so(view_)) return {};
      if (auto stop = outer_.check(); !stop) {
        // The thread knows which parts have not come.
        if (stop.error().code == ErrorCode::kTimeout && !view_.complete)
          is_late_ = true;
        else
          ask(std::move(stop.error()));
      }
      const auto limit = asked_ ? kMostAnswer : options_.silence + kMostAnswer;
      if (Clock::now() - (asked_ ? asked_at_ : heard_) > limit) return fail(unheard());
      to_caller_.wait_for(lock, kLookAgain);
    }
  }

  Result<void> enter(PartStage stage) {
    {
      const std::lock_guard lock(mutex_);
      own_.stage = stage;
      dirty_ = true;
    }
    to_herald_.notify_all();
    if (stage == PartStage::kReady)
      return wait([](const LeadRecord& view) { return view.complete; });
    return wait([](const LeadRecord& view) { return view.decision.verdict == Verdict::kDone; });
  }

  milliseconds left() const {
    const std::lock_guard lock(mutex_);
    if (options_.timeout.count() == 0) return milliseconds(0);
    // The group's deadline comes first, and names the parts that are late.
    const auto end = complete_at_ + options_.timeout + 2 * kGrace;
    const auto rest = std::chrono::ceil<milliseconds>(end - Clock::now());
    return std::max(rest, milliseconds(1));
  }

  Result<std::optional<microseconds>> wait_until_quiesced() {
    {
      const std::lock_guard lock(mutex_);
      own_.stage = PartStage::kHeld;
      own_.round = obeyed_;
      dirty_ = true;
    }
    to_herald_.notify_all();
    STASIS_TRY(wait([this](const LeadRecord& view) {
      return view.decision.verdict == Verdict::kStill || asked_round(view) > obeyed_;
    }));
    const std::lock_guard lock(mutex_);
    if (view_.decision.verdict == Verdict::kStill) return std::optional<microseconds>();
    obeyed_ = asked_round(view_);
    own_.stage = PartStage::kReady;
    return std::optional<microseconds>(view_.moment);
  }

  bool is_quiesced() const {
    const std::lock_guard lock(mutex_);
    return view_.decision.verdict == Verdict::kStill;
  }

  Result<void> agree_on_links(const GroupLinks& links) {
    {
      const std::lock_guard lock(mutex_);
      links_ = record_to_text(links);
      own_.stage = PartStage::kLocked;
      dirty_ = true;
    }
    to_herald_.notify_all();
    return wait([](const LeadRecord& view) { return view.linked; });
  }

  Error give_up(Error why) {
    {
      const std::lock_guard lock(mutex_);
      own_.stage = PartStage::kFailed;
      own_.code = error_code_name(why.code);
      own_.why = shortened(why.message, kMostWhy);
      dirty_ = true;
      // What needs no agreement: the others go on with it.
      if (!agrees()) {
        if (auto stop = outer_.check(); !stop) ask(std::move(stop.error()));
      } else if (!is_against(view_.decision.verdict)) {
        ask(why);
      }
    }
    to_herald_.notify_all();
    // What is heard is the decision, this part's or another's.
    auto heard = wait([](const LeadRecord& view) { return is_last(view.decision.verdict); });
    const std::lock_guard lock(mutex_);
    // This part was stopped as by a signal when the group was given up.
    const bool stopped = agrees() && why.code == ErrorCode::kInterrupted && outer_.check();
    if (stopped && is_against(view_.decision.verdict)) return decided_error();
    if (is_last(view_.decision.verdict) || heard || refused_) return why;
    return Error(stopped && asked_ ? *asked_ : why).within("the other parts could not be told");
  }

 private:
  // What the one that leads knows of a part.
  struct Seen {
    PartRecord record;
    std::string text;
    Clock::time_point changed = Clock::now();
    bool is_there = false;
    bool was_held = false;
  };

  // Longer than a part that is cut off waits before it goes back by itself.
  milliseconds longest_stay() const {
    constexpr milliseconds kMore{2000};
    return rendezvous_->serves_others() ? options_.silence + kMostAnswer + kMore : milliseconds(0);
  }

  bool agrees() const {
    return options_.operation != Operation::kResume && options_.operation != Operation::kStart;
  }
  // Its programs run until they rest: that has a deadline, and needs moments. Those that are
  // restored stand still as soon as they are there, which takes as long as their images are large.
  bool quiesces() const { return agrees() && options_.operation != Operation::kRestore; }
  // Before a dump comes what a part may do while its programs run.
  bool is_soon_ready() const { return !agrees() || options_.operation == Operation::kSuspend; }

  // The first call counts. With the lock.
  void ask(Error why) {
    if (asked_ || refused_ || is_last(view_.decision.verdict)) return;
    asked_ = std::move(why);
    asked_at_ = Clock::now();
    to_herald_.notify_all();
  }

  Error decided_error() const {
    if (asked_ && view_.decision.by == options_.name) return *asked_;
    return error_of(view_.decision);
  }

  Error unheard() const {
    if (asked_) return *asked_;
    return {ErrorCode::kTimeout, fmt::format("{} does not answer", rendezvous_->place()),
            rendezvous_->when_silent()};
  }

  std::uint64_t asked_round(const LeadRecord& view) const {
    return index_ < view.asked.size() ? view.asked[index_] : 0;
  }

  // False: not yet.
  Result<bool> try_to_join() {
    const std::string own = part_file(options_.name);
    // No file is made then: the last part of that operation waits for those that it finds.
    STASIS_TRY_ASSIGN(const bool before, was_decided());
    if (before) return false;
    STASIS_TRY_ASSIGN(const bool is_new,
                      rendezvous_->claim(own, options_.name, record_to_text(own_)));
    if (!is_new) return false;
    // Once more: those may have been about to be removed.
    const auto after = was_decided();
    if (!after || *after) {
      rendezvous_->remove({own});
      return after ? Result<bool>(false) : after;
    }
    LeadRecord lead;
    lead.leader = options_.name;
    lead.id = random_id();
    STASIS_TRY_ASSIGN(leads_, rendezvous_->claim(kLead, options_.name, record_to_text(lead)));
    if (leads_) lead_ = std::move(lead);
    return true;
  }

  Result<bool> was_decided() {
    for (const char* decision : {kRest, kOutcome}) {
      STASIS_TRY_ASSIGN(const auto text, rendezvous_->read(decision, kMostPartBytes));
      if (text) return true;
    }
    return false;
  }

  // --- Of the thread.

  void run() {
    bool again = false;   // what was to be told could not be
    bool agreed = false;  // all do it
    for (;;) {
      std::unique_lock lock(mutex_);
      const bool quick = own_.stage == PartStage::kHeld || (leads_ && view_.complete);
      const microseconds poll =
          std::max(quick ? kPollHeld : kPollOther, kPollEach * options_.parts);
      to_herald_.wait_for(lock, poll, [this] { return dirty_; });
      const bool due = dirty_ || again || Clock::now() - told_ >= kBeat;
      dirty_ = false;
      if (due) ++own_.beat;
      const PartRecord own = own_;
      const std::optional<Error> asked = asked_;
      const std::optional<std::string> links = std::exchange(links_, std::nullopt);
      lock.unlock();
      // Before the stage that says that they are there.
      const bool listed = !links || rendezvous_->write(links_file(options_.name), *links);
      bool told = !due;
      if (due && listed)
        told = rendezvous_->write(part_file(options_.name), record_to_text(own)).has_value();
      if (told && due) told_ = Clock::now();
      if (asked && !is_last(decision_.verdict)) decide_against(*asked);
      if (leads_)
        lead();
      else
        follow();
      lock.lock();
      if (!listed && !links_) links_ = links;
      again = !told;
      show();
      agreed = agrees() && decision_.verdict == Verdict::kDone;
      // The part that leads waits for it.
      if (own.left && (told || !agreed || Clock::now() - left_at_ > kMostFarewell)) break;
    }
    bool all_left = false;
    while (rendezvous_->cleans_up()) {
      all_left = clear();
      if (all_left || Clock::now() - left_at_ > longest_stay()) break;
      // A part that does not hear that all have done it goes back by itself: one that was cut off
      // comes again.
      if (!agreed && !rendezvous_->is_needed()) break;
      std::this_thread::sleep_for(kPollHeld);
    }
    const bool serves = rendezvous_->serves_others();
    rendezvous_->leave();
    const std::lock_guard lock(mutex_);
    if (agreed && serves && !all_left) unheard_ = staying_;
    ended_ = true;
    to_caller_.notify_all();
  }

  // To the caller. With the lock.
  void show() {
    heard_ = Clock::now();
    if (lead_.complete && !view_.complete) complete_at_ = Clock::now();
    view_ = lead_;
    if (decision_.verdict != Verdict::kNone) view_.decision = decision_;
    const bool decided = is_last(view_.decision.verdict);
    const bool unheard = asked_ && !decided && Clock::now() - asked_at_ > kMostAnswer;
    if (agrees() && (is_against(view_.decision.verdict) || unheard)) stop_.request(SIGTERM);
    to_caller_.notify_all();
  }

  void decide_against(const Error& why) {
    GroupDecision decision{Verdict::kPartly, options_.name, std::string(error_code_name(why.code)),
                           shortened(why.message, kMostWhy)};
    if (agrees() && decision_.verdict != Verdict::kStill) {
      decision.verdict = Verdict::kGoOn;
      make(kRest, decision);
    }
    if (!agrees() || decision_.verdict == Verdict::kStill) {
      decision.verdict = agrees() ? Verdict::kBack : Verdict::kPartly;
      make(kOutcome, decision);
    }
  }

  // Makes the decision, or hears the one that another part has made. A file system that fails is
  // asked again.
  void make(const char* name, const GroupDecision& decision) {
    const auto made = rendezvous_->claim(name, options_.name, record_to_text(decision));
    if (!made) return;
    if (*made) {
      decision_ = decision;
      return;
    }
    const auto text = rendezvous_->read(name, kMostPartBytes);
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
      decision_.why = fmt::format("{}/{} is damaged", rendezvous_->place(), name);
      return;
    }
    decision_ = std::move(*other);
  }

  void follow() {
    const auto text = rendezvous_->read(kLead, kMostLeadBytes);
    if (text && *text && **text != lead_text_) {
      if (auto lead = record_from_text<LeadRecord>(**text)) {
        lead_text_ = **text;
        lead_changed_ = Clock::now();
        // What this part has heard by itself is newer.
        const bool newer =
            decision_.verdict == Verdict::kNone ||
            (decision_.verdict == Verdict::kStill && is_last(lead->decision.verdict));
        if (newer) decision_ = lead->decision;
        lead_ = std::move(*lead);
        if (lead_.complete && !find_index()) lead_.complete = false;
      }
    }
    if (is_last(decision_.verdict)) return;
    if (Clock::now() - lead_changed_ > options_.silence) {
      want(silent(lead_.leader.empty() ? "that leads" : shortened(lead_.leader, kMostName),
                  options_.silence));
    }
    check_deadlines();
  }

  // This part's place in the roster.
  bool find_index() {
    if (has_index_) return true;
    const auto text = rendezvous_->read(kRoster, kMostRosterBytes);
    const auto roster =
        text && *text ? record_from_text<GroupRoster>(**text) : std::optional<GroupRoster>();
    if (!roster) {
      lead_text_.clear();  // read again
      return false;
    }
    const auto found = std::find(roster->names.begin(), roster->names.end(), options_.name);
    index_ = static_cast<std::size_t>(found - roster->names.begin());
    has_index_ = found != roster->names.end();
    if (!has_index_) {
      const std::lock_guard lock(mutex_);
      refused_ = {ErrorCode::kUsage,
                  fmt::format("the group in {} is complete without part {}", rendezvous_->place(),
                              options_.name),
                  "give all parts the same number (--parts), and start as many"};
    }
    return has_index_;
  }

  // The deadlines, as this part knows them.
  void check_deadlines() {
    if (options_.timeout.count() == 0 || is_last(decision_.verdict)) return;
    if (!lead_.complete && (is_late_ || since(start_) > options_.timeout)) {
      const auto names = rendezvous_->names();
      std::vector<std::string> there;
      for (const std::string& name : names ? *names : std::vector<std::string>())
        if (name.starts_with(kPartPrefix))
          there.push_back(printable(name.substr(kPartPrefix.size())));
      std::sort(there.begin(), there.end());
      if (there.size() >= options_.parts && !is_soon_ready() && !is_late_) return;
      std::vector<std::string> busy;
      for (const auto& [name, seen] : seen_)
        if (seen.is_there && seen.record.stage == PartStage::kComing) busy.push_back(name);
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
    const bool rests = quiesces() && decision_.verdict == Verdict::kNone && lead_.complete;
    const auto limit = options_.timeout + (leads_ ? milliseconds(0) : kGrace);
    if (!rests || complete_at_ == Clock::time_point() || Clock::now() - complete_at_ <= limit)
      return;
    std::vector<std::string> late;
    for (const auto& [name, seen] : seen_)
      if (!seen.was_held) late.push_back(name + quiet_text(seen.changed));
    // Only that part sees all.
    if (late.empty()) {
      late.push_back(fmt::format("{}{}, which leads, or another,",
                                 shortened(lead_.leader, kMostName), quiet_text(lead_changed_)));
    }
    want({ErrorCode::kTimeout,
          fmt::format("the GPU work of part {} was not quiesced within {} ms", listed(late, ", "),
                      options_.timeout.count()),
          "give it more time (--timeout), or try when fewer kernels are in flight"});
  }

  // The thread itself wants the group to be given up.
  void want(const Error& why) {
    {
      const std::lock_guard lock(mutex_);
      if (refused_) return;
      if (!asked_) {
        asked_ = why;
        asked_at_ = Clock::now();
      }
    }
    decide_against(why);
  }

  // --- Of the part that leads.

  void lead() {
    const auto before = record_to_text(lead_);
    if (!is_last(decision_.verdict)) probe_parts();
    if (!is_last(decision_.verdict)) check_deadlines();
    lead_.decision = decision_;
    if (record_to_text(lead_) == before && Clock::now() - lead_told_ < kBeat) return;
    ++lead_.beat;
    if (rendezvous_->write(kLead, record_to_text(lead_))) lead_told_ = Clock::now();
  }

  void probe_parts() {
    if (!lead_.complete) find_parts();
    for (auto& [name, seen] : seen_)
      probe_part(name, seen);
    if (is_last(decision_.verdict)) return;
    if (!lead_.complete) {
      complete_roster();
    } else if (!agrees() || decision_.verdict == Verdict::kStill) {
      if (!lead_.linked) check_links();
      check_outcome();
    } else {
      check_quiescence();
    }
  }

  void find_parts() {
    const auto names = rendezvous_->names();
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

  void probe_part(const std::string& name, Seen& seen) {
    const auto text = rendezvous_->read(part_file(name), kMostPartBytes);
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
    if (seen.is_there &&
        (record.parts != options_.parts || record.operation != options_.operation)) {
      return want({ErrorCode::kUsage,
                   fmt::format("part {} is one of {} of a {}, and part {} one of {} of a {}", name,
                               record.parts, printable(record.operation.name()), options_.name,
                               options_.parts, operation_name(options_.operation)),
                   "give all parts the same verb, and the same number (--parts)"});
    }
    if (seen.is_there && record.dump_id != options_.dump_id) {
      return want({ErrorCode::kUsage,
                   fmt::format("the images of part {} and of part {} are of different dumps", name,
                               options_.name),
                   "restore all parts from the images that one dump of the group has made (`stasis "
                   "inspect` says which)"});
    }
    if (!agrees()) return;
    if (record.stage == PartStage::kFailed && name != options_.name) return pass_on(name, record);
    if (Clock::now() - seen.changed > options_.silence) want(silent(name, options_.silence));
  }

  // It may have died before it could decide.
  void pass_on(const std::string& name, const PartRecord& record) {
    GroupDecision decision{Verdict::kGoOn, name, record.code, record.why};
    if (decision_.verdict != Verdict::kStill) make(kRest, decision);
    if (decision_.verdict != Verdict::kStill) return;
    decision.verdict = Verdict::kBack;
    make(kOutcome, decision);
  }

  void complete_roster() {
    const bool all = seen_.size() == options_.parts &&
                     std::all_of(seen_.begin(), seen_.end(), [this](const auto& one) {
                       return one.second.is_there &&
                              (!agrees() || one.second.record.stage != PartStage::kComing);
                     });
    if (!all) return;
    if (options_.operation == Operation::kRestore && !links_are_whole()) return;
    GroupRoster roster;
    for (const auto& [name, seen] : seen_)
      roster.names.push_back(name);
    if (!rendezvous_->write(kRoster, record_to_text(roster))) return;
    lead_.complete = true;
    lead_.asked.assign(seen_.size(), 0);
    rounds_.begin(Clock::now());
    (void)find_index();
  }

  void check_quiescence() {
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
    if (!quiesces() || !rounds_.is_due(Clock::now(), held)) return;
    lead_.moment = rounds_.moment();
    i = 0;
    for (auto& [name, seen] : seen_) {
      if (std::exchange(seen.was_held, false)) lead_.asked[i] = rounds_.round();
      ++i;
    }
  }

  void check_links() {
    const bool all = std::all_of(seen_.begin(), seen_.end(), [](const auto& one) {
      return one.second.record.stage == PartStage::kLocked;
    });
    if (all && links_are_whole()) lead_.linked = true;
  }

  // Whether each connection of a part is one of another part's, from its other end. Gives the group
  // up if one is not. False also where it cannot be known yet.
  bool links_are_whole() {
    std::map<std::string, GroupLinks> parts;
    for (const auto& [name, seen] : seen_) {
      const auto text = rendezvous_->read(links_file(name), kMostLinksBytes);
      auto links =
          text && *text ? record_from_text<GroupLinks>(**text) : std::optional<GroupLinks>();
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

  // All have done it; or, where that needs no agreement, those that can.
  void check_outcome() {
    std::vector<std::string> not_done;
    for (const auto& [name, seen] : seen_) {
      if (seen.record.stage == PartStage::kDone) continue;
      // Of one that has failed or says nothing, probe_part() makes all go back.
      if (agrees()) return;
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

  // If all that came have heard what was decided, the place is used no more: true.
  bool clear() {
    const auto names = rendezvous_->names();
    if (!names) return false;
    staying_.clear();
    std::vector<std::string> files = {kLead, kRoster};
    for (const std::string& name : *names) {
      if (!name.starts_with(kPartPrefix)) continue;
      const auto text = rendezvous_->read(name, kMostPartBytes);
      const auto record =
          text && *text ? record_from_text<PartRecord>(**text) : std::optional<PartRecord>();
      const std::string part = name.substr(kPartPrefix.size());
      if (!record || !record->left) staying_.push_back(printable(part));
      files.push_back(links_file(part));
      files.push_back(name);
    }
    if (!staying_.empty()) return false;
    files.insert(files.end(), {kRest, kOutcome});
    rendezvous_->remove(files);
    return true;
  }

  const std::unique_ptr<GroupRendezvous> rendezvous_;
  const GroupPartOptions options_;
  const Interrupt& outer_;  // of the caller, which alone asks it
  Interrupt stop_;
  const Clock::time_point start_ = Clock::now();

  mutable std::mutex mutex_;  // of these
  std::condition_variable to_herald_;
  std::condition_variable to_caller_;
  PartRecord own_;
  std::optional<std::string> links_;  // to be written
  bool dirty_ = false;                // to be told at once
  LeadRecord view_;
  Clock::time_point complete_at_;
  Clock::time_point heard_;     // when the thread was last here
  std::optional<Error> asked_;  // why this part wants all to go on, or back
  Clock::time_point asked_at_;
  std::optional<Error> refused_;  // it is none of the group
  std::uint64_t obeyed_ = 0;
  std::size_t index_ = 0;  // written before the roster is complete for the caller
  bool ended_ = false;
  Clock::time_point left_at_;
  std::vector<std::string> unheard_;   // parts that may not know that all have done it
  std::atomic<bool> is_late_ = false;  // the caller's time is over

  // Of the thread.
  bool leads_ = false;
  bool has_index_ = false;
  Clock::time_point told_;
  Clock::time_point lead_told_;
  Clock::time_point lead_changed_;
  std::string lead_text_;
  LeadRecord lead_;
  GroupDecision decision_;
  std::map<std::string, Seen> seen_;
  GroupRounds rounds_;
  std::vector<std::string> staying_;  // parts that have not left, when that was looked at last
};

Result<std::unique_ptr<GroupPart>> GroupPart::join(std::unique_ptr<GroupRendezvous> rendezvous,
                                                   GroupPartOptions options,
                                                   const Interrupt& interrupt) {
  auto herald = std::make_shared<Herald>(std::move(rendezvous), std::move(options), interrupt);
  STASIS_TRY(herald->join());
  return std::unique_ptr<GroupPart>(new GroupPart(std::move(herald)));
}

GroupPart::~GroupPart() { (void)herald_->leave(); }

const GroupPartOptions& GroupPart::options() const { return herald_->options(); }
std::string GroupPart::id() const { return herald_->id(); }
const Interrupt& GroupPart::interrupt() const { return herald_->interrupt(); }
Result<void> GroupPart::wait_for_all() { return herald_->enter(PartStage::kReady); }
milliseconds GroupPart::left() const { return herald_->left(); }
Result<std::optional<microseconds>> GroupPart::wait_until_quiesced() {
  return herald_->wait_until_quiesced();
}
Result<void> GroupPart::agree_on_links(const GroupLinks& links) {
  return herald_->agree_on_links(links);
}
bool GroupPart::is_quiesced() const { return herald_->is_quiesced(); }
Result<void> GroupPart::finish() { return herald_->enter(PartStage::kDone); }
bool GroupPart::knows_outcome() const { return herald_->knows_outcome(); }
Result<void> GroupPart::leave() { return herald_->leave(); }
Error GroupPart::give_up(Error why) { return herald_->give_up(std::move(why)); }

Error told(GroupPart* part, Error why) {
  return part != nullptr ? part->give_up(std::move(why)) : why;
}

const Interrupt& interrupt_of(const GroupPart* part, const Interrupt& own) {
  return part != nullptr ? part->interrupt() : own;
}

}  // namespace stasis
