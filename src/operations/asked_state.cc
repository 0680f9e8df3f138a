// Long because each kind of state is asked, judged and set again beside the others, by the same
// calls.
#include "operations/asked_state.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/keyctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <functional>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/fd.h"
#include "base/processors.h"
#include "base/threads.h"
#include "base/units.h"
#include "image/manifest_format.h"
#include "proc/address_space.h"
#include "proc/bystander.h"
#include "proc/parking.h"
#include "proc/process_file.h"
#include "proc/procfs.h"
#include "proc/tiles.h"

namespace stasis {
namespace {

// linux/prctl.h and asm/prctl.h; Debian 12 has none of the first two and two of the last.
constexpr std::uint64_t kSetMdwe = 65;
constexpr std::uint64_t kGetMdwe = 66;
constexpr std::uint64_t kSetMemoryMerge = 67;
constexpr std::uint64_t kGetMemoryMerge = 68;
constexpr std::uint64_t kFutexHash = 78;                   // PR_FUTEX_HASH
constexpr std::uint64_t kSetFutexSlots = 1;                // PR_FUTEX_HASH_SET_SLOTS
constexpr std::uint64_t kGetFutexSlots = 2;                // PR_FUTEX_HASH_GET_SLOTS
constexpr std::uint64_t kExceptAdvised = 2;                // PR_THP_DISABLE_EXCEPT_ADVISED
constexpr std::uint64_t kGetStatePermission = 0x1022;      // ARCH_GET_XCOMP_PERM
constexpr std::uint64_t kRequestStatePermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr std::uint64_t kGetCpuid = 0x1011;                // ARCH_GET_CPUID

constexpr std::uint64_t kPage = 4096;
// Where in the page that the process maps for us the answers are.
constexpr std::uint64_t kPermissionAt = 8;
constexpr std::uint64_t kListAt = 16;
constexpr std::uint64_t kResidentAt = 64;
constexpr std::uint64_t kKeyAt = 128;
constexpr std::uint64_t kTableAt = 1024;
constexpr std::uint64_t kTableBytes = 2048;
// A process may have thousands of threads, and each is stopped for the question.
constexpr std::size_t kMostAskedThreads = 64;
// Of those that ask at the same time.
constexpr unsigned kMostAskers = 8;
// Of /proc/PID/smaps: of some 40,000 mappings.
constexpr std::size_t kMostLines = 1'000'000;

constexpr std::uint64_t word(long value) { return static_cast<std::uint64_t>(value); }

using Arguments = std::array<std::uint64_t, 6>;
// The answer of a system call; negative for an error, also where it could not be made.
using Ask = std::function<std::int64_t(std::uint64_t number, const Arguments& arguments)>;

// What every process may use without having asked.
std::uint64_t usual_permission() {
  std::uint64_t mask = 0;
  return ::syscall(SYS_arch_prctl, kGetStatePermission, &mask) == 0 ? mask : ~std::uint64_t{0};
}

// The session's, which a restored process has of the tool that restores it, counts only where it is
// another one than ours and holds more than what a login puts into it: the keyring of the user.
void note_keyrings(const Ask& ask, const proc::AddressSpace& space, std::uint64_t page,
                   std::vector<std::string>& lost) {
  const auto keyring = [&](int which) {
    return ask(SYS_keyctl, {KEYCTL_GET_KEYRING_ID, word(which), 0});
  };
  if (keyring(KEY_SPEC_THREAD_KEYRING) > 0)
    lost.emplace_back("the keys of its first thread (keyctl)");
  if (keyring(KEY_SPEC_PROCESS_KEYRING) > 0) lost.emplace_back("the keys of the process (keyctl)");
  const std::int64_t session = keyring(KEY_SPEC_SESSION_KEYRING);
  if (session <= 0 ||
      session == ::syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING, 0)) {
    return;
  }
  std::int32_t key = 0;
  const std::uint64_t at = page + kKeyAt;
  const std::int64_t bytes = ask(SYS_keyctl, {KEYCTL_READ, word(session), at, sizeof key});
  if (bytes == sizeof key) {
    std::array<char, 8> type{};
    constexpr std::string_view kKeyring = "keyring;";
    if (!space.read(at, &key, sizeof key) ||
        ask(SYS_keyctl, {KEYCTL_DESCRIBE, word(key), at, kPage - kKeyAt}) < 0 ||
        !space.read(at, type.data(), type.size()) ||
        std::string_view(type.data(), type.size()) == kKeyring) {
      return;
    }
  }
  if (bytes > 0) lost.emplace_back("the keys of its session (keyctl)");
}

void note_futex_table(const Ask& ask, Pid pid, AskedState& out) {
  const std::int64_t slots = ask(SYS_prctl, {kFutexHash, kGetFutexSlots});  // Linux 6.16
  if (slots < 0) return;
  const long processors = ::sysconf(_SC_NPROCESSORS_ONLN);
  const auto number = static_cast<std::uint64_t>(slots);
  if (may_be_kernels_choice(number, proc::ProcFs().threads(pid).size(),
                            static_cast<std::size_t>(std::max(processors, 1L))))
    return;
  if (number <= manifest_format::kMaxFutexSlots)
    out.state.futex_slots = static_cast<std::uint32_t>(number);
  else
    out.lost.push_back(fmt::format("the size of its futex table, {} (PR_FUTEX_HASH)", number));
}

// That a child was continued, and no wait(2) has told it yet: the kernel tells it to the parent
// alone, and leaves it as it is with WNOWAIT.
void note_continued(const Ask& ask, const proc::AddressSpace& space, std::uint64_t page,
                    std::vector<std::string>& lost) {
  const std::uint64_t at = page + kTableAt;
  siginfo_t info{};
  if (ask(SYS_waitid, {P_ALL, 0, at, WCONTINUED | WNOWAIT | WNOHANG, 0}) == 0 &&
      space.read(at, &info, sizeof info) && info.si_pid > 0)
    lost.push_back(fmt::format("that its child {} goes on again (wait with WCONTINUED)",
                               static_cast<int>(info.si_pid)));
}

// What is seldom used, and that CRIU 4.2.1 does not know.
void note_seldom_used(const Ask& ask, const proc::AddressSpace& space, std::uint64_t page,
                      std::vector<std::string>& lost) {
  int time_stamp = 0;
  if (ask(SYS_prctl, {PR_GET_TSC, page + kKeyAt}) == 0 &&
      space.read(page + kKeyAt, &time_stamp, sizeof time_stamp) && time_stamp == PR_TSC_SIGSEGV) {
    lost.emplace_back("the ban on reading the time stamp counter of its first thread (PR_SET_TSC)");
  }
  if (ask(SYS_arch_prctl, {kGetCpuid}) == 0)
    lost.emplace_back("the signal that CPUID raises in its first thread (ARCH_SET_CPUID)");
  std::array<std::uint64_t, kTableBytes / 8> table{};
  const std::int64_t bytes = ask(SYS_modify_ldt, {0, page + kTableAt, kTableBytes});
  if (bytes <= 0 || !space.read(page + kTableAt, table.data(), kTableBytes)) return;
  if (std::any_of(table.begin(), table.end(), [](std::uint64_t entry) { return entry != 0; }))
    lost.emplace_back(
        "its local descriptor table (modify_ldt): its 16-bit and 32-bit code fails "
        "without it");
}

// VmLck of /proc/PID/status.
std::uint64_t locked_bytes(Pid pid) {
  constexpr std::string_view kKey = "\nVmLck:";
  const auto status = read_file(AT_FDCWD, fmt::format("/proc/{}/status", pid.value));
  const std::size_t at = status ? status->find(kKey) : std::string::npos;
  if (at == std::string::npos) return 0;
  const std::size_t digit = status->find_first_of("0123456789", at);
  std::uint64_t number = 0;
  if (digit != std::string::npos)
    (void)std::from_chars(status->data() + digit, status->data() + status->size(), number);
  return number << 10;
}

// CRIU makes private memory that a parent has at the same address by fork(2), which takes the lock
// from the child's.
void lock_again(const Ask& ask, Pid pid, const OwnStateRecord& state,
                std::vector<std::string>& lost) {
  std::uint64_t wanted = 0;
  for (const LockedRecord& locked : state.locked)
    wanted += locked.size;
  if (locked_bytes(pid) >= wanted) return;
  // Of memory that nothing may read it says that there is none, and locks it.
  for (const LockedRecord& locked : state.locked)
    (void)ask(SYS_mlock, {locked.start, locked.size});
  const std::uint64_t now = locked_bytes(pid);
  if (now < wanted)
    lost.push_back(fmt::format("process {}: that {} of its memory are locked (mlock)", pid.value,
                               format_bytes(wanted - now)));
}

// The kernel looks at each page of a process before it tells that, so that only those are asked
// that have locked anything.
void note_locked(Pid pid, std::vector<LockedRecord>& locked, std::vector<std::string>& lost) {
  if (locked_bytes(pid) == 0) return;
  proc::ProcessText smaps(pid, "smaps");
  const std::uint64_t bytes = locked_and_not_there(smaps, locked);
  if (bytes == 0) return;
  lost.push_back(
      fmt::format("that {} of its locked memory takes none before it is used (MLOCK_ONFAULT): a "
                  "restore needs as much more memory",
                  format_bytes(bytes)));
}

// Of its threads: of whom a supervisor answers system calls, and who computes with AMX. Of the
// first one also whether its system calls become signals: asked_threads.h is of the others.
void note_threads(const proc::AddressSpace& space, AskedState& out) {
  std::vector<Tid> threads = proc::ProcFs().threads(space.pid());
  threads.resize(std::min(threads.size(), kMostAskedThreads));
  (void)trace_on_own_thread([&]() -> Result<void> {
    STASIS_TRY_ASSIGN(auto stopped, proc::StoppedThreads::stop(space, threads));
    for (const Tid thread : stopped.threads()) {
      out.has_supervisor |= stopped.leaves_calls_to_supervisor(thread);
      if (proc::has_tiles(thread)) out.with_tiles.push_back(thread);
      if (thread.value == space.pid().value && stopped.dispatches_system_calls(thread))
        out.lost.emplace_back(
            "that system calls of its first thread become signals (PR_SET_SYSCALL_USER_DISPATCH)");
    }
    return {};
  });
}

// Asks threads whether they are in a Landlock domain. One bystander serves all of a user.
class Sandboxes {
 public:
  std::optional<Pid> bystander_for(Pid pid, Tid thread) {
    const bool suits = bystander_ && bystander_->suits(pid, thread);
    if (!suits && !given_up_) {
      constexpr std::chrono::seconds kLong{1};
      const auto start = Clock::now();
      bystander_.reset();
      if (auto made = proc::Bystander::for_thread(pid, thread))
        bystander_.emplace(std::move(*made));
      given_up_ = Clock::now() - start > kLong;
    }
    if (given_up_) return std::nullopt;
    return bystander_ ? std::optional(bystander_->pid()) : std::nullopt;
  }

