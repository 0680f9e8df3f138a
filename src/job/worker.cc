#include "job/worker.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "base/printable.h"
#include "base/trace.h"
#include "checkpoint/process_tree.h"
#include "image/image_reader.h"
#include "job/init.h"
#include "job/json_message.h"
#include "job/shared_memory.h"
#include "job/stop_signal.h"
#include "operations/operations.h"
#include "operations/session.h"
#include "proc/procfs.h"
#include "report/metrics.h"
#include "report/report.h"
#include "report/trace_file.h"

namespace stasis::job {
namespace {

// In the worker, which does one thing and ends.
Interrupt& worker_interrupt() {
  static Interrupt interrupt;
  return interrupt;
}

// Told to by init: a save is rolled back, and the job gets what it has no more time to wait for; a
// restore leaves nothing.
void obey_stop() { stop_by_sigterm(worker_interrupt()); }

// What an operation of a worker is done with.
struct Worker {
  explicit Worker(const Interrupt& interrupt)
      : session(interrupt, progress, [this](const std::string& text) { notes.push_back(text); }) {}
  // With all that there is to say of it.
  WorkResult result(decltype(WorkResult::what) what) const { return {std::move(what), notes}; }

  NoProgress progress;
  std::vector<std::string> notes;
  OperationSession session;
  std::optional<OperationFigures> figures;  // of an operation that succeeded
};

// Has the user suspended it by `stasis suspend NAME`?
Result<bool> is_suspended(Driver& driver, Pid root) {
  STASIS_TRY_ASSIGN(auto tree, ProcessTree::open(driver, root));
  tree.dismiss();
  return std::any_of(tree.members().begin(), tree.members().end(),
                     [](const auto& member) { return member.initial == CudaState::kCheckpointed; });
}

// An image has the tree below the root. The namespace has reparented orphans besides, which are
// init's.
void tell_of_orphans(Worker& worker, Pid root) {
  const auto all_processes = proc::ProcFs().all();
  if (!all_processes) return;
  for (const proc::ProcessInfo& info : *all_processes) {
    if (info.parent.value != 1 || info.pid == root || info.pid.value == ::getpid()) continue;
    if (info.has_ended()) continue;
    worker.notes.push_back(
        fmt::format("process {} ({}) has left the job's tree: no image has it, and a restored job "
                    "is without it",
                    info.pid.value, printable(info.comm)));
  }
}

// The other parts see that this one has begun, and come (Supervisor::follow_group).
constexpr std::chrono::seconds kComeToSave{10};

Result<std::unique_ptr<GroupPart>> join_save(const JobGroup& group, const SaveOrder& order) {
  if (!group.has_others()) return std::unique_ptr<GroupPart>();
  GroupPartOptions options;
  options.operation = Operation::kDump;
  options.timeout = order.end ? order.limit : kComeToSave;
  return join(group, order.end ? Together::kSaveEnd : Together::kSave, std::move(options),
              worker_interrupt());
}

// A TCP connection of the job leads to a process outside of it.
bool leads_out(const Error& error) {
  return std::any_of(error.obstacles.begin(), error.obstacles.end(), [](const Obstacle& obstacle) {
    return obstacle.id == ObstacleId("tcp-connection") && obstacle.severity == Severity::kRed;
  });
}

// `stasis dump` has other options than a job.
Error with_remedy_of_run(Error error) {
  error.message +=
      "; have it close them before a save, or start it with `stasis run --tcp-close`, after which "
      "a "
      "restore closes them";
  return error;
}

WorkResult save(Worker& worker, Driver& driver, Pid root, const SaveOrder& order,
                const StreamEnds& streams, const WorkerOptions& of_job) {
  const JobGroup& group = of_job.group;
  DumpOptions options;
  options.images_dir = order.images_dir;
  options.images_folder = order.images_folder;
  options.job_name = of_job.name;
  options.after = order.end ? AfterDump::kKill : AfterDump::kRunning;
  options.job.emplace();
  options.job->command = order.command;
  for (const UniqueFd& stream : streams) {
    auto name = pipe_name(stream);
    if (!name) return worker.result(name.error());
    options.job->streams.push_back(std::move(*name));
  }
  options.base = order.base;
  options.base_may_be_empty = true;
  // A job's own save is given no options of CRIU's. A restore waits for a lock that another program
  // has by then, as the job did.
  options.criu.file_locks = true;
  worker_interrupt().set_time_limit(order.limit);
  options.on_complete = [](const UniqueFd& criu_dir) -> Result<void> {
    STASIS_TRY(save_shared_memory(kSharedMemory, criu_dir));
    return {};
  };
  if (options.after == AfterDump::kRunning) {
    const auto suspended = is_suspended(driver, root);
    if (suspended && *suspended) return worker.result(WasSuspended{});
  }
  tell_of_orphans(worker, root);
  auto part = join_save(group, order);
  if (!part) return worker.result(part.error());
  options.part = part->get();
  const auto env = worker.session.environment(driver);
  auto report = dump(env, root, options);
  // The parts of a group are connected with each other.
  if (!report && !group.has_others() && leads_out(report.error())) {
    if (!of_job.tcp_close) return worker.result(with_remedy_of_run(std::move(report.error())));
    // Those of its processes with each other are kept where there are no others.
    worker.notes.push_back("its connections are closed at a restore, as asked (--tcp-close): " +
                           report.error().message);
    options.criu.tcp_close = true;
    report = dump(env, root, options);
  }
  if (!report) return worker.result(report.error());
  if (*part) {
    if (auto heard = (*part)->leave(); !heard) worker.notes.push_back(heard.error().to_string());
  }
  worker.figures = figures_of(*report);
  Saved saved{size_text(*report), report->total.count(), {}};
  if (report->downtime) saved.downtime = report->downtime->count();
  return worker.result(std::move(saved));
}

// The changes that preload/environment.h reads: what is listed as it is in our own environment.
Result<void> write_environment(const std::vector<std::string>& listed) {
  // Whatever an image has by that name.
  std::error_code ignored;
  std::filesystem::remove_all(kEnvironmentFile, ignored);
  std::string changes;
  for (const std::string& name : listed) {
    const bool prefix = name.ends_with('*');
    if (prefix) changes += name + '\0';
    const std::string begin = prefix ? name.substr(0, name.size() - 1) : name + "=";
    bool found = false;
    for (char** at = environ; *at != nullptr; ++at) {
      if (!std::string_view(*at).starts_with(begin)) continue;
      changes += std::string(*at) + '\0';
      found = true;
    }
    if (!prefix && !found) changes += name + '\0';
  }
  return make_environment_file(changes);
}

Result<std::unique_ptr<GroupPart>> join_restore(const RestoreOptions& restore,
                                                const WorkerOptions& wanted) {
  const JobGroup& group = wanted.group;
  if (!group.has_others()) return std::unique_ptr<GroupPart>();
  STASIS_TRY_ASSIGN(auto options, part_of_image(restore));
  if (options.parts != group.parts || options.name != group.part) {
    return fail(
        ErrorCode::kUsage,
        fmt::format("{} is the image of part {} of {}, and this is part {} of {}",
                    restore.images_dir, options.name, options.parts, group.part, group.parts),
        "start as many parts as before, each with its own images");
  }
  options.timeout = wanted.group_timeout;
  return join(group, Together::kStart, std::move(options), worker_interrupt());
}

WorkResult bring_back(Worker& worker, Driver& driver, const RestoreOrder& order,
                      const StreamEnds& streams, const WorkerOptions& wanted) {
  RestoreOptions options;
  options.images_dir = order.images_dir;
  options.images_folder = order.images_folder;
  options.only_own = true;
  if (wanted.map == kAutomaticMap) {
    options.gpu_choice.emplace();
    if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"))
      options.gpu_choice->visible = visible;
  } else {
    auto entries = parse_gpu_map(wanted.map);
    if (!entries) return worker.result(entries.error());
    options.gpu_map = std::move(*entries);
  }
  auto image = ImageReader::open(options.images_dir);
  if (!image) return worker.result(image.error());
  if (auto there = image->check_place(options.images_folder); !there)
    return worker.result(there.error());
  const auto& job = image->manifest().job;
  for (std::size_t i = 0; job && i < job->streams.size() && i < streams.size(); ++i)
    options.inherit.push_back({job->streams[i], &streams.at(i)});
  options.on_checked = [&wanted](const UniqueFd& criu_dir) {
    auto done = restore_shared_memory(kSharedMemory, criu_dir);
    return done ? write_environment(wanted.refreshed) : done;
  };
  options.on_standing = number_from_first;
  options.caller_ends = true;  // this worker; the job's own parent is init, before and after
  auto part = join_restore(options, wanted);
  if (!part) return worker.result(part.error());
  options.part = part->get();
  // What stays suspended is resumed by the same mover.
  const Environment env = worker.session.environment(driver).for_any_amount();
  auto report = restore(env, options);
  part->reset();
  if (!report) return worker.result(report.error());
  worker.figures = figures_of(*report);
  const Restored restored{report->root, report->total.count()};
  // Saved at its end while the user had it suspended: a user who starts it again wants it to run.
  const bool suspended =
      std::any_of(report->processes.begin(), report->processes.end(),
                  [](const auto& one) { return one.state == CudaState::kCheckpointed; });
  if (!suspended) return worker.result(restored);
  auto resumed = resume(env, report->root, {});
  if (!resumed) return worker.result(resumed.error());
  return worker.result(restored);
}

WorkResult meet(Worker& worker, const WorkerOptions& wanted) {
  auto met = start_together(wanted.group, wanted.group_timeout, worker_interrupt());
  if (!met) return worker.result(met.error());
  return worker.result(Met{});
}

WorkResult bring_to_run(Worker& worker, Driver& driver, Pid root) {
  auto report = recover(worker.session.environment(driver), root);
  if (!report) return worker.result(report.error());
  if (report->error) return worker.result(*report->error);
  return worker.result(Recovered{});
}

// In a process of its own, in the job's namespaces.
WorkResult work(Worker& worker, const WorkOrder& order, const StreamEnds& streams,
                const WorkerOptions& wanted) {
  using Movers = OperationSession::Movers;
  worker.session.ring_bytes = wanted.ring_bytes;
  if (!std::holds_alternative<RecoverOrder>(order.what)) obey_stop();
  // Without a driver.
  if (std::holds_alternative<MeetOrder>(order.what)) return meet(worker, wanted);
  auto loaded = worker.session.load_driver(
      std::holds_alternative<SaveOrder>(order.what) ? Movers::kDigests : Movers::kOne);
  if (!loaded) return worker.result(loaded.error());
  Driver& driver = **loaded;
  if (driver.info().simulated)
    worker.notes.push_back("this is the simulated GPU (" + driver.info().library + ")");
  return std::visit(
      Cases{
          [&](const SaveOrder& one) {
            return save(worker, driver, order.root, one, streams, wanted);
          },
          [&](const RestoreOrder& one) { return bring_back(worker, driver, one, streams, wanted); },
          [&](const RecoverOrder&) { return bring_to_run(worker, driver, order.root); },
          [&](const MeetOrder&) { return meet(worker, wanted); }},
      order.what);
}

Result<void> measure(const std::string& directory, const std::string& verb, const Worker& worker,
                     const WorkResult& result) {
  STASIS_TRY_ASSIGN(const auto opened, open_metrics(directory));
  if (const auto* error = std::get_if<Error>(&result.what))
    return add_metrics(opened, verb, *error);
  return add_metrics(opened, verb, worker.figures);
}

// As the workers are to find it, wherever that is; `option` is for the message.
Result<std::string> place_of(const std::string& path, const std::string& option) {
  std::error_code failed;
  // Of a name that is not there yet it would leave out where we are.
  auto place = std::filesystem::absolute(path, failed);
  if (!failed) place = std::filesystem::weakly_canonical(place, failed);
  if (failed) return fail(errno_error("cannot find " + path, failed.value()));
  if (place.parent_path() != kSharedMemory && place != kSharedMemory) return place.string();
  return fail(ErrorCode::kUsage,
              fmt::format("{} cannot be written: the job has a {} of its own", place.string(),
                          kSharedMemory),
              "name another directory for " + option);
}

Result<void> check_refreshed(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    std::string_view rest = name;
    if (rest.ends_with('*')) rest.remove_suffix(1);
    const bool good = !rest.empty() && std::isdigit(static_cast<unsigned char>(rest[0])) == 0 &&
                      std::all_of(rest.begin(), rest.end(),
                                  [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
    // By which a program gets the agent, and that its list.
    const auto ours = [&](std::string_view variable) {
      return rest == variable || (name.ends_with('*') && variable.starts_with(rest));
    };
    if (good && !ours("LD_PRELOAD") && !ours("STASIS_ENV_FILE")) continue;
    return fail(
        ErrorCode::kUsage,
        fmt::format("'{}' is no variable that can be refreshed for what the job starts", name),
        "--refresh-env takes names, and beginnings of names with a star: SLURM_*");
  }
  return {};
}

}  // namespace

Result<void> check_worker_options(WorkerOptions& options) {
  if (options.map != kAutomaticMap) STASIS_TRY(parse_gpu_map(options.map));
  STASIS_TRY(check_refreshed(options.refreshed));
  if (!options.trace.empty()) {
    STASIS_TRY_ASSIGN(options.trace, place_of(options.trace, "--trace"));
  }
  if (!options.metrics.empty()) {
    STASIS_TRY(open_metrics(options.metrics));
    STASIS_TRY_ASSIGN(options.metrics, place_of(options.metrics, "--metrics"));
  }
  return {};
}

WorkResult do_work(const WorkOrder& order, const StreamEnds& streams,
                   const WorkerOptions& options) {
  if (!options.trace.empty()) trace_begin();
  Worker worker(worker_interrupt());
  WorkResult result = work(worker, order, streams, options);
  if (!options.trace.empty()) {
    auto written = replace_trace(options.trace, trace_of_process("run: " + name_of(order)));
    if (!written) result.notes.push_back("no trace: " + written.error().to_string());
  }
  if (!options.metrics.empty()) {
    auto written = measure(options.metrics, name_of(order), worker, result);
    if (!written) result.notes.push_back("no metrics: " + written.error().to_string());
  }
  return result;
}

}  // namespace stasis::job
