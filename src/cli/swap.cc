// Suspends one job and resumes another on the same GPUs, at once where both fit: each direction of
// the bus has its own speed. Each in a process of its own, in the job's namespaces, as operations
// are about one tree.
#include "cli/swap.h"

#include <poll.h>

#include <array>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "checkpoint/swap_record.h"
#include "cli/swap_side.h"
#include "proc/procfs.h"

namespace stasis::cli {
namespace {

using nlohmann::json;

constexpr int kLookForSignals = 100;  // milliseconds

class Swap {
 public:
  Swap(Context& context, Side& out, Side& in) : context_(context), out_(out), in_(in) {}

  // Leaves everything as it was on an error, or says what is not.
  Result<void> run(SwapRecord record);
  // After a swap that was killed: what the two are now, as a sentence.
  Result<std::string> decide();
  bool at_once() const { return at_once_; }
  // Why it was not done at once after it had been tried; empty if it was not.
  const std::string& no_room() const { return no_room_; }

 private:
  // Until both are done; a signal is passed on to both, once.
  void wait() {
    while (out_.busy() || in_.busy()) {
      if (context_.interrupt.requested() && !stopped_) {
        stopped_ = true;
        out_.stop();
        in_.stop();
      }
      std::array<pollfd, 2> ready{{{out_.fd(), POLLIN, 0}, {in_.fd(), POLLIN, 0}}};
      if (::poll(ready.data(), ready.size(), kLookForSignals) <= 0) continue;
      if (ready[0].revents != 0) out_.take();
      if (ready[1].revents != 0) in_.take();
      if (in_waits_ && out_.at_rest() && !stopped_) {
        in_waits_ = false;
        in_.begin("resume");
      }
    }
  }
  Result<void> look();
  Result<void> swap();
  enum class Stands { kGone, kRunning, kSuspended };
  Result<Stands> stands(Side& side);
  // False if that has failed.
  bool does(Side& side, const char* what);
  bool lacks_room() const;
  Error undo(Error why, Side& side, const char* what);
  static Error both_failed(Error first, const Error& second, const std::string& mends_second);