 private:
  std::optional<proc::Bystander> bystander_;
  // A user who stops one holds the tool up for seconds, and the program stands still meanwhile: it
  // is tried once.
  bool given_up_ = false;
};

// A page that the process maps for us while `act` runs.
Result<void> with_page(const SystemCall& make, const std::function<void(std::uint64_t)>& act) {
  STASIS_TRY_ASSIGN(const auto page,
                    make(SYS_mmap, Arguments{0, kPage, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, word(-1), 0}));
  if (page < 0) return fail(errno_error("cannot allocate a page in it", static_cast<int>(-page)));
  act(static_cast<std::uint64_t>(page));
  (void)make(SYS_munmap, Arguments{static_cast<std::uint64_t>(page), kPage});
  return {};
}

Ask asker(const SystemCall& make) {
  return [&make](std::uint64_t number, const Arguments& arguments) -> std::int64_t {
    const auto answer = make(number, arguments);
    return answer ? *answer : -EIO;
  };
}

bool is_in_domain(const Ask& ask, std::optional<Pid> bystander, std::uint64_t room) {
  return bystander && ask(SYS_get_robust_list, {word(bystander->value), room, room + 8}) == -EPERM;
}

// A thread that goes into a domain by itself has to forbid itself new privileges before, so only
// those are asked that have done so other than the first: each question stops a thread.
bool has_thread_in_domain(Pid pid, Sandboxes& sandboxes) {
  const proc::ProcFs procfs;
  const std::vector<Tid> threads = procfs.threads(pid);
  if (threads.size() == 1) return false;
  const auto first = procfs.thread_status(pid, Tid{pid.value});
  for (const Tid thread : threads) {
    const auto status = procfs.thread_status(pid, thread);
    if (!first || !status || first->no_new_privileges || !status->no_new_privileges) continue;
    const auto bystander = sandboxes.bystander_for(pid, thread);
    bool found = false;
    (void)call_from_thread(pid, thread, {}, [&](const SystemCall& make, std::uint64_t) {
      return with_page(make, [&](std::uint64_t at) {
        found = is_in_domain(asker(make), bystander, at + kListAt);
      });
    });
    if (found) return true;
  }
  return false;
}

bool may_ask(Pid pid) {
  const auto its = proc::ProcFs().thread_status(pid, Tid{pid.value});
  return its && (its->seccomp == 0 || may_lift_filters());
}

Result<AskedState> ask_process(Pid pid, bool has_children, Sandboxes& sandboxes,
                               AskedThreads& threads) {
  const auto bystander = sandboxes.bystander_for(pid, Tid{pid.value});
  STASIS_TRY_ASSIGN(auto space, proc::AddressSpace::open(pid));
  AskedState out;
  const Tid first{pid.value};
  auto done = call_from_thread(space, first, {}, [&](const SystemCall& make, std::uint64_t) {
    return with_page(make, [&](std::uint64_t at) {
      const Ask ask = asker(make);
      // A new page that cannot be given back is locked. So nothing has changed by the question, and
      // whether it was there at once is still to be seen.
      if (ask(SYS_madvise, {at, kPage, MADV_DONTNEED}) == -EINVAL) {
        unsigned char resident = 0;
        if (ask(SYS_mincore, {at, kPage, at + kResidentAt}) == 0)
          (void)space.read(at + kResidentAt, &resident, sizeof resident);
        out.state.lock_new = (resident & 1) != 0 ? MCL_FUTURE : MCL_FUTURE | MCL_ONFAULT;
      }
      std::uint64_t permission = 0;
      if (ask(SYS_arch_prctl, {kGetStatePermission, at + kPermissionAt}) == 0 &&
          space.read(at + kPermissionAt, &permission, sizeof permission)) {
        out.state.processor_state = permission & ~usual_permission();
      }
      out.state.deny_new_code =
          static_cast<std::uint32_t>(std::max<std::int64_t>(0, ask(SYS_prctl, {kGetMdwe})));
      out.state.merge_memory = ask(SYS_prctl, {kGetMemoryMerge}) == 1;
      const std::int64_t huge_pages = ask(SYS_prctl, {PR_GET_THP_DISABLE});
      out.state.advised_huge_pages = huge_pages == (1 | kExceptAdvised);
      note_futex_table(ask, pid, out);
      note_keyrings(ask, space, at, out.lost);
      note_seldom_used(ask, space, at, out.lost);
      if (has_children) note_continued(ask, space, at, out.lost);
      out.in_domain = is_in_domain(ask, bystander, at + kListAt);
    });
  });
  STASIS_TRY(std::move(done));
  note_threads(space, out);
  note_threads_asked(space, threads, out.lost);
  note_locked(pid, out.state.locked, out.lost);
  if (!out.in_domain) out.in_domain = has_thread_in_domain(pid, sandboxes);
  return out;
}

Error because(ObstacleId id, Pid pid, const std::string& what, std::string remedy,
              std::int64_t answer) {
  return refusal({id, Severity::kRed, pid,
                  fmt::format("process {} {}: {}", pid.value, what,
                              std::generic_category().message(static_cast<int>(-answer))),
                  std::move(remedy)});
}

bool is_set_within(const FileStateRecord& file) { return file.signals || file.owner_thread != 0; }

bool has_own_state(const KernelStateRecord& state) {
  return state.own != OwnStateRecord{} ||
         std::any_of(state.files.begin(), state.files.end(), is_set_within);
}

// By the process: the kernel tells the number that the descriptor has where it was set, and signals
// with the rights of the caller.
void set_signalling(const SystemCall& make, const proc::AddressSpace& space,
                    const KernelStateRecord& state, std::vector<std::string>& lost) {
  const auto set = [&](const Ask& ask, const FileStateRecord& file, std::uint64_t room) {
    const std::uint64_t descriptor = word(file.descriptor);
    if (file.owner_thread != 0) {
      const f_owner_ex owner{F_OWNER_TID, static_cast<pid_t>(file.owner_thread)};
      if (!space.write(room, &owner, sizeof owner) ||
          ask(SYS_fcntl, {descriptor, F_SETOWN_EX, room}) < 0) {
        return false;
      }
    }
    if (!file.signals) return true;
    // CRIU opens a pipe with the flag, which the kernel shows then and does nothing for.
    const std::int64_t flags = ask(SYS_fcntl, {descriptor, F_GETFL});
    const std::uint64_t without = word(flags & ~std::int64_t{O_ASYNC});
    return flags >= 0 && ask(SYS_fcntl, {descriptor, F_SETFL, without}) >= 0 &&
           ask(SYS_fcntl, {descriptor, F_SETFL, without | O_ASYNC}) >= 0;
  };
  std::size_t failed = 0;
  (void)with_page(make, [&](std::uint64_t at) {
    const Ask ask = asker(make);
    for (const FileStateRecord& file : state.files)
      if (is_set_within(file) && !set(ask, file, at)) ++failed;
  });
  if (failed > 0)
    lost.push_back(
        fmt::format("process {}: the process that {} of its files signal (F_SETOWN_EX, O_ASYNC)",
                    space.pid().value, failed));
}

// The right to the components of a mask.
Result<void> ask_for_processor_state(const SystemCall& make, Pid pid, std::uint64_t components) {
  constexpr int kBits = 64;
  for (std::uint64_t bit = 0; bit < kBits; ++bit) {
    if ((components >> bit & 1) == 0) continue;
    STASIS_TRY_ASSIGN(const auto answer,
                      make(SYS_arch_prctl, Arguments{kRequestStatePermission, bit}));
    if (answer < 0) {
      return fail(because("processor-state", pid,
                          fmt::format("uses processor state {} (18: AMX), and this machine does "
                                      "not let it",
                                      bit),
                          "restore it on a machine whose processor and kernel have it "
                          "(`grep amx /proc/cpuinfo`)",
                          answer));
    }
  }
  return {};
}

Result<void> set_own_state(Pid pid, const KernelStateRecord& all, std::vector<std::string>& lost) {
  const OwnStateRecord& state = all.own;
  STASIS_TRY_ASSIGN(auto space, proc::AddressSpace::open(pid));
  return call_from_thread(
      space, Tid{pid.value}, {}, [&](const SystemCall& make, std::uint64_t) -> Result<void> {
        set_signalling(make, space, all, lost);
        STASIS_TRY(ask_for_processor_state(make, pid, state.processor_state));
        const auto set = [&](std::uint64_t number, const Arguments& arguments,
                             const char* what) -> Result<void> {
          STASIS_TRY_ASSIGN(const auto answer, make(number, arguments));
          if (answer < 0)
            lost.push_back(fmt::format("process {}: {} ({})", pid.value, what,
                                       std::generic_category().message(static_cast<int>(-answer))));
          return {};
        };
        if (state.merge_memory) {
          STASIS_TRY(set(SYS_prctl, {kSetMemoryMerge, 1},
                         "that pages of equal content are merged (PR_SET_MEMORY_MERGE)"));
        }
        if (state.advised_huge_pages) {
          STASIS_TRY(set(SYS_prctl, {PR_SET_THP_DISABLE, 1, kExceptAdvised},
                         "huge pages of memory that is advised to have them "
                         "(PR_THP_DISABLE_EXCEPT_ADVISED)"));
        }
        if (state.futex_slots) {
          STASIS_TRY(set(SYS_prctl, {kFutexHash, kSetFutexSlots, *state.futex_slots},
                         "the size of its futex table (PR_FUTEX_HASH)"));
        }
        for (const ListenerRecord& listener : state.listeners) {
          STASIS_TRY(set(SYS_listen, {word(listener.descriptor), word(listener.backlog)},
                         "the user and process that peers of its sockets see (SO_PEERCRED)"));
        }
        lock_again(asker(make), pid, state, lost);
        if (state.lock_new != 0) {
          STASIS_TRY(set(SYS_mlockall, {static_cast<std::uint64_t>(state.lock_new)},
                         "that new memory is locked (mlockall)"));
        }
        if (state.deny_new_code == 0) return {};
        STASIS_TRY_ASSIGN(const auto answer,
                          make(SYS_prctl, Arguments{kSetMdwe, state.deny_new_code}));
        if (answer == 0) return {};
        return fail(because("mdwe", pid,
                            "has forbidden itself new code (PR_SET_MDWE), which this kernel does "
                            "not know",
                            "restore it on Linux 6.3 or newer", answer));
      });
}

}  // namespace

