#include "job/swap.h"

#include <poll.h>

#include <array>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/units.h"
#include "checkpoint/swap_record.h"
#include "job/swap_side.h"
#include "proc/procfs.h"
#include "report/report.h"

namespace stasis::job {
namespace {

constexpr int kSignalPollMs = 100;  // milliseconds

// Of a side that was asked for it; a program may be held by the driver where that is unknown.
TreeStatus tree_status(const SwapSide& side) {
  const auto* status = side.get<TreeStatus>();
  return status != nullptr ? *status : TreeStatus{0, 0, 0, true, {}};
}

bool undid(const SwapSide& side) {
  const auto* undone = side.get<Undone>();
  return undone != nullptr && undone->any;
}

class Swap {
 public:
  Swap(const SwapCaller& caller, SwapSide& out, SwapSide& in)
      : caller_(caller), out_(out), in_(in) {}

  // Leaves everything as it was on an error, or says what is not.
  Result<void> run(SwapRecord record, bool attaches);
  // After a swap that was killed: what the two are now, as a sentence.
  Result<std::string> decide();
  bool at_once() const { return at_once_; }
  // Why it was not done at once after it had been tried; empty if it was not.
  const std::string& no_room() const { return no_room_; }

 private:
  // Until both are done; a signal is passed on to both, and that the user insists, again and again:
  // a side counts it from a second after its first.
  void wait() {
    while (out_.busy() || in_.busy()) {
      if (caller_.interrupt.requested() && !stopped_ && out_.hears() && in_.hears()) {
        stopped_ = true;
        out_.stop();
        in_.stop();
      }
      if (caller_.interrupt.insists()) {
        out_.insist();
        in_.insist();
      }
      std::array<pollfd, 2> ready{{{out_.fd(), POLLIN, 0}, {in_.fd(), POLLIN, 0}}};
      show();
      if (::poll(ready.data(), ready.size(), kSignalPollMs) <= 0) continue;
      if (ready[0].revents != 0) out_.take();
      if (ready[1].revents != 0) in_.take();
      if (in_waits_ && out_.quiesced() && !stopped_) {
        in_waits_ = false;
        in_.begin(SideOrder::kResume);
      }
    }
  }
  // How far both have come together.
  void show() {
    Progressed sum;
    for (const SwapSide* side : {&out_, &in_}) {
      sum.done += side->progressed().done;
      sum.total += side->progressed().total;
    }
    caller_.progress.update(caller_.interrupt.requested() ? "stopping" : "swap", sum.done,
                            sum.total);
  }
  Result<void> probe();
  Result<void> attach();
  Result<void> swap();
  enum class SideStatus { kGone, kRunning, kSuspended };
  Result<SideStatus> status_of(SwapSide& side);
  // False if that has failed.
  bool does(SwapSide& side, SideOrder order);
  bool lacks_room() const;
  Error undo(Error why, SwapSide& side, SideOrder order);
  static Error both_failed(Error first, const Error& second, const std::string& mends_second);

