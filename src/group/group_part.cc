#include "group/group_part.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/host_name.h"
#include "base/listing.h"
#include "base/printable.h"
#include "base/threads.h"
#include "base/units.h"
#include "group/following_side.h"
#include "group/group_records.h"
#include "group/leading_side.h"

namespace stasis {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How often the directory is read: while programs stand still, and otherwise; the one that leads
// reads a file for each part.
constexpr microseconds kPollHeld{2000};
constexpr microseconds kPollOther{20000};
constexpr microseconds kPollEach{20};
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

// 128 random bits.
std::string random_id() {
  std::random_device device;
  std::string text;
  for (int i = 0; i < 4; ++i)
    text += fmt::format("{:08x}", static_cast<std::uint32_t>(device()));
  return text;
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

// Between the caller and the records. A thread of its own writes this part's, and has a side of the
// agreement (group_side.h) read the others'. A dead file system may hold the thread for ever: so no
// caller waits for it without an end, and it outlives the part then.
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
    heard_ = Clock::now();
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
        is_hurried_ = true;
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
      if (!agrees(options_.operation)) {
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
    const bool stopped =
        agrees(options_.operation) && why.code == ErrorCode::kInterrupted && outer_.check();
    if (stopped && is_against(view_.decision.verdict)) return decided_error();
    if (is_last(view_.decision.verdict) || heard || refused_) return why;
    return Error(stopped && asked_ ? *asked_ : why).within("the other parts could not be told");
  }

 private:
  // Longer than a part that is cut off waits before it goes back by itself.
  milliseconds longest_stay() const {
    constexpr milliseconds kMore{2000};
    return rendezvous_->serves_others() ? options_.silence + kMostAnswer + kMore : milliseconds(0);
  }

  // The first call counts. With the lock.
  void ask(Error why) {
    if (asked_ || refused_ || is_last(view_.decision.verdict)) return;
    asked_ = std::move(why);
    asked_at_ = Clock::now();
    to_herald_.notify_all();
  }

  Error decided_error() const {
    return asked_ && view_.decision.by == options_.name ? *asked_ : error_of(view_.decision);
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
    STASIS_TRY_ASSIGN(const bool leads,
                      rendezvous_->claim(kLead, options_.name, record_to_text(lead)));
    if (leads)
      side_ = std::make_unique<LeadingSide>(*rendezvous_, options_, start_, std::move(lead));
    else
      side_ = std::make_unique<FollowingSide>(*rendezvous_, options_, start_);
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
      const bool quick = own_.stage == PartStage::kHeld || (side_->leads() && view_.complete);
      const microseconds poll =
          std::max(quick ? kPollHeld : kPollOther, kPollEach * options_.parts);
      to_herald_.wait_for(lock, poll, [this] { return dirty_; });
      const bool due = dirty_ || again || Clock::now() - told_ >= kBeat;
      dirty_ = false;
      if (due) ++own_.beat;
      const PartRecord own = own_;
      const std::optional<Error> asked = asked_;
      const Clock::time_point asked_at = asked_at_;
      const std::optional<std::string> links = std::exchange(links_, std::nullopt);
      lock.unlock();
      // Before the stage that says that they are there.
      const bool listed = !links || rendezvous_->write(links_file(options_.name), *links);
      bool told = !due;
      if (due && listed)
        told = rendezvous_->write(part_file(options_.name), record_to_text(own)).has_value();
      if (told && due) told_ = Clock::now();
      const bool waits =
          own.stage == PartStage::kFailed && !is_hurried_ && side_->waits_for_others(asked_at);
      if (asked && !waits && !is_last(side_->decision().verdict)) side_->decide_against(*asked);
      side_->step(is_late_);
      lock.lock();
      if (!listed && !links_) links_ = links;
      again = !told;
      // Before what the caller may have asked for meanwhile.
      if (!asked && side_->wanted()) {
        asked_ = side_->wanted();
        asked_at_ = Clock::now();
      }
      show();
      agreed = agrees(options_.operation) && side_->decision().verdict == Verdict::kDone;
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
    complete_at_ = side_->complete_at();
    index_ = side_->index();
    refused_ = side_->refused();
    view_ = side_->lead();
    if (side_->decision().verdict != Verdict::kNone) view_.decision = side_->decision();
    const bool decided = is_last(view_.decision.verdict);
    const bool unheard = asked_ && !decided && Clock::now() - asked_at_ > kMostAnswer;
    if (agrees(options_.operation) && (is_against(view_.decision.verdict) || unheard))
      stop_.request(SIGTERM);
    to_caller_.notify_all();
  }

  // If all that came have heard what was decided, the place is used no more: true.
  bool clear() {
    const auto names = rendezvous_->names();
    if (!names) return false;
    staying_.clear();
    std::vector<std::string> files = {kLead, kRoster};
    for (const std::string& name : *names) {
      if (!name.starts_with(kPartPrefix)) continue;
      const auto record = read_part(*rendezvous_, name);
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
  std::size_t index_ = 0;  // in the roster
  bool ended_ = false;
  Clock::time_point left_at_;
  std::vector<std::string> unheard_;      // parts that may not know that all have done it
  std::atomic<bool> is_late_ = false;     // the caller's time is over
  std::atomic<bool> is_hurried_ = false;  // the same, or it was interrupted

  std::unique_ptr<GroupSide> side_;  // made before the thread, and its own then
  // Of the thread.
  Clock::time_point told_;
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
