// Suspends one job and resumes another on the same GPUs, at once where both fit: each direction of
// the bus has its own speed. Each in a process of its own, in the job's namespaces, as operations
// are about one tree.
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <list>
#include <memory>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "base/helper_process.h"
#include "base/trace.h"
#include "cli/target.h"
#include "cli/verbs.h"
#include "job/init.h"

namespace stasis::cli {
namespace {

using nlohmann::json;

constexpr int kLookForSignals = 100;  // milliseconds

struct SwapArguments {
  Target out;
  Target in;
  SuspendOptions suspend;
  std::optional<std::string> device_map;
};

Result<void> send_order(const Channel& channel, const json& order,
                        std::span<const UniqueFd> files = {}) {
  const std::string text = order.dump(-1, ' ', false, json::error_handler_t::replace);
  return channel.send(std::as_bytes(std::span(text)), files);
}

std::optional<json> order_of(const Channel::Message& message) {
  const std::string_view text(reinterpret_cast<const char*>(message.bytes.data()),
                              message.bytes.size());
  json parsed = json::parse(text, nullptr, false);
  if (!parsed.is_object()) return std::nullopt;
  return parsed;
}

// What a side has done until now: more than a message holds. Invalid if there is no memory for it.
UniqueFd trace_file(const std::string& name) {
  const std::string text =
      trace_of_process("swap: " + name).dump(-1, ' ', false, json::error_handler_t::replace);
  UniqueFd file(::memfd_create("stasis-trace", MFD_CLOEXEC));
  if (file.valid() && !write_all(file.get(), text.data(), text.size(), name)) file.reset();
  return file;
}

// As of the process with that number: of its own namespace's it may be another's, too.
json read_trace(const UniqueFd& file, Pid pid) {
  constexpr std::size_t kMost = 256 << 20;
  (void)::lseek(file.get(), 0, SEEK_SET);
  const auto text = read_file(file, "trace", kMost);
  json events = json::parse(text ? *text : std::string(), nullptr, false);
  if (!events.is_array()) return json::array();
  for (json& event : events)
    event["pid"] = pid.value;
  return events;
}

// --- In the process of a side.

Interrupt* g_side_interrupt = nullptr;

void stop_side(int signal_number) { g_side_interrupt->request(signal_number); }

json failure(const Error& error) { return {{"error", job::error_to_json(error)}}; }

json report_of(const Result<Report>& report) {
  if (!report) return failure(report.error());
  json out = to_json(*report);
  // A message holds so much: of very many processes nobody reads each here.
  constexpr std::size_t kMostProcesses = 64;
  json& processes = out["processes"];
  while (processes.is_array() && processes.size() > kMostProcesses)
    processes.erase(processes.size() - 1);
  return {{"report", std::move(out)},
          {"text", subject_text(*report)},
          {"seconds", report->total.count()},
          {"standstill", report->standstill ? json(report->standstill->count()) : json()}};
}

json work_on(Context& context, Driver& driver, const Interrupt& interrupt,
             const SwapArguments& arguments, Pid root, const json& order, const Channel& channel) {
  const auto what = order.value("do", std::string());
  const Environment whole = context.environment(driver);
  const Environment env{driver,      interrupt,       whole.progress,  whole.note,
                        whole.mover, whole.end_mover, whole.ring_bytes};
  if (what == "look") {
    auto standing = look_at(env, root);
    if (!standing) return failure(standing.error());
    return {{"running", standing->running},
            {"suspended", standing->suspended},
            {"locked", standing->locked},
            {"held_before", standing->held_before},
            {"fits", standing->fits ? json(*standing->fits) : json()}};
  }
  if (what == "suspend") {
    SuspendOptions options = arguments.suspend;
    if (order.value("at_once", false))
      options.at_rest = [&] { (void)send_order(channel, {{"at_rest", true}}); };
    return report_of(suspend(env, root, options));
  }
  ResumeOptions options;
  if (arguments.device_map) {
    auto map = parse_gpu_map(*arguments.device_map);
    if (!map) return failure(map.error());
    options.gpu_map = std::move(*map);
  }
  return report_of(resume(env, root, options));
}

void serve_side(const Channel& channel, const SwapArguments& arguments, const Target& target,
                const Elsewhere& there, const Context& asked) {
  Terminal nobody;
  // One for each order: what was stopped has to be undone. They stay, for a signal that is late.
  std::list<Interrupt> interrupts(1);
  g_side_interrupt = &interrupts.back();
  struct sigaction action {};
  action.sa_handler = stop_side;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
  Context context{nobody, interrupts.front(), true};
  context.patience = asked.patience;
  context.ring_bytes = asked.ring_bytes;
  auto entered = there.enter();
  std::unique_ptr<Driver> driver;
  if (entered) {
    auto loaded = context.load_moving_driver(true);
    if (loaded)
      driver = std::move(*loaded);
    else
      entered = fail(std::move(loaded.error()));
  }
  while (true) {
    auto message = channel.receive(-1);
    if (!message || !*message) break;
    const auto order = order_of(**message);
    if (!order) break;
    context.notes.clear();
    g_side_interrupt = &interrupts.emplace_back();
    json result = entered ? work_on(context, *driver, interrupts.back(), arguments, target.pid,
                                    *order, channel)
                          : failure(entered.error());
    result["notes"] = context.notes;
    if (entered && driver->info().simulated) result["simulated"] = driver->info().library;
    const UniqueFd trace = trace_is_on() ? trace_file(target.text) : UniqueFd();
    if (!send_order(channel, result, std::span(&trace, trace.valid() ? 1 : 0))) break;
  }
  driver.reset();
  context.mover.reset();
}

// --- Here.

class Side {
 public:
  static Result<Side> start(const SwapArguments& arguments, const Target& target,
                            const Context& asked) {
    auto there = Elsewhere::open(target);
    if (!there) return fail(std::move(there.error()));
    auto process = HelperProcess::start("stasis-swap", [&](const Channel& channel) {
      serve_side(channel, arguments, target, *there, asked);
    });
    if (!process) return fail(std::move(process.error()));
    return Side(target.text, std::move(*process));
  }

