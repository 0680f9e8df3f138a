#include "proc/lesser_rights.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/units.h"
#include "proc/cgroup.h"

namespace stasis::proc {
namespace {

constexpr std::uint64_t kTrace = std::uint64_t{1} << CAP_SYS_PTRACE;
constexpr std::uint64_t kChangeUser =
    (std::uint64_t{1} << CAP_SETUID) | (std::uint64_t{1} << CAP_SETGID);
constexpr unsigned kUnchanged = ~0U;

struct Credentials {
  std::array<unsigned, 3> uid{};  // real, effective, saved
  std::array<unsigned, 3> gid{};
  std::uint64_t permitted = 0;

  bool is_one_user() const {
    return uid[0] == uid[1] && uid[0] == uid[2] && gid[0] == gid[1] && gid[0] == gid[2];
  }
};

std::optional<Credentials> credentials_of(Pid pid) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/status", pid.value));
  if (!text) return std::nullopt;
  const auto numbers = [&](const char* key, std::array<unsigned, 3>& out) {
    const std::size_t at = text->find(key);
    if (at == std::string::npos) return false;
    const char* from = text->c_str() + at + std::char_traits<char>::length(key);
    for (unsigned& number : out) {
      char* end = nullptr;
      number = static_cast<unsigned>(std::strtoul(from, &end, 10));
      if (end == from) return false;
      from = end;
    }
    return true;
  };
  Credentials out;
  const std::size_t capabilities = text->find("\nCapPrm:");
  if (!numbers("\nUid:", out.uid) || !numbers("\nGid:", out.gid) ||
      capabilities == std::string::npos)
    return std::nullopt;
  out.permitted = std::strtoull(text->c_str() + capabilities + 8, nullptr, 16);
  return out;
}

bool in_our_user_namespace(Pid pid) {
  struct stat its {};
  struct stat ours {};
  return ::stat(fmt::format("/proc/{}/ns/user", pid.value).c_str(), &its) == 0 &&
         ::stat("/proc/self/ns/user", &ours) == 0 && its.st_dev == ours.st_dev &&
         its.st_ino == ours.st_ino;
}

using CapabilityData = std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3>;

__user_cap_header_struct this_thread() { return {_LINUX_CAPABILITY_VERSION_3, 0}; }

std::uint64_t both(const CapabilityData& data, std::uint32_t __user_cap_data_struct::*part) {
  return data[0].*part | std::uint64_t{data[1].*part} << 32;
}

CapabilityData words_of(std::uint64_t effective, std::uint64_t permitted,
                        std::uint64_t inheritable) {
  CapabilityData data{};
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i].effective = static_cast<std::uint32_t>(effective >> (32 * i));
    data[i].permitted = static_cast<std::uint32_t>(permitted >> (32 * i));
    data[i].inheritable = static_cast<std::uint32_t>(inheritable >> (32 * i));
  }
  return data;
}

}  // namespace

LesserRights LesserRights::of(Pid pid) {
  LesserRights out;
  auto header = this_thread();
  CapabilityData data{};
  const auto target = credentials_of(pid);
  if (!target || ::syscall(SYS_capget, &header, data.data()) != 0) return out;
  out.effective_ = both(data, &__user_cap_data_struct::effective);
  out.permitted_ = both(data, &__user_cap_data_struct::permitted);
  out.inheritable_ = both(data, &__user_cap_data_struct::inheritable);
  out.uid_ = target->uid[0];
  out.gid_ = target->gid[0];
  const bool same_user = out.uid_ == ::getuid() && out.gid_ == ::getgid();
  // What our effective user has made of namespaces is ours whatever rights we have given up
  // (cap_capable() of security/commoncap.c): a container's setuid program would be no other user's.
  if (!in_our_user_namespace(pid)) return out;
  const bool may_all =
      target->is_one_user() && target->uid[0] == 0 && (out.permitted_ & ~target->permitted) == 0;
  if ((out.effective_ & kTrace) == 0 || may_all)
    out.way_ = Way::kAsItIs;
  else if (target->is_one_user() && (same_user || (out.effective_ & kChangeUser) == kChangeUser))
    out.way_ = Way::kGivenUp;
  return out;
}