  const SwapCaller& caller_;
  SwapSide& out_;
  SwapSide& in_;
  bool stopped_ = false;
  bool at_once_ = false;
  bool in_waits_ = false;  // for OUT to be quiesced
  std::string no_room_;
};

Result<void> Swap::probe() {
  out_.begin(SideOrder::kProbe);
  in_.begin(SideOrder::kProbe);
  wait();
  for (const SwapSide* side : {&out_, &in_})
    if (!side->succeeded()) return fail(side->error());
  const TreeStatus out = tree_status(out_);
  const TreeStatus in = tree_status(in_);
  if (out.suspended + out.locked > 0) {
    return fail(ErrorCode::kWrongState,
                fmt::format("{} does not run: {} of its processes are suspended or locked",
                            out_.name(), out.suspended + out.locked),
                fmt::format("the first is the one to be suspended; to bring the second back alone: "
                            "`stasis resume {}`",
                            in_.name()));
  }
  if (in.running + in.locked > 0) {
    return fail(ErrorCode::kWrongState, fmt::format("{} is not suspended", in_.name()),
                fmt::format("the second is the one to be resumed; to suspend the first alone: "
                            "`stasis suspend {}`",
                            out_.name()));
  }
  at_once_ = in.fits.value_or(false);
  // IN's contexts, and those of its mover, must not be made beside a kernel of OUT's then.
  in_waits_ = at_once_ && out.held_before;
  return {};
}

Result<void> Swap::attach() {
  if (!does(out_, SideOrder::kAttach)) return fail(out_.error());
  for (const std::string& note : out_.result().notes)
    caller_.note(out_.name() + ": " + note);
  return {};
}

// OUT has gone, and IN found no room beside it: OUT may have taken more since we looked. IN is as
// it was, or waits for its memory.
bool Swap::lacks_room() const {
  return at_once_ && out_.succeeded() && !in_.succeeded() &&
         in_.error().code == ErrorCode::kOutOfGpuMemory && !caller_.interrupt.requested();
}

// Where both have failed: what is left behind of each, and what mends it.
Error Swap::both_failed(Error first, const Error& second, const std::string& mends_second) {
  std::string remedy = first.code == ErrorCode::kNotRolledBack ? std::move(first.remedy) : "";
  remedy += (remedy.empty() ? "" : "; ") + mends_second;
  return {ErrorCode::kNotRolledBack,
          fmt::format("{}; and then {}", first.to_string(), second.to_string()), std::move(remedy)};
}

// `side` had done its part; brings it back to what it was.
Error Swap::undo(Error why, SwapSide& side, SideOrder order) {
  stopped_ = true;  // what is undone is undone to the end
  side.begin(order);
  wait();
  if (side.succeeded()) {
    if (why.code != ErrorCode::kNotRolledBack) why.message += "; the other one is as it was";
    return why;
  }
  const Error second = side.error();
  const bool lost = second.code == ErrorCode::kNotRolledBack;
  return both_failed(
      std::move(why), second,
      lost ? second.remedy
           : fmt::format("`stasis {} {}`", order == SideOrder::kSuspend ? "suspend" : "resume",
                         side.name()));
}

Result<void> Swap::run(SwapRecord record, bool attaches) {
  STASIS_TRY(probe());
  // Before anything is done to the second: it takes its time, and may be refused.
  if (attaches) STASIS_TRY(attach());
  STASIS_TRY(caller_.interrupt.check());
  STASIS_TRY_ASSIGN(auto journal, SwapJournal::begin(std::move(record)));
  auto done = fault(FaultPoint::kSwapRecorded);
  if (done) done = swap();
  if (done) fault_only(FaultPoint::kSwapDone);
  // What is left behind of it `recover --all` finds by the record.
  if (done || done.error().code != ErrorCode::kNotRolledBack) journal.finish();
  return done;
}

Result<void> Swap::swap() {
  out_.begin(at_once_ ? SideOrder::kSuspendBeside : SideOrder::kSuspend);
  if (at_once_ && !in_waits_) in_.begin(SideOrder::kResume);
  fault_only(FaultPoint::kSwapBegun);
  wait();
  if (std::exchange(in_waits_, false)) at_once_ = false;  // OUT has never said so
  if (!at_once_) {
    if (!out_.succeeded()) return fail(out_.error());
    if (auto stop = caller_.interrupt.check(); !stop)
      return fail(undo(std::move(stop.error()), out_, SideOrder::kResume));
    in_.begin(SideOrder::kResume);
    wait();
  }
  if (lacks_room()) {
    at_once_ = false;
    no_room_ = in_.error().message;
    in_.begin(SideOrder::kResume);
    wait();
  }
  if (out_.succeeded() && in_.succeeded()) return {};
  if (!out_.succeeded() && !in_.succeeded()) {
    const bool out_is_lost = out_.error().code == ErrorCode::kNotRolledBack;
    if (in_.error().code != ErrorCode::kNotRolledBack) return fail(out_.error());
    if (!out_is_lost) return fail(in_.error());
    return fail(both_failed(out_.error(), in_.error(), in_.error().remedy));
  }
  if (out_.succeeded()) return fail(undo(in_.error(), out_, SideOrder::kResume));
  return fail(undo(out_.error(), in_, SideOrder::kSuspend));
}

bool Swap::does(SwapSide& side, SideOrder order) {
  side.begin(order);
  wait();
  return side.succeeded();
}

Result<Swap::SideStatus> Swap::status_of(SwapSide& side) {
  if (does(side, SideOrder::kProbe)) {
    return tree_status(side).running > 0 ? SideStatus::kRunning : SideStatus::kSuspended;
  }
  const ErrorCode code = side.error().code;
  if (code == ErrorCode::kNoSuchProcess || code == ErrorCode::kZombie ||
      code == ErrorCode::kThreadId || code == ErrorCode::kNotCuda)
    return SideStatus::kGone;
  return fail(side.error());
}

Result<std::string> Swap::decide() {
  const std::string& a = out_.name();
  const std::string& b = in_.name();
  if (!does(out_, SideOrder::kUndo)) return fail(out_.error());
  bool undone = undid(out_);
  STASIS_TRY_ASSIGN(auto out, status_of(out_));
  STASIS_TRY_ASSIGN(auto in, status_of(in_));
  if (out != SideStatus::kRunning && in != SideStatus::kGone) {
    // The first has made room, so that there is room for the second.
    if (does(in_, SideOrder::kResume)) {
      return out == SideStatus::kGone
                 ? fmt::format("{} runs, as asked for; {} has ended", b, a)
                 : fmt::format("{} is suspended and {} runs, as asked for", a, b);
    }
    Error why = in_.error();
    if (out == SideStatus::kGone || caller_.interrupt.requested()) return fail(std::move(why));
    if (!does(out_, SideOrder::kResume)) {
      const bool lost = out_.error().code == ErrorCode::kNotRolledBack;
      return fail(both_failed(std::move(why), out_.error(),
                              lost ? out_.error().remedy : fmt::format("`stasis resume {}`", a)));
    }
    if (why.code == ErrorCode::kNotRolledBack) return fail(std::move(why));
    return fmt::format("{} runs and {} is suspended, as before: it could not be resumed: {}", a, b,
                       why.to_string());
  }
  if (in == SideStatus::kGone) {
    if (out == SideStatus::kSuspended && !does(out_, SideOrder::kResume)) return fail(out_.error());
    return out == SideStatus::kGone ? fmt::format("neither {} nor {} lives any more", a, b)
                                    : fmt::format("{} runs, as before; {} has ended", a, b);
  }
  if (!does(in_, SideOrder::kUndo)) return fail(in_.error());
  undone = undone || undid(in_);
  STASIS_TRY_ASSIGN(in, status_of(in_));
  // Nothing of it was half done: then the user has resumed it since.
  if (in == SideStatus::kRunning && !undone) return fmt::format("both {} and {} run", a, b);
  if (in == SideStatus::kRunning && !does(in_, SideOrder::kSuspend)) return fail(in_.error());
  return in == SideStatus::kGone ? fmt::format("{} runs, as before; {} has ended", a, b)
                                 : fmt::format("{} runs and {} is suspended, as before", a, b);
}

// Which process it is about, told from a later process with the same number.
SwapParty party_of(const Target& target) {
  const Pid pid = target.is_elsewhere() ? target.job->init : target.pid;
  const auto info = proc::ProcFs().process(pid);
  return {target.text, info ? info->id() : ProcessId{pid}};
}

// The program of a record; the number 0, which no process has, if it has ended.
Target find_again(const SwapParty& party) {
  Target target;
  target.text = party.name;
  const bool found = target.find().has_value();
  const SwapParty now = found ? party_of(target) : SwapParty();
  if (found && now.root == party.root) return target;
  // A name may go, or be another's, while its process lives.
  Target by_number{std::to_string(party.root.pid.value), {}, {}};
  if (is_alive(party.root) && by_number.find() && !by_number.is_elsewhere()) return by_number;
  target.pid = Pid{};
  target.job.reset();
  return target;
}

Result<SwapSide> start_side(const SwapCaller& caller, const Target& target,
                            const SwapOptions& options, const std::string& gpu_map) {
  SideSetup setup;
  setup.timeout = options.timeout;
  setup.path = options.path;
  setup.ignore_obstacles = options.ignore_obstacles;
  setup.attach = options.attach;
  setup.gpu_map = gpu_map;
  setup.ring_bytes = caller.ring_bytes;
  setup.timeouts = caller.timeouts;
  return SwapSide::start(target, std::move(setup), caller.start_helper);
}

Result<std::string> recover_swap(const SwapCaller& caller, const SwapRecord& record) {
  // What is brought back of the first is where it was.
  STASIS_TRY_ASSIGN(auto out, start_side(caller, find_again(record.out), {}, {}));
  STASIS_TRY_ASSIGN(auto in, start_side(caller, find_again(record.in), {}, record.gpu_map));
  auto decided = Swap(caller, out, in).decide();
  for (SwapSide* side : {&out, &in})
    caller.take_trace(side->take_trace());
  return decided;
}

SwapReport::Side side_report(const SwapSide& side) {
  const auto* report = side.get<Report>();
  return {side.name(), report != nullptr ? *report : Report()};
}

}  // namespace

Result<SwapReport> swap(const SwapCaller& caller, Target out, Target in,
                        const SwapOptions& options) {
  const auto start = Clock::now();
  STASIS_TRY(caller.interrupt.check());
  if (!options.gpu_map.empty()) STASIS_TRY(parse_gpu_map(options.gpu_map));
  for (Target* target : {&out, &in})
    STASIS_TRY(target->find());
  const auto init_of = [](const Target& target) {
    return target.is_elsewhere() ? target.job->init.value : 0;
  };
  if (out.pid == in.pid && init_of(out) == init_of(in)) {
    return fail(ErrorCode::kUsage, fmt::format("{} and {} are the same", out.text, in.text),
                "name the one to be suspended, and the one to be resumed");
  }
  STASIS_TRY_ASSIGN(auto first, start_side(caller, out, options, {}));
  STASIS_TRY_ASSIGN(auto second, start_side(caller, in, options, options.gpu_map));
  Swap swap(caller, first, second);
  auto done =
      swap.run({{}, party_of(out), party_of(in), options.gpu_map}, options.attach.has_value());
  for (SwapSide* side : {&first, &second})
    caller.take_trace(side->take_trace());
  if (const std::string& library = first.result().simulated; !library.empty())
    caller.simulated(library);
  for (const SwapSide* side : {&first, &second})
    for (const std::string& note : side->result().notes)
      caller.note(side->name() + ": " + note);
  STASIS_TRY(std::move(done));
  return SwapReport{side_report(first), side_report(second), swap.at_once(), swap.no_room(),
                    since(start)};
}

nlohmann::json to_json(const SwapReport& report) {
  nlohmann::json out = {{"ok", true},
                        {"suspended", to_json(report.suspended.report)},
                        {"resumed", to_json(report.resumed.report)},
                        {"at_once", report.at_once},
                        {"seconds", report.total.count()},
                        {"no_room_at_once", nullptr}};
  if (!report.no_room_at_once.empty()) out["no_room_at_once"] = report.no_room_at_once;
  return out;
}

std::vector<RecoverReport> recover_swaps(const SwapCaller& caller) {
  std::vector<RecoverReport> reports;
  auto entries = read_swaps();
  if (!entries) return reports;  // recover_all() says why
  for (const SwapEntry& entry : *entries) {
    if (entry.under_way && !wait_for_killed(caller.interrupt, entry.record.owner)) continue;
    RecoverReport report;
    report.root = entry.record.out.root.pid;
    report.operation = Operation::kSwap;
    report.outcome =
        fmt::format("{} and {}: not recovered", entry.record.out.name, entry.record.in.name);
    auto journal = SwapJournal::adopt(entry.record);
    if (journal && !*journal) continue;  // another recover was quicker
    if (journal) {
      auto decided = recover_swap(caller, (*journal)->record());
      fault_only(FaultPoint::kSwapUndone);
      if (decided) {
        report.outcome = std::move(*decided);
        (*journal)->finish();
      } else {
        report.error = std::move(decided.error());
      }
    } else {
      report.error = std::move(journal.error());
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace stasis::job