// futex_hash_allocate_default() of the kernel: for each thread that was there when another one was
// made, four, but no more than the processors need. It may have had more threads before.
bool may_be_kernels_choice(std::uint64_t slots, std::size_t threads, std::size_t processors) {
  constexpr std::uint64_t kEach = 4;
  constexpr std::uint64_t kFewest = 16;
  const auto chosen = [&](std::size_t count) {
    return std::max(kFewest, std::bit_ceil(kEach * std::min(count, processors)));
  };
  if (slots == 0) return threads <= 1;
  return slots >= (threads > 1 ? chosen(threads - 1) : kFewest) && slots <= chosen(processors);
}

std::uint64_t locked_and_not_there(std::istream& smaps, std::vector<LockedRecord>& locked) {
  std::uint64_t sum = 0;
  std::uint64_t size = 0;
  std::uint64_t there = 0;
  bool reachable = false;
  std::uint64_t start = 0;
  const auto kibibytes = [](std::string_view line) -> std::uint64_t {
    const auto digit = line.find_first_of("0123456789");
    std::uint64_t number = 0;
    if (digit != std::string_view::npos)
      (void)std::from_chars(line.data() + digit, line.data() + line.size(), number);
    return number << 10;
  };
  // A program can have millions of mappings, and stands still meanwhile.
  std::size_t lines = 0;
  for (std::string line; lines < kMostLines && std::getline(smaps, line); ++lines) {
    if (!line.empty() && (line.front() < 'A' || line.front() > 'Z')) {
      (void)std::from_chars(line.data(), line.data() + line.size(), start, 16);
      const auto space = line.find(' ');
      // No page of one that nothing may read is ever there.
      reachable = space != std::string::npos && line.compare(space + 1, 3, "---") != 0;
    } else if (line.starts_with("Size:")) {
      size = kibibytes(line);
    } else if (line.starts_with("Rss:")) {
      there = kibibytes(line);
    } else if (line.starts_with("Swap:")) {
      there += kibibytes(line);
    } else if (line.starts_with("VmFlags:") && line.find(" lo") != std::string::npos) {
      if (reachable && size > there) sum += size - there;
      if (!locked.empty() && locked.back().start + locked.back().size == start)
        locked.back().size += size;
      else if (locked.size() < manifest_format::kMaxLocked)
        locked.push_back({start, size});
    }
  }
  return sum;
}