  const std::string& name() const { return name_; }
  int fd() const { return busy_ ? process_.channel().fd() : -1; }
  bool busy() const { return busy_; }
  // What it suspends has no work on the GPU any more.
  bool at_rest() const { return at_rest_; }

  // `at_once`: the other one does its part meanwhile.
  void begin(const char* what, bool at_once = false) {
    done_ = json();
    at_rest_ = false;
    busy_ = send_order(process_.channel(), {{"do", what}, {"at_once", at_once}}).has_value();
    if (!busy_) lost();
  }
  // Takes the answer, which is there.
  void take() {
    auto message = process_.channel().receive(0);
    if (message && !*message) return;
    auto answer = message ? order_of(**message) : std::nullopt;
    at_rest_ = answer && answer->contains("at_rest");
    if (at_rest_) return;
    busy_ = false;
    if (message && !(*message)->descriptors.empty())
      trace_ = read_trace((*message)->descriptors.front(), process_.pid());
    if (answer)
      done_ = std::move(*answer);
    else
      lost();
  }
  void stop() {
    if (auto pidfd = Pidfd::open(process_.pid())) (void)pidfd->signal(SIGTERM);
  }

  // Of all that was done; with --trace.
  json take_trace() { return std::exchange(trace_, json::array()); }
  // Of what was done last.
  const json& result() const { return done_; }
  bool succeeded() const { return done_.is_object() && !done_.contains("error"); }
  Error error() const {
    return job::error_from_json(done_.value("error", json::object()))
        .within(fmt::format("{}", name_));
  }

 private:
  Side(std::string name, HelperProcess process)
      : name_(std::move(name)), process_(std::move(process)) {}

  void lost() {
    busy_ = false;
    (void)process_.end_after(1000);
    done_ = failure({ErrorCode::kNotRolledBack,
                     fmt::format("the process that worked on it {}", process_.how_it_ended()),
                     fmt::format("`stasis recover {}`", name_),
                     {},
                     {}});
  }

  std::string name_;
  HelperProcess process_;
  bool busy_ = false;
  bool at_rest_ = false;
  json done_;
  json trace_ = json::array();
};

class Swap {
 public:
  Swap(Context& context, Side& out, Side& in) : context_(context), out_(out), in_(in) {}

  // Leaves everything as it was on an error, or says what is not.
  Result<void> run();
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
  bool lacks_room() const;
  Error undo(Error why, Side& side, const char* what);
  static Error both_failed(Error first, const Error& second, const std::string& mends_second);

