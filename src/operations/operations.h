// The whole procedures that a user asks for: suspend, resume, dump, restore, recover. Each checks
// everything it can before it touches a target, writes the journal before each step, and on every
// error brings each target back to the state it was in, or says exactly what is left and how to
// mend it.
//
// Blocking; one call per target at a time, which the journal enforces between processes too.
// Nothing here prints.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/cuda_state.h"
#include "base/ids.h"
#include "base/interrupt.h"
#include "base/operation.h"
#include "base/phases.h"
#include "base/progress.h"
#include "base/result.h"
#include "base/units.h"
#include "criu/criu.h"
#include "criu/criu_addresses.h"
#include "direct/environment.h"
#include "driver/driver.h"
#include "driver/gpu_map.h"
#include "image/content.h"
#include "image/content_writer.h"
#include "image/manifest.h"
#include "proc/process_id.h"

namespace stasis {

class GroupPart;
struct GroupPartOptions;

struct ProcessReport {
  Pid pid;
  std::string comm;
  bool cuda = false;
  std::optional<CudaState> state;  // at the end; nothing without CUDA, or if it has ended
  std::uint64_t gpu_bytes = 0;     // on the GPU before the checkpoint, 0 if unknown
};

struct Report {
  Pid root;
  std::vector<ProcessReport> processes;
  std::vector<PhaseRecord> phases;
  // What an image does not hold of the processes (dump), or could not be put back (restore), a
  // sentence each: "process 12 (descriptor 5): datagrams not yet read".
  std::vector<std::string> lost;
  Seconds total{0};
  // The downtime: from when the gate or the driver's lock closed to the end of the checkpoint, or
  // until the processes ran again, or were ended. None: they stood still already.
  std::optional<Seconds> downtime;
  // The processes were in the state that was asked for, and nothing was done.
  bool was_so = false;
  // Of processes that were suspended already: what moved their GPU memory then.
  std::optional<MemoryPath> moved_before;
  int lock_tries = 0;  // how often the processes were asked until all were locked; 0: no lock
  // Bytes of GPU memory that the mover has copied; the driver has copied the rest.
  std::uint64_t direct_bytes = 0;
};

// How the agent comes to programs that run without it (docs/adr/0053-attach.md).
struct AttachWay {
  std::shared_ptr<const UniqueFd> library;  // the agent's file, open
  // How the user consents, as what a program has made before cannot be seen: one of the two. With
  // neither the programs are watched for a moment, and refused whatever is seen.
  // They are watched for so long, a time in which each would launch all its CUDA graphs.
  std::optional<std::chrono::milliseconds> watch = {};
  // None of their graphs has a copy from or to the host in it: they are not watched.
  bool graphs_are_safe = false;
};

struct SuspendOptions {
  // For the lock; zero: no deadline.
  std::chrono::milliseconds timeout{10000};
  // Tell of what the driver would refuse or lose (checkpoint/driver_obstacles.h), and go on.
  bool ignore_obstacles = false;
  MemoryPath path = MemoryPath::kAutomatic;
  // Called once, when none of the processes has work on its GPU any more, and no process of ours
  // will make a context there: other programs may (direct/mover_server.h). GPU memory is copied
  // before the driver is asked then, not beside it: a caller that wants to know keeps the driver
  // busy meanwhile.
  std::function<void()> on_quiesced = {};
  // The agent is brought first to what runs without it; if it cannot be, that is the error.
  std::optional<AttachWay> attach = {};
  // Of a group of several nodes: all parts are suspended, or none. `timeout` is the group's then.
  GroupPart* part = nullptr;
};

// Locks and checkpoints every CUDA process of the tree: their GPU memory is free afterwards. Those
// that were suspended already stay so. kNotCuda if none of them uses CUDA.
Result<Report> suspend(const Environment& env, Pid root, const SuspendOptions& options);

struct ResumeOptions {
  std::vector<GpuMapEntry> gpu_map;  // in part or whole; empty: where they were
  // The image that has the content of their GPU memory, if it is not where it was, or if the record
  // of that is lost. Empty: it is where it was.
  std::string images_dir;
  // Of a group of several nodes: an error names the parts that were not resumed, also where this
  // one was.
  GroupPart* part = nullptr;
};

// Restores and unlocks every CUDA process of the tree that is suspended or locked. Fails before it
// touches any if the GPUs have not enough free memory.
Result<Report> resume(const Environment& env, Pid root, const ResumeOptions& options);

struct AttachOptions {
  AttachWay way;
  std::chrono::milliseconds timeout{10000};  // for the lock, and for each exchange
  bool ignore_obstacles = false;             // as with suspend
};

// What an agent did with the memory of its process.
struct AttachedProcess {
  struct Left {
    std::string why;  // "small", "shared-area", ...
    std::uint32_t count = 0;
    std::uint64_t bytes = 0;
  };
  Pid pid;
  std::string comm;
  bool was_so = false;  // it had an agent already
  std::uint32_t converted_count = 0;
  std::uint64_t converted_bytes = 0;
  std::vector<Left> left;  // with the driver, when the agent came
};

struct AttachReport : Report {
  std::vector<AttachedProcess> attached;
};

// Brings the agent to every CUDA process of the tree that runs without one, and what device memory
// can be had to the agent, at the same addresses (docs/adr/0053-attach.md). On an error every
// program runs on, but with kNotRolledBack, and agents that are in stay.
Result<AttachReport> attach_agents(const Environment& env, Pid root, const AttachOptions& options);

// The same before another operation, and tells what has come of it. Nothing where no process of the
// tree runs, or all have an agent. An error says that the driver can do the rest.
Result<void> attach_first(const Environment& env, Pid root, const AttachOptions& options,
                          Phases& phases);

// How a tree stands, as far as its CUDA processes go.
struct TreeStatus {
  std::size_t running = 0;
  std::size_t suspended = 0;
  std::size_t locked = 0;
  // One of those that run was held by the driver before, or that is unknown.
  bool held_before = false;
  // Is there room on the GPUs now for what the suspended ones get back, and for the contexts of two
  // movers? Nothing if it is unknown what they get back.
  std::optional<bool> fits;
};

// A probe, which changes nothing. kNotCuda if none of them uses CUDA, kNoSuchProcess,
// kNotPermitted.
Result<TreeStatus> probe(const Environment& env, Pid root);

enum class AfterDump { kKill, kRunning, kSuspended };

// By whom large host memory is moved.
enum class HostMemoryWay {
  kAutomatic,  // by us from a size on that is worth it
  kCriu,
  kParallel,  // by us, whatever there is
};

// Whether content is pre-copied while the job runs, so that only what has changed since is copied
// while it stands still.
enum class Precopy {
  kAutomatic,  // from a size on that is worth it
  kNever,
  kAlways,
};

struct DumpOptions {
  std::string images_dir;
  // A folder_id(): the image is written in that folder, and nowhere where the way to it may lead by
  // then. Empty: wherever it leads.
  std::string images_folder = {};
  bool overwrite = false;
  SyncPolicy sync = SyncPolicy::kDisk;
  AfterDump after = AfterDump::kKill;
  std::chrono::milliseconds timeout{10000};                    // for the lock
  ContentCompression compression = ContentCompression::kNone;  // of what the mover copies
  // Past the page cache, likewise. Unset: where it is not read back at once, and it has to reach
  // the disk (docs/adr/0018-content-store.md: three times as fast).
  std::optional<bool> direct_io = {};
  bool ignore_obstacles = false;  // as with suspend
  MemoryPath path = MemoryPath::kAutomatic;
  std::optional<AttachWay> attach = {};  // as with suspend
  HostMemoryWay host_memory = HostMemoryWay::kAutomatic;
  // Of a job that goes on: pre-copies host memory while it runs.
  Precopy precopy = Precopy::kAutomatic;
  bool ignore_undumpable = false;  // let CRIU try what doctor/criu_obstacles.h finds red
  // The job of which this is an image: for the manifest. It need not use CUDA, or not yet.
  std::optional<JobRecord> job;
  std::string job_name = {};  // of `stasis run --name`, for the manifest; empty: it has none
  // Called with the directory of CRIU's files when they are complete and every process still stands
  // still, to add more files. May be empty.
  std::function<Result<void>(const UniqueFd& criu_dir)> on_complete = {};
  // An earlier image of the same job, on the same file system: GPU memory that the mover copies and
  // that is there already is not written again. Where the base cannot serve, the dump says so and
  // writes all; with `base_may_be_empty` it says nothing of a base without GPU content.
  std::optional<std::string> base = {};
  bool base_may_be_empty = false;
  CriuOptions criu;
  std::optional<std::string> criu_path;
  int criu_log_level = 4;
  // Of a group of several nodes: all parts have a complete image, and then all end (or go on), or
  // none has. `timeout` is the group's then.
  GroupPart* part = nullptr;