namespace {

constexpr std::size_t kStack = 16384;

// What the process does and has done. It has our memory and a stack of its own, and its thread's
// variables are those of the thread that waits for it: so it calls the kernel and nothing else.
struct Errand {
  alignas(16) std::array<std::byte, kStack> stack;
  bool write = false;
  int pid = 0;
  std::uint64_t address = 0;
  std::byte* data = nullptr;
  std::size_t size = 0;
  unsigned uid = 0;
  unsigned gid = 0;
  int owner = 0;  // our process
  __user_cap_header_struct header{};
  CapabilityData capabilities{};  // without CAP_SYS_PTRACE
  std::atomic<std::size_t> done = 0;
};

#define STASIS_UNINSTRUMENTED __attribute__((no_sanitize("address", "undefined", "thread")))

STASIS_UNINSTRUMENTED long call(long number, unsigned long a, unsigned long b, unsigned long c,
                                unsigned long d, unsigned long e, unsigned long f) {
  long result = 0;
  register unsigned long r10 asm("r10") = d;
  register unsigned long r8 asm("r8") = e;
  register unsigned long r9 asm("r9") = f;
  asm volatile("syscall"
               : "=a"(result)
               : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
               : "rcx", "r11", "memory");
  return result;
}

// The real user and group only: what a process may do to files goes by the others, and while these
// are ours the target's user cannot trace it.
STASIS_UNINSTRUMENTED int run_errand(void* what) {
  Errand& errand = *static_cast<Errand*>(what);
  // First: one that outlived us would keep our descriptors, and the locks by them.
  if (call(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0, 0) != 0 ||
      call(SYS_getppid, 0, 0, 0, 0, 0, 0) != errand.owner)
    return 1;
  if (call(SYS_setresgid, errand.gid, kUnchanged, kUnchanged, 0, 0, 0) != 0 ||
      call(SYS_setresuid, errand.uid, kUnchanged, kUnchanged, 0, 0, 0) != 0 ||
      call(SYS_capset, reinterpret_cast<unsigned long>(&errand.header),
           reinterpret_cast<unsigned long>(&errand.capabilities), 0, 0, 0, 0) != 0)
    return 1;
  std::size_t done = 0;
  while (done < errand.size) {
    const iovec local{errand.data + done, errand.size - done};
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the target's address
    const iovec remote{reinterpret_cast<void*>(errand.address + done), errand.size - done};
    const long moved =
        call(errand.write ? SYS_process_vm_writev : SYS_process_vm_readv,
             static_cast<unsigned long>(errand.pid), reinterpret_cast<unsigned long>(&local), 1,
             reinterpret_cast<unsigned long>(&remote), 1, 0);
    if (moved <= 0) break;
    done += static_cast<std::size_t>(moved);
    errand.done.store(done, std::memory_order_release);
  }
  return 0;
}

// A user who may freeze processes (a freezer of cgroups of version 1 that was delegated to him) can
// move it there, where SIGKILL waits until he thaws it. It has then made its last call.
bool is_frozen(int process) {
  const auto cgroup = frozen_cgroup(Pid{process});
  if (!cgroup || !cgroup->version1) return false;
  const auto state = read_file(AT_FDCWD, cgroup->directory + "/freezer.state", 64);
  return state && state->starts_with("FROZEN");
}

// A process may stand on its stack until this one ends.
void keep_for_ever(std::unique_ptr<Errand> errand) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::unique_ptr<Errand>>;
  const std::scoped_lock lock(mutex);
  kept->push_back(std::move(errand));
}

enum class End { kByItself, kKilled, kNever };

