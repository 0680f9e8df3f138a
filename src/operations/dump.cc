// Long because DumpRun is one procedure, whose steps are read in order and share what they must
// undo.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/background.h"
#include "base/call_within.h"
#include "base/fault_point.h"
#include "base/fd.h"
#include "base/scope_guard.h"
#include "checkpoint/inherited_files.h"
#include "checkpoint/suspend_record.h"
#include "criu/criu_core.h"
#include "criu/criu_deleted.h"
#include "criu/criu_fifos.h"
#include "criu/criu_files.h"
#include "criu/criu_memory_files.h"
#include "criu/criu_tcp_queues.h"
#include "group/group_part.h"
#include "image/image_writer.h"
#include "operations/asked_state.h"
#include "operations/dump_checks.h"
#include "operations/dump_connections.h"
#include "operations/dump_manifest.h"
#include "operations/dump_terminals.h"
#include "operations/dump_watch.h"
#include "operations/host_memory_dump.h"
#include "operations/image_watcher.h"
#include "operations/kept_files.h"
#include "operations/kernel_state.h"
#include "operations/leftovers.h"
#include "operations/lost.h"
#include "operations/open.h"
#include "operations/quiesce.h"
#include "operations/refusals.h"
#include "operations/rollback.h"
#include "operations/socket_state.h"
#include "proc/bounded_seize.h"
#include "proc/fifo_readers.h"
#include "proc/tiles.h"

namespace stasis {

namespace {

// How long an ended tree may take to vanish once CRIU has killed it.
constexpr int kExitWaitMs = 10000;
// How often a dump is tried that CRIU refuses for a state that passes, and how long the tree runs
// on between two tries.
constexpr int kTries = 4;
constexpr std::chrono::milliseconds kBetweenTries{150};

Result<void> note_ending(OpenedTree& opened) {
  STASIS_TRY_ASSIGN(auto tree, proc::ProcFs().tree(opened.tree.root()));
  std::vector<ProcessId> processes;
  for (const proc::ProcessInfo& info : tree)
    processes.push_back(info.id());
  return opened.journal->note_ending(std::move(processes));
}

// Has any process of the tree ended, or is it about to? If all are `back` in their states, they
// have answered since: a killed process does not. Others take a while to let go of their memory.
bool any_has_ended(const ProcessTree& tree, bool back) {
  const int timeout_ms = back ? 100 : kExitWaitMs;
  return std::any_of(tree.members().begin(), tree.members().end(), [&](const TreeMember& member) {
    return member.process.pidfd().wait_exit(timeout_ms);
  });
}

// CRIU has ended the tree; no process of it may be left.
Result<void> wait_until_gone(const ProcessTree& tree) {
  for (const TreeMember& member : tree.members()) {
    if (member.process.pidfd().wait_exit(kExitWaitMs)) continue;
    return fail(ErrorCode::kNotRolledBack,
                fmt::format("process {} is still there after the dump", member.process.pid().value),
                fmt::format("the image is complete; end the process with `kill -9 {}`",
                            member.process.pid().value));
  }
  return {};
}

// What all of the tree have had on the GPUs.
std::vector<GpuUse> use_of(const ProcessTree& tree) {
  std::vector<GpuUse> all;
  for (const auto& [pid, uses] : tree.gpu_use())
    all.insert(all.end(), uses.begin(), uses.end());
  return all;
}

bool all_have_ended(const ProcessTree& tree) {
  const auto& members = tree.members();
  return std::none_of(members.begin(), members.end(), [](const TreeMember& member) {
    return member.initial && member.process.alive();
  });
}

// After a dump that lets the tree run on.
Result<void> go_on_with_memory(const Environment& env, OpenedTree& opened, Phases& phases) {
  std::vector<const Process*> processes;
  for (const TreeMember& member : opened.tree.members())
    if (member.initial == CudaState::kRunning) processes.push_back(&member.process);
  auto moved = opened.direct.move_in(env, processes, phases);
  if (moved) return {};
  return fail(stands_still(std::move(moved.error()), opened.tree.root(), false));
}

Error no_directory(const DumpOptions& options, Error error) {
  // A job that runs cannot be told another folder for its images.
  const bool of_job = !options.images_folder.empty();
  if (error.remedy.empty()) {
    error.remedy = of_job ? "put the job's folder back, where it may be written"
                          : "name a directory whose parent exists and may be written";
  }
  if (of_job) error.remedy += "; or save the job elsewhere, by its name, with `stasis dump`";
  return error;
}

// One dump. Its members end in the opposite order: the tree before the image's writer, which may
// hold what it needs.
class DumpRun {
 public:
  DumpRun(const Environment& env, Pid root, const DumpOptions& options)
      : env_(env), root_(root), options_(options) {}

