// Long because RestoreRun is one procedure, whose steps are read in order and share what they must
// undo.
#include <algorithm>
#include <functional>
#include <future>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/background.h"
#include "base/fault_point.h"
#include "base/scope_guard.h"
#include "checkpoint/gpu_room.h"
#include "direct/neighbours.h"
#include "group/group_part.h"
#include "image/image_reader.h"
#include "operations/asked_state.h"
#include "operations/awaited_lock.h"
#include "operations/dump_terminals.h"
#include "operations/foreign_links.h"
#include "operations/host_memory.h"
#include "operations/kept_files.h"
#include "operations/kernel_state.h"
#include "operations/leftovers.h"
#include "operations/machine_checks.h"
#include "operations/part_links.h"
#include "operations/refusals.h"
#include "operations/restore_checks.h"
#include "operations/restore_log.h"
#include "operations/restored_job.h"
#include "operations/rollback.h"
#include "operations/socket_state.h"
#include "proc/next_numbers.h"

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
  // CRIU takes a socket for a connection that has had one, and dumps it without a word: refused or
  // reset by the other end, and still open in the program. Live connections were refused then.
  if (!words.tcp_close && !words.tcp_established) {
    words.tcp_established = true;
    words.network_lock = NetworkLock::kSkip;
  }
  if (options.ext_unix_sk) words.ext_unix_sk = true;
  if (options.cgroups) words.cgroups = *options.cgroups;
  return words;
}

std::string lonely_part(const GroupRecord& group) {
  return fmt::format(
      "the image is part {} of {} of a job of several nodes, and is restored alone "
      "(--group restores all)",
      group.name, group.parts);
}

