#include "direct/close_round.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/units.h"

namespace stasis::direct {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How long nothing may happen before those that are closed are let go on; grows by half each time.
constexpr microseconds kFirstPatience{5000};
// How long they are let go on at first, at most; doubles each time that this brings nobody.
constexpr microseconds kFirstMoment{500};
constexpr microseconds kLongestMoment{1'000'000};
// Answers come by different pages, for which nobody can wait together.
constexpr microseconds kPollAnswers{100};
// What an agent is given beyond the time that it was told, and to open its gate.
constexpr milliseconds kMostDelay{5000};

class Round {
 public:
  Round(std::vector<AgentClient>& agents, milliseconds slice, const Interrupt& interrupt)
      : end_(Clock::now() + slice), half_(end_ - slice / 2), interrupt_(interrupt) {
    for (AgentClient& agent : agents)
      ranks_.push_back({&agent, Step::kAsked, 0});
  }

  CloseRound run() {
    for (Rank& rank : ranks_)
      ask(rank);
    auto patience = kFirstPatience;
    auto last = Clock::now();
    while (!decided()) {
      const auto now = Clock::now();
      if (take_answers()) {
        last = now;
      } else if (any(Step::kGoesOn)) {
        if (others_came_ || now >= moment_end_)
          ask_again();
        else
          std::this_thread::sleep_for(std::min<Clock::duration>(kPollAnswers, moment_end_ - now));
      } else if (now >= last + patience && now < half_ && any(Step::kClosed)) {
        // Somebody holds up the others, or has much to do.
        patience = others_came_ ? kFirstPatience : patience + patience / 2;
        if (!others_came_ && out_.tries > 1) moment_ = std::min(moment_ * 2, kLongestMoment);
        let_go_on();
        last = Clock::now();
      } else {
        std::this_thread::sleep_for(kPollAnswers);
      }
      if (auto stop = interrupt_.check(); !stop) note(std::move(stop));
    }
    out_.all_closed = out_.result && all(Step::kClosed);
    if (!out_.all_closed) give_up();
    return std::move(out_);
  }

 private:
  enum class Step { kAsked, kGoesOn, kClosed, kOpen };
  struct Rank {
    AgentClient* agent;
    Step step;
    int went_on;  // in which try it was last let go on
  };

  bool all(Step step) const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [step](const Rank& rank) { return rank.step == step; });
  }
  bool any(Step step) const {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [step](const Rank& rank) { return rank.step == step; });
  }
  bool decided() const { return !out_.result || all(Step::kClosed); }

  // What is worse than not to come to rest in time is told, whatever comes first.
  void note(Result<void> what) {
    if (what) return;
    if (out_.result || out_.result.error().code == ErrorCode::kTimeout)
      out_.result = std::move(what);
  }

  void ask(Rank& rank) const {
    const auto left = std::chrono::ceil<milliseconds>(end_ - Clock::now());
    rank.agent->begin(AgentCommand::kClose,
                      static_cast<std::uint64_t>(std::max(left, milliseconds(1)).count()));
    rank.step = Step::kAsked;
  }

  void take(Rank& rank) {
    auto done = rank.agent->finish(milliseconds(0));
    rank.step = done ? Step::kClosed : Step::kOpen;
    if (done && rank.went_on != out_.tries) others_came_ = true;
    note(std::move(done));
  }

  bool take_answers() {
    bool some = false;
    const bool late = Clock::now() > end_ + kMostDelay;
    for (Rank& rank : ranks_) {
      if (rank.step != Step::kAsked || !(late || rank.agent->has_answered())) continue;
      take(rank);
      some = true;
    }
    return some;
  }

  // All at the same time: those that are not open yet hold up the others.
  void open_closed() {
    const bool asked_again = out_.result || out_.result.error().code == ErrorCode::kTimeout;
    for (Rank& rank : ranks_)
      if (rank.step == Step::kClosed)
        rank.agent->begin(AgentCommand::kOpen, asked_again ? kKeepBuffer : 0);
    for (Rank& rank : ranks_) {
      if (rank.step != Step::kClosed) continue;
      auto opened = rank.agent->finish(kMostDelay);
      rank.step = opened ? Step::kGoesOn : Step::kOpen;
      rank.went_on = out_.tries;
      note(std::move(opened));
    }
  }

  void let_go_on() {
    others_came_ = false;
    ++out_.tries;
    open_closed();
    moment_end_ = std::min<Clock::time_point>(Clock::now() + moment_, half_);
  }

  // Those that are asked answer in their own time, and no other command can be given to them
  // before. It is short when nobody holds them up.
  void give_up() {
    for (open_closed(); any(Step::kAsked); open_closed())
      if (!take_answers()) std::this_thread::sleep_for(kPollAnswers);
  }

  void ask_again() {
    for (Rank& rank : ranks_)
      if (rank.step == Step::kGoesOn) ask(rank);
  }

  Clock::time_point end_;
  Clock::time_point half_;  // from here on nobody is let go on
  const Interrupt& interrupt_;
  std::vector<Rank> ranks_;
  microseconds moment_ = kFirstMoment;
  Clock::time_point moment_end_;
  // Since some were last let go on, one has come that was not among them.
  bool others_came_ = false;
  CloseRound out_;
};

}  // namespace

CloseRound close_round(std::vector<AgentClient>& agents, milliseconds slice,
                       const Interrupt& interrupt) {
  return Round(agents, slice, interrupt).run();
}

}  // namespace stasis::direct
