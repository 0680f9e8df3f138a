// Long because each check has the words of what is wrong and what to do.
#include "operations/restore_checks.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/nsfs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/listing.h"
#include "base/units.h"
#include "criu/criu.h"
#include "criu/criu_core.h"
#include "criu/criu_files.h"
#include "operations/foreign_links.h"
#include "operations/image_report.h"
#include "proc/capabilities.h"
#include "proc/memory_cgroup.h"
#include "proc/procfs.h"

namespace stasis {

namespace {

constexpr Seconds kReapTimeout{2};

}  // namespace

CudaState wanted_state(const ProcessRecord& record) {
  return record.cuda_state.value_or(CudaState::kRunning);
}

Result<std::vector<Gpu>> gpus_of(const Manifest& manifest) {
  std::vector<Gpu> out;
  for (const GpuRecord& record : manifest.gpus) {
    const auto uuid = GpuUuid::parse(record.uuid);
    if (!uuid) return fail(ErrorCode::kImageCorrupt, "the image names a GPU " + record.uuid);
    out.push_back({*uuid, record.name, record.pci_bus_id, record.total_memory, 0});
  }
  return out;
}

// Every uuid is one of the manifest's GPUs, which gpus_of() has judged.
std::vector<GpuUse> gpu_use_of(const ProcessRecord& record) {
  std::vector<GpuUse> uses;
  for (const GpuMemoryRecord& use : record.gpu_memory) {
    if (const auto uuid = GpuUuid::parse(use.gpu_uuid)) uses.push_back({*uuid, use.bytes});
  }
  return uses;
}

// The program has the driver's library mapped, so the very same version must be here.
Result<void> check_driver(const Driver& driver, const Manifest& manifest) {
  const DriverInfo& here = driver.info();
  if (here.simulated != manifest.simulated) {
    return fail(ErrorCode::kGpuMismatch,
                fmt::format("the image was made on a {} GPU and the driver here is {}",
                            manifest.simulated ? "simulated" : "real",
                            here.simulated ? "the simulated one" : "a real one"),
                "restore it with the driver it was made with (STASIS_LIBCUDA)");
  }
  if (here.cuda_version != manifest.cuda_version ||
      (!here.driver_version.empty() && !manifest.driver_version.empty() &&
       here.driver_version != manifest.driver_version)) {
    return fail(refusal(
        {"driver",
         Severity::kRed,
         {},
         fmt::format("the image was made with driver {} (CUDA {}) and this machine has {} ({})",
                     manifest.driver_version, manifest.cuda_version, here.driver_version,
                     here.cuda_version),
         "restore it on a machine with the same version of the driver"},
        ErrorCode::kDriverUnsupported));
  }
  return {};
}

namespace {

// Has the process started this one, as the shell of a script does, or `timeout`?
bool is_above(Pid pid) {
  const proc::ProcFs procfs;
  constexpr int kGenerations = 64;
  auto info = procfs.process(Pid{static_cast<int>(::getpid())});
  for (int i = 0; info && i < kGenerations; ++i) {
    if (info->parent == pid) return true;
    info = procfs.process(info->parent);
  }
  return false;
}

// It stays until the job ends: the namespace ends with it.
constexpr const char* kInANamespace = "`unshare --pid --fork --mount-proc stasis restore ...`";

Error no_number(std::string what, std::string remedy, ErrorCode code = ErrorCode::kPidInUse) {
  return refusal({"process-number", Severity::kRed, {}, std::move(what), std::move(remedy)}, code);
}

Error pid_in_use(const proc::ProcessInfo& user) {
  if (is_above(user.pid)) {
    return no_number(
        fmt::format("the image needs process number {}, which is in use by {}, by which this "
                    "stasis was started",
                    user.pid.value, user.comm),
        fmt::format("restore in a PID namespace of its own, which ends with the root: {}",
                    kInANamespace));
  }
  const bool zombie = user.has_ended();
  return no_number(
      fmt::format("the image needs process number {}, which is in use by {}{}", user.pid.value,
                  user.comm,
                  zombie ? fmt::format(": it has exited, and its parent {} has not waited for it",
                                       user.parent.value)
                         : ""),
      fmt::format("{}, or restore in a PID namespace of its own: {}",
                  zombie ? fmt::format("end process {}", user.parent.value)
                         : "is the job still running? end what uses the number",
                  kInANamespace));
}

// Another PID namespace would not help: there, too, we may have the number.
Error number_is_ours(const ImageReader& image, std::string_view whose) {
  const int highest =
      std::max(*image.manifest().numbers().rbegin(), highest_number(image.criu_dir()));
  // Not by another shell (`sh -c`), which could have the number itself.
  return no_number(
      fmt::format("the image needs {} number {}, which is the one of this process", whose,
                  ::getpid()),
      fmt::format("leave out --detach; or give the next program another number, in the very "
                  "shell that starts stasis: echo {} >/proc/sys/kernel/ns_last_pid",
                  highest));
}

// A process whose session, or whose group, has the number of a process of the image.
struct GroupMemberOf {
  proc::ProcessInfo process;
  int number = 0;
  const char* what = "";
};

// Such a number is given to no process, also while the last one of these has ended and was not
// waited for.
std::optional<GroupMemberOf> find_of_group(const proc::ProcFs& procfs,
                                           const std::set<int>& numbers) {
  const auto all = procfs.all();
  if (!all) return std::nullopt;
  for (const proc::ProcessInfo& info : *all) {
    if (numbers.contains(info.session)) return GroupMemberOf{info, info.session, "session"};
    const int group = ::getpgid(info.pid.value);
    if (numbers.contains(group)) return GroupMemberOf{info, group, "process group"};
  }
  return std::nullopt;
}

Error group_in_use(const GroupMemberOf& user) {
  const proc::ProcessInfo& process = user.process;
  const bool ended = process.has_ended();
  return no_number(
      fmt::format("the image needs process number {}, which is in use as that of the {} of "
                  "process {} ({}{})",
                  user.number, user.what, process.pid.value, process.comm,
                  ended ? ", which has exited and was not waited for" : ""),
      fmt::format("{} {}, or restore in a PID namespace of its own: {}",
                  ended ? "have its parent wait for it, process" : "end process",
                  ended ? process.parent.value : process.pid.value, kInANamespace));
}

Error thread_in_use(Tid thread, const std::string& who) {
  return no_number(
      fmt::format("the image needs thread number {}, which is in use: {}", thread.value, who),
      fmt::format("end what uses it, or restore in a PID namespace of its own: {}", kInANamespace));
}

// The kernel lets those choose numbers who have the right in the user namespace that the PID
// namespace belongs to.
Result<void> may_choose_numbers() {
  const auto numbers = open_file(AT_FDCWD, "/proc/self/ns/pid", O_RDONLY);
  if (!numbers) return {};
  const UniqueFd owner(::ioctl(numbers->get(), NS_GET_USERNS));
  if (owner.valid() || errno != EPERM) return {};
  return fail(
      no_number("the image needs its process numbers, which cannot be chosen here: this user "
                "namespace has no PID namespace of its own",
                "restore in one: unshare --user --map-root-user --pid --fork --mount-proc "
                "--kill-child stasis restore ...",
                ErrorCode::kNotPermitted));
}

// Those of the machine's own user namespace; one of its own is made anew with all of them.
Result<std::uint64_t> missing_capabilities(const ImageReader& image) {
  const auto& files = image.manifest().files;
  const bool own_namespace = std::any_of(files.begin(), files.end(), [](const FileRecord& file) {
    return file.path.starts_with("criu/userns-");
  });
  if (own_namespace) return 0;
  STASIS_TRY_ASSIGN(const auto ours, proc::ProcFs().permitted_capabilities());
  std::uint64_t needed = 0;
  for (const ProcessRecord& process : image.manifest().processes)
    needed |= permitted_capabilities(image.criu_dir(), Tid{process.pid.value}).value_or(0);
  return needed & ~ours;
}

}  // namespace

Result<void> check_rights(const ImageReader& image) {
  constexpr const char* kAsItsUser =
      ", or in a user namespace, as the user who started the job: unshare --user --map-root-user "
      "--pid --fork --mount-proc --kill-child stasis restore ...";
  if (auto may = Criu::may_restore(); !may) {
    may.error().remedy += kAsItsUser;
    for (Obstacle& obstacle : may.error().obstacles)
      obstacle.remedy = may.error().remedy;
    return may;
  }
  STASIS_TRY_ASSIGN(const auto missing, missing_capabilities(image));
  if (missing == 0) return {};
  return fail(refusal(
      {"permissions",
       Severity::kRed,
       {},
       fmt::format("the image's processes have capabilities that this user cannot give them: "
                   "{}",
                   proc::capability_names(missing)),
       fmt::format("restore with these (a container: --cap-add){}", kAsItsUser)},
      ErrorCode::kNotPermitted));
}

// A number is a thread's, or of a process that this user is not shown.
static bool is_of_another(const Error& why) {
  return why.code == ErrorCode::kThreadId || why.code == ErrorCode::kNotPermitted;
}

Result<void> check_numbers(const ImageReader& image) {
  const Manifest& manifest = image.manifest();
  STASIS_TRY(may_choose_numbers());
  const proc::ProcFs procfs;
  const auto start = Clock::now();
  for (const ProcessRecord& record : manifest.processes) {
    auto info = procfs.process(record.pid);
    // A dump has just ended the job, and those who have to wait for it come to it in a moment.
    while (info && info->has_ended() && since(start) < kReapTimeout) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      info = procfs.process(record.pid);
    }
    if (info && info->pid.value == ::getpid()) return fail(number_is_ours(image, "process"));
    if (info) return fail(pid_in_use(*info));
    if (info.error().code == ErrorCode::kNoSuchProcess) continue;
    if (!is_of_another(info.error())) return fail(std::move(info.error()));
    return fail(
        no_number(fmt::format("the image needs process number {}, which is in use: {}",
                              record.pid.value, info.error().message),
                  "restore in a PID namespace of its own: unshare --pid --fork --mount-proc stasis "
                  "restore ..."));
  }
  std::set<int> numbers;
  for (const ProcessRecord& record : manifest.processes)
    numbers.insert(record.pid.value);
  while (const auto user = find_of_group(procfs, numbers)) {
    if (!user->process.has_ended() || since(start) >= kReapTimeout)
      return fail(group_in_use(*user));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  // The threads of the processes above, which have gone, have gone with them.
  for (const ProcessRecord& record : manifest.processes) {
    for (const Tid thread : record.threads) {
      auto info = procfs.process(Pid{thread.value});
      if (info && info->pid.value == ::getpid()) return fail(number_is_ours(image, "thread"));
      if (info) return fail(thread_in_use(thread, "it is process " + info->comm));
      if (info.error().code == ErrorCode::kNoSuchProcess) continue;
      if (!is_of_another(info.error())) return fail(std::move(info.error()));
      return fail(thread_in_use(thread, info.error().message));
    }
  }
  return {};
}

namespace {

// Of the files that are outside: what a job had in its /dev/shm is in its images.
std::vector<NeededFile> files_from_outside(const ImageReader& image) {
  std::vector<NeededFile> files = needed_files(image.criu_dir());
  // A terminal is another one at each restore: CRIU, or who restores, makes it.
  std::erase_if(files, [](const NeededFile& file) { return file.path.starts_with("/dev/pts/"); });
  if (is_for_a_job(image.manifest())) {
    std::erase_if(files, [](const NeededFile& file) { return file.path.starts_with("/dev/shm/"); });
  }
  return files;
}

// By each of CRIU's names.
using KeptByName = std::map<std::string, const KeptFile*>;

KeptByName by_name(const std::vector<KeptFile>& all) {
  KeptByName names;
  for (const KeptFile& kept : all) {
    names.emplace(kept.path, &kept);
    for (const std::string& name : kept.links)
      names.emplace(name, &kept);
  }
  return names;
}

const KeptFile* kept_of(const KeptByName& names, const NeededFile& file) {
  const auto it = names.find(file.path);
  return it == names.end() ? nullptr : it->second;
}

// What a person can do about it.
enum class Remedy { kPutBack, kUsedUp, kNameTaken };

std::string remedy_text(Remedy remedy) {
  switch (remedy) {
    case Remedy::kUsedUp:
      return "CRIU keeps a file that has lost its name by another one (link_remap), which the "
             "first restore uses up, and which is gone where the job ran on after the dump: "
             "restore from another image";
    case Remedy::kNameTaken:
      return "end the program that has made the file, or remove it if none needs it: the restore "
             "then makes it again from the image";
    case Remedy::kPutBack:
      break;
  }
  return "put it back where it was, with the content and the mode that it had at the dump; if it "
         "was on a mount that is gone, mount that";
}

}  // namespace

Result<void> check_files(const ImageReader& image) {
  STASIS_TRY(refuse_foreign_links(image.criu_dir()));
  STASIS_TRY_ASSIGN(const auto all_kept, read_kept_files(image.criu_dir()));
  const KeptByName names = by_name(all_kept);
  std::vector<std::string> wrong;
  Remedy remedy = Remedy::kPutBack;
  for (const NeededFile& file : files_from_outside(image)) {
    const auto why = what_is_wrong(file);
    if (!why) continue;
    const KeptFile* kept = kept_of(names, file);
    if (kept != nullptr && how_to_put_back(*kept, file) != PutBack::kNothing) continue;
    if (kept != nullptr && kept->link && kept->content) {
      remedy = Remedy::kNameTaken;
      wrong.push_back(fmt::format("{} is another file", fmt::join(kept->names, ", ")));
      continue;
    }
    if (file.of_criu) remedy = Remedy::kUsedUp;
    wrong.push_back(fmt::format("{} {}", file.path, *why));
  }
  if (wrong.empty()) return {};
  std::sort(wrong.begin(), wrong.end());
  wrong.erase(std::unique(wrong.begin(), wrong.end()), wrong.end());
  return fail(ErrorCode::kCriuFailed, "what the job had open is not as it was: " + listed(wrong),
              remedy_text(remedy));
}

Result<std::vector<std::pair<KeptFile, PutBack>>> files_to_put_back(const ImageReader& image) {
  std::vector<std::pair<KeptFile, PutBack>> out;
  STASIS_TRY_ASSIGN(const auto all_kept, read_kept_files(image.criu_dir()));
  if (all_kept.empty()) return out;
  const KeptByName names = by_name(all_kept);
  std::map<std::string, PutBack> known;
  for (const NeededFile& file : files_from_outside(image)) {
    const KeptFile* kept = kept_of(names, file);
    if (kept == nullptr || known.contains(kept->path)) continue;
    const PutBack how = how_to_put_back(*kept, file);
    if (how == PutBack::kNothing) continue;
    known.emplace(kept->path, how);
    out.emplace_back(*kept, how);
  }
  return out;
}

std::vector<std::string> files_changed_for_good(const ImageReader& image) {
  const auto all_kept = read_kept_files(image.criu_dir());
  const KeptByName names = all_kept ? by_name(*all_kept) : KeptByName();
  std::set<std::string> out;
  for (const NeededFile& file : files_from_outside(image)) {
    const KeptFile* kept = kept_of(names, file);
    if (kept != nullptr && has_changed_for_good(*kept, file)) out.insert(file.path);
  }
  return {out.begin(), out.end()};
}

std::vector<std::string> files_used_up(const ImageReader& image) {
  const auto all_kept = read_kept_files(image.criu_dir());
  const KeptByName names = all_kept ? by_name(*all_kept) : KeptByName();
  std::vector<std::string> out;
  for (NeededFile& file : files_from_outside(image)) {
    const KeptFile* kept = kept_of(names, file);
    if (file.of_criu && (kept == nullptr || !kept->content)) out.push_back(std::move(file.path));
  }
  return out;
}

Result<void> check_owner(const ImageReader& image) {
  constexpr uid_t kSquashed = 65534;
  const uid_t ours = ::geteuid();
  const char* by = ours == 0 ? ::secure_getenv("SUDO_UID") : nullptr;
  for (const UniqueFd* folder : {&image.dir(), &image.criu_dir()}) {
    struct stat info {};
    struct statfs system {};
    if (::fstat(folder->get(), &info) != 0 || ::fstatfs(folder->get(), &system) != 0)
      return fail(errno_error("cannot stat " + image.path(), errno));
    const bool is_squashed =
        ours == 0 && info.st_uid == kSquashed && system.f_type == NFS_SUPER_MAGIC;
    const bool is_callers = by != nullptr && std::to_string(info.st_uid) == by;
    if (info.st_uid == ours || info.st_uid == 0 || is_squashed || is_callers) continue;
    return fail(
        ErrorCode::kNotPermitted,
        fmt::format("the image {} belongs to user {}, and what it holds would run as user "
                    "{}",
                    image.path(), info.st_uid, ours),
        fmt::format(
            "if you trust it, make it this user's (chown -R), or give the same line as user "
            "{} (setpriv --reuid {} ...); otherwise name a directory in which no other user "
            "can write",
            info.st_uid, info.st_uid));
  }
  return {};
}

Result<void> check_shared_memory(const ImageReader& image, const RestoreOptions& options) {
  if (options.on_checked || !is_for_a_job(image.manifest())) return {};
  const std::string& path = image.path();
  const std::string name = path.substr(path.rfind('/') + 1);
  const bool is_numbered = name.find_first_not_of("0123456789") == std::string::npos;
  return fail(
      ErrorCode::kUsage,
      fmt::format("{} is of a job of `stasis run --images-dir`, which has a /dev/shm of its own",
                  path),
      is_numbered && image.manifest().job
          ? fmt::format("give its directory, from whose newest image the job goes on: `stasis "
                        "restore {}`; or start `{}`, with --every and the like as before",
                        shell_word(path.substr(0, path.rfind('/'))),
                        line_of_job(image.manifest(), path))
          : "let it be DIR/000001, or have a greater number there, and start `stasis run "
            "--images-dir DIR` with the same command: it goes on from there");
}

// Not the sum of all pages: those that forked processes share with their parents are in the image
// several times, and CRIU shares them again.
std::uint64_t least_memory(const Manifest& manifest, std::uint64_t elsewhere,
                           std::uint64_t filled) {
  std::uint64_t largest = 0;
  std::uint64_t on_gpus = 0;
  for (const FileRecord& file : manifest.files)
    if (file.path.rfind("criu/pages-", 0) == 0) largest = std::max(largest, file.size);
  for (const ProcessRecord& record : manifest.processes)
    for (const GpuMemoryRecord& use : record.gpu_memory)
      on_gpus += use.bytes > kContextBytes ? use.bytes - kContextBytes : 0;
  return std::max(largest + filled, on_gpus - std::min(on_gpus, elsewhere));
}

Result<void> check_host_memory(const Manifest& manifest, std::uint64_t elsewhere,
                               bool in_our_cgroup, std::uint64_t ours, std::uint64_t filled) {
  const std::uint64_t needed = least_memory(manifest, elsewhere, filled);
  const proc::ProcFs procfs;
  const auto memory = procfs.memory_available();
  const auto swap = procfs.swap_free();
  if (memory && swap && needed > *memory + *swap) {
    return fail(refusal(
        {"host-memory",
         Severity::kRed,
         {},
         fmt::format("the processes have at least {} of memory, GPU memory included, and this host "
                     "has {} free",
                     format_bytes(needed), format_bytes(*memory + *swap)),
         "free some, or restore on a host with more"},
        ErrorCode::kOutOfHostMemory));
  }
  for (const proc::MemoryCgroup& group : proc::memory_cgroups(Pid{::getpid()})) {
    const std::uint64_t theirs = in_our_cgroup ? needed : 0;
    const std::uint64_t room = group.room(swap.value_or(0));
    if (theirs + ours <= room) continue;
    return fail(refusal(
        {"host-memory",
         Severity::kRed,
         {},
         fmt::format("the processes have at least {} of memory, GPU memory included{}, and the "
                     "memory limit of {} ({}) leaves {} free",
                     format_bytes(theirs),
                     ours == 0 ? "" : fmt::format(", to copy takes {}", format_bytes(ours)),
                     group.directory, format_bytes(group.limit), format_bytes(room)),
         ours == 0 ? "raise the limit, or restore from outside of that cgroup"
                   : "raise the limit, take less to copy through (--ring 16M), or restore from "
                     "outside of that cgroup"},
        ErrorCode::kOutOfHostMemory));
  }
  return {};
}

Result<GpuPlan> plan_gpus(const Environment& env, const Manifest& manifest,
                          std::span<const Gpu> from, const RestoreOptions& options) {
  STASIS_TRY_ASSIGN(auto to, env.driver.gpus());
  std::vector<GpuUse> needed;
  bool all_known = true;
  for (const ProcessRecord& record : manifest.processes) {
    if (!record.cuda || wanted_state(record) == CudaState::kCheckpointed) continue;
    const std::vector<GpuUse> uses = gpu_use_of(record);
    all_known = all_known && !uses.empty();
    needed.insert(needed.end(), uses.begin(), uses.end());
  }
  STASIS_TRY_ASSIGN(auto pairs,
                    options.gpu_choice
                        ? plan_chosen_gpus(env.driver, needed, from, to,
                                           allotted_gpus(options.gpu_choice->visible, to))
                        : plan_gpu_map(env.driver, options.gpu_map, from, to));
  if (options.leave_suspended) return GpuPlan{std::move(pairs), {}, {}};
  STASIS_TRY(check_gpu_memory(needed, pairs, to));
  // Without a word on what each of them needs, nothing is known to be left over.
  std::map<GpuUuid, std::uint64_t> room;
  if (all_known) room = spare_gpu_memory(needed, pairs, to);
  return GpuPlan{std::move(pairs), std::move(room), std::move(needed)};
}

}  // namespace stasis