AskedStates ask_processes(Pid root, ThreadAnswers threads) {
  AskedStates answers;
  const auto tree = proc::ProcFs().tree(root);
  if (!tree) return answers;
  std::vector<AskedStates::value_type*> places;
  std::set<Pid> parents;
  for (const proc::ProcessInfo& info : *tree) {
    if (!info.has_ended()) {
      parents.insert(info.parent);
      places.push_back(&*answers.try_emplace(info.pid).first);
      threads.try_emplace(info.pid);
    }
  }
  // Each question is answered by a thread that has to be woken for it.
  const auto count =
      std::min<std::size_t>(places.size(), std::min(kMostAskers, usable_processors()));
  std::atomic<std::size_t> next = 0;
  on_threads(static_cast<unsigned>(count), [&](unsigned) {
    const KeptCallThread calls;
    Sandboxes sandboxes;
    for (std::size_t i = next++; i < places.size(); i = next++) {
      auto& [pid, state] = *places[i];
      state.answered = may_ask(pid);
      if (!state.answered) continue;
      if (auto answer = ask_process(pid, parents.contains(pid), sandboxes, threads.at(pid)))
        state = std::move(*answer);
      else
        state.answered = false;
    }
  });
  return answers;
}

Result<void> refuse_tiles(const AskedStates& answers) {
  for (const auto& [pid, answer] : answers)
    if (!answer.with_tiles.empty()) return fail(proc::refusal_of_tiles(pid, answer.with_tiles));
  return {};
}