  Context& context_;
  Side& out_;
  Side& in_;
  bool stopped_ = false;
  bool at_once_ = false;
  bool in_waits_ = false;  // for OUT to be quiesced
  std::string no_room_;
};

Result<void> Swap::look() {
  out_.begin("look");
  in_.begin("look");
  wait();
  for (const Side* side : {&out_, &in_})
    if (!side->succeeded()) return fail(side->error());
  const auto count = [](const Side& side, const char* what) {
    return side.result().value(what, std::size_t{0});
  };
  if (count(out_, "suspended") + count(out_, "locked") > 0) {
    return fail(ErrorCode::kWrongState,
                fmt::format("{} does not run: {} of its processes are suspended or locked",
                            out_.name(), count(out_, "suspended") + count(out_, "locked")),
                fmt::format("the first is the one to be suspended; to bring the second back alone: "
                            "`stasis resume {}`",
                            in_.name()));
  }
  if (count(in_, "running") + count(in_, "locked") > 0) {
    return fail(ErrorCode::kWrongState, fmt::format("{} is not suspended", in_.name()),
                fmt::format("the second is the one to be resumed; to suspend the first alone: "
                            "`stasis suspend {}`",
                            out_.name()));
  }
  at_once_ = in_.result()["fits"].is_boolean() && in_.result()["fits"].get<bool>();
  // IN's contexts, and those of its mover, must not be made beside a kernel of OUT's then.
  in_waits_ = at_once_ && out_.result().value("held_before", true);
  return {};
}

// OUT has gone, and IN found no room beside it: OUT may have taken more since we looked. IN is as
// it was, or waits for its memory.
bool Swap::lacks_room() const {
  return at_once_ && out_.succeeded() && !in_.succeeded() &&
         in_.error().code == ErrorCode::kOutOfGpuMemory && !context_.interrupt.requested();
}

// Where both have failed: what is left behind of each, and what mends it.
Error Swap::both_failed(Error first, const Error& second, const std::string& mends_second) {
  std::string remedy = first.code == ErrorCode::kNotRolledBack ? std::move(first.remedy) : "";
  remedy += (remedy.empty() ? "" : "; ") + mends_second;
  return {ErrorCode::kNotRolledBack,
          fmt::format("{}; and then {}", first.to_string(), second.to_string()), std::move(remedy)};
}

// `side` had done its part; brings it back to what it was.
Error Swap::undo(Error why, Side& side, const char* what) {
  stopped_ = true;  // what is undone is undone to the end
  side.begin(what);
  wait();
  if (side.succeeded()) {
    if (why.code != ErrorCode::kNotRolledBack) why.message += "; the other one is as it was";
    return why;
  }
  const Error second = side.error();
  const bool lost = second.code == ErrorCode::kNotRolledBack;
  return both_failed(std::move(why), second,
                     lost ? second.remedy : fmt::format("`stasis {} {}`", what, side.name()));
}

Result<void> Swap::run(SwapRecord record) {
  STASIS_TRY(look());
  STASIS_TRY(context_.interrupt.check());
  STASIS_TRY_ASSIGN(auto journal, SwapJournal::begin(std::move(record)));
  auto done = fault(FaultPoint::kSwapRecorded);
  if (done) done = swap();
  if (done) fault_only(FaultPoint::kSwapDone);
  // What is left behind of it `recover --all` finds by the record.
  if (done || done.error().code != ErrorCode::kNotRolledBack) journal.finish();
  return done;
}

Result<void> Swap::swap() {
  out_.begin("suspend", at_once_);
  if (at_once_ && !in_waits_) in_.begin("resume");
  fault_only(FaultPoint::kSwapBegun);
  wait();
  if (std::exchange(in_waits_, false)) at_once_ = false;  // OUT has never said so
  if (!at_once_) {
    if (!out_.succeeded()) return fail(out_.error());
    if (auto stop = context_.interrupt.check(); !stop)
      return fail(undo(std::move(stop.error()), out_, "resume"));
    in_.begin("resume");
    wait();
  }
  if (lacks_room()) {
    at_once_ = false;
    no_room_ = in_.error().message;
    in_.begin("resume");
    wait();
  }
  if (out_.succeeded() && in_.succeeded()) return {};
  if (!out_.succeeded() && !in_.succeeded()) {
    const bool out_is_lost = out_.error().code == ErrorCode::kNotRolledBack;
    if (in_.error().code != ErrorCode::kNotRolledBack) return fail(out_.error());
    if (!out_is_lost) return fail(in_.error());
    return fail(both_failed(out_.error(), in_.error(), in_.error().remedy));
  }
  if (out_.succeeded()) return fail(undo(in_.error(), out_, "resume"));
  return fail(undo(out_.error(), in_, "suspend"));
}

bool Swap::does(Side& side, const char* what) {
  side.begin(what);
  wait();
  return side.succeeded();
}

Result<Swap::Stands> Swap::stands(Side& side) {
  if (does(side, "look")) {
    return side.result().value("running", std::size_t{0}) > 0 ? Stands::kRunning
                                                              : Stands::kSuspended;
  }
  const ErrorCode code = side.error().code;
  if (code == ErrorCode::kNoSuchProcess || code == ErrorCode::kZombie ||
      code == ErrorCode::kThreadId || code == ErrorCode::kNotCuda)
    return Stands::kGone;
  return fail(side.error());
}

Result<std::string> Swap::decide() {
  const std::string& a = out_.name();
  const std::string& b = in_.name();
  if (!does(out_, "undo")) return fail(out_.error());
  bool undone = out_.result().value("undone", false);
  STASIS_TRY_ASSIGN(auto out, stands(out_));
  auto in = stands(in_);
  if (!in) return fail(std::move(in.error()));
  if (out != Stands::kRunning && *in != Stands::kGone) {
    // The first has made room, so that there is room for the second.
    if (does(in_, "resume")) {
      return out == Stands::kGone ? fmt::format("{} runs, as asked for; {} has ended", b, a)
                                  : fmt::format("{} is suspended and {} runs, as asked for", a, b);
    }
    Error why = in_.error();
    if (out == Stands::kGone || context_.interrupt.requested()) return fail(std::move(why));
    if (!does(out_, "resume")) {
      const bool lost = out_.error().code == ErrorCode::kNotRolledBack;
      return fail(both_failed(std::move(why), out_.error(),
                              lost ? out_.error().remedy : fmt::format("`stasis resume {}`", a)));
    }
    if (why.code == ErrorCode::kNotRolledBack) return fail(std::move(why));
    return fmt::format("{} runs and {} is suspended, as before: it could not be resumed: {}", a, b,
                       why.to_string());
  }
  if (*in == Stands::kGone) {
    if (out == Stands::kSuspended && !does(out_, "resume")) return fail(out_.error());
    return out == Stands::kGone ? fmt::format("neither {} nor {} lives any more", a, b)
                                : fmt::format("{} runs, as before; {} has ended", a, b);
  }
  if (!does(in_, "undo")) return fail(in_.error());
  undone = undone || in_.result().value("undone", false);
  in = stands(in_);
  if (!in) return fail(std::move(in.error()));
  // Nothing of it was half done: then the user has resumed it since.
  if (*in == Stands::kRunning && !undone) return fmt::format("both {} and {} run", a, b);
  if (*in == Stands::kRunning && !does(in_, "suspend")) return fail(in_.error());
  return *in == Stands::kGone ? fmt::format("{} runs, as before; {} has ended", a, b)
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
  target.pid = Pid{};
  target.job.reset();
  return target;
}

Result<std::string> recover_swap(Context& context, const SwapRecord& record) {
  SwapArguments arguments;
  arguments.out = find_again(record.out);
  arguments.in = find_again(record.in);
  if (!record.gpu_map.empty()) arguments.device_map = record.gpu_map;
  STASIS_TRY_ASSIGN(auto out, Side::start(arguments, arguments.out, context));
  STASIS_TRY_ASSIGN(auto in, Side::start(arguments, arguments.in, context));
  auto decided = Swap(context, out, in).decide();
  context.traces_of_helpers.push_back(out.take_trace());
  context.traces_of_helpers.push_back(in.take_trace());
  return decided;
}

void tell_notes(Context& context, const Side& side) {
  for (const json& note : side.result().value("notes", json::array()))
    context.terminal.note(side.name() + ": " + note.get<std::string>());
}

Result<int> run_swap(Context& context, SwapArguments& arguments) {
  const auto start = Clock::now();
  if (arguments.device_map) {
    STASIS_TRY(parse_gpu_map(*arguments.device_map));
  }
  for (Target* target : {&arguments.out, &arguments.in})
    STASIS_TRY(target->find());
  const auto init_of = [](const Target& target) {
    return target.is_elsewhere() ? target.job->init.value : 0;
  };
  if (arguments.out.pid == arguments.in.pid && init_of(arguments.out) == init_of(arguments.in)) {
    return fail(ErrorCode::kUsage,
                fmt::format("{} and {} are the same", arguments.out.text, arguments.in.text),
                "name the one to be suspended, and the one to be resumed");
  }
  STASIS_TRY_ASSIGN(auto out, Side::start(arguments, arguments.out, context));
  STASIS_TRY_ASSIGN(auto in, Side::start(arguments, arguments.in, context));
  Swap swap(context, out, in);
  auto done = swap.run({Pid{}, party_of(arguments.out), party_of(arguments.in),
                        arguments.device_map.value_or(std::string())});
  context.traces_of_helpers = {out.take_trace(), in.take_trace()};
  if (!context.json && out.result().contains("simulated")) {
    context.terminal.note("this is the simulated GPU (" +
                          out.result()["simulated"].get<std::string>() + ")");
  }
  tell_notes(context, out);
  tell_notes(context, in);
  STASIS_TRY(std::move(done));
  const Seconds total = since(start);
  if (context.json) {
    json result = {{"ok", true},
                   {"suspended", out.result()["report"]},
                   {"resumed", in.result()["report"]},
                   {"at_once", swap.at_once()},
                   {"seconds", total.count()}};
    if (!swap.no_room().empty()) result["no_room_at_once"] = swap.no_room();
    context.print(result);
    return 0;
  }
  if (!swap.no_room().empty()) {
    context.terminal.note(fmt::format("there was no room for {} beside {} after all: {}", in.name(),
                                      out.name(), swap.no_room()));
  }
  const auto part = [](const Side& side) {
    return fmt::format("{} ({}) in {}", side.name(), side.result().value("text", ""),
                       format_seconds(Seconds(side.result().value("seconds", 0.0))));
  };
  context.terminal.out(fmt::format("suspended {}, resumed {}; {} in all, {}", part(out), part(in),
                                   format_seconds(total),
                                   swap.at_once() ? "both at once" : "one after the other"));
  return 0;
}

}  // namespace

std::vector<RecoverReport> recover_swaps(Context& context) {
  std::vector<RecoverReport> reports;
  auto entries = read_swaps();
  if (!entries) return reports;  // recover_all() says why
  for (const SwapEntry& entry : *entries) {
    if (entry.under_way && !wait_for_killed(context.interrupt, entry.record.owner)) continue;
    RecoverReport report;
    report.root = entry.record.out.root.pid;
    report.operation = "swap";
    report.outcome =
        fmt::format("{} and {}: not recovered", entry.record.out.name, entry.record.in.name);
    auto journal = SwapJournal::adopt(entry.record);
    if (journal && !*journal) continue;  // another recover was quicker
    if (journal) {
      auto decided = recover_swap(context, (*journal)->record());
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

Verb add_swap(CLI::App& app) {
  auto options = std::make_shared<SwapArguments>();
  CLI::App* command = app.add_subcommand(
      "swap", "suspend one process tree and resume another in its place, at once where both fit");
  add_target(*command, options->out, "OUT");
  add_target(*command, options->in, "IN");
  command->get_option("OUT")->description(
      "the process to suspend: its number, or the name of the job");
  command->get_option("IN")->description("the process to resume, likewise");
  add_timeout(*command, options->suspend.timeout);
  add_path(*command, options->suspend.path);
  add_device_map(*command, options->device_map);
  command->add_flag("--ignore-obstacles", options->suspend.ignore_obstacles,
                    "go on although the driver may refuse or lose the first one's memory");
  return {command, [options](Context& context) { return run_swap(context, *options); }};
}

}  // namespace stasis::cli