  // The steps of docs/how-it-works.md.
  Result<DumpReport> run() {
    if (auto known = probe(); !known) return fail(told(options_.part, std::move(known.error())));
    if (options_.attach) {
      auto come = attach_first(
          env_, root_, {*options_.attach, options_.timeout, options_.ignore_obstacles}, phases_);
      if (!come) return fail(told(options_.part, std::move(come.error())));
    }
    if (auto opened = open(); !opened) return fail(told(options_.part, std::move(opened.error())));
    if (auto ready = get_ready(); !ready) return fail(undone(std::move(ready.error())));
    auto precopied =
        host_.precopy(tree(), writer_->dir(), into_image_->options, needs_.bytes, phases_);
    if (!precopied) return fail(undone(std::move(precopied.error())));
    // CRIU has the job stop, writes it down, and waits until the image is complete.
    if (auto dumped = let_criu_dump(); !dumped) STASIS_TRY(take_back(std::move(dumped.error())));
    if (ends()) forget_links_.dismiss();
    if (!is_deferred()) commit();
    report_.downtime = phases_.downtime();
    if (ends())
      STASIS_TRY(end_job());
    else if (goes_on())
      STASIS_TRY(let_job_go_on());
    else
      STASIS_TRY(leave_suspended());
    if (!is_deferred()) opened_->journal->finish();
    return report();
  }

  // A connection that the tree just opens, say: only CRIU sees it, once all have stopped. The tree
  // is as it was.
  bool may_try_again(const Error& error) const {
    // The other parts of a group know of one try.
    if (options_.part != nullptr) return false;
    const bool passes = stage_ >= Stage::kWriting || error.retry == Retry::kSame;
    if (error.code != ErrorCode::kBusy || !passes || !env_.interrupt.check()) return false;
    (void)::unlink(writer_->failed_log_path().c_str());
    return true;
  }

 private:
  // How far it has come, which decides what a failure leaves.
  enum class Stage {
    kPreparing,
    kQuiescing,
    kQuiesced,
    kWriting,   // CRIU has gone on
    kAgreeing,  // the image is whole, and other parts of the group may not have theirs
    kComplete,
  };

  bool ends() const { return options_.after == AfterDump::kKill; }
  bool goes_on() const { return options_.after == AfterDump::kRunning; }
  // Past the processes' own memory.
  bool into_image() const { return ends() || goes_on(); }
  // The image is completed when the job runs again.
  bool is_deferred() const { return sync_ == SyncPolicy::kDeferred; }
  ProcessTree& tree() { return opened_->tree; }
  std::vector<Pid> pids() {
    std::vector<Pid> out;
    for (const TreeMember& member : tree().members())
      out.push_back(member.process.pid());
    return out;
  }

  // CRIU, the GPUs, the place of the image and its base; nothing is touched.
  Result<void> probe() {
    // Each takes some 20 ms: one asks a criu process, the other starts NVML.
    auto search = in_background([this] { return Criu::find(options_.criu_path); });
    auto gpus = env_.driver.gpus();
    STASIS_TRY_ASSIGN(auto criu, search.get());
    criu_.emplace(std::move(criu));
    STASIS_TRY_ASSIGN(gpus_, std::move(gpus));
    auto path = ImageWriter::probe(options_.images_dir, options_.overwrite, options_.images_folder);
    if (!path) return fail(no_directory(options_, std::move(path.error())));
    path_ = std::move(*path);
    if (options_.base) phases_.begin("base");
    auto base = open_base(env_, options_);
    phases_.end();
    STASIS_TRY_ASSIGN(base_, std::move(base));
    STASIS_TRY(host_.open_base());
    // A base that cannot be opened has been told of.
    tell_of_base_ = options_.base && !options_.base_may_be_empty &&
                    (base_ != nullptr || !may_deduplicate(env_, options_));
    return refuse_from_within(root_);
  }