  // GPUs compute digests, or copy while the program runs: a mover may be lost, and another be had.
  bool wants_spare_mover() const {
    return base || (after == AfterDump::kRunning && precopy != Precopy::kNever);
  }
};

struct DumpReport : Report {
  std::string images_dir;           // absolute
  std::uint64_t image_bytes = 0;    // of all its files
  std::uint64_t written_bytes = 0;  // of the files that are not an earlier image's too
  std::uint64_t reused_bytes = 0;   // of an earlier image's files, what is in use in this one
  // What was written before the job stood still, and is in the image.
  std::uint64_t precopied_bytes = 0;
  bool direct_io = false;  // GPU memory went past the page cache, all of it
  // Pages of zeros that the driver had saved, and that the image does not need.
  std::uint64_t dropped_zero_bytes = 0;
};

// Suspends the tree, writes it into `images_dir` through CRIU, and ends it (or lets it go on). It
// is not ended before the image is complete, and durable with SyncPolicy::kDisk.
Result<DumpReport> dump(const Environment& env, Pid root, const DumpOptions& options);

// GPUs that the user does not name: those of the same kind among what a scheduler has given us.
struct GpuChoice {
  std::optional<std::string> visible;  // CUDA_VISIBLE_DEVICES; not set: all
};

struct RestoreOptions {
  std::string images_dir;
  std::string images_folder = {};  // as with a dump: the image has to lie in it
  std::vector<GpuMapEntry> gpu_map;
  std::optional<GpuChoice> gpu_choice = {};  // instead of `gpu_map`
  bool leave_suspended = false;
  // The caller, which is the root's parent, ends while the tree goes on. Without: a root that has
  // asked for a signal at its parent's end (PR_SET_PDEATHSIG) gets it at the caller's.
  bool caller_ends = false;
  // And the job is none of the caller's process group, if it was one of a shell's.
  bool in_background = false;
  // No user has named this image: what it holds runs as this user only if it is this user's, or
  // root's.
  bool only_own = false;
  // Reads all of the image before anything is made, and not while it is needed.
  bool verify_first = false;
  std::vector<InheritedFd> inherit;
  // Called with the directory of CRIU's files, which are sound but for the pages, before CRIU is.
  // It has to put back what a job of `stasis run` had in /dev/shm; where it is empty such an image
  // is refused.
  std::function<Result<void>(const UniqueFd& criu_dir)> on_checked = {};
  // Called when every process stands complete and none runs yet; an error gives the restore up. May
  // be empty.
  std::function<Result<void>()> on_standing = {};
  // Options of CRIU besides those of the dump, which hold unless these say otherwise.
  std::vector<std::string> external;  // in the form of a restore: "mnt[name]:/path"
  bool tcp_close = false;
  bool ext_unix_sk = false;
  std::optional<CgroupMode> cgroups;
  std::optional<std::string> criu_path;
  int criu_log_level = 4;
  // What the sockets are bound to, and connected with, in the place of what they were.
  std::vector<AddressPair> addresses = {};
  // Of a group of several nodes, by part_of_image(): all parts are restored, or none.
  GroupPart* part = nullptr;
};

// As which part the image in `options` is restored; of `options`, what it says of connections and
// addresses counts. kUsage if it is an image of no group.
Result<GroupPartOptions> part_of_image(const RestoreOptions& options);

struct RestoreReport : Report {
  std::string images_dir;
  std::uint64_t image_bytes = 0;
  Pidfd root_fd;                          // a child of this process
  std::string job_name = {};              // the manifest's
  std::vector<std::string> command = {};  // of the root, as the manifest has it
};

// Checks the image and this machine, brings the tree back through CRIU, then its GPU state, and
// verifies the state of each CUDA process. On an error nothing of the tree is left, and the image
// is as it was.
Result<RestoreReport> restore(const Environment& env, const RestoreOptions& options);

struct InspectOptions {
  std::string images_dir;
  bool verify = false;               // read every byte, also the pages
  std::vector<GpuMapEntry> gpu_map;  // as a restore would be given
  std::optional<std::string> criu_path;
};

struct RestoreCheckInfo {
  std::string_view id;
  std::string_view meaning;  // what holds if it is fulfilled
};
inline constexpr RestoreCheckInfo kRestoreChecks[] = {
    {"driver", "the GPU driver fits"},
    {"criu", "CRIU is there"},
    {"gpus", "the GPUs fit and have room"},
    {"host-memory", "the machine has the memory"},
    {"process-numbers", "the process numbers are free"},
    {"tcp-ports", "the TCP ports are free"},
    {"addresses", "the addresses of its sockets are here"},
    {"open-files", "the files it had open are as they were"},
    {"files", "the files are all there and whole"},
    {"checksums", "every byte is as it was written"},
    {"permissions", "this user may restore"},
};

// One thing that a restore here needs.
struct RestoreCheck {
  std::string_view id;         // of kRestoreChecks
  std::optional<Error> error;  // none: it is fulfilled
};

// What the files of an image hold: "memory of process 12".
struct ImagePart {
  std::string what;
  std::uint64_t bytes = 0;
};

// The content of GPU or host memory in an image that is not in CRIU's files.
struct ContentReport {
  struct OfProcess {
    Pid pid;
    ContentUse use;
  };
  ContentKind kind = ContentKind::kGpu;
  ContentUse all;
  std::vector<OfProcess> processes;
  std::uint32_t chunk_bytes = 0;
  // Of the data files: what an earlier image had in them, and this one has no use for.
  std::uint64_t unused_bytes = 0;
};

// What a restore would find on this machine.
struct MachineFacts {
  std::string hostname;
  std::string kernel_release;
  std::string criu_version;    // empty if there is none that works
  std::string driver_version;  // empty if there is no driver, or it does not say
  int cuda_version = 0;        // 0 if there is no driver
  bool simulated = false;
};

struct ImageReport {
  MachineFacts here;
  std::string path;  // as ImageReader has it
  Manifest manifest;
  std::vector<ImagePart> parts;  // the largest first
  // Nothing also if it cannot be read: see `checks`.
  std::optional<ContentReport> content;
  std::optional<ContentReport> host_content;
  // Files outside of the image that a restore uses up; with any it can be restored only once.
  std::vector<std::string> used_up;
  // All, also behind one that failed; but of GPUs only the right driver can tell.
  std::vector<RestoreCheck> checks;
};

// What is in an image, and what stands in the way of a restore here, as far as that can be seen
// beforehand. Changes nothing. `env` may be missing
// where no driver could be loaded, for the reason `no_driver`. Fails if there is no image that can
// be read, or kInterrupted.
Result<ImageReport> inspect(const Environment* env, const Error& no_driver,
                            const InspectOptions& options, Progress& progress,
                            const Interrupt& interrupt);

struct VerifyReport {
  std::string path;  // absolute
  std::uint64_t bytes = 0;
  std::size_t files = 0;
  std::optional<ContentReport> content;
  std::optional<ContentReport> host_content;
  double seconds = 0;
};

// Reads an image to its last byte, with all processors, and needs neither driver nor CRIU. What is
// wrong is the error: kImageIncomplete, kImageCorrupt, kImageVersion, kIo; kInterrupted.
Result<VerifyReport> verify_image(const std::string& images_dir, Progress& progress,
                                  const Interrupt& interrupt);

struct RecoverReport {
  Pid root;
  // What was cut short; kNone if a PID was given and no record exists.
  RecordedOperation operation;
  std::string image;
  std::vector<ProcessReport> processes;  // empty if none lives any more
  // It was past the point of no return, with `image` complete: the rest of the tree was ended.
  bool finished = false;
  // Its processes live, and `image` is complete all the same: it is kept.
  bool image_kept = false;
  // Of a swap: how its two programs are now.
  std::string outcome = {};
  std::optional<Error> error;  // why it could not be recovered
  // With `error`: nothing is left half done, and its processes are as they were before the
  // operation.
  bool as_before = false;
  // All of its processes ran, no operation was cut short, and nothing was done.
  bool was_so = false;
};

// Makes every CUDA process of the tree run again, whatever state an interrupted operation, or
// another tool, has left it in. Of one that an operation on a larger tree has left so: all of that.
Result<RecoverReport> recover(const Environment& env, Pid pid);
// The same for the targets of every operation that was killed, by what the journal says; operations
// under way are left alone. A resume is finished; where it cannot be, its targets are suspended as
// before it, and its report says why. Other targets that were suspended before stay suspended.
Result<std::vector<RecoverReport>> recover_all(const Environment& env);
// The same for one record, of the operation that was killed on `root`; a resume is not finished but
// taken back: for a caller that decides what becomes of it. Nothing if there is none.
Result<std::optional<RecoverReport>> undo_cut_short(const Environment& env, Pid root);
// Waits for a tool that has been killed and has not gone yet. False if it has not been killed.
bool wait_for_killed(const Interrupt& interrupt, const ProcessId& owner);

}  // namespace stasis