Result<void> refuse_sandboxes(const AskedStates& answers) {
  for (const auto& [pid, answer] : answers) {
    if (answer.has_supervisor) {
      return fail(refusal(
          {"seccomp-listener", Severity::kRed, pid,
           fmt::format("process {} has a filter that leaves system calls to a supervisor "
                       "(SECCOMP_RET_USER_NOTIF); a restore does not connect the two, and these "
                       "calls would fail with ENOSYS",
                       pid.value),
           "start the program without the supervisor (of a container's engine, or a sandbox)",
           Override::kIgnoreUndumpable},
          ErrorCode::kUndumpable));
    }
    if (!answer.in_domain) continue;
    return fail(refusal(
        {"landlock", Severity::kRed, pid,
         fmt::format(
             "process {} has threads in a sandbox (a Landlock domain), which a restore would "
             "take from it: the kernel does not tell its rules",
             pid.value),
         "start the program without it; to dump it all the same, and to restore it inside "
         "of such a sandbox if need be: --ignore-obstacles",
         Override::kIgnoreUndumpable},
        ErrorCode::kUndumpable));
  }
  return {};
}

namespace {

// The answer of the nearest process above `pid` that was asked, as fork(2) hands it down.
const AskedState* inherited_answer(const AskedStates& answers,
                                   const std::vector<ProcessRecord>& processes, Pid pid) {
  for (std::size_t steps = 0; steps <= processes.size(); ++steps) {
    if (const auto own = answers.find(pid); own != answers.end()) return &own->second;
    const auto record = std::find_if(processes.begin(), processes.end(),
                                     [&](const ProcessRecord& one) { return one.pid == pid; });
    if (record == processes.end()) return nullptr;
    pid = record->parent;
  }
  return nullptr;
}

}  // namespace