  // The tree is in the journal, and what the driver refuses is refused.
  Result<void> open() {
    STASIS_TRY_ASSIGN(auto opened,
                      open_tree(env_, Operation::kDump, root_, path_, options_.job.has_value()));
    opened_.emplace(std::move(opened));
    if (options_.part != nullptr) STASIS_TRY(refuse_rdma(env_, tree(), options_.ignore_obstacles));
    return refuse_obstacles(env_, *opened_, options_.ignore_obstacles);
  }

  Error undone(Error why) {
    why = told(options_.part, std::move(why));
    connections_.unlock();
    Error error = roll_back(env_, *opened_, std::move(why));
    // The half of an image, and all there is of a program's GPU memory: for `stasis recover`.
    if (writer_) keep_partial_image();
    return error;
  }

  // The image's directory; and what cannot be dumped is refused before anything is touched.
  Result<void> get_ready() {
    STASIS_TRY(check_content(tree(), fmt::format("`stasis resume {}`", root_.value)));
    for (const proc::ProcessInfo& info : tree().infos())
      STASIS_TRY(proc::check_can_be_stopped(info.pid));
    if (const auto needs = who_needs(path_)) {
      return fail(
          ErrorCode::kBusy,
          fmt::format("{} has the memory of process {}, which is suspended", path_, needs->value),
          fmt::format("resume that one first (`stasis resume {}`), or dump to another "
                      "directory",
                      needs->value));
    }
    // After the journal, which says where to find the half of it if we are killed.
    auto created =
        ImageWriter::create(options_.images_dir, options_.overwrite, options_.images_folder);
    if (!created) return fail(no_directory(options_, std::move(created.error())));
    writer_.emplace(std::move(*created));
    STASIS_TRY_ASSIGN(needs_, check_disk_space(tree(), writer_->criu_dir(), writer_->final_path(),
                                               base_.get(), into_image()));
    criu_options_ = options_.criu;
    if (!criu_options_.shell_job && proc::is_shell_job(tree().infos())) {
      criu_options_.shell_job = true;
      env_.tell(
          "the job belongs to a terminal, or to the session of another program such as your shell; "
          "the dump allows for that: --shell-job is set");
    }
    connections_.choose(tree().infos(), criu_options_);
    STASIS_TRY(refuse_undumpable(env_, tree().members(), criu_options_, options_));
    STASIS_TRY(find_inherited_files(proc::ProcFs(), tree().members(), env_.driver.info().simulated,
                                    options_.ignore_obstacles));
    STASIS_TRY(criu_->may_dump());
    sync_ = when_to_sync(options_, *writer_);
    // No part goes on before all images are whole.
    if (options_.part != nullptr && is_deferred()) sync_ = SyncPolicy::kDisk;
    into_image_.emplace(
        IntoImage{writer_->dir(),
                  {options_.compression, past_the_cache(options_), sync_, kContentChunk, base_},
                  gpu_precopy_limits(),
                  needs_.room});
    // Also should an exception end us.
    writer_->keep_partial(true);
    STASIS_TRY(opened_->direct.come_back(env_));
    manifest_ = describe_dump(env_, tree(), *criu_, criu_options_, gpus_);
    return {};
  }

  std::optional<GpuPrecopyLimits> gpu_precopy_limits() const {
    // Less is copied in some tenths of a second.
    constexpr std::uint64_t kWorthIt = 1U << 30;
    if (!goes_on() || options_.precopy == Precopy::kNever || needs_.room) return std::nullopt;
    return GpuPrecopyLimits{options_.precopy == Precopy::kAlways ? 0 : kWorthIt, needs_.bytes};
  }

