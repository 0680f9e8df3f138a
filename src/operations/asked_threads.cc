#include "operations/asked_threads.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/keyctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <initializer_list>
#include <span>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/fd.h"
#include "base/listing.h"
#include "base/processors.h"
#include "base/threads.h"
#include "base/units.h"
#include "proc/parking.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

// linux/prctl.h and asm/prctl.h; Debian 12 does not have all of them.
constexpr int kSchedCoreOf = 62;                // PR_SCHED_CORE, with 0: PR_SCHED_CORE_GET
constexpr std::uint64_t kTellCpuid = 0x1011;    // ARCH_GET_CPUID
constexpr std::uint64_t kChooseCpuid = 0x1012;  // ARCH_SET_CPUID
// PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE of linux/sched.h
constexpr unsigned long kFlushesFiles = 0x80000 | 0x100000;

constexpr std::uint64_t kPageOfAnswers = 4096;
// So many are stopped at a time, for some 0.1 ms each.
constexpr std::size_t kStoppedTogether = 32;
constexpr std::chrono::seconds kLongestOfThreads{1};
constexpr std::chrono::milliseconds kLongestOfLate{20};
constexpr unsigned kMostThreadAskers = 8;

std::string named(const std::vector<Tid>& threads) {
  std::vector<std::string> out;
  out.reserve(threads.size());
  for (const Tid thread : threads)
    out.push_back(std::to_string(thread.value));
  return listed(out, ", ");
}

std::string status_of(Pid pid, Tid thread) {
  return read_file(AT_FDCWD, fmt::format("/proc/{}/task/{}/status", pid.value, thread.value))
      .value_or("");
}

// May threads of the process have keyrings of their own? The kernel shows those of our own user by
// their name, and of another one whether he has any keys; where it shows none, as in a container
// without /proc/keys, they may.
bool may_have_thread_keys(Pid pid) {
  const auto keys = read_file(AT_FDCWD, "/proc/keys");
  const auto users = read_file(AT_FDCWD, "/proc/key-users");
  const std::string status = status_of(pid, Tid{pid.value});
  constexpr std::string_view kUser = "\nUid:\t";
  const std::size_t at = status.find(kUser);
  if (!keys || !users || keys->empty() || users->empty() || at == std::string::npos) return true;
  unsigned user = 0;
  (void)std::from_chars(status.data() + at + kUser.size(), status.data() + status.size(), user);
  if (user == ::getuid() && user == ::geteuid()) return keys->find(" _tid: ") != std::string::npos;
  return users->find(fmt::format("{:5}: ", user)) != std::string::npos;
}

// Does the processor let CPUID become a signal? Asked by what is so anyway.
bool can_refuse_cpuid() {
  static const bool can = ::syscall(SYS_arch_prctl, kChooseCpuid, 1) == 0;
  return can;
}

// Asks threads of one process by calls of their own.
class ThreadQuestions {
 public:
  ThreadQuestions(const proc::AddressSpace& space, AskedThreads& out)
      : space_(space), out_(out), asks_keys_(may_have_thread_keys(space.pid())) {}

  void ask(std::span<const Tid> threads, Clock::time_point deadline) {
    while (!threads.empty() && Clock::now() < deadline) {
      const auto some = threads.first(std::min(kStoppedTogether, threads.size()));
      threads = threads.subspan(some.size());
      auto done = trace_on_own_thread([&]() -> Result<void> {
        STASIS_TRY_ASSIGN(const auto stopped, proc::StoppedThreads::stop(space_, some));
        return ask_stopped(stopped);
      });
      if (done) continue;
      (void)finish_remote_call(space_.pid());
      return;
    }
  }