Error connected_part(const GroupRecord& group) {
  return {
      ErrorCode::kUsage,
      fmt::format("the image is part {} of {} of a job of several nodes, and has TCP "
                  "connections with the others",
                  group.name, group.parts),
      fmt::format("restore all parts together (--group DIR --parts {}), or this one without its "
                  "connections (--tcp-close)",
                  group.parts)};
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

std::vector<Pid> running_pids(const Manifest& manifest) {
  std::vector<Pid> pids;
  for (const ProcessRecord& record : manifest.processes)
    if (record.cuda && wanted_state(record) == CudaState::kRunning) pids.push_back(record.pid);
  return pids;
}

// Those that are to run had their content in this very image when CRIU saved them; to look for
// another one, as for a suspended job whose image was moved, makes no sense. `id`: of the content
// here.
Result<void> check_content(const std::vector<const Process*>& processes,
                           const direct::ContentId& id) {
  for (const Process* process : processes) {
    const auto agent = direct::probe_agent(process->pid());
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

// One restore. Its members end in the opposite order: what works beside CRIU, then the tree and its
// record, the files that were put back for it, and the mover.
class RestoreRun {
 public:
  RestoreRun(const Environment& env, const RestoreOptions& options)
      : env_(env), options_(options) {}

  // The steps of docs/how-it-works.md.
  Result<RestoreReport> run() {
    auto report = restore_tree();
    // The tree has ended, and then the others are told.
    if (!report) return fail(told(options_.part, std::move(report.error())));
    return report;
  }

 private:
  Result<RestoreReport> restore_tree() {
    phases_.begin("verify");
    STASIS_TRY(open_image());
    // The cheap checks first: the user does not wait for checksums to hear that a number is taken.
    STASIS_TRY(find_tools());
    STASIS_TRY(find_content());
    STASIS_TRY(check_machine());
    STASIS_TRY(verify());
    if (options_.part != nullptr) {
      phases_.begin("meet");
      STASIS_TRY(options_.part->wait_for_all());
    }
    STASIS_TRY(open_journal());
    STASIS_TRY(put_files_back());
    phases_.begin("criu");
    begin_beside_criu();
    STASIS_TRY(let_criu_restore());
    auto back = bring_back();
    if (back) back = finish_group();
    phases_.end();
    if (!back) return fail(ended(std::move(back.error())));
    return report(keep());
  }

  const Manifest& manifest() const { return image_->manifest(); }
  // CRIU makes the processes in the memory cgroup of this one.
  bool in_our_cgroup() const { return criu_options_.cgroups == CgroupMode::kIgnore; }
  // Bytes of GPU content that do not become memory of the processes.
  std::uint64_t content_bytes() const {
    std::uint64_t bytes = 0;
    for (const ContentStream& stream : streams_)
      bytes += stream.bytes;
    return bytes;
  }
  Warn warn() const {
    return [this](std::string text) { env_.tell(std::move(text)); };
  }

  Result<void> open_image() {
    STASIS_TRY_ASSIGN(auto image, ImageReader::open(options_.images_dir));
    image_.emplace(std::move(image));
    STASIS_TRY(image_->check_place(options_.images_folder));
    if (options_.only_own) STASIS_TRY(check_owner(*image_));
    // In a fresh PID namespace, or after the highest number, what it needs would come next.
    proc::keep_free(manifest().numbers());
    if (options_.leave_suspended && !options_.gpu_map.empty()) {
      return fail(ErrorCode::kUsage, "a GPU map is for the moment at which GPU memory comes back",
                  "give --device-map to `stasis resume` instead");
    }
    criu_options_ = criu_options_of(manifest(), options_);
    STASIS_TRY(check_group());
    return check_shared_memory(*image_, options_);
  }

  Result<void> check_group() const {
    const auto& group = manifest().group;
    if (options_.part == nullptr) {
      if (!group) return {};
      const bool has_links = !group->links.empty() || !group->closing_links.empty();
      if (has_links && !options_.tcp_close) return fail(connected_part(*group));
      env_.tell(lonely_part(*group));
      return {};
    }
    const GroupPartOptions& own = options_.part->options();
    if (group && group->id == own.dump_id && group->parts == own.parts && group->name == own.name)
      return {};
    return fail(
        ErrorCode::kImageCorrupt,
        fmt::format("{} is another image than the one that this part came with", image_->path()),
        "restore again, and leave the images alone meanwhile");
  }

  // CRIU, the driver, and the GPUs to which the memory goes.
  Result<void> find_tools() {
    STASIS_TRY_ASSIGN(auto criu, Criu::find(options_.criu_path));
    criu_.emplace(std::move(criu));
    STASIS_TRY_ASSIGN(old_gpus_, gpus_of(manifest()));
    STASIS_TRY(check_driver(env_.driver, manifest()));
    STASIS_TRY(direct_.come_back(env_));
    STASIS_TRY_ASSIGN(plan_, plan_gpus(env_, manifest(), old_gpus_, options_));
    if (!options_.leave_suspended)
      tell_of_neighbours_to_come(env_, {}, targets_of(plan_.needed, plan_.pairs));
    return {};
  }

  // The GPU content that is not in CRIU's files.
  Result<void> find_content() {
    if (manifest().host_content) {
      STASIS_TRY_ASSIGN(auto host, image_->open_content({false, ContentKind::kHost}));
      host_.emplace(std::move(host));
    }
    if (!manifest().content) return {};
    STASIS_TRY_ASSIGN(auto content, image_->open_content());
    streams_ = content.streams();
    auto here = ImageContent::of(std::move(content), *manifest().content);
    content_id_ = here->id();
    direct_.add_image(std::move(here));
    return {};
  }

  // The room, and all that the processes had by number, by address or by name.
  Result<void> check_machine() {
    const std::uint64_t elsewhere = content_bytes();
    const std::uint64_t to_copy =
        options_.leave_suspended ? 0 : std::min(elsewhere, mover_memory(env_, {}, elsewhere));
    const MachineCheckInput input{.image = *image_,
                                  .progress = env_.progress,
                                  .interrupt = env_.interrupt,
                                  .host = host_ ? &*host_ : nullptr,
                                  .elsewhere = elsewhere,
                                  .in_our_cgroup = in_our_cgroup(),
                                  .ours = to_copy,
                                  .tcp_close = criu_options_.tcp_close,
                                  .addresses = options_.addresses,
                                  .waits = &env_};
    for (const MachineCheck& each : kMachineChecks)
      STASIS_TRY(each.check(input));
    return {};
  }

  Result<void> verify() {
    const auto part =
        options_.verify_first ? ImageReader::Part::kAll : ImageReader::Part::kAllButPages;
    STASIS_TRY(image_->verify(env_.progress, env_.interrupt, part));
    return fault(FaultPoint::kRestoreVerified);
  }

  // From here on what is made is undone on every way out, an exception's included.
  Result<void> open_journal() {
    STASIS_TRY_ASSIGN(auto log, RestoreLog::create());
    log_.emplace(std::move(log));
    STASIS_TRY(fault(FaultPoint::kRestoreLog));
    STASIS_TRY_ASSIGN(
        auto journal,
        Journal::begin({Operation::kRestore, manifest().root, {}, image_->path(), {}}));
    journal_.emplace(std::move(journal));
    files_.emplace(image_->criu_dir(), warn(), env_.interrupt);
    job_.emplace(manifest());
    // A tree that is not well is ended, and its record is kept if that cannot be done.
    close_journal_.emplace([this] {
      if (job_->end()) journal_->finish();
    });
    return note_targets();
  }

  Result<void> note_targets() {
    targets_ = job_->targets(options_.leave_suspended);
    return journal_->update(targets_);
  }

  Result<void> map_addresses() {
    if (options_.addresses.empty()) return {};
    STASIS_TRY_ASSIGN(
        mapped_, stasis::map_addresses(image_->criu_dir(), log_->directory(), options_.addresses));
    for (const AddressPair& pair : options_.addresses)
      env_.tell(fmt::format("sockets that had the address {} have {}", pair.from, pair.to));
    return {};
  }

  // Before CRIU opens them.
  Result<void> put_files_back() {
    if (options_.on_checked) STASIS_TRY(options_.on_checked(image_->criu_dir()));
    STASIS_TRY(map_addresses());
    STASIS_TRY_ASSIGN(auto to_put_back, files_to_put_back(*image_));
    for (const auto& [kept, how] : to_put_back)
      STASIS_TRY(files_->put_back(kept, how));
    for (const std::string& path : files_changed_for_good(*image_))
      env_.tell(path +
                " was written to after the dump: the job finds what is in it now, because "
                "it is too large for its content to be in the image");
    return {};
  }

  // While CRIU reads the pages the tool does too: nothing of the tree runs before they are found
  // sound. The driver gets ready meanwhile.
  void begin_beside_criu() {
    pages_ = in_background([this]() -> Result<void> {
      if (options_.verify_first) return {};
      return image_->verify(env_.progress, env_.interrupt, ImageReader::Part::kPages);
    });
    if (options_.leave_suspended) return;
    driver_ready_ = in_background([this] { env_.driver.prepare_restore(); });
    // Without one that has to be held while the mover's context is made.
    const auto gpus = targets_of(plan_.needed, plan_.pairs);
    if (!manifest().content || !restored_neighbours(env_, {}, gpus).empty()) return;
    const PrefetchRoom room{
        plan_.room, plan_.pairs,
        in_our_cgroup() ? least_memory(manifest(), content_bytes(), host_ ? most_filled(*host_) : 0)
                        : 0};
    direct_.prefetch(env_, running_pids(manifest()), room);
  }

  Result<void> let_criu_restore() {
    auto restored = criu_->restore(
        criu_request(), [this] { return take_hold(); }, env_.interrupt);
    if (!restored) return fail(not_restored(std::move(restored.error())));
    job_->adopt(std::move(*restored));
    (void)log_->save(*image_);
    set_kernel_state_within(manifest().processes, manifest().root, options_.caller_ends,
                            image_->criu_dir(), warn());
    return {};
  }

  // Before what is written to one is stopped again.
  void give_terminals_back() {
    std::vector<Pid> pids;
    for (const ProcessRecord& record : manifest().processes)
      pids.push_back(record.pid);
    std::vector<std::string> failed;
    DumpedTerminals(image_->criu_dir(), std::move(pids), DumpedTerminals::Unread::kWritten)
        .give_back(failed);
    for (std::string& what : failed)
      warn()(std::move(what));
  }

  RestoreRequest criu_request() {
    RestoreRequest request{mapped_.valid() ? mapped_ : image_->criu_dir(), log_->directory(),
                           log_->name()};
    request.options = criu_options_;
    request.external = options_.external;
    request.inherit = options_.inherit;
    request.in_background = options_.in_background;
    request.binds_anywhere = binds_anywhere(manifest());
    request.root = manifest().root;
    for (const ProcessRecord& record : manifest().processes) {
      request.pids.push_back(record.pid);
      request.threads.insert(request.threads.end(), record.threads.begin(), record.threads.end());
    }
    request.log_path = [this] { return log_->save_surely(*image_); };
    request.on_wait = [this, pids = request.pids] {
      tell_progress();
      tell_of_lock(pids);
    };
    request.on_resume = [this] {
      give_terminals_back();
      set_kernel_state(manifest().processes, warn());
    };
    request.check = [this] { return check_alive(); };
    request.on_give_up = [this] { let_links_end(); };
    request.deadline = kRestoreDeadlineBase +
                       std::chrono::seconds(manifest().total_bytes / kSlowestBytesPerSecond);
    request.log_level = options_.criu_log_level;
    request.on_started = [this](Pid started) { return note_criu(*journal_, started, false); };
    return request;
  }

  // The reader of the pages tells how far it is; when it is done, CRIU's work is told.
  void tell_progress() const {
    if (!pages_.valid() || pages_.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
      return;
    const std::uint64_t total = manifest().total_bytes;
    env_.progress.update("criu", std::min(job_->resident_bytes(), total), total);
  }

  // CRIU waits for it as the program would, within its deadline.
  void tell_of_lock(const std::vector<Pid>& pids) {
    constexpr std::chrono::seconds kLook{1};
    if (told_of_lock_ || Clock::now() - looked_for_lock_ < kLook) return;
    looked_for_lock_ = Clock::now();
    const auto lock = awaited_lock(pids);
    if (!lock) return;
    env_.tell("the restore waits for " + *lock + "; Ctrl-C ends it, and leaves the image as it is");
    told_of_lock_ = true;
  }

  // CRIU may wait for ever for one that was killed (seen with 4.2.1). One that ends by
  // itself as soon as it runs is none of that: criu answers within milliseconds.
  Result<void> check_alive() {
    constexpr std::chrono::seconds kGrace{2};
    auto alive = job_->check_alive();
    if (!alive && !dead_since_) dead_since_ = Clock::now();
    return alive || Clock::now() - *dead_since_ < kGrace ? Result<void>() : alive;
  }

  // Every process stands complete, and none runs before this is done. The one moment that covers
  // processes without CUDA, too.
  Result<void> take_hold() {
    STASIS_TRY(pages_.get());
    const bool content_stays = options_.leave_suspended && manifest().content;
    STASIS_TRY(job_->take_hold(env_.driver, old_gpus_,
                               content_stays ? image_->path() : std::string(),
                               options_.leave_suspended));
    set_fault_target(manifest().root);
    STASIS_TRY(note_targets());
    STASIS_TRY(refuse_foreign_files(image_->criu_dir(), job_->processes(), options_.inherit));
    if (host_) STASIS_TRY(fill_host_memory(env_, *host_, env_.interrupt));
    lost_ = put_sockets_back(manifest(), job_->processes());
    STASIS_TRY_ASSIGN(to_set_later_, set_asked_state(manifest().processes, lost_));
    note_audit_sessions(manifest().processes, lost_);
    if (options_.on_standing) STASIS_TRY(options_.on_standing());
    STASIS_TRY(fault(FaultPoint::kRestoreHeld));
    return wait_for_others();
  }

  // Until the trees of all parts stand complete.
  Result<void> wait_for_others() {
    if (options_.part == nullptr) return {};
    STASIS_TRY(options_.part->wait_until_quiesced());
    return fault(FaultPoint::kPartQuiesced);
  }

  std::vector<Pid> restored_pids() const {
    std::vector<Pid> pids;
    for (const auto& process : job_->processes())
      if (process) pids.push_back(process->pid());
    return pids;
  }

  // Before the tree is killed.
  void let_links_end() const {
    if (options_.part != nullptr) end_links_with_processes(restored_pids());
  }

  // Until all parts run no program hears another: of one that is ended again, the others see
  // nothing.
  Result<void> finish_group() {
    if (options_.part == nullptr) return {};
    phases_.begin("agree");
    STASIS_TRY(options_.part->finish());
    for (const std::string& failed : let_links_go(restored_pids()))
      env_.tell(failed);
    fault_only(FaultPoint::kPartDone);
    return {};
  }

  // CRIU has failed, and has left nothing of the tree.
  Error not_restored(Error why) {
    // CRIU may well have stumbled over what the checksums show.
    if (pages_.valid() && why.code != ErrorCode::kNotRolledBack) {
      if (auto sound = pages_.get(); !sound) why = std::move(sound.error());
    }
    if (why.code != ErrorCode::kImageCorrupt) return why;
    return std::move(why).within("what there was of the restored tree was ended");
  }

  // The GPU state, then the GPU memory past the driver; the processes run.
  Result<void> bring_back() {
    STASIS_TRY(set_asked_state_of(to_set_later_, manifest().processes, lost_));
    STASIS_TRY(fault(FaultPoint::kRestoreAdopted));
    STASIS_TRY(env_.interrupt.check());
    if (!options_.leave_suspended) STASIS_TRY(refuse_ranks());
    phases_.begin("restore");
    const auto gpus = targets_of(plan_.needed, plan_.pairs);
    // If the room has been taken since it was looked at, the image is there still. What this takes
    // is not to be what another operation has found.
    auto room = GpuRoom::hold(
        gpus, {env_.interrupt, [this](auto text) { env_.tell(text); }, std::chrono::minutes(2)});
    STASIS_TRY(env_.interrupt.check());
    const auto ours = proc::ProcFs().tree(manifest().root);
    STASIS_TRY(
        direct_.hold_neighbours(env_, ours.value_or(std::vector<proc::ProcessInfo>()), gpus, {}));
    if (!options_.leave_suspended) direct_.prefetch(env_, job_->to_run(targets_), plan_.pairs);
    direct_.make_room(env_.driver, plan_.needed, plan_.pairs);
    STASIS_TRY(job_->bring_back(targets_, plan_.pairs, env_.progress, [&] { direct_.settle(); }));
    if (!options_.leave_suspended)
      STASIS_TRY(bring_content_back(room ? std::move(*room) : GpuRoom()));
    return fault(FaultPoint::kRestoreBack);
  }

  // The kernel has the sockets of the ranks again, by which they are known.
  Result<void> refuse_ranks() {
    STASIS_TRY_ASSIGN(const auto tree, proc::ProcFs().tree(manifest().root));
    return refuse_beside_ranks(env_, tree, targets_of(plan_.needed, plan_.pairs));
  }

  // `room` is held until the memory is taken.
  Result<void> bring_content_back(GpuRoom room) {
    STASIS_TRY(check_content(job_->to_run(targets_), content_id_));
    STASIS_TRY_ASSIGN(direct_bytes_, direct_.move_in(env_, job_->to_run(targets_), phases_,
                                                     IfItFails::kCallerEndsThem, std::move(room)));
    if (direct_bytes_ >= wanted_bytes()) return {};
    return fail(ErrorCode::kInternal,
                "a restored process has no agent that takes its GPU memory, which is in the image",
                "use the stasis that has made the image");
  }

  // Bytes of content that the image has for the processes that are to run.
  std::uint64_t wanted_bytes() const {
    std::uint64_t bytes = 0;
    for (const Process* process : job_->to_run(targets_)) {
      for (const ContentStream& stream : streams_)
        if (process->alive() && stream.pid == process->pid()) bytes += stream.bytes;
    }
    return bytes;
  }

  // The tree stands or runs, and is not as it should be.
  Error ended(Error why) {
    let_links_end();
    if (!job_->end()) return could_not_end(why, manifest().root);
    const bool damaged = why.code == ErrorCode::kImageCorrupt;
    return std::move(why).within(damaged ? "the restored tree was ended"
                                         : "the restored tree was ended; the image is intact");
  }

  RestoredTree keep() {
    RestoredTree tree = job_->keep(options_.leave_suspended);
    files_->keep();
    fault_only(FaultPoint::kRestoreKept);
    return tree;
  }

  RestoreReport report(RestoredTree tree) {
    RestoreReport report{{}, image_->path(), manifest().total_bytes, std::move(tree.root_fd)};
    report.root = tree.root;
    report.job_name = manifest().job_name;
    for (const ProcessRecord& process : manifest().processes)
      if (process.pid == tree.root) report.command = process.command;
    const auto& processes = job_->processes();
    for (std::size_t i = 0; i < processes.size(); ++i) {
      if (!processes[i]) continue;
      const ProcessRecord& record = manifest().processes[i];
      report.processes.push_back(
          report_process(*processes[i], record.cuda, total_bytes(gpu_use_of(record))));
    }
    tell_of_lost(env_, lost_, "could not be put back");
    report.lost = std::move(lost_);
    report.total = phases_.total();
    report.direct_bytes = direct_bytes_;
    report.phases = phases_.take();
    return report;
  }

  const Environment& env_;
  const RestoreOptions& options_;
  Phases phases_;
  std::optional<ImageReader> image_;
  UniqueFd mapped_;  // CRIU's files, in which sockets have other addresses
  CriuOptions criu_options_;
  std::optional<Criu> criu_;
  std::vector<Gpu> old_gpus_;  // of the machine where the image was made
  GpuMemory direct_;
  GpuPlan plan_;
  std::vector<ContentStream> streams_;
  std::optional<ContentReader> host_;
  direct::ContentId content_id_{};
  std::optional<RestoreLog> log_;
  std::optional<Journal> journal_;
  std::optional<FilesPutBack> files_;  // undone after the tree has ended
  std::optional<RestoredJob> job_;
  std::optional<ScopeGuard<std::function<void()>>> close_journal_;
  std::vector<JournalTarget> targets_;
  std::vector<std::string> lost_;
  std::vector<Pid> to_set_later_;  // the root: CRIU traced it while the others were set
  std::optional<Clock::time_point> dead_since_;
  Clock::time_point looked_for_lock_ = Clock::now();
  bool told_of_lock_ = false;
  std::uint64_t direct_bytes_ = 0;
  std::future<Result<void>> pages_;
  std::future<void> driver_ready_;
};

}  // namespace

Result<GroupPartOptions> part_of_image(const RestoreOptions& options) {
  STASIS_TRY_ASSIGN(const auto image, ImageReader::open(options.images_dir));
  const auto& group = image.manifest().group;
  if (!group || !is_part_name(group->name)) {
    return fail(ErrorCode::kUsage, options.images_dir + " is no image of a job of several nodes",
                "restore it without --group");
  }
  GroupPartOptions part;
  part.operation = Operation::kRestore;
  part.parts = group->parts;
  part.name = group->name;
  part.dump_id = group->id;
  if (!options.tcp_close) {
    part.links = {mapped_links(group->links, options.addresses),
                  mapped_links(group->closing_links, options.addresses), group->links_may_lead_out};
  }
  return part;
}

Result<RestoreReport> restore(const Environment& given, const RestoreOptions& options) {
  const Environment env = given.with(interrupt_of(options.part, given.interrupt));
  return RestoreRun(env, options).run();
}

}  // namespace stasis
