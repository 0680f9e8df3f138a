// Room: in memory, on the disk, and for our own records.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fd.h"
#include "base/units.h"
#include "checkpoint/journal.h"
#include "checkpoint/state_file.h"
#include "doctor/machine_parts.h"
#include "proc/memory_cgroup.h"
#include "proc/procfs.h"

namespace stasis::doctor {
namespace {

constexpr std::uint64_t kMiB = 1U << 20;
constexpr std::uint64_t kHostPart = 1U << 30;  // what a CUDA program has besides, at least
constexpr std::uint64_t kFullDisk = 64 * kMiB;
constexpr std::uint64_t kTrial = 64 * kMiB;

std::string parent_of(std::string path) {
  while (path.size() > 1 && path.back() == '/')
    path.pop_back();
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return path.substr(0, std::max<std::size_t>(slash, 1));
}

// The directory or the nearest one above it that is there.
Result<std::string> nearest_existing(std::string path) {
  for (;;) {
    while (path.size() > 1 && path.back() == '/')
      path.pop_back();
    struct stat info {};
    if (::stat(path.c_str(), &info) == 0) {
      if (S_ISDIR(info.st_mode)) return path;
      return fail(ErrorCode::kIo, fmt::format("{} is no directory", path),
                  "name a directory for images");
    }
    if (errno != ENOENT) return fail(errno_error("cannot stat " + path, errno));
    path = parent_of(std::move(path));
  }
}

// A file without a name: it goes away with its descriptor, however we end.
Result<UniqueFd> unnamed_file(const std::string& directory) {
  auto file = open_file(AT_FDCWD, directory, O_TMPFILE | O_WRONLY, 0600);
  if (file) return file;
  std::string path = directory + "/.stasis-doctor-XXXXXX";
  UniqueFd made(::mkostemp(path.data(), O_CLOEXEC));
  if (!made.valid()) return fail(errno_error("cannot write to " + directory, errno));
  ::unlink(path.c_str());
  return made;
}

// How long the disk takes for kTrial bytes. kInterrupted, kNoSpace, kIo.
Result<Seconds> time_writing(const UniqueFd& file, const std::string& directory,
                             const Interrupt& interrupt) {
  // Nothing that a file system could compress.
  std::vector<std::uint64_t> noise(4 * kMiB / sizeof(std::uint64_t));
  std::uint64_t state = 0x9e3779b97f4a7c15;
  for (std::uint64_t& word : noise) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    word = state;
  }
  const std::size_t size = noise.size() * sizeof noise[0];
  const auto start = Clock::now();
  for (std::uint64_t done = 0; done < kTrial; done += size) {
    STASIS_TRY(interrupt.check());
    STASIS_TRY(write_all(file.get(), reinterpret_cast<const char*>(noise.data()), size, directory));
  }
  if (::fdatasync(file.get()) != 0)
    return fail(errno_error("cannot write to the disk of " + directory, errno));
  return since(start);
}

constexpr const char* kElsewhere = "choose another directory for images";

struct Disk {
  std::string place;  // the folder on it that is there
  UniqueFd file;      // a new one
  std::optional<std::uint64_t> free;
};

// Where an image would be made in `directory`.
Result<Disk> find_disk(const std::string& directory) {
  STASIS_TRY_ASSIGN(auto place, nearest_existing(directory));
  // A dump, and a job, make the last folder of the path alone.
  const std::string parent = parent_of(directory);
  struct stat above {};
  if (::stat(parent.c_str(), &above) != 0) {
    return fail(ErrorCode::kIo,
                fmt::format("{} does not exist, and a dump does not make it", parent),
                fmt::format("make it (`mkdir -p {}`), or {}", parent, kElsewhere));
  }
  struct statvfs info {};
  if (::statvfs(place.c_str(), &info) != 0) return fail(errno_error("cannot stat " + place, errno));
  STASIS_TRY_ASSIGN(auto file, unnamed_file(place));
  Disk disk{std::move(place), std::move(file), {}};
  // One that has no blocks does not say (ramfs, a tmpfs without a limit).
  if (info.f_blocks != 0) disk.free = static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
  return disk;
}

}  // namespace