  Result<void> let_criu_dump() {
    const DumpRequest request{
        root_,
        writer_->criu_dir(),
        writer_->log_dir(),
        criu_options_,
        !ends(),
        host_.inside_criu(),
        writer_->failed_log_path(),
        std::chrono::milliseconds(0),
        options_.criu_log_level,
        [this](Pid started) { return note_criu(*opened_->journal, started, ends()); },
        [this] { return stop_job(); },
        [this] { return watch_.check(tree()); }};
    phases_.begin("criu start");
    auto dumped = criu_->dump(
        request,
        [this] {
          auto done = complete_image();
          if (!done && ends()) give_terminals_back();
          return done;
        },
        env_.interrupt);
    watcher_.reset();
    fault_only(FaultPoint::kDumpFinish);
    const InsideCriu* const inside = host_.inside_criu();
    const auto kept_from = inside != nullptr ? inside->thread_with_tiles() : std::nullopt;
    if (!dumped && kept_from)
      return fail(proc::refusal_of_tiles(process_of(*kept_from), {*kept_from}));
    return dumped;
  }

  // CRIU has started, and waits for this: until it has tried the kernel out the job runs.
  Result<void> stop_job() {
    // One that stays suspended keeps its memory's content itself: the image need not be kept for
    // it.
    const IntoImage* into = into_image() ? &*into_image_ : nullptr;
    const QuiesceOptions how{.purpose = goes_on() ? Purpose::kDumpAndGoOn : Purpose::kDump,
                             .timeout = options_.timeout,
                             .ignore_obstacles = options_.ignore_obstacles,
                             .path = options_.path,
                             .image = into,
                             .part = options_.part};
    auto threads = ask_threads(root_);
    stage_ = Stage::kQuiescing;
    auto stopped = quiesce(env_, *opened_, how, phases_);
    // Also of those whom the driver has by then, if that was not all of them.
    needed_ = use_of(tree());
    STASIS_TRY(std::move(stopped));
    stage_ = Stage::kQuiesced;
    STASIS_TRY(connections_.lock(criu_options_, manifest_, phases_));
    STASIS_TRY(watch_.refuse_held_up(tree()));
    answers_ = ask_processes(root_, std::move(threads));
    STASIS_TRY(refuse_tiles(answers_));
    if (!options_.ignore_undumpable) STASIS_TRY(refuse_sandboxes(answers_));
    direct_bytes_ = opened_->direct.bytes();
    keep_partial_image();
    STASIS_TRY(host_.begin(tree(), writer_->dir(), *criu_));
    phases_.begin("criu");
    stage_ = Stage::kWriting;
    if (const ContentRecord* content = opened_->direct.content()) manifest_.content = *content;
    watcher_.emplace(env_.progress, *writer_, sync_);
    return {};
  }

  void keep_partial_image() { writer_->keep_partial(opened_->direct.needs_image()); }

  Pid process_of(Tid thread) {
    for (const TreeMember& member : tree().members()) {
      const auto threads = proc::ProcFs().threads(member.process.pid());
      if (std::find(threads.begin(), threads.end(), thread) != threads.end())
        return member.process.pid();
    }
    return root_;  // it has ended since
  }

  void tell_of_no_content() const {
    if (options_.compression != ContentCompression::kNone)
      env_.tell(fmt::format("{} is compressed: no GPU memory of the job is moved past the driver",
                            manifest_.host_content ? "only large host memory" : "nothing"));
    if (tell_of_base_)
      env_.tell(fmt::format(
          "{} is deduplicated against {}: no GPU memory of the job goes into "
          "the image past the driver",
          manifest_.host_content && host_.has_base() ? "only large host memory" : "nothing",
          *options_.base));
  }