std::vector<std::string> note_answers(const AskedStates& answers,
                                      std::vector<ProcessRecord>& processes) {
  std::vector<std::string> lost;
  const proc::ProcFs procfs;
  for (ProcessRecord& process : processes) {
    const bool asked = answers.contains(process.pid);
    const AskedState* answer = inherited_answer(answers, processes, process.pid);
    if (answer == nullptr || !answer->answered) {
      const auto info = procfs.process(process.pid);
      if (!asked || !info || info->has_ended()) continue;
      lost.push_back(
          fmt::format("process {}: whether it uses AMX, forbids itself new code or locks its "
                      "memory; it could not be asked",
                      process.pid.value));
      continue;
    }
    if (process.kernel_state) {
      process.kernel_state->own = answer->state;
      if (!asked) {  // what fork(2) hands down
        process.kernel_state->own.lock_new = 0;
        process.kernel_state->own.locked.clear();
        process.kernel_state->own.futex_slots.reset();
      }
    }
    if (answer->has_supervisor)
      lost.push_back(
          fmt::format("process {}: the supervisor of its system calls "
                      "(SECCOMP_RET_USER_NOTIF), without which they fail with ENOSYS",
                      process.pid.value));
    if (answer->in_domain)
      lost.push_back(fmt::format("process {}: its sandbox (a Landlock domain)", process.pid.value));
    if (!asked) continue;
    for (const std::string& what : answer->lost)
      lost.push_back(fmt::format("process {}: {}", process.pid.value, what));
  }
  return lost;
}

Result<std::vector<Pid>> set_asked_state(const std::vector<ProcessRecord>& processes,
                                         std::vector<std::string>& lost) {
  std::vector<Pid> left;
  for (const ProcessRecord& process : processes) {
    if (!process.kernel_state || !has_own_state(*process.kernel_state)) continue;
    auto done = set_own_state(process.pid, *process.kernel_state, lost);
    if (done || done.error().code == ErrorCode::kProcessGone) continue;
    if (done.error().code != ErrorCode::kBusy) return fail(std::move(done.error()));
    left.push_back(process.pid);
  }
  return left;
}

Result<void> set_asked_state_of(const std::vector<Pid>& wanted,
                                const std::vector<ProcessRecord>& processes,
                                std::vector<std::string>& lost) {
  for (const ProcessRecord& process : processes) {
    if (std::find(wanted.begin(), wanted.end(), process.pid) == wanted.end()) continue;
    auto done = set_own_state(process.pid, *process.kernel_state, lost);
    if (!done && done.error().code != ErrorCode::kProcessGone) return done;
  }
  return {};
}

}  // namespace stasis
