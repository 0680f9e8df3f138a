#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <csignal>
#include <filesystem>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/background.h"
#include "base/fault_point.h"
#include "base/fd.h"
#include "base/scope_guard.h"
#include "base/version.h"
#include "checkpoint/inherited_files.h"
#include "checkpoint/suspend_record.h"
#include "criu/criu_core.h"
#include "doctor/criu_obstacles.h"
#include "driver/gpu_plan.h"
#include "image/image_writer.h"
#include "operations/asked_state.h"
#include "operations/kept_files.h"
#include "operations/kernel_state.h"
#include "operations/leftovers.h"
#include "operations/open.h"
#include "operations/quiesce.h"
#include "operations/refusals.h"
#include "operations/rollback.h"
#include "operations/socket_state.h"

namespace stasis {

namespace {

// How long an ended tree may take to vanish once CRIU has killed it.
constexpr int kExitWaitMs = 10000;
constexpr std::chrono::milliseconds kSizePoll{50};
constexpr std::uint64_t kWorthWriting = 1ULL << 20;

ImageCudaState image_state(CudaState state) {
  switch (state) {
    case CudaState::kLocked:
      return ImageCudaState::kLocked;
    case CudaState::kCheckpointed:
      return ImageCudaState::kCheckpointed;
    default:
      return ImageCudaState::kRunning;
  }
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : std::string();
}

// Bytes free for this user on the file system that holds `fd`; nothing if it does not say (ramfs, a
// tmpfs without a limit: no blocks at all).
std::optional<std::uint64_t> free_space(const UniqueFd& fd) {
  struct statvfs info {};
  if (::fstatvfs(fd.get(), &info) != 0 || info.f_blocks == 0) return std::nullopt;
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

// Refuses a dump that cannot fit. Counts private memory only: shared files may stay outside.
// `base` counts as if nothing had changed since: if it has, the dump fails in time all the same.
Result<void> check_disk_space(const Environment& env, const Group& group, const UniqueFd& dir,
                              const std::string& path, const ContentBase* base) {
  const proc::ProcFs procfs;
  std::uint64_t needed = 0;
  for (const GroupMember& member : group.members()) {
    if (auto bytes = procfs.anonymous_bytes(member.process.pid())) needed += *bytes;
  }
  if (auto use = env.driver.memory_by_process()) {
    for (const GroupMember& member : group.members()) {
      if (member.initial != CudaState::kRunning && member.initial != CudaState::kLocked) continue;
      std::uint64_t bytes = 0;
      if (auto it = use->find(member.process.pid()); it != use->end()) {
        for (const GpuUse& part : it->second)
          bytes += part.bytes;
      }
      needed += bytes - std::min(bytes, kContextBytes);
    }
  }
  if (base != nullptr) needed -= std::min(needed, base->usable_bytes());
  const auto free = free_space(dir);
  if (!free || *free >= needed) return {};
  return fail(ErrorCode::kNoSpace,
              fmt::format("the image needs about {} and {} has {} free", format_bytes(needed), path,
                          format_bytes(*free)),
              "free some space, or choose a directory on another file system");
}

// Watches what CRIU writes, from a thread of its own: tells how much it is, has the kernel begin to
// write it to the disk, so that the sync at the end finds little left (2.7 GB on an H100 machine:
// 1.3 s of sync after 1.0 s of writing to memory, one after the other), and digests it (50 ms at
// the end). Ends at once when destroyed: the job stands still meanwhile.
class ImageWatcher {
 public:
  ImageWatcher(Progress& progress, ImageWriter& writer, SyncPolicy sync) {
    try {
      thread_ = std::jthread([this, &progress, &writer, sync](const std::stop_token& stop) {
        const std::string directory = writer.path() + "/criu";
        std::unique_lock lock(mutex_);
        while (!wake_.wait_for(lock, stop, kSizePoll, [] { return false; }) &&
               !stop.stop_requested()) {
          progress.update("write", look_at(directory, sync), 0);
          writer.digest_ahead(stop);
        }
      });
    } catch (const std::system_error&) {
      // No thread is to be had: it goes without.
    }
  }

 private:
  static std::uint64_t look_at(const std::string& directory, SyncPolicy sync) {
    std::error_code ignored;
    std::uint64_t sum = 0;
    std::filesystem::directory_iterator entries(directory, ignored);
    for (; !ignored && entries != std::filesystem::directory_iterator();
         entries.increment(ignored)) {
      const auto& entry = *entries;
      std::error_code gone;
      const auto size = entry.file_size(gone);
      if (gone) continue;
      sum += size;
      if (sync != SyncPolicy::kDisk || size < kWorthWriting) continue;
      if (auto file = open_file(AT_FDCWD, entry.path().string(), O_RDONLY | O_NOFOLLOW)) {
        (void)::sync_file_range(file->get(), 0, 0, SYNC_FILE_RANGE_WRITE);
      }
    }
    return sum;
  }

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::jthread thread_;  // last: it uses the others
};

Manifest describe(const Environment& env, const Group& group, const Criu& criu,
                  const CriuOptions& options, std::span<const Gpu> gpus) {
  Manifest manifest;
  manifest.stasis_version = kVersion;
  manifest.hostname = host_name();
  manifest.kernel_release = proc::kernel_release();
  manifest.criu_version = criu.version();
  manifest.driver_version = env.driver.info().driver_version;
  manifest.cuda_version = env.driver.info().cuda_version;
  manifest.simulated = env.driver.info().simulated;
  for (const Gpu& gpu : gpus) {
    manifest.gpus.push_back({gpu.uuid.to_string(), gpu.name, gpu.memory_total, gpu.pci_bus_id});
  }
  manifest.root = group.root();
  manifest.criu_options = options;
  return manifest;
}

std::vector<GpuMemoryRecord> gpu_memory_of(const Group& group, const GroupMember& member) {
  std::vector<GpuUse> uses;
  if (auto use = group.gpu_use().find(member.process.pid()); use != group.gpu_use().end()) {
    uses = use->second;
  } else if (member.initial) {
    if (auto memory = recall_suspended(member.process)) uses = std::move(memory->uses);
  }
  std::vector<GpuMemoryRecord> out;
  out.reserve(uses.size());
  for (const GpuUse& part : uses)
    out.push_back({part.gpu.to_string(), part.bytes});
  return out;
}

// The TCP ports that a process listens on. CRIU binds those of connections whoever has them. The
// kernel takes some 8 ms to write down the TCP sockets of a network namespace, however few there
// are (its table is large), and so is asked once for each, and only if somebody has one.
using SocketTables = std::map<ino_t, std::vector<proc::TcpSocket>>;
std::vector<std::uint16_t> tcp_ports_of(const proc::ProcFs& procfs, Pid pid, SocketTables& tables) {
  const auto own = procfs.tcp_socket_inodes(pid);
  struct stat space = {};
  if (!own || own->empty() ||
      ::stat(fmt::format("/proc/{}/ns/net", pid.value).c_str(), &space) != 0)
    return {};
  const auto [table, is_new] = tables.try_emplace(space.st_ino);
  if (is_new) table->second = procfs.tcp_sockets(pid).value_or(std::vector<proc::TcpSocket>());
  std::set<std::uint16_t> ports;
  for (const proc::TcpSocket& socket : table->second) {
    if (socket.listens && std::find(own->begin(), own->end(), socket.inode) != own->end()) {
      ports.insert(socket.local_port);
    }
  }
  return {ports.begin(), ports.end()};
}

// The numbers of a process's threads without its own.
std::vector<Tid> other_threads(const proc::ProcFs& procfs, Pid pid) {
  std::vector<Tid> threads = procfs.threads(pid);
  std::erase(threads, Tid{pid.value});
  std::sort(threads.begin(), threads.end());
  return threads;
}

// What is in the image: the tree as it stands still now. Processes without CUDA ran on until CRIU
// stopped them, and may have come, gone or lost their parent since we looked last.
Result<std::vector<ProcessRecord>> take_stock(const Group& group) {
  const proc::ProcFs procfs;
  STASIS_TRY_ASSIGN(auto tree, procfs.tree(group.root()));
  SocketTables tables;
  std::vector<ProcessRecord> records;
  for (const proc::ProcessInfo& info : tree) {
    ProcessRecord record;
    record.pid = info.pid;
    if (info.pid != group.root()) record.parent = info.parent;
    if (auto details = procfs.details(info.pid)) record.command = std::move(details->argv);
    record.threads = other_threads(procfs, info.pid);
    record.tcp_ports = tcp_ports_of(procfs, info.pid, tables);
    const auto member =
        std::find_if(group.members().begin(), group.members().end(),
                     [&](const GroupMember& m) { return m.process.id() == info.id(); });
    if (member == group.members().end()) {
      auto maps = procfs.maps_file(info.pid, "libcuda.so");
      if (maps && *maps) {
        return fail(ErrorCode::kBusy,
                    fmt::format("process {} ({}) has appeared during the dump, and may use CUDA",
                                info.pid.value, info.comm),
                    "dump once more");
      }
    } else if (member->initial && member->process.alive()) {
      record.cuda = true;
      record.cuda_state = image_state(*member->initial);
      record.gpu_memory = gpu_memory_of(group, *member);
    }
    records.push_back(std::move(record));
  }
  for (const GroupMember& member : group.members()) {
    const bool there = std::any_of(records.begin(), records.end(), [&](const ProcessRecord& r) {
      return r.pid == member.process.pid();
    });
    if (there || !member.initial || !member.process.alive()) continue;
    return fail(
        ErrorCode::kBusy,
        fmt::format("process {} ({}) has lost its parent during the dump, and so is not in "
                    "the image",
                    member.process.pid().value, member.process.info().comm),
        fmt::format("dump process {} and the rest each by itself", member.process.pid().value));
  }
  return records;
}

// CRIU 4.2.1 saves no tiles of AMX: what they hold would be lost without a word.
Result<void> refuse_tiles(const UniqueFd& criu_dir, const std::vector<ProcessRecord>& processes) {
  for (const ProcessRecord& process : processes) {
    const auto threads = threads_with_tiles(criu_dir, process.pid);
    if (threads.empty()) continue;
    return fail(
        ErrorCode::kBusy,
        fmt::format("process {} was in the middle of a computation with AMX (thread {}{}), and "
                    "CRIU does not save its tiles",
                    process.pid.value, threads.front().value,
                    threads.size() > 1 ? fmt::format(" and {} more", threads.size() - 1) : ""),
        "dump once more; if that is always so, have the program release its tiles "
        "(_tile_release) when it has computed, or run without AMX (ONEDNN_MAX_CPU_ISA="
        "AVX512_CORE_BF16)");
  }
  return {};
}

Result<void> note_ending(OpenedGroup& opened) {
  STASIS_TRY_ASSIGN(auto tree, proc::ProcFs().tree(opened.group.root()));
  std::vector<ProcessId> processes;
  for (const proc::ProcessInfo& info : tree)
    processes.push_back(info.id());
  return opened.journal->note_ending(std::move(processes));
}

// Has any process of the tree ended, or is it about to? If all are `back` in their states, they
// have answered since, which who was killed does not. Others take a while to let go of their
// memory.
bool anybody_ended(const Group& group, bool back) {
  const int patience_ms = back ? 100 : kExitWaitMs;
  return std::any_of(
      group.members().begin(), group.members().end(),
      [&](const GroupMember& member) { return member.process.pidfd().wait_exit(patience_ms); });
}

// CRIU has ended the tree; nobody may be left of it.
Result<void> wait_until_gone(const Group& group) {
  for (const GroupMember& member : group.members()) {
    if (member.process.pidfd().wait_exit(kExitWaitMs)) continue;
    return fail(ErrorCode::kNotRolledBack,
                fmt::format("process {} is still there after the dump", member.process.pid().value),
                fmt::format("the image is complete; end the process with `kill -9 {}`",
                            member.process.pid().value));
  }
  return {};
}

// CRIU says so too, but only when the GPU's memory has been moved; or never, of what it loses. Who
// insists is told what it is.
Result<void> refuse_undumpable(const Environment& env, const std::vector<GroupMember>& members,
                               const CriuOptions& criu, const DumpOptions& options) {
  const auto& job = options.job;
  const std::vector<std::string> connected = job ? job->streams : std::vector<std::string>();
  // CRIU gives a file that has lost its name another one, and takes that away when the tree runs
  // on: no restore would find the file. What a job has in its /dev/shm is in the image besides.
  CriuOptions wanted = criu;
  const bool lost = options.after == AfterDump::kRunning && criu.link_remap && !job;
  if (lost) wanted.link_remap = false;
  std::vector<std::string> reasons;
  std::set<std::string> remedies;
  for (const Finding& finding :
       find_undumpable(proc::ProcFs(), members, wanted, env.driver.info().simulated, connected)) {
    if (finding.id == "fifo" || finding.id == "posix-timer") env.tell(finding.what);
    if (finding.light != Light::kRed) continue;
    reasons.push_back(finding.what);
    remedies.insert(lost && finding.id == "link-remap"
                        ? "dump it without --leave-running, by which the file would be lost to the "
                          "image, or start it under `stasis run --images-dir`, which saves its "
                          "/dev/shm"
                        : finding.remedy);
  }
  if (reasons.empty()) return {};
  if (options.ignore_undumpable) {
    for (const std::string& reason : reasons)
      env.tell(reason);
    return {};
  }
  return fail(ErrorCode::kUndumpable, fmt::format("{}", fmt::join(reasons, "; ")),
              fmt::format("{}; to let CRIU try all the same: --ignore-undumpable",
                          fmt::join(remedies, "; ")));
}

// Whether there may be something to take over from the base.
bool may_take_over(const Environment& env, const DumpOptions& options) {
  return options.base && env.mover && options.path != MemoryPath::kDriver &&
         options.after != AfterDump::kSuspended;
}

// Nothing if all is to be written. Reads all of it, while the job runs. kInterrupted.
Result<std::shared_ptr<const ContentBase>> open_base(const Environment& env,
                                                     const DumpOptions& options) {
  if (!may_take_over(env, options)) return nullptr;
  auto base = ContentBase::open(*options.base, env.progress, env.interrupt);
  if (!base && base.error().code == ErrorCode::kInterrupted) return base;
  if (!base) {
    if (base.error().code != ErrorCode::kNotSupported || !options.base_may_be_empty) {
      env.tell(fmt::format("all GPU memory is written, and nothing taken over from {}: {}",
                           *options.base, base.error().to_string()));
    }
    return nullptr;
  }
  for (const Error& damage : (*base)->damage()) {
    env.tell(fmt::format("{} is damaged, and what is in that file is written anew: {}",
                         *options.base, damage.message));
  }
  return base;
}

bool past_the_cache(const DumpOptions& options) {
  return options.direct_io.value_or(options.sync == SyncPolicy::kDisk &&
                                    options.after == AfterDump::kKill);
}

// Whether what was written is to be had again until somebody syncs it, whatever becomes of the
// disk: room is set aside at the write, and pages that could not be brought to the disk stay in the
// page cache as they are. A network file system finds out at the sync, btrfs drops them, and what
// lies below an overlay is not to be seen.
bool keeps_what_it_has_taken(const UniqueFd& dir) {
  struct statfs info = {};
  if (::fstatfs(dir.get(), &info) != 0) return false;
  const auto type = static_cast<std::uint32_t>(info.f_type);
  constexpr std::array kKnown{std::uint32_t{EXT4_SUPER_MAGIC}, std::uint32_t{XFS_SUPER_MAGIC},
                              std::uint32_t{TMPFS_MAGIC}};
  return std::find(kKnown.begin(), kKnown.end(), type) != kKnown.end();
}

// A tree that runs on waits neither for checksums nor for the disk: its image is completed, and
// goes there, when it runs again. Not where that image takes another's place: until it is safe the
// other must be there to fall back on.
SyncPolicy when_to_sync(const DumpOptions& options, const ImageWriter& writer) {
  const bool later = options.sync == SyncPolicy::kDisk && options.after == AfterDump::kRunning &&
                     !options.direct_io.value_or(false) && !writer.replaces() &&
                     keeps_what_it_has_taken(writer.dir());
  return later ? SyncPolicy::kDeferred : options.sync;
}

// What all of the group have had on the GPUs.
std::vector<GpuUse> use_of(const Group& group) {
  std::vector<GpuUse> all;
  for (const auto& [pid, uses] : group.gpu_use())
    all.insert(all.end(), uses.begin(), uses.end());
  return all;
}

// CRIU would stop who waits for it.
Result<void> refuse_from_within(Pid root) {
  STASIS_TRY_ASSIGN(auto tree, proc::ProcFs().tree(root));
  if (std::none_of(tree.begin(), tree.end(),
                   [](const proc::ProcessInfo& info) { return info.pid.value == ::getpid(); })) {
    return {};
  }
  return fail(ErrorCode::kUsage,
              fmt::format("process {} cannot be dumped from within: this stasis ({}) is below it",
                          root.value, ::getpid()),
              "run stasis from another shell, or under setsid and a subshell that ends");
}

bool nobody_is_left(const Group& group) {
  const auto& members = group.members();
  return std::none_of(members.begin(), members.end(), [](const GroupMember& member) {
    return member.initial && member.process.alive();
  });
}

// After a dump that lets the tree run on.
Result<void> go_on_with_memory(const Environment& env, OpenedGroup& opened, Phases& phases) {
  std::vector<const Process*> processes;
  for (const GroupMember& member : opened.group.members())
    if (member.initial == CudaState::kRunning) processes.push_back(&member.process);
  auto moved = opened.direct.move_in(env, processes, phases);
  if (moved) return {};
  return fail(stands_still(std::move(moved.error()), opened.group.root(), false));
}

}  // namespace

Result<DumpReport> dump(const Environment& env, Pid root, const DumpOptions& options) {
  if (options.criu.tcp_close && options.criu.tcp_established) {
    return fail(ErrorCode::kUsage,
                "--tcp-established keeps open TCP connections, and --tcp-close closes them",
                "give one of them; a restore can still close what was kept: `stasis restore "
                "--tcp-close`");
  }
  Phases phases;
  // Each takes some 20 ms: one asks a criu process, the other starts NVML.
  auto search = in_background([&] { return Criu::find(options.criu_path); });
  auto gpus = env.driver.gpus();
  STASIS_TRY_ASSIGN(auto criu, search.get());
  if (!gpus) return fail(std::move(gpus.error()));
  const auto no_directory = [](Error error) {
    if (error.remedy.empty())
      error.remedy = "name a directory whose parent exists and may be written";
    return fail(std::move(error));
  };
  auto path = ImageWriter::look(options.images_dir, options.overwrite);
  if (!path) return no_directory(std::move(path.error()));
  if (options.base) phases.begin("base");
  auto base = open_base(env, options);
  phases.end();
  if (!base) return fail(std::move(base.error()));
  // A base that cannot be opened has been told of.
  const bool tell_of_base = options.base && !options.base_may_be_empty &&
                            (*base != nullptr || !may_take_over(env, options));
  STASIS_TRY(refuse_from_within(root));
  std::optional<ImageWriter> writer;  // before the group, which may need what it has written
  STASIS_TRY_ASSIGN(auto opened, open_group(env, "dump", root, *path, options.job.has_value()));
  STASIS_TRY(refuse_obstacles(env, opened, options.ignore_obstacles));
  Group& group = opened.group;
  const auto undo = [&](Error why) {
    Error error = roll_back(env, opened, std::move(why));
    // The half of an image, and all there is of somebody's memory: for `stasis recover`.
    if (writer) writer->hold(opened.direct.needs_image());
    return fail(std::move(error));
  };
  auto whole = check_content(group, fmt::format("`stasis resume {}`", root.value));
  if (!whole) return undo(std::move(whole.error()));
  if (const auto needs = who_needs(*path)) {
    return undo(
        {ErrorCode::kBusy,
         fmt::format("{} has the memory of process {}, which is suspended", *path, needs->value),
         fmt::format("resume that one first (`stasis resume {}`), or dump to another "
                     "directory",
                     needs->value)});
  }
  // After the journal, which says where to find the half of it if we are killed.
  auto created = ImageWriter::create(options.images_dir, options.overwrite);
  if (!created) return no_directory(undo(std::move(created.error())).value());
  writer.emplace(std::move(*created));
  if (auto fits =
          check_disk_space(env, group, writer->criu_dir(), writer->final_path(), base->get());
      !fits) {
    return undo(std::move(fits.error()));
  }
  CriuOptions criu_options = options.criu;
  if (!criu_options.shell_job && proc::is_shell_job(group.infos())) {
    criu_options.shell_job = true;
    env.tell("the job hangs on a terminal or session of somebody else: --shell-job is set");
  }

  // What cannot be dumped is refused before anything is touched.
  auto dumpable = refuse_undumpable(env, group.members(), criu_options, options);
  if (!dumpable) return undo(std::move(dumpable.error()));
  auto inherited = find_inherited_files(proc::ProcFs(), group.members(),
                                        env.driver.info().simulated, options.ignore_obstacles);
  if (!inherited) return undo(std::move(inherited.error()));
  const SyncPolicy sync = when_to_sync(options, *writer);
  // One that stays suspended keeps its memory's content itself: nobody has to keep the image for
  // it.
  const IntoImage into_image{
      writer->dir(),
      {options.compression, past_the_cache(options), sync, kContentChunk, std::move(*base)}};
  // Also should an exception end us.
  writer->hold(true);
  auto done = opened.direct.come_back(env);
  if (!done) return undo(std::move(done.error()));
  Manifest manifest = describe(env, group, criu, criu_options, *gpus);
  std::uint64_t direct_bytes = 0;
  std::vector<GpuUse> needed;
  std::optional<ImageWatcher> watcher;
  bool asked_in_vain = false;
  AskedStates answers;
  // CRIU has started by then, and waits for it: until it has tried the kernel out the job runs.
  const auto stop = [&]() -> Result<void> {
    auto stopped = quiesce(env, opened,
                           {options.timeout, options.ignore_obstacles, true, options.path,
                            options.after == AfterDump::kSuspended ? nullptr : &into_image,
                            options.after == AfterDump::kRunning},
                           phases);
    asked_in_vain = !stopped;
    // Also of those whom the driver has by then, if that was not all of them.
    needed = use_of(group);
    if (!stopped) return stopped;
    answers = ask_processes(root);
    if (!options.ignore_undumpable) {
      if (auto none = refuse_domains(answers); !none) return none;
    }
    direct_bytes = opened.direct.bytes();
    writer->hold(opened.direct.needs_image());
    phases.begin("criu");
    if (const ContentRecord* content = opened.direct.content()) {
      manifest.content = *content;
    } else {
      if (options.compression != ContentCompression::kNone)
        env.tell("nothing is compressed: no GPU memory of the job is moved past the driver");
      if (tell_of_base)
        env.tell(
            fmt::format("nothing is taken over from {}: no GPU memory of the job goes into "
                        "the image past the driver",
                        *options.base));
    }
    watcher.emplace(env.progress, *writer, sync);
    return {};
  };
  const auto seal = [&](const Interrupt& interrupt) -> Result<void> {
    STASIS_TRY_ASSIGN(auto sealed,
                      writer->seal(std::move(manifest), sync, env.progress, interrupt));
    manifest = std::move(sealed);
    return fault(FaultPoint::kDumpComplete);
  };
  bool complete = false;
  KeepReport kept_files;
  // A program that runs on has its files by their own names.
  ScopeGuard forget_links([&] { remove_links(kept_files.links); });
  // CRIU has written all it has to, and the tree stands as it is in the image.
  const auto written = [&]() -> Result<void> {
    watcher.reset();
    phases.end();
    STASIS_TRY_ASSIGN(auto processes, take_stock(group));
    manifest.processes = std::move(processes);
    read_kernel_state(group.root(), manifest.processes);
    auto lost = note_answers(answers, manifest.processes);
    if (has_terminal_data(writer->criu_dir()))
      lost.emplace_back(
          "what was not yet read of a terminal, as it was: it comes with other ends of lines, and "
          "with the echo once more");
    for (const ProcessRecord& process : manifest.processes) {
      if (auto mended = restart_calls(writer->criu_dir(), process.pid); !mended)
        return fail(std::move(mended.error()));
    }
    STASIS_TRY(refuse_tiles(writer->criu_dir(), manifest.processes));
    STASIS_TRY(note_sockets(env, manifest, lost));
    STASIS_TRY_ASSIGN(auto files,
                      keep_files(writer->criu_dir(),
                                 options.after == AfterDump::kRunning || options.job.has_value(),
                                 options.job.has_value()));
    kept_files = std::move(files);
    manifest.phases = phases.done();
    manifest.job = options.job;
    if (options.on_complete) {
      if (auto added = options.on_complete(writer->criu_dir()); !added) return added;
    }
    if (sync != SyncPolicy::kDeferred) {
      if (auto sealed = seal(env.interrupt); !sealed) return sealed;
    }
    phases.begin("finish");
    if (options.after == AfterDump::kKill) {
      if (auto noted = note_ending(opened); !noted) return noted;
    }
    STASIS_TRY(fault(FaultPoint::kDumpEnding));
    complete = true;
    return {};
  };
  const DumpRequest request{root,
                            writer->criu_dir(),
                            writer->log_dir(),
                            criu_options,
                            options.after != AfterDump::kKill,
                            writer->failed_log_path(),
                            std::chrono::milliseconds(0),
                            options.criu_log_level,
                            [&](Pid started) { return note_criu(*opened.journal, started); },
                            stop};
  phases.begin("criu start");
  auto dumped = criu.dump(request, written, env.interrupt);
  watcher.reset();
  fault_only(FaultPoint::kDumpFinish);
  if (!dumped) {
    // First the job, then the disk: removing a large image takes seconds.
    const Error why = dumped.error();
    opened.direct.make_room(env.driver, needed, {});
    auto back = group.roll_back();
    // CRIU died after it had the word to end the tree: the image may be all that is left of the
    // job.
    if (!complete || options.after != AfterDump::kKill || !anybody_ended(group, back.has_value())) {
      // The image is about to go, so nothing may say that it is all there is.
      if (!opened.journal->record().ending.empty()) (void)opened.journal->note_ending({});
      auto failed = fail(rolled_back(env, opened, std::move(dumped.error()), std::move(back)));
      writer->hold(opened.direct.needs_image());
      (void)writer->discard();
      // Nothing went wrong in CRIU, so nobody wants its log.
      if (why.code == ErrorCode::kInterrupted || asked_in_vain)
        (void)::unlink(writer->failed_log_path().c_str());
      return failed;
    }
    forget_links.dismiss();
    env.tell("the image is complete, though CRIU came to a bad end: " + why.message);
    for (const GroupMember& member : group.members())
      (void)member.process.pidfd().signal(SIGKILL);
  }

  // CRIU has ended the tree, and the image is complete; or it lets the tree go on.
  if (options.after == AfterDump::kKill) forget_links.dismiss();
  const auto commit = [&] {
    if (auto committed = writer->commit(); !committed) env.tell(committed.error().to_string());
    fault_only(FaultPoint::kImageCommitted);
  };
  if (sync != SyncPolicy::kDeferred) commit();
  DumpReport report;
  report.standstill = phases.standstill();
  if (options.after == AfterDump::kKill) {
    opened.direct.dismiss();
    if (auto gone = wait_until_gone(group); !gone) {
      group.dismiss();
      return fail(std::move(gone.error()));
    }

    group.dismiss();
    for (const GroupMember& member : group.members())
      forget_suspended(member.process);
  } else if (options.after == AfterDump::kRunning) {
    opened.direct.make_room(env.driver, needed, {});
    auto back = group.roll_back();
    if (back)
      back = go_on_with_memory(env, opened, phases);
    else
      opened.direct.dismiss();
    // Whoever has no more time for a job is not to lose its newest image for that.
    const Interrupt nobody;
    const Interrupt& interrupt = options.job ? nobody : env.interrupt;
    if (!back) {
      auto kept = sync == SyncPolicy::kDeferred ? seal(nobody) : Result<void>();
      if (kept && sync == SyncPolicy::kDeferred) commit();
      // Who has ended needs nothing.
      if (back.error().code == ErrorCode::kProcessGone && nobody_is_left(group))
        opened.journal->finish();
      return fail(std::move(back.error())
                      .within(kept ? "the image " + writer->final_path() + " is complete"
                                   : kept.error().to_string()));
    }
    report.standstill = phases.standstill();
    if (sync == SyncPolicy::kDeferred) {
      phases.end();
      writer->hold(false);
      auto kept = seal(interrupt);
      // Nothing is left to be mended, and the next one need not wait for the disk.
      opened.journal->finish();
      phases.begin("sync");
      if (kept) kept = writer->sync(env.progress, interrupt);
      if (!kept) {
        (void)writer->discard();
        return fail(std::move(kept.error()).within("the job runs on, and has no image"));
      }
      commit();
    }
  } else {
    group.dismiss();
    opened.direct.dismiss();
    remember_suspended(group);
    if (auto kept = verify_states(group, CudaState::kCheckpointed); !kept) {
      return fail(
          std::move(kept.error()).within("the image " + writer->final_path() + " is complete"));
    }
  }
  if (sync != SyncPolicy::kDeferred) opened.journal->finish();
  phases.end();
  report.root = root;
  report.processes = report_processes(group);
  report.total = phases.total();
  report.lock_tries = group.lock_tries();
  report.direct_bytes = direct_bytes;
  report.dropped_zero_bytes = group.dropped_zero_bytes();
  report.phases = manifest.phases;
  // What came after the manifest was written.
  const auto& done_since = phases.done();
  report.phases.insert(
      report.phases.end(),
      std::find_if(done_since.begin(), done_since.end(),
                   [](const PhaseRecord& phase) { return phase.name == "finish"; }),
      done_since.end());
  if (manifest.sockets) report.lost = manifest.sockets->lost;
  report.lost.insert(report.lost.end(), kept_files.lost.begin(), kept_files.lost.end());
  tell_of_lost(env, report.lost, "the image does not hold");
  report.images_dir = writer->final_path();
  report.image_bytes = manifest.total_bytes;
  report.written_bytes =
      manifest.total_bytes - (manifest.content ? manifest.content->taken_bytes() : 0);
  report.taken_bytes = opened.direct.taken_bytes();
  report.direct_io = opened.direct.direct_io();
  return report;
}

}  // namespace stasis