  // CRIU has written all it has to, and the tree stands as it is in the image.
  Result<void> complete_image() {
    watcher_.reset();
    phases_.end();
    put_terminals_right();
    STASIS_TRY(watch_.refuse_held_up(tree()));
    STASIS_TRY_ASSIGN(manifest_.host_content, host_.finish(*criu_, phases_));
    if (!manifest_.content) tell_of_no_content();
    STASIS_TRY(tree().verify_programs());
    STASIS_TRY_ASSIGN(manifest_.processes, take_stock(tree()));
    std::vector<std::string> lost;
    read_kernel_state(root_, manifest_.processes, lost);
    for (std::string& answer : note_answers(answers_, manifest_.processes))
      lost.push_back(std::move(answer));
    for (std::string& late : set_late(manifest_.processes))
      lost.push_back(std::move(late));
    terminals_.tell_of_unread(lost);
    STASIS_TRY(keep_fifos_unwritten(lost));
    STASIS_TRY(restart_calls_of(writer_->criu_dir(), manifest_.processes));
    STASIS_TRY(put_listeners_first(writer_->criu_dir()));
    STASIS_TRY(drop_owner_threads(writer_->criu_dir()));
    STASIS_TRY(drop_signalling(writer_->criu_dir()));
    STASIS_TRY(drop_execute_rights(writer_->criu_dir()));
    STASIS_TRY(rename_deleted(writer_->criu_dir()));
    if (connections_.are_all_saved()) STASIS_TRY(count_as_sent(writer_->criu_dir()));
    STASIS_TRY(refuse_descriptors_under_way(writer_->criu_dir(), criu_options_));
    STASIS_TRY(refuse_lost_tiles(writer_->criu_dir(), manifest_.processes));
    STASIS_TRY(connections_.judge(manifest_));
    STASIS_TRY(
        note_sockets(env_, writer_->criu_dir(), manifest_, lost, options_.ignore_undumpable));
    STASIS_TRY_ASSIGN(kept_files_,
                      keep_files(writer_->criu_dir(), goes_on() || options_.job.has_value(),
                                 options_.job.has_value()));
    manifest_.phases = phases_.done();
    manifest_.beside = beside_of(spans_.ended(), phases_.beginning());
    manifest_.job = options_.job;
    manifest_.job_name = options_.job_name;
    if (options_.on_complete) STASIS_TRY(options_.on_complete(writer_->criu_dir()));
    if (!is_deferred()) STASIS_TRY(seal(env_.interrupt));
    phases_.begin("finish");
    if (ends()) STASIS_TRY(note_ending(*opened_));
    STASIS_TRY(fault(FaultPoint::kDumpEnding));
    STASIS_TRY(complete_group());
    stage_ = Stage::kComplete;
    return {};
  }

  void put_terminals_right() {
    using Unread = DumpedTerminals::Unread;
    terminals_ =
        DumpedTerminals(writer_->criu_dir(), pids(), ends() ? Unread::kTaken : Unread::kWritten);
    std::vector<std::string> failed;
    terminals_.wait_again(failed);
    tell_of_lost(env_, failed, "terminals are not as they were");
    if (!ends()) give_terminals_back();
  }

  void give_terminals_back() {
    std::vector<std::string> failed;
    terminals_.give_back(failed);
    tell_of_lost(env_, failed, "what was not yet read of terminals is not as it was");
  }

  Result<void> keep_fifos_unwritten(std::vector<std::string>& out) {
    const proc::FifoReaders readers = proc::unwritten_fifos(pids());
    Lost lost(out);
    for (const auto& [pid, descriptor] : readers.others)
      lost.add(pid, descriptor, "that the FIFO never had a writer: poll(2) says POLLHUP of it");
    std::vector<std::pair<int, int>> descriptors;
    for (const auto& [pid, descriptor] : readers.as_opened) {
      const auto details = proc::ProcFs().details(pid);
      if (details) descriptors.emplace_back(details->ns_pid, descriptor);
    }
    return open_fifos_as_files(writer_->criu_dir(), descriptors);
  }

  // Waits until all parts have a whole image. It gets its name before anything is ended: a tool
  // that is killed from now on leaves an image that is one of the group's.
  Result<void> complete_group() {
    if (options_.part == nullptr) return {};
    phases_.begin("agree");
    stage_ = Stage::kAgreeing;
    STASIS_TRY(options_.part->finish());
    fault_only(FaultPoint::kPartDone);
    commit();
    phases_.begin("finish");
    return {};
  }

  Result<void> seal(const Interrupt& interrupt) {
    STASIS_TRY_ASSIGN(manifest_,
                      writer_->seal(std::move(manifest_), sync_, env_.progress, interrupt));
    return fault(FaultPoint::kDumpComplete);
  }

  void commit() {
    if (std::exchange(is_committed_, true)) return;
    if (auto committed = writer_->commit(); !committed) env_.tell(committed.error().to_string());
    fault_only(FaultPoint::kImageCommitted);
  }

