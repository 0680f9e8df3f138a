#include "job/inside.h"

#include <csignal>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "image/manifest_fields.h"
#include "job/json_message.h"
#include "job/shared_memory.h"
#include "job/stop_signal.h"
#include "job/swap_messages.h"
#include "operations/session.h"
#include "report/report_record.h"

namespace stasis {

// The way of GPU and host memory, and how much CRIU logs, are not for C to choose.
void fields(auto& io, Described<DumpOptions> auto& options) {
  job::path_field(io, "images_dir", options.images_dir);
  io("overwrite", options.overwrite);
  io("sync", options.sync);
  io("after", options.after);
  io("timeout", options.timeout);
  io("compression", options.compression);
  io("ignore_obstacles", options.ignore_obstacles);
  io("ignore_undumpable", options.ignore_undumpable);
  io.optional("job", options.job);
  io("job_name", options.job_name);
  job::path_field(io, "base", options.base);
  job::path_field(io, "criu_path", options.criu_path);
  io("criu", options.criu);
}

namespace job {
namespace {

constexpr int kInsidePollMs = 100;

// The order for the side: where, who, and what.
struct InsideErrand {
  InsideVerb verb = InsideVerb::kSuspend;
  std::string gpu_map;
  std::string images_dir;  // of a resume
  std::chrono::milliseconds time_limit{0};
  DumpOptions dump;
};

// What comes back.
struct InsideHears {};  // a signal stops it from now on
struct InsideTold {
  std::string phase;
  std::uint64_t done = 0;
  std::uint64_t total = 0;
};
struct InsideNoted {
  std::string text;
};
struct InsideDone {
  std::variant<InsideReport, Error> what;
};
using InsideEvent = std::variant<InsideHears, InsideTold, InsideNoted, InsideDone>;

void fields(auto& io, Described<InsideErrand> auto& errand) {
  io("verb", errand.verb);
  io("gpu_map", errand.gpu_map);
  path_field(io, "images_dir", errand.images_dir);
  io("time_limit", errand.time_limit);
  io("dump", errand.dump);
}
void fields(auto& io, Described<InsideTold> auto& told) {
  io("phase", told.phase);
  io("done", told.done);
  io("total", told.total);
}
void fields(auto& io, Described<InsideNoted> auto& noted) { io("text", noted.text); }
void fields(auto& io, Described<InsideDone> auto& done) { io("what", done.what); }

// The process in the job's namespaces.
class InsideServer final : public Progress {
 public:
  InsideServer(const Channel& channel, SideSetup setup, InsideErrand errand)
      : channel_(channel), setup_(std::move(setup)), errand_(std::move(errand)) {
    session_.ring_bytes = setup_.ring_bytes;
    session_.timeouts = setup_.timeouts;
  }

  void serve() {
    stop_by_sigterm(interrupt_);
    tell(InsideHears{});
    interrupt_.set_time_limit(errand_.time_limit);
    auto report = carry_out();
    session_.drop_movers();
    if (!report) return tell(InsideDone{std::move(report.error())});
    if (auto sent = send_any_size(channel_, InsideEvent(InsideDone{std::move(*report)})); !sent)
      tell(InsideDone{Error{ErrorCode::kNotRolledBack,
                            "it is done, and its report is lost: " + sent.error().message,
                            "see what it has come to: `stasis ps`"}});
  }

  void update(std::string_view phase, std::uint64_t done, std::uint64_t total) override {
    tell(InsideTold{std::string(phase), done, total});
  }

 private:
  void tell(const InsideEvent& event) { (void)send_any_size(channel_, event); }

  Result<InsideReport> carry_out() {
    STASIS_TRY(enter(setup_.entry));
    const bool is_dump = errand_.verb == InsideVerb::kDump;
    STASIS_TRY_ASSIGN(auto driver, session_.load_driver(!is_dump ? OperationSession::Movers::kSpare
                                                        : errand_.dump.wants_spare_mover()
                                                            ? OperationSession::Movers::kDigests
                                                            : OperationSession::Movers::kOne));
    const Environment env = session_.environment(*driver);
    switch (errand_.verb) {
      case InsideVerb::kSuspend: {
        SuspendOptions options;
        options.timeout = setup_.timeout;
        options.ignore_obstacles = setup_.ignore_obstacles;
        options.attach = setup_.attach;
        return suspend(env, setup_.root, options);
      }
      case InsideVerb::kResume: {
        ResumeOptions options;
        options.images_dir = errand_.images_dir;
        if (!errand_.gpu_map.empty()) {
          STASIS_TRY_ASSIGN(options.gpu_map, parse_gpu_map(errand_.gpu_map));
        }
        return resume(env, setup_.root, options);
      }
      case InsideVerb::kDump:
        if (errand_.dump.job) {
          errand_.dump.on_complete = [](const UniqueFd& criu_dir) -> Result<void> {
            STASIS_TRY(save_shared_memory(kSharedMemory, criu_dir));
            return {};
          };
        }
        errand_.dump.attach = setup_.attach;
        return dump(env, setup_.root, errand_.dump);
      case InsideVerb::kRecover:
        break;
    }
    STASIS_TRY_ASSIGN(auto one, recover(env, setup_.root));
    if (one.error) return fail(std::move(*one.error));
    return one;
  }