void probe_disk(const std::string& directory, std::uint64_t gpu_bytes, const Interrupt& interrupt,
                Obstacles& out) {
  constexpr ObstacleId kId = "disk";
  const auto disk = find_disk(directory);
  if (!disk) {
    out.push_back(from_error(Severity::kRed, kId, disk.error(), kElsewhere));
    return;
  }
  const std::uint64_t free = disk->free.value_or(UINT64_MAX);
  const std::uint64_t needed = gpu_bytes + kHostPart;
  std::string what = disk->free ? fmt::format("{} free in {}", format_bytes(free), disk->place)
                                : fmt::format("{} does not say how much is free", disk->place);
  constexpr const char* kMakeRoom = "free some space, or choose a directory on another file system";
  if (free < kFullDisk) {
    out.push_back(red(kId,
                      fmt::format("{}, and an image needs {} at least", what,
                                  format_bytes(std::max(kFullDisk, gpu_bytes))),
                      kMakeRoom));
    return;
  }
  if (free > 2 * kTrial) {
    const auto time = time_writing(disk->file, disk->place, interrupt);
    if (!interrupt.check()) return;
    if (!time) {
      out.push_back(from_error(Severity::kRed, kId, time.error(), kElsewhere));
      return;
    }
    what += fmt::format(", written at {}", format_rate(kTrial, *time));
  }
  if (free < needed) {
    out.push_back(yellow(kId,
                         fmt::format("{}: {} are in use on the GPUs, and an image of all of it "
                                     "would not fit",
                                     what, format_bytes(gpu_bytes)),
                         kMakeRoom));
    return;
  }
  out.push_back(green(kId, what));
}

void probe_host_memory(const KernelFolders& folders, std::uint64_t gpu_bytes, Obstacles& out) {
  constexpr ObstacleId kId = "host-memory";
  const proc::ProcFs procfs(folders.proc);
  const auto available = procfs.memory_available();
  if (!available) {
    out.push_back(
        from_error(Severity::kYellow, kId, available.error(), "see that /proc is mounted"));
    return;
  }
  const std::uint64_t swap = procfs.swap_free().value_or(0);
  std::uint64_t free = *available + swap;
  std::string what = fmt::format("{} of memory free", format_bytes(*available));
  if (swap > 0) what += fmt::format(" and {} of swap", format_bytes(swap));
  // Suspended memory counts for the program's cgroup, which may be another one than ours.
  for (const auto& group : proc::memory_cgroups(Pid{static_cast<int>(::getpid())}, folders.proc)) {
    if (group.room(swap) >= free) continue;
    free = group.room(swap);
    what = fmt::format("{} of memory free within the limit of {} ({})", format_bytes(free),
                       format_bytes(group.limit), group.directory);
  }
  what += fmt::format("; {} in use on the GPUs", format_bytes(gpu_bytes));
  if (free < gpu_bytes) {
    out.push_back(yellow(kId, what + ": suspending everything at once would not fit",
                         "suspend or dump one job at a time, or make room: more memory, swap, or a "
                         "higher limit"));
    return;
  }
  out.push_back(green(kId, what));
}

void probe_shared_memory(const KernelFolders& folders, Obstacles& out) {
  const std::string path = folders.dev + "/shm";
  struct statfs info {};
  if (::statfs(path.c_str(), &info) != 0 || info.f_type != TMPFS_MAGIC) {
    out.push_back(yellow("shm",
                         path + " is no tmpfs: programs that use shared memory (NCCL, PyTorch's "
                                "loaders) do not start, or are restored without it",
                         "mount -t tmpfs tmpfs " + path));
    return;
  }
  const auto block = static_cast<std::uint64_t>(info.f_bsize);
  out.push_back(green("shm", fmt::format("{} of {} free in {}", format_bytes(info.f_bavail * block),
                                         format_bytes(info.f_blocks * block), path)));
}

void probe_state_directory(Obstacles& out) {
  constexpr ObstacleId kId = "state-directory";
  constexpr const char* kOther = "make it writable, or name another by STASIS_STATE_DIR";
  const auto directory = journal_directory();
  if (!directory) {
    out.push_back(from_error(Severity::kRed, kId, directory.error(), kOther));
    return;
  }
  if (const auto writable = check_writable(*directory); !writable) {
    out.push_back(from_error(Severity::kRed, kId, writable.error(), kOther));
    return;
  }
  const auto entries = read_journal();
  if (!entries) {
    out.push_back(from_error(Severity::kRed, kId, entries.error(), kOther));
    return;
  }
  std::vector<std::string> left;
  for (const JournalEntry& entry : *entries) {
    if (entry.under_way) continue;
    left.push_back(fmt::format("`{}` on process {}", command_name(entry.record.operation),
                               entry.record.root.value));
  }
  if (left.empty()) {
    out.push_back(green(kId, *directory + " can be written to, and nothing is left in it"));
    return;
  }
  out.push_back(yellow(kId,
                       fmt::format("operations were killed and left behind: {} ({})",
                                   fmt::join(left, ", "), *directory),
                       "`stasis ps` shows them; run `stasis recover --all`"));
}

}  // namespace stasis::doctor