 private:
  // The first of them maps a page for the answers, and the last gives it back.
  Result<void> ask_stopped(const proc::StoppedThreads& stopped) {
    const std::vector<Tid>& threads = stopped.threads();
    for (const Tid thread : threads)
      if (stopped.dispatches_system_calls(thread)) out_.dispatching.push_back(thread);
    std::array<int, kStoppedTogether> time_stamps{};
    std::uint64_t page = 0;
    std::size_t at = 0;
    STASIS_TRY(call_from_each(
        space_, stopped, threads, [&](Tid thread, const SystemCall& make) -> Result<void> {
          const auto call = [&](std::uint64_t number,
                                std::initializer_list<std::uint64_t> arguments) {
            return make(number, std::span(arguments.begin(), arguments.size()));
          };
          if (at == 0) {
            STASIS_TRY_ASSIGN(const auto mapped,
                              call(SYS_mmap, {0, kPageOfAnswers, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS, ~std::uint64_t{0}, 0}));
            if (mapped < 0) return fail(ErrorCode::kIo, "no page for answers", {});
            page = static_cast<std::uint64_t>(mapped);
          }
          constexpr auto kThreadKeyring = static_cast<std::uint64_t>(KEY_SPEC_THREAD_KEYRING);
          if (asks_keys_) {
            STASIS_TRY_ASSIGN(const auto keyring,
                              call(SYS_keyctl, {KEYCTL_GET_KEYRING_ID, kThreadKeyring, 0}));
            if (keyring > 0) out_.with_keys.push_back(thread);
          }
          if (can_refuse_cpuid()) {
            STASIS_TRY_ASSIGN(const auto allowed, call(SYS_arch_prctl, {kTellCpuid}));
            if (allowed == 0) out_.without_cpuid.push_back(thread);
          }
          STASIS_TRY(call(SYS_prctl, {PR_GET_TSC, page + at * sizeof time_stamps[0]}));
          if (++at < threads.size()) return {};
          (void)space_.read(page, time_stamps.data(), sizeof time_stamps);
          STASIS_TRY(call(SYS_munmap, {page, kPageOfAnswers}));
          return {};
        }));
    for (std::size_t i = 0; i < threads.size(); ++i) {
      if (time_stamps[i] == PR_TSC_SIGSEGV) out_.without_time_stamp.push_back(threads[i]);
      out_.asked.insert(threads[i]);
    }
    return {};
  }

  const proc::AddressSpace& space_;
  AskedThreads& out_;
  bool asks_keys_;
};

// What the kernel shows of each thread by itself; those of them that may be asked more.
std::vector<Tid> look_at_threads(Pid pid, const std::vector<Tid>& threads,
                                 Clock::time_point deadline, bool lifts_filters,
                                 AskedThreads& out) {
  const proc::ProcFs procfs;
  std::vector<Tid> to_ask;
  for (const Tid thread : threads) {
    if (Clock::now() >= deadline) {
      out.all_seen = false;
      break;
    }
    const std::string status = status_of(pid, thread);
    if (limits_speculation(status)) out.without_speculation.push_back(thread);
    const auto info = procfs.thread(pid, thread);
    if (!info) continue;  // it has ended
    if ((info->flags & kFlushesFiles) == kFlushesFiles) out.flushing.push_back(thread);
    std::uint64_t cookie = 0;  // which the kernel tells those who may trace it
    if (::prctl(kSchedCoreOf, 0, thread.value, 0, &cookie) == 0 && cookie != 0)
      out.in_group.push_back(thread);
    // One that nothing interrupts would keep the others stopped for long.
    const bool can_stop = info->state != 'D';
    const bool is_filtered = status.find("\nSeccomp:\t0\n") == std::string::npos;
    if (thread.value != pid.value && can_stop && (!is_filtered || lifts_filters))
      to_ask.push_back(thread);
  }
  return to_ask;
}

void ask_threads_of(Pid pid, Clock::time_point deadline, bool lifts_filters, AskedThreads& out) {
  const std::vector<Tid> threads = proc::ProcFs().threads(pid);
  const auto to_ask = look_at_threads(pid, threads, deadline, lifts_filters, out);
  if (to_ask.empty()) return;
  const auto space = proc::AddressSpace::open(pid);
  if (space) ThreadQuestions(*space, out).ask(to_ask, deadline);
}

}  // namespace