  // After CRIU has failed. No error: the image is complete, and what was left of the job is ended.
  Result<void> take_back(Error why) {
    if (stage_ == Stage::kComplete && options_.part != nullptr) return end_as_agreed(why);
    // First the job, then the disk: removing a large image takes seconds.
    const Error first = why;
    why = told(options_.part, std::move(why));
    connections_.unlock();
    host_.request_stop();
    opened_->direct.make_room(env_.driver, needed_, {});
    auto back = roll_back_tree(env_, tree());
    host_.stop();
    // CRIU died after it had the word to end the tree: the image may be all that is left of the
    // job.
    if (stage_ != Stage::kComplete || !ends() || !any_has_ended(tree(), back.has_value())) {
      // The image is about to go, so nothing may say that it is all there is.
      if (!opened_->journal->record().ending.empty()) (void)opened_->journal->note_ending({});
      Error failed = rolled_back(env_, *opened_, std::move(why), std::move(back));
      keep_partial_image();
      // All parts may have ended, but this one did not hear so: its image belongs to theirs.
      if (stage_ == Stage::kAgreeing && !options_.part->knows_outcome()) {
        commit();
        failed.remedy += fmt::format(
            "{}the image {} is kept: if the other parts have theirs and have ended, end this one, "
            "and restore all",
            failed.remedy.empty() ? "" : "; ", writer_->final_path());
        return fail(std::move(failed));
      }
      (void)writer_->discard();
      // Nothing went wrong in CRIU, so its log says nothing.
      if (first.code == ErrorCode::kInterrupted || stage_ == Stage::kQuiescing ||
          stage_ == Stage::kAgreeing)
        (void)::unlink(writer_->failed_log_path().c_str());
      return fail(std::move(failed));
    }
    env_.tell("the image is complete, though CRIU failed at its end: " + first.message);
    for (const TreeMember& member : tree().members())
      (void)member.process.pidfd().signal(SIGKILL);
    return {};
  }

  // CRIU has failed after all parts had their images.
  Result<void> end_as_agreed(const Error& why) {
    env_.tell("the image is complete, though CRIU failed at its end: " + why.message);
    host_.stop();
    for (const TreeMember& member : tree().members())
      if (ends()) (void)member.process.pidfd().signal(SIGKILL);
    return {};
  }

  Result<void> end_job() {
    connections_.forget();
    opened_->direct.dismiss();
    auto gone = wait_until_gone(tree());
    tree().dismiss();
    STASIS_TRY(std::move(gone));
    for (const TreeMember& member : tree().members())
      forget_suspended(member.process);
    return {};
  }

  Result<void> leave_suspended() {
    connections_.unlock();
    tree().dismiss();
    opened_->direct.dismiss();
    remember_suspended(tree());
    auto kept = verify_states(tree(), CudaState::kCheckpointed);
    if (kept) return {};
    return fail(
        std::move(kept.error()).within("the image " + writer_->final_path() + " is complete"));
  }

  Result<void> let_job_go_on() {
    connections_.unlock();
    opened_->direct.make_room(env_.driver, needed_, {});
    auto back = roll_back_tree(env_, tree());
    if (back)
      back = go_on_with_memory(env_, *opened_, phases_);
    else
      opened_->direct.dismiss();
    if (!back) return keep_image_of_lost(std::move(back.error()));
    report_.downtime = phases_.downtime();
    phases_.begin("trim");  // the job runs
    opened_->direct.give_back_room();
    host_.give_back_room();
    return is_deferred() ? complete_later() : Result<void>();
  }

  // The job does not go on: its image is all there is.
  Result<void> keep_image_of_lost(Error why) {
    const Interrupt never;
    auto kept = is_deferred() ? seal(never) : Result<void>();
    if (kept) commit();
    keep_partial_image();
    // A job that has ended needs nothing.
    if (why.code == ErrorCode::kProcessGone && all_have_ended(tree())) opened_->journal->finish();
    return fail(std::move(why).within(kept ? "the image " + writer_->final_path() + " is complete"
                                           : kept.error().to_string()));
  }