  Context& context_;
  Side& out_;
  Side& in_;
  bool stopped_ = false;
  bool at_once_ = false;
  bool in_waits_ = false;  // for OUT to come to rest
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

// Where both have come to grief: what is left behind of each, and what mends it.
Error Swap::both_failed(Error first, const Error& second, const std::string& mends_second) {
  std::string remedy = first.code == ErrorCode::kNotRolledBack ? std::move(first.remedy) : "";
  remedy += (remedy.empty() ? "" : "; ") + mends_second;
  return {ErrorCode::kNotRolledBack,
          fmt::format("{}; and then {}", first.to_string(), second.to_string()),
          std::move(remedy),
          {},
          {}};
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

Result<void> Swap::run() {
  if (auto fine = look(); !fine) return fine;
  if (auto stop = context_.interrupt.check(); !stop) return stop;
  out_.begin("suspend", at_once_);
  if (at_once_ && !in_waits_) in_.begin("resume");
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

void tell_notes(Context& context, const Side& side) {
  for (const json& note : side.result().value("notes", json::array()))
    context.terminal.note(side.name() + ": " + note.get<std::string>());
}

Result<int> run_swap(Context& context, SwapArguments& arguments) {
  const auto start = Clock::now();
  if (arguments.device_map) {
    if (auto map = parse_gpu_map(*arguments.device_map); !map) return fail(std::move(map.error()));
  }
  for (Target* target : {&arguments.out, &arguments.in})
    if (auto found = target->find(); !found) return fail(std::move(found.error()));
  const auto init_of = [](const Target& target) {
    return target.is_elsewhere() ? target.job->init.value : 0;
  };
  if (arguments.out.pid == arguments.in.pid && init_of(arguments.out) == init_of(arguments.in)) {
    return fail(ErrorCode::kUsage,
                fmt::format("{} and {} are the same", arguments.out.text, arguments.in.text),
                "name the one to be suspended, and the one to be resumed");
  }
  auto out = Side::start(arguments, arguments.out, context);
  if (!out) return fail(std::move(out.error()));
  auto in = Side::start(arguments, arguments.in, context);
  if (!in) return fail(std::move(in.error()));
  Swap swap(context, *out, *in);
  auto done = swap.run();
  context.traces_of_helpers = {out->take_trace(), in->take_trace()};
  if (!context.json && out->result().contains("simulated")) {
    context.terminal.note("this is the simulated GPU (" +
                          out->result()["simulated"].get<std::string>() + ")");
  }
  tell_notes(context, *out);
  tell_notes(context, *in);
  if (!done) return fail(std::move(done.error()));
  const Seconds total = since(start);
  if (context.json) {
    json result = {{"ok", true},
                   {"suspended", out->result()["report"]},
                   {"resumed", in->result()["report"]},
                   {"at_once", swap.at_once()},
                   {"seconds", total.count()}};
    if (!swap.no_room().empty()) result["no_room_at_once"] = swap.no_room();
    context.print(result);
    return 0;
  }
  if (!swap.no_room().empty()) {
    context.terminal.note(fmt::format("there was no room for {} beside {} after all: {}",
                                      in->name(), out->name(), swap.no_room()));
  }
  const auto part = [](const Side& side) {
    return fmt::format("{} ({}) in {}", side.name(), side.result().value("text", ""),
                       format_seconds(Seconds(side.result().value("seconds", 0.0))));
  };
  context.terminal.out(fmt::format("suspended {}, resumed {}; {} in all, {}", part(*out), part(*in),
                                   format_seconds(total),
                                   swap.at_once() ? "both at once" : "one after the other"));
  return 0;
}

}  // namespace

Verb add_swap(CLI::App& app) {
  auto options = std::make_shared<SwapArguments>();
  CLI::App* command = app.add_subcommand(
      "swap", "suspend one process tree and resume another in its place, at once where both fit");
  add_target(*command, options->out, "OUT");
  add_target(*command, options->in, "IN");
  command->get_option("OUT")->description(
      "who is to be suspended: number of the process, or name of the job");
  command->get_option("IN")->description("who is to be resumed, likewise");
  add_timeout(*command, options->suspend.timeout);
  add_path(*command, options->suspend.path);
  add_device_map(*command, options->device_map);
  command->add_flag("--ignore-obstacles", options->suspend.ignore_obstacles,
                    "go on although the driver may refuse or lose the first one's memory");
  return {command, [options](Context& context) { return run_swap(context, *options); }};
}

}  // namespace stasis::cli
