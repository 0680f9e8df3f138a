#include "job/swap_side.h"

#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <list>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include "base/trace.h"
#include "job/stop_signal.h"
#include "operations/session.h"
#include "report/trace_file.h"

namespace stasis::job {
namespace {

using nlohmann::json;

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

decltype(SideResult::what) moved(Result<Report> report) {
  if (!report) return std::move(report.error());
  return std::move(*report);
}

// The process of a side.
class Server {
 public:
  Server(const Channel& channel, SideSetup setup) : channel_(channel), setup_(std::move(setup)) {
    session_.ring_bytes = setup_.ring_bytes;
    session_.timeouts = setup_.timeouts;
  }

  void serve() {
    stop_by_sigterm(interrupts_.back());
    auto entered = enter(setup_.entry);
    std::unique_ptr<Driver> driver;
    if (entered) {
      auto loaded = session_.load_driver(OperationSession::Movers::kSpare);
      if (loaded)
        driver = std::move(*loaded);
      else
        entered = fail(std::move(loaded.error()));
    }
    while (true) {
      auto message = channel_.receive(-1);
      if (!message || !*message) break;
      const auto order = parse_side_order(**message);
      if (!order) break;
      notes_.clear();
      stop_by_sigterm(interrupts_.emplace_back());
      SideResult result;
      if (entered)
        result.what = carry_out(*driver, *order);
      else
        result.what = entered.error();
      result.notes = notes_;
      if (entered && driver->info().simulated) result.simulated = driver->info().library;
      if (!send(channel_, result, trace_is_on() ? trace_file(setup_.name) : UniqueFd())) break;
    }
    driver.reset();
    session_.drop_movers();
  }

 private:
  decltype(SideResult::what) carry_out(Driver& driver, SideOrder order) {
    const Environment env = session_.environment(driver).with(interrupts_.back());
    // The party of a killed swap that has ended (find_again()); nothing of it is to be undone.
    if (setup_.root.value == 0 && order != SideOrder::kUndo)
      return Error{ErrorCode::kNoSuchProcess, "it has ended", {}};
    switch (order) {
      case SideOrder::kProbe:
        if (auto status = probe(env, setup_.root))
          return *status;
        else
          return status.error();
      case SideOrder::kAttach: {
        Phases phases;
        if (auto attached =
                attach_first(env, setup_.root,
                             {*setup_.attach, setup_.timeout, setup_.ignore_obstacles}, phases))
          return Attached{};
        else
          return attached.error();
      }
      case SideOrder::kSuspend:
      case SideOrder::kSuspendBeside:
        return moved(suspend(env, setup_.root, suspend_options(order)));
      case SideOrder::kUndo:
        if (auto undone = undo_cut_short(env, setup_.root))
          return Undone{undone->has_value()};
        else
          return undone.error();
      case SideOrder::kResume:
        break;
    }
    ResumeOptions options;
    if (!setup_.gpu_map.empty()) {
      auto map = parse_gpu_map(setup_.gpu_map);
      if (!map) return map.error();
      options.gpu_map = std::move(*map);
    }
    return moved(resume(env, setup_.root, options));
  }

  SuspendOptions suspend_options(SideOrder order) const {
    SuspendOptions options;
    options.timeout = setup_.timeout;
    options.path = setup_.path;
    options.ignore_obstacles = setup_.ignore_obstacles;
    if (order == SideOrder::kSuspendBeside)
      options.on_quiesced = [this] { (void)send(channel_, Quiesced{}, UniqueFd()); };
    return options;
  }

  const Channel& channel_;
  const SideSetup setup_;
  // One for each order: what was stopped has to be undone. They stay, for a signal that is late.
  std::list<Interrupt> interrupts_ = std::list<Interrupt>(1);
  std::vector<std::string> notes_;
  struct ToCaller final : Progress {
    explicit ToCaller(const Channel& to) : channel(to) {}
    void update(std::string_view, std::uint64_t done, std::uint64_t total) override {
      send(channel, Progressed{done, total});
    }
    const Channel& channel;
  };
  ToCaller progress_{channel_};
  OperationSession session_{interrupts_.front(), progress_,
                            [this](const std::string& text) { notes_.push_back(text); }};
};

}  // namespace

void serve_swap_side(const Channel& channel) {
  auto message = channel.receive(-1);
  if (!message || !*message) return;
  auto setup = parse_side_setup(**message);
  if (setup) Server(channel, std::move(*setup)).serve();
}

Result<SwapSide> SwapSide::start(const Target& target, SideSetup setup, const StartHelper& helper) {
  STASIS_TRY_ASSIGN(auto there, Elsewhere::open(target));
  STASIS_TRY_ASSIGN(auto process, helper());
  setup.name = target.text;
  setup.root = target.pid;
  setup.entry = there.entry();
  STASIS_TRY(send(process.channel(), setup));
  return SwapSide(target.text, std::move(process));
}

void SwapSide::begin(SideOrder order) {
  done_ = {};
  quiesced_ = false;
  progressed_ = {};
  is_stopped_ = false;
  busy_ = send(process_.channel(), order).has_value();
  if (!busy_) lost();
}

void SwapSide::take() {
  auto message = process_.channel().receive(0);
  if (message && !*message) return;
  auto event = message ? parse_side_event(**message) : std::nullopt;
  has_answered_ = true;
  if (const auto* progressed = event ? std::get_if<Progressed>(&*event) : nullptr) {
    progressed_ = *progressed;
    return;
  }
  if (event && std::holds_alternative<Quiesced>(*event)) {
    quiesced_ = true;
    return;
  }
  busy_ = false;
  if (message && !(*message)->descriptors.empty())
    trace_ = read_trace((*message)->descriptors.front(), process_.pid());
  if (event)
    done_ = std::move(std::get<SideResult>(*event));
  else
    lost();
}

void SwapSide::insist() {
  if (busy_ && is_stopped_) stop();
}

void SwapSide::stop() {
  is_stopped_ = true;
  if (auto pidfd = Pidfd::open(process_.pid())) (void)pidfd->signal(SIGTERM);
}

Error SwapSide::error() const {
  Error error;
  if (const Error* said = get<Error>()) error = *said;
  // One that is named by its number, which the message has.
  if (error.message.ends_with("process " + name_)) return error;
  return std::move(error).within(name_);
}

void SwapSide::lost() {
  busy_ = false;
  (void)process_.end_after(1000);
  done_ = {Error{ErrorCode::kNotRolledBack,
                 fmt::format("the process that worked on it {}", process_.how_it_ended()),
                 fmt::format("`stasis recover {}`", name_)}};
}

}  // namespace stasis::job