// Until it has ended: it uses our memory. One that takes too long is killed. Its user may have put
// it where it gets no time; what he may set of that we set again.
End wait_for_end(int process, const UniqueFd& pidfd, std::chrono::milliseconds timeout) {
  constexpr int kPoll = 50;  // milliseconds
  const auto deadline = Clock::now() + timeout;
  bool killed = false;
  int status = 0;
  for (;;) {
    // Without a pidfd, on an old kernel, it just waits a little.
    pollfd ends{pidfd.get(), POLLIN, 0};
    (void)::poll(&ends, 1, pidfd.valid() ? kPoll : 1);
    const pid_t ended = ::waitpid(process, &status, WNOHANG | __WALL);
    if (ended == process || (ended < 0 && errno != EINTR)) break;
    if (killed && is_frozen(process)) return End::kNever;
    if (Clock::now() >= deadline) {
      killed = true;
      (void)::kill(process, SIGKILL);
      const sched_param usual{};
      cpu_set_t all;
      CPU_ZERO(&all);
      for (std::size_t i = 0; i < CPU_SETSIZE; ++i)
        CPU_SET(i, &all);
      (void)::sched_setscheduler(process, SCHED_OTHER, &usual);
      (void)::sched_setaffinity(process, sizeof all, &all);
    }
  }
  return !killed && WIFEXITED(status) ? End::kByItself : End::kKilled;
}

}  // namespace

std::size_t LesserRights::move_by_process(ServedPages::Access access, Pid pid,
                                          std::uint64_t address, void* data,
                                          std::size_t size) const {
  constexpr std::size_t kSlowest = 500'000;  // bytes in a millisecond
  auto errand = std::make_unique<Errand>();
  errand->write = access == ServedPages::Access::kWrite;
  errand->pid = pid.value;
  errand->address = address;
  errand->data = static_cast<std::byte*>(data);
  errand->size = size;
  errand->uid = uid_;
  errand->gid = gid_;
  errand->owner = ::getpid();
  errand->header = this_thread();
  errand->capabilities = words_of(effective_ & ~kTrace, permitted_, inheritable_);
  // Such as it may be sent wait in it for ever; but for two, which end or stop nothing but itself.
  // Without the C library, which leaves two of its own out.
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  std::uint64_t before = 0;
  if (::syscall(SYS_rt_sigprocmask, SIG_SETMASK, &kAll, &before, sizeof before) != 0) return 0;
  // Not CLONE_SIGHAND: threads alone may be killed only together. No signal tells of its end, so
  // that those who wait for other children do not see it.
  int pidfd = -1;
  const int process =
      ::clone(&run_errand, errand->stack.data() + errand->stack.size(),
              CLONE_VM | CLONE_FILES | CLONE_FS | CLONE_PIDFD, errand.get(), &pidfd);
  const UniqueFd ends(pidfd);
  const End end =
      process > 0 ? wait_for_end(process, ends, std::chrono::milliseconds(200 + size / kSlowest))
                  : End::kByItself;
  if (end != End::kByItself) given_up_->store(true);
  (void)::syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, nullptr, sizeof before);
  const std::size_t done = errand->done.load(std::memory_order_acquire);
  if (end == End::kNever) keep_for_ever(std::move(errand));
  return done;
}

std::size_t LesserRights::move(ServedPages::Access access, Pid pid, std::uint64_t address,
                               void* data, std::size_t size) const {
  // To make and end a process takes some 50 microseconds, in which a descriptor moves as much.
  constexpr std::size_t kWorthAProcess = std::size_t{512} << 10;
  if (way_ == Way::kGivenUp && size >= kWorthAProcess && !given_up_->load())
    return move_by_process(access, pid, address, data, size);
  std::size_t done = 0;
  while (way_ == Way::kAsItIs && done < size) {
    const iovec local{static_cast<std::byte*>(data) + done, size - done};
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the target's address
    const iovec remote{reinterpret_cast<void*>(address + done), size - done};
    const ssize_t moved = access == ServedPages::Access::kRead
                              ? ::process_vm_readv(pid.value, &local, 1, &remote, 1, 0)
                              : ::process_vm_writev(pid.value, &local, 1, &remote, 1, 0);
    if (moved <= 0) break;
    done += static_cast<std::size_t>(moved);
  }
  return done;
}

}  // namespace stasis::proc