  const Channel& channel_;
  const SideSetup setup_;
  InsideErrand errand_;
  Interrupt interrupt_;
  OperationSession session_{interrupt_, *this,
                            [this](const std::string& text) { tell(InsideNoted{text}); }};
};

Error lost_inside(HelperProcess& process, const Target& target) {
  (void)process.end_after(1000);
  return {ErrorCode::kNotRolledBack,
          fmt::format("the process that worked on {} {}", target.text, process.how_it_ended()),
          fmt::format("`stasis recover {}`", target.text)};
}

Result<InsideReport> wait_for_inside(const InsideCaller& caller, HelperProcess process,
                                     const Target& target) {
  bool hears = false;
  bool stopped = false;
  while (true) {
    auto message = process.channel().receive(kInsidePollMs);
    if (!message) return fail(lost_inside(process, target));
    if (*message) {
      auto event = parse_any_size<InsideEvent>(**message);
      if (!event) return fail(lost_inside(process, target));
      hears = true;
      if (const auto* told = std::get_if<InsideTold>(&*event))
        caller.progress.update(told->phase, told->done, told->total);
      if (const auto* noted = std::get_if<InsideNoted>(&*event)) caller.note(noted->text);
      if (auto* done = std::get_if<InsideDone>(&*event)) {
        if (auto* error = std::get_if<Error>(&done->what)) return fail(std::move(*error));
        return std::move(std::get<InsideReport>(done->what));
      }
    }
    // That the caller insists is said again and again: it counts from a second after the first.
    if (caller.interrupt.requested() && hears && (!stopped || caller.interrupt.insists())) {
      stopped = true;
      if (auto pidfd = Pidfd::open(process.pid())) (void)pidfd->signal(SIGTERM);
    }
  }
}

}  // namespace

Result<InsideReport> operate_inside(const InsideCaller& caller, const Target& target,
                                    const InsideOrder& order) {
  STASIS_TRY(caller.interrupt.check());
  SideSetup setup;
  setup.name = target.text;
  setup.root = target.pid;
  setup.timeout = order.suspend.timeout;
  setup.ignore_obstacles = order.suspend.ignore_obstacles;
  setup.attach = order.verb == InsideVerb::kDump ? order.dump.attach : order.suspend.attach;
  setup.ring_bytes = caller.ring_bytes;
  setup.timeouts = caller.timeouts;
  InsideErrand errand{order.verb, gpu_map_text(order.resume.gpu_map), order.resume.images_dir,
                      order.time_limit, order.dump};
  // As `stasis run` would have made the image, so that its standard streams are known.
  if (order.verb == InsideVerb::kDump && target.pid == target.job->root)
    errand.dump.job = {target.job->command, target.job->streams};
  const auto start = [&]() -> Result<HelperProcess> {
    STASIS_TRY_ASSIGN(auto there, Elsewhere::open(target));
    setup.entry = there.entry();
    return caller.start_helper();
  };
  STASIS_TRY_ASSIGN(auto process, start());
  STASIS_TRY(send(process.channel(), setup));
  STASIS_TRY(send_message(process.channel(), errand));
  caller.note(fmt::format("process numbers are those inside of job {}: its own is {} there",
                          target.job->name, target.pid.value));
  return wait_for_inside(caller, std::move(process), target);
}

void serve_inside(const Channel& channel) {
  auto first = channel.receive(-1);
  if (!first || !*first) return;
  auto setup = parse_side_setup(**first);
  auto second = channel.receive(-1);
  if (!setup || !second || !*second) return;
  if (auto errand = parse_message<InsideErrand>(**second))
    InsideServer(channel, std::move(*setup), std::move(*errand)).serve();
}

}  // namespace job
}  // namespace stasis
