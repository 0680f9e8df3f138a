#include "cli/swap_side.h"

#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <list>
#include <memory>
#include <span>

#include <fmt/format.h>

#include "base/trace.h"
#include "job/messages.h"

namespace stasis::cli {
namespace {

using nlohmann::json;

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

Interrupt* g_side_interrupt = nullptr;

void stop_side(int signal_number) { g_side_interrupt->request(signal_number); }

json failure(const Error& error) { return {{"error", job::error_to_json(error)}}; }

json report_of(const Result<Report>& report) {
  if (!report) return failure(report.error());
  json out = to_json(*report);
  // A message holds so much: of very many processes the reader needs no list here.
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
  if (what == "undo") {
    const auto undone = undo_cut_short(env, root);
    if (!undone) return failure(undone.error());
    return {{"undone", undone->has_value()}};
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
  Terminal silent;
  // One for each order: what was stopped has to be undone. They stay, for a signal that is late.
  std::list<Interrupt> interrupts(1);
  g_side_interrupt = &interrupts.back();
  struct sigaction action {};
  action.sa_handler = stop_side;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
  Context context{silent, interrupts.front(), true};
  context.patience = asked.patience;
  context.session.ring_bytes = asked.session.ring_bytes;
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
  context.session.drop_movers();
}

}  // namespace

Result<Side> Side::start(const SwapArguments& arguments, const Target& target,
                         const Context& asked) {
  STASIS_TRY_ASSIGN(auto there, Elsewhere::open(target));
  auto process = HelperProcess::start("stasis-swap", [&](const Channel& channel) {
    serve_side(channel, arguments, target, there, asked);
  });
  if (!process) return fail(std::move(process.error()));
  return Side(target.text, std::move(*process));
}

void Side::begin(const char* what, bool at_once) {
  done_ = json();
  at_rest_ = false;
  busy_ = send_order(process_.channel(), {{"do", what}, {"at_once", at_once}}).has_value();
  if (!busy_) lost();
}

void Side::take() {
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

void Side::stop() {
  if (auto pidfd = Pidfd::open(process_.pid())) (void)pidfd->signal(SIGTERM);
}

Error Side::error() const {
  return job::error_from_json(done_.value("error", json::object()))
      .within(fmt::format("{}", name_));
}

void Side::lost() {
  busy_ = false;
  (void)process_.end_after(1000);
  done_ = failure({ErrorCode::kNotRolledBack,
                   fmt::format("the process that worked on it {}", process_.how_it_ended()),
                   fmt::format("`stasis recover {}`", name_)});
}

}  // namespace stasis::cli