bool may_lift_filters() {
  const proc::ProcFs procfs;
  const Pid self{static_cast<int>(::getpid())};
  const auto ours = procfs.thread_status(self, Tid{self.value});
  const auto capabilities = procfs.effective_capabilities();
  return ours && ours->seccomp == 0 && capabilities && (*capabilities >> CAP_SYS_ADMIN & 1) != 0 &&
         !procfs.in_own_user_namespace();
}

// fs/proc/array.c of the kernel: "thread mitigated", "thread force mitigated", "conditional
// disabled", "conditional force disabled"; otherwise it is not the thread's own choice.
bool limits_speculation(std::string_view status) {
  constexpr std::array<std::string_view, 4> kOwn = {
      "\nSpeculation_Store_Bypass:\tthread mitigated\n",
      "\nSpeculation_Store_Bypass:\tthread force mitigated\n",
      "\nSpeculationIndirectBranch:\tconditional disabled\n",
      "\nSpeculationIndirectBranch:\tconditional force disabled\n"};
  return std::any_of(kOwn.begin(), kOwn.end(), [&](std::string_view line) {
    return status.find(line) != std::string_view::npos;
  });
}

ThreadAnswers ask_threads(Pid root) {
  ThreadAnswers answers;
  const auto tree = proc::ProcFs().tree(root);
  if (!tree) return answers;
  std::vector<ThreadAnswers::value_type*> places;
  for (const proc::ProcessInfo& info : *tree)
    if (!info.has_ended()) places.push_back(&*answers.try_emplace(info.pid).first);
  const auto deadline = Clock::now() + kLongestOfThreads;
  const bool lifts_filters = may_lift_filters();
  const auto count =
      std::min<std::size_t>(places.size(), std::min(kMostThreadAskers, usable_processors()));
  std::atomic<std::size_t> next = 0;
  on_threads(static_cast<unsigned>(count), [&](unsigned) {
    const KeptCallThread calls;
    for (std::size_t i = next++; i < places.size(); i = next++)
      ask_threads_of(places[i]->first, deadline, lifts_filters, places[i]->second);
  });
  return answers;
}

void note_threads_asked(const proc::AddressSpace& space, AskedThreads& answers,
                        std::vector<std::string>& lost) {
  const Pid pid = space.pid();
  const auto unasked = [&] {
    std::vector<Tid> out = proc::ProcFs().threads(pid);
    std::erase_if(out,
                  [&](Tid one) { return one.value == pid.value || answers.asked.contains(one); });
    return out;
  };
  auto left = unasked();
  if (!left.empty()) {
    const auto deadline = Clock::now() + kLongestOfLate;
    const auto late = look_at_threads(pid, left, deadline, may_lift_filters(), answers);
    ThreadQuestions(space, answers).ask(late, deadline);
    left = unasked();
  }
  const auto note = [&](std::string_view what, std::vector<Tid>& threads) {
    std::sort(threads.begin(), threads.end());
    threads.erase(std::unique(threads.begin(), threads.end()), threads.end());
    if (!threads.empty()) lost.push_back(fmt::format("{}: {}", what, named(threads)));
  };
  note("that threads run without speculation (PR_SET_SPECULATION_CTRL)",
       answers.without_speculation);
  note("that threads write for a file system (PR_SET_IO_FLUSHER)", answers.flushing);
  note("the core scheduling group of threads (PR_SCHED_CORE)", answers.in_group);
  note("the keys of threads other than the first (keyctl)", answers.with_keys);
  note("the ban on reading the time stamp counter of threads other than the first (PR_SET_TSC)",
       answers.without_time_stamp);
  note("the signal that CPUID raises in threads other than the first (ARCH_SET_CPUID)",
       answers.without_cpuid);
  note("that system calls of threads become signals (PR_SET_SYSCALL_USER_DISPATCH)",
       answers.dispatching);
  if (left.empty()) return;
  lost.push_back(fmt::format(
      "what {} of its threads have of their own, such as keys (keyctl), a ban on the time stamp "
      "counter (PR_SET_TSC) or system calls that become signals: they could not be asked{}",
      left.size(), answers.all_seen ? "" : ", as there are too many"));
}

}  // namespace stasis
