#include <algorithm>
#include <future>

#include <fmt/format.h>

#include "base/background.h"
#include "base/fault_point.h"
#include "base/scope_guard.h"
#include "image/image_reader.h"
#include "operations/asked_state.h"
#include "operations/image_report.h"
#include "operations/kept_files.h"
#include "operations/kernel_state.h"
#include "operations/leftovers.h"
#include "operations/refusals.h"
#include "operations/restore_checks.h"
#include "operations/restore_log.h"
#include "operations/restored_job.h"
#include "operations/rollback.h"
#include "operations/socket_state.h"
#include "operations/tcp_ports.h"

namespace stasis {

namespace {

// CRIU can hang for ever in a restore (criu.md of the project's facts; seen without CAP_SETPCAP).
// It reads pages at several hundred MB/s at least, so this is generous for an image of any size.
constexpr std::chrono::seconds kRestoreDeadlineBase{60};
constexpr std::uint64_t kSlowestBytesPerSecond = 50'000'000;

// The words of the dump, with what the caller wants otherwise.
CriuOptions criu_options_of(const Manifest& manifest, const RestoreOptions& options) {
  CriuOptions words = manifest.criu_options;
  if (options.tcp_close) {
    words.tcp_close = true;
    words.tcp_established = false;
  }
  if (options.ext_unix_sk) words.ext_unix_sk = true;
  if (options.cgroups) words.cgroups = *options.cgroups;
  return words;
}

Error could_not_end(const Error& why, Pid root) {
  Error error{
      ErrorCode::kNotRolledBack,
      fmt::format("the restored tree below process {} does not end: {}", root.value,
                  why.to_string()),
      fmt::format("the image is intact; end the tree with `kill -9 {}`, or make it run with "
                  "`stasis recover {}`",
                  root.value, root.value)};
  return error;
}

// Those that were suspended by the direct path have their GPU memory in their own.
std::vector<const Process*> running_processes(const RestoredJob& job,
                                              std::span<const JournalTarget> targets) {
  std::vector<const Process*> running;
  for (const auto& process : job.processes()) {
    if (!process) continue;
    const bool runs = std::any_of(targets.begin(), targets.end(), [&](const JournalTarget& target) {
      return target.pid == process->pid() && target.initial == CudaState::kRunning;
    });
    if (runs) running.push_back(&*process);
  }
  return running;
}

std::vector<Pid> running_pids(const Manifest& manifest) {
  std::vector<Pid> pids;
  for (const ProcessRecord& record : manifest.processes)
    if (record.cuda && wanted_state(record) == CudaState::kRunning) pids.push_back(record.pid);
  return pids;
}

// A job of `stasis run` has a /dev/shm of its own: only there can it be put back.
Result<void> check_shared_memory(const ImageReader& image, const RestoreOptions& options) {
  if (options.on_checked || !is_for_a_job(image.manifest())) return {};
  return fail(ErrorCode::kUsage,
              fmt::format("{} is of a job of `stasis run --images-dir`, and has what was in the "
                          "/dev/shm of that",
                          image.path()),
              "let it be DIR/000001, or have a greater number there, and start `stasis run "
              "--images-dir DIR` with the same command: it goes on from there");
}

// Bytes of content that the image has for those that are to run.
std::uint64_t wanted_bytes(const RestoredJob& job, std::span<const JournalTarget> targets,
                           const std::vector<ContentStream>& streams) {
  std::uint64_t bytes = 0;
  for (const Process* process : running_processes(job, targets)) {
    for (const ContentStream& stream : streams)
      if (process->alive() && stream.pid == process->pid()) bytes += stream.bytes;
  }
  return bytes;
}

// Those that are to run had their content in this very image when CRIU saved them; to look for
// another one, as for a suspended job whose image was moved, makes no sense. `id`: of the content
// here.
Result<void> check_content(const std::vector<const Process*>& processes,
                           const direct::ContentId& id) {
  for (const Process* process : processes) {
    const auto agent = direct::AgentClient::look(process->pid());
    if (!agent || !*agent || !direct::is_away((*agent)->state) || !process->alive()) continue;
    if ((*agent)->content_id == direct::ContentId{} || (*agent)->content_id == id) continue;
    return fail(ErrorCode::kImageCorrupt,
                fmt::format("the content of process {}'s GPU memory is not in the image",
                            process->pid().value),
                "its parts are not of the same dump: restore from another image, or copy it again "
                "from where it came from");
  }
  return {};
}

}  // namespace

Result<RestoreReport> restore(const Environment& env, const RestoreOptions& options) {
  Phases phases;
  phases.begin("verify");
  STASIS_TRY_ASSIGN(auto image, ImageReader::open(options.images_dir));
  const Manifest& manifest = image.manifest();
  if (options.leave_suspended && !options.gpu_map.empty()) {
    return fail(ErrorCode::kUsage, "a GPU map is for the moment at which GPU memory comes back",
                "give --device-map to `stasis resume` instead");
  }
  STASIS_TRY(check_shared_memory(image, options));
  // The cheap checks first: the user does not wait for checksums to hear that a number is taken.
  STASIS_TRY_ASSIGN(auto criu, Criu::find(options.criu_path));
  STASIS_TRY_ASSIGN(auto old_gpus, gpus_of(manifest));
  STASIS_TRY(check_driver(env.driver, manifest));
  GpuMemory direct;
  STASIS_TRY(direct.come_back(env));
  STASIS_TRY_ASSIGN(auto plan, plan_gpus(env, manifest, old_gpus, options));
  std::uint64_t elsewhere = 0;
  std::vector<ContentStream> streams;
  direct::ContentId content_id{};
  if (manifest.content) {
    STASIS_TRY_ASSIGN(auto content, image.open_content());
    streams = content.streams();
    for (const ContentStream& stream : streams)
      elsewhere += stream.bytes;
    auto here = ImageContent::of(std::move(content), *manifest.content);
    content_id = here->id();
    direct.look_in(std::move(here));
  }
  const bool in_our_cgroup = criu_options_of(manifest, options).cgroups == CgroupMode::kIgnore;
  const std::uint64_t to_copy =
      options.leave_suspended ? 0 : std::min(elsewhere, mover_memory(env, {}));
  STASIS_TRY(check_host_memory(manifest, elsewhere, in_our_cgroup, to_copy));
  STASIS_TRY(check_rights(image));
  STASIS_TRY(check_numbers(manifest));
  STASIS_TRY(check_addresses(manifest, criu_options_of(manifest, options).tcp_close));
  STASIS_TRY(wait_for_ports(env, manifest));
  STASIS_TRY(check_files(image));
  const auto before =
      options.verify_first ? ImageReader::Part::kAll : ImageReader::Part::kAllButPages;
  STASIS_TRY(image.verify(env.progress, env.interrupt, before));
  STASIS_TRY(fault(FaultPoint::kRestoreVerified));
  STASIS_TRY_ASSIGN(auto log, RestoreLog::create());
  STASIS_TRY(fault(FaultPoint::kRestoreLog));

  std::vector<Pid> pids;
  std::vector<Tid> threads;
  for (const ProcessRecord& record : manifest.processes) {
    pids.push_back(record.pid);
    threads.insert(threads.end(), record.threads.begin(), record.threads.end());
  }
  auto journal = Journal::begin({"restore", manifest.root, Pid{}, image.path(), {}});
  if (!journal) return fail(std::move(journal.error()));
  // Undone after the tree has ended.
  FilesPutBack files(
      image.criu_dir(), [&](std::string text) { env.tell(std::move(text)); }, env.interrupt);
  RestoredJob job(manifest);
  // On every way out, an exception's included: what is not well is ended, and the record is kept if
  // that cannot be done.
  ScopeGuard close_journal([&] {
    if (job.end()) journal->finish();
  });
  auto targets = job.targets(options.leave_suspended);
  STASIS_TRY(journal->update(targets));

  if (options.on_checked) {
    if (auto allowed = options.on_checked(image.criu_dir()); !allowed)
      return fail(std::move(allowed.error()));
  }
  STASIS_TRY_ASSIGN(auto to_put_back, files_to_put_back(image));
  for (const auto& [kept, how] : to_put_back)
    STASIS_TRY(files.put_back(kept, how));
  phases.begin("criu");
  // While CRIU reads the pages we do too: nothing of the tree runs before they are found sound. The
  // driver gets ready meanwhile.
  auto pages = in_background([&]() -> Result<void> {
    if (options.verify_first) return {};
    return image.verify(env.progress, env.interrupt, ImageReader::Part::kPages);
  });
  const PrefetchRoom start{plan.room, plan.pairs,
                           in_our_cgroup ? least_memory(manifest, elsewhere) : 0};
  std::future<void> driver_ready;
  if (!options.leave_suspended) {
    driver_ready = in_background([&] { env.driver.prepare_restore(); });
    if (manifest.content) direct.prefetch(env, running_pids(manifest), start);
  }
  const std::string needed =
      options.leave_suspended && manifest.content ? image.path() : std::string();
  std::vector<std::string> lost;
  std::vector<Pid> to_set_later;
  const auto take = [&]() -> Result<void> {
    STASIS_TRY(pages.get());
    STASIS_TRY(job.take_hold(env.driver, old_gpus, needed));
    set_fault_target(manifest.root);
    targets = job.targets(options.leave_suspended);
    STASIS_TRY(journal->update(targets));
    // The one moment that covers processes without CUDA, too: the next thing that CRIU does is to
    // let all of them run.
    lost = put_sockets_back(manifest, job.processes());
    STASIS_TRY_ASSIGN(auto left, set_asked_state(manifest.processes, lost));
    to_set_later = std::move(left);
    if (options.on_standing) {
      if (auto allowed = options.on_standing(); !allowed) return allowed;
    }
    return fault(FaultPoint::kRestoreHeld);
  };
  RestoreRequest request{image.criu_dir(), log.directory(), log.name()};
  request.options = criu_options_of(manifest, options);
  request.external = options.external;
  request.inherit = options.inherit;
  const auto warn = [&](std::string text) { env.tell(std::move(text)); };
  request.on_resume = [&] { set_kernel_state(manifest.processes, warn); };
  request.root = manifest.root;
  request.pids = std::move(pids);
  request.threads = std::move(threads);
  request.log_path = [&] { return log.save_surely(image); };
  // The other reader tells how far it is; when it is done, it is for us to say that CRIU works.
  request.on_wait = [&] {
    if (pages.valid() && pages.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
      env.progress.update("criu", std::min(job.resident_bytes(), manifest.total_bytes),
                          manifest.total_bytes);
    }
  };
  // CRIU may wait for ever for one that was killed (seen with 4.2.1). One that ends by
  // itself as soon as it runs is none of that: criu answers within milliseconds.
  std::optional<Clock::time_point> dead_since;
  request.check = [&]() -> Result<void> {
    constexpr std::chrono::seconds kGrace{2};
    auto alive = job.check_alive();
    if (!alive && !dead_since) dead_since = Clock::now();
    return alive || Clock::now() - *dead_since < kGrace ? Result<void>() : alive;
  };
  request.deadline =
      kRestoreDeadlineBase + std::chrono::seconds(manifest.total_bytes / kSlowestBytesPerSecond);
  request.log_level = options.criu_log_level;
  request.on_started = [&](Pid started) { return note_criu(*journal, started); };
  auto restored = criu.restore(request, take, env.interrupt);
  if (!restored) {
    Error why = std::move(restored.error());
    // CRIU may well have stumbled over what the checksums show.
    if (pages.valid() && why.code != ErrorCode::kNotRolledBack) {
      if (auto sound = pages.get(); !sound) why = std::move(sound.error());
    }
    if (why.code == ErrorCode::kImageCorrupt)
      why = std::move(why).within("what there was of the restored tree was ended");
    return fail(std::move(why));
  }
  job.adopt(std::move(*restored));
  (void)log.save(image);
  set_kernel_state_within(manifest.processes, manifest.root, options.caller_ends, image.criu_dir(),
                          warn);

  auto done = set_asked_state_of(to_set_later, manifest.processes, lost);
  if (done) done = fault(FaultPoint::kRestoreAdopted);
  if (done) done = env.interrupt.check();
  if (done) {
    phases.begin("restore");
    if (!options.leave_suspended) direct.prefetch(env, running_processes(job, targets), plan.pairs);
    direct.make_room(env.driver, plan.needed, plan.pairs);
    done = job.bring_back(targets, plan.pairs, env.progress, [&] { direct.settle(); });
  }
  if (done && !options.leave_suspended)
    done = check_content(running_processes(job, targets), content_id);
  std::uint64_t direct_bytes = 0;
  if (done && !options.leave_suspended) {
    auto moved = direct.move_in(env, running_processes(job, targets), phases, true);
    if (moved && *moved < wanted_bytes(job, targets, streams)) {
      moved =
          fail(ErrorCode::kInternal,
               "a restored process has no agent that takes its GPU memory, which is in the image",
               "use the stasis that has made the image");
    }
    if (moved) direct_bytes = *moved;
    if (!moved) done = fail(std::move(moved.error()));
  }
  if (done) done = fault(FaultPoint::kRestoreBack);
  phases.end();
  if (!done) {
    if (!job.end()) return fail(could_not_end(done.error(), manifest.root));
    return fail(std::move(done.error())
                    .within(done.error().code == ErrorCode::kImageCorrupt
                                ? "the restored tree was ended"
                                : "the restored tree was ended; the image is intact"));
  }
  RestoredTree tree = job.keep(options.leave_suspended);
  files.keep();
  fault_only(FaultPoint::kRestoreKept);
  RestoreReport report{{}, image.path(), manifest.total_bytes, std::move(tree.root_fd)};
  report.root = tree.root;
  const auto& processes = job.processes();
  for (std::size_t i = 0; i < processes.size(); ++i) {
    if (!processes[i]) continue;
    const ProcessRecord& record = manifest.processes[i];
    std::uint64_t bytes = 0;
    for (const GpuUse& use : gpu_use_of(record))
      bytes += use.bytes;
    report.processes.push_back(report_process(*processes[i], record.cuda, bytes));
  }
  tell_of_lost(env, lost, "could not be put back");
  report.lost = std::move(lost);
  report.total = phases.total();
  report.direct_bytes = direct_bytes;
  report.phases = phases.take();
  return report;
}

}  // namespace stasis