  // The job runs again.
  Result<void> complete_later() {
    // A user who has no more time for a job is not to lose its newest image for that.
    const Interrupt never;
    const Interrupt& interrupt = options_.job ? never : env_.interrupt;
    phases_.end();
    writer_->keep_partial(false);
    auto kept = seal(interrupt);
    // Nothing is left to be mended, and the next one need not wait for the disk.
    opened_->journal->finish();
    phases_.begin("sync");
    if (kept) kept = writer_->sync(env_.progress, interrupt);
    if (!kept) {
      (void)writer_->discard();
      return fail(std::move(kept.error()).within("the job runs on, and has no image"));
    }
    commit();
    return {};
  }

  DumpReport report() {
    phases_.end();
    report_.root = root_;
    report_.processes = report_processes(tree());
    report_.total = phases_.total();
    report_.lock_tries = tree().lock_tries();
    report_.direct_bytes = direct_bytes_;
    report_.dropped_zero_bytes = tree().dropped_zero_bytes();
    report_.phases = manifest_.phases;
    // What came after the manifest was written.
    const auto& done_since = phases_.done();
    report_.phases.insert(
        report_.phases.end(),
        std::find_if(done_since.begin(), done_since.end(),
                     [](const PhaseRecord& phase) { return phase.name == "finish"; }),
        done_since.end());
    if (manifest_.sockets) report_.lost = manifest_.sockets->lost;
    report_.lost.insert(report_.lost.end(), kept_files_.lost.begin(), kept_files_.lost.end());
    tell_of_lost(env_, report_.lost, "the image does not hold");
    report_.images_dir = writer_->final_path();
    report_.image_bytes = manifest_.total_bytes;
    report_.written_bytes = manifest_.total_bytes;
    for (const auto& content : {manifest_.content, manifest_.host_content})
      if (content) report_.written_bytes -= content->reused_bytes();
    report_.reused_bytes = opened_->direct.reused_bytes() + host_.reused_bytes();
    report_.precopied_bytes = opened_->direct.precopied_bytes() + host_.precopied_bytes();
    report_.direct_io = opened_->direct.direct_io();
    return std::move(report_);
  }

  const Environment& env_;
  const Pid root_;
  const DumpOptions& options_;
  const SpanNotes spans_;
  DumpWatch watch_{env_};  // before there is a file of the image
  Phases phases_;
  std::optional<Criu> criu_;
  std::vector<Gpu> gpus_;
  std::string path_;
  std::shared_ptr<const ContentBase> base_;
  bool tell_of_base_ = false;
  bool is_committed_ = false;
  ImageNeeds needs_;
  std::optional<ImageWriter> writer_;
  DumpedTerminals terminals_;
  std::optional<OpenedTree> opened_;
  CriuOptions criu_options_;
  SyncPolicy sync_ = SyncPolicy::kDisk;
  std::optional<IntoImage> into_image_;
  Manifest manifest_;
  std::vector<GpuUse> needed_;  // of the GPUs' memory, to bring all back
  std::uint64_t direct_bytes_ = 0;
  Stage stage_ = Stage::kPreparing;
  AskedStates answers_;
  DumpReport report_;
  std::optional<ImageWatcher> watcher_;
  KeepReport kept_files_;
  DumpConnections connections_{env_, root_, options_};
  HostMemoryDump host_{env_, options_};  // needs the tree, and the image's directory
  // A program that runs on has its files by their own names.
  ScopeGuard<std::function<void()>> forget_links_{[this] { remove_links(kept_files_.links); }};
};

}  // namespace

Result<DumpReport> dump(const Environment& given, Pid root, const DumpOptions& options) {
  const Environment env = given.with(interrupt_of(options.part, given.interrupt));
  if (options.criu.tcp_close && options.criu.tcp_established) {
    return fail(ErrorCode::kUsage,
                "--tcp-established keeps open TCP connections, and --tcp-close closes them",
                "give one of them; a restore can still close what was kept: `stasis restore "
                "--tcp-close`");
  }
  const KeptCallThread calls;
  for (int tries = 1;; ++tries) {
    DumpRun run(env, root, options);
    auto dumped = run.run();
    if (dumped || tries == kTries || !run.may_try_again(dumped.error())) return dumped;
    env.tell(dumped.error().message + "; the dump is tried again");
    std::this_thread::sleep_for(kBetweenTries);
  }
}

}  // namespace stasis
