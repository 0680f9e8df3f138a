#include "checkpoint/inherited_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "proc/parking.h"
#include "proc/remote_syscall.h"

namespace stasis {
namespace {

using proc::ProcFs;
using proc::StoppedThreads;

// linux/kcmp.h: are two descriptors one open file; do two processes share their memory, or their
// table of descriptors?
constexpr long kKcmpFile = 0;
constexpr long kKcmpMemory = 1;
constexpr long kKcmpFiles = 2;
// linux/eventfd.h and sys/eventfd.h name the same numbers.
constexpr std::uint64_t kEventfdFlags = O_CLOEXEC | O_NONBLOCK;

// Containers may forbid kcmp, and kernels may lack it.
Result<void> can_compare_files() {
  const pid_t self = ::getpid();
  if (::syscall(SYS_kcmp, self, self, kKcmpMemory, 0, 0) == 0) return {};
  return fail(
      refusal({"gpu-files",
               Severity::kRed,
               {},
               fmt::format("the kernel does not tell whose device files a process has: kcmp: {}",
                           std::generic_category().message(errno)),
               "in a container, allow the system call kcmp (CAP_SYS_PTRACE does for most); the "
               "kernel needs CONFIG_KCMP, as CRIU does"}));
}

bool same_file(Pid a, int descriptor_a, Pid b, int descriptor_b) {
  return ::syscall(SYS_kcmp, a.value, b.value, kKcmpFile, descriptor_a, descriptor_b) == 0;
}

struct Owner {
  Pid pid;
  std::vector<int> descriptors;
};

// What is replaced in such a process goes from the owner as well: one between vfork() and exec, or
// made by clone() with CLONE_VM or CLONE_FILES. "Cannot tell" counts as yes.
bool shares_with_owner(const std::vector<Owner>& owners, Pid pid) {
  return std::any_of(owners.begin(), owners.end(), [&](const Owner& owner) {
    return ::syscall(SYS_kcmp, owner.pid.value, pid.value, kKcmpMemory, 0, 0) <= 0 ||
           ::syscall(SYS_kcmp, owner.pid.value, pid.value, kKcmpFiles, 0, 0) <= 0;
  });
}

bool is_owned(const std::vector<Owner>& owners, Pid pid, int descriptor) {
  return std::any_of(owners.begin(), owners.end(), [&](const Owner& owner) {
    // Mostly under the same number.
    if (same_file(owner.pid, descriptor, pid, descriptor)) return true;
    return std::any_of(owner.descriptors.begin(), owner.descriptors.end(),
                       [&](int other) { return same_file(owner.pid, other, pid, descriptor); });
  });
}

std::vector<int> driver_descriptors(const ProcFs& procfs, Pid pid, bool simulated) {
  std::vector<int> out;
  if (auto files = procfs.open_files(pid)) {
    for (const proc::OpenFile& file : *files) {
      if (is_drivers_file(file.path, simulated)) out.push_back(file.descriptor);
    }
  }
  return out;
}

std::uint64_t protection(std::string_view permissions) {
  std::uint64_t out = PROT_NONE;
  if (permissions[0] == 'r') out |= PROT_READ;
  if (permissions[1] == 'w') out |= PROT_WRITE;
  if (permissions[2] == 'x') out |= PROT_EXEC;
  return out;
}

Error refused(Pid pid, std::string_view what, std::int64_t result) {
  return refusal(
      {"gpu-files", Severity::kRed, pid,
       fmt::format("process {} cannot {}, to let go of the GPU's files that it has from "
                   "the process that forked it: {}",
                   pid.value, what, std::generic_category().message(static_cast<int>(-result))),
       "see whether a seccomp filter of the process forbids it; processes that are started "
       "anew (multiprocessing's \"spawn\" or \"forkserver\") have no such files"});
}

Result<void> replace(const proc::AddressSpace& space, const InheritedFiles& files,
                     const StoppedThreads& stopped, const RemoteCallRoom& places) {
  const Pid pid = files.process.pid;
  return make_system_calls(space, stopped, places, [&](const SystemCall& call) -> Result<void> {
    const auto make = [&](std::string_view what, std::uint64_t number,
                          const std::array<std::uint64_t, 6>& arguments) -> Result<std::int64_t> {
      auto result = call(number, arguments);
      if (result && *result < 0) return fail(refused(pid, what, *result));
      return result;
    };
    STASIS_TRY(fault(FaultPoint::kReplaceStep));
    // The first makes room for what replaces it, should all numbers be taken.
    for (std::size_t i = 0; i < files.descriptors.size(); ++i) {
      const auto old = static_cast<std::uint64_t>(files.descriptors[i]);
      STASIS_TRY(make("close a file", SYS_close, {old}));
      if (i == 0) {
        STASIS_TRY(fault(FaultPoint::kReplaceClosed));
      }
      STASIS_TRY_ASSIGN(auto fresh, make("open an eventfd", SYS_eventfd2, {0, kEventfdFlags}));
      const auto number = static_cast<std::uint64_t>(fresh);
      if (number != old) {
        auto moved = make("move a file", SYS_dup3, {number, old, O_CLOEXEC});
        if (moved) moved = make("close a file", SYS_close, {number});
        STASIS_TRY(std::move(moved));
      }
      if (i > 0) continue;
      STASIS_TRY(fault(FaultPoint::kReplaceFile));
    }
    for (const proc::Mapping& mapping : files.mappings) {
      auto mapped =
          make("map memory", SYS_mmap,
               {mapping.start, mapping.end - mapping.start, protection(mapping.permissions),
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, ~0ULL, 0});
      STASIS_TRY(std::move(mapped));
      if (&mapping != &files.mappings.front()) continue;
      STASIS_TRY(fault(FaultPoint::kReplaceMapped));
    }
    return {};
  });
}

// What was found may have changed since: only what is still the driver's is replaced.
Result<void> replace_now(const proc::AddressSpace& space, const InheritedFiles& found,
                         const StoppedThreads& stopped) {
  const ProcFs procfs;
  const Pid pid = found.process.pid;
  if (stopped.threads().empty()) return {};
  STASIS_TRY_ASSIGN(const auto mappings, procfs.mappings(pid));
  STASIS_TRY_ASSIGN(const auto open, procfs.open_files(pid));
  RemoteCallRoom places;
  InheritedFiles now{found.process, {}, {}, found.simulated};
  for (const proc::Mapping& mapping : mappings) {
    places.probe(space, mapping);
    const bool listed =
        std::any_of(found.mappings.begin(), found.mappings.end(), [&](const auto& m) {
          return m.start == mapping.start && m.end == mapping.end && m.path == mapping.path;
        });
    if (listed) now.mappings.push_back(mapping);
  }
  for (const proc::OpenFile& file : open) {
    const bool listed = std::find(found.descriptors.begin(), found.descriptors.end(),
                                  file.descriptor) != found.descriptors.end();
    if (listed && is_drivers_file(file.path, found.simulated))
      now.descriptors.push_back(file.descriptor);
  }
  if (places.begun) {
    STASIS_TRY(finish_remote_call(space, stopped, *places.begun));
    places.room = places.begun->address;
  }
  if (now.descriptors.empty() && now.mappings.empty()) return {};
  return replace(space, now, stopped, places);
}

Result<void> replace_in(const InheritedFiles& files) {
  const Pid pid = files.process.pid;
  auto done = trace_on_own_thread([&]() -> Result<void> {
    const auto space = proc::AddressSpace::open(pid);
    if (!space) return fail(Error(space.error()));
    STASIS_TRY_ASSIGN(auto stopped, StoppedThreads::stop(*space, [](Tid) { return true; }));
    const auto now = ProcFs().process(pid);
    if (!now || now->id() != files.process.id()) return {};
    return between(FaultPoint::kReplaceBefore, FaultPoint::kReplaceAfter,
                   [&] { return replace_now(*space, files, stopped); });
  });
  if (done) return done;
  const ErrorCode code = done.error().code;
  if (code == ErrorCode::kProcessGone || code == ErrorCode::kNoSuchProcess) return {};
  if (finish_remote_call(pid)) return done;
  Error error = std::move(done.error());
  error.remedy +=
      fmt::format("; one of its threads is still held: run `stasis recover {}`", pid.value);
  return fail(std::move(error));
}

}  // namespace

bool is_drivers_file(std::string_view path, bool simulated) {
  constexpr std::string_view kDeleted = " (deleted)";
  if (path.ends_with(kDeleted)) path.remove_suffix(kDeleted.size());
  // The simulated driver's stand-ins: something that CRIU cannot dump, and something to map.
  if (simulated && (path == "anon_inode:[userfaultfd]" || path == "anon_inode:[landlock-ruleset]" ||
                    path == "anon_inode:[perf_event]" || path == "/memfd:nvidiactl")) {
    return true;
  }
  return path.find("/dev/nvidia") != std::string_view::npos;  // somewhere, in a chroot
}

Result<std::vector<InheritedFiles>> find_inherited_files(const ProcFs& procfs,
                                                         const std::vector<TreeMember>& members,
                                                         bool simulated, bool ignore) {
  std::vector<Owner> owners;
  for (const TreeMember& member : members) {
    if (!member.initial || !member.process.alive()) continue;
    const Pid pid = member.process.pid();
    owners.push_back({pid, driver_descriptors(procfs, pid, simulated)});
  }
  std::vector<InheritedFiles> out;
  for (const TreeMember& member : members) {
    if (member.initial) continue;
    const Pid pid = member.process.pid();
    InheritedFiles files{
        member.process.info(), driver_descriptors(procfs, pid, simulated), {}, simulated};
    if (auto mappings = procfs.mappings(pid)) {
      for (proc::Mapping& mapping : *mappings) {
        if (is_drivers_file(mapping.path, simulated) && mapping.permissions.ends_with('s')) {
          files.mappings.push_back(std::move(mapping));
        }
      }
    }
    if (files.descriptors.empty() && files.mappings.empty()) continue;
    if (auto able = can_compare_files(); !able) {
      if (ignore) continue;
      return fail(std::move(able.error()));
    }
    if (shares_with_owner(owners, pid)) continue;
    const bool all_inherited = std::all_of(files.descriptors.begin(), files.descriptors.end(),
                                           [&](int fd) { return is_owned(owners, pid, fd); });
    if (all_inherited) {
      out.push_back(std::move(files));
    } else if (driver_descriptors(procfs, pid, simulated).empty()) {
      continue;  // it has ended since, or has just closed them
    } else if (!ignore) {
      return fail(refusal(
          {"gpu-files", Severity::kRed, pid,
           fmt::format("process {} ({}) does not use CUDA and has the GPU's device files open, "
                       "which CRIU cannot dump: it watches the GPU (NVML), or was forked from a "
                       "process with CUDA that another tool has suspended",
                       pid.value, member.process.info().comm),
           "end what watches the GPU, or see whether the program can start its workers anew "
           "(multiprocessing's \"spawn\"); use `stasis suspend` instead of the other tool"}));
    }
  }
  return out;
}

Result<void> replace_inherited_files(std::span<const InheritedFiles> found, Journal* journal) {
  if (found.empty()) return {};
  if (journal != nullptr) {
    std::vector<ProcessId> processes;
    for (const InheritedFiles& files : found)
      processes.push_back(files.process.id());
    STASIS_TRY(journal->note_remote_calls(std::move(processes)));
  }
  Result<void> first;
  for (const InheritedFiles& files : found) {
    if (auto done = replace_in(files); !done && first) first = std::move(done);
  }
  return first;
}

}  // namespace stasis
