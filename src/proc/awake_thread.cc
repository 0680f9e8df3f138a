#include "proc/awake_thread.h"

#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include "base/fd.h"
#include "proc/bounded_seize.h"
#include "proc/procfs.h"
#include "proc/ptrace_status.h"

namespace stasis::proc {
namespace {

using Clock = std::chrono::steady_clock;

// A thread in the driver's code can be in a system call that nothing interrupts for a while.
constexpr std::chrono::seconds kAwakeStopLimit{10};
constexpr std::uint64_t kAllButTrap = ~(1ULL << (SIGTRAP - 1));

Error gone(Pid pid, Tid thread) {
  return Error{ErrorCode::kProcessGone,
               fmt::format("thread {} of process {} has ended", thread.value, pid.value),
               "start the program again, or restore it from an image"};
}

Result<void> request(Pid pid, Tid thread, int what, std::uint64_t address, void* data,
                     std::string_view doing) {
  if (::ptrace(static_cast<__ptrace_request>(what), thread.value, as_pointer(address), data) == 0) {
    return {};
  }
  if (errno == ESRCH) return fail(gone(pid, thread));
  return fail(errno_error(
      fmt::format("cannot {} thread {} of process {}", doing, thread.value, pid.value), errno));
}

Result<void> set_mask(Pid pid, Tid thread, std::uint64_t mask) {
  return request(pid, thread, PTRACE_SETSIGMASK, sizeof mask, &mask, "set the signal mask of");
}

// The stops of system calls are told from others (PTRACE_O_TRACESYSGOOD), as CRIU wants it.
// Where the thread's system calls are filtered, CRIU lifts that while it holds the thread; without
// CAP_SYS_ADMIN the kernel refuses, and there CRIU did without as well. A thread that runs is to be
// filtered.
void set_options(Pid pid, Tid thread, bool held) {
  const auto status = ProcFs().thread_status(pid, thread);
  const auto set = [&](std::uint64_t options) {
    return ::ptrace(PTRACE_SETOPTIONS, thread.value, nullptr, as_pointer(options)) == 0;
  };
  if (held && status && status->seccomp != 0 && set(PTRACE_O_TRACESYSGOOD | kSuspendSeccomp))
    return;
  (void)set(PTRACE_O_TRACESYSGOOD);
}

}  // namespace

Result<AwakeThread> AwakeThread::wake(Pid pid, Tid thread) {
  const auto status = ProcFs().thread_status(pid, thread);
  if (!status) return fail(gone(pid, thread));
  if (status->tracer != static_cast<int>(::syscall(SYS_gettid))) {
    return fail(ErrorCode::kBusy,
                fmt::format("thread {} of process {} is traced by {}, and not by stasis",
                            thread.value, pid.value, status->tracer),
                "wait for that to end, or detach it");
  }
  AwakeThread awake(pid, thread, false);
  STASIS_TRY(awake.let_go_on());
  return awake;
}

Result<AwakeThread> AwakeThread::seize(Pid pid, Tid thread) {
  // The threads of a process come to the stop one after the other. One that is still on its way
  // there would stop again as soon as it was let go.
  constexpr std::chrono::seconds kStopping{1};
  const auto start = Clock::now();
  for (auto now = ProcFs().thread(pid, thread); now && now->state != 'T';
       now = ProcFs().thread(pid, thread)) {
    if (Clock::now() - start > kStopping) {
      return fail(ErrorCode::kBusy,
                  fmt::format("thread {} of process {} is not stopped (state {})", thread.value,
                              pid.value, now->state),
                  "try again");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  AwakeThread awake(pid, thread, true);
  if (proc::seize(thread, 0) != 0) {
    if (errno == EINTR) return fail(held_by_an_execve(pid));
    if (errno == ESRCH) return fail(gone(pid, thread));
    return fail(errno_error(
        fmt::format("cannot trace thread {} of process {}", thread.value, pid.value), errno));
  }
  // The thread is stopped, and reports it at once. PTRACE_INTERRUPT would stop it once more after
  // that.
  auto alive = awake.wait_for_stop();
  Result<void> done;
  if (!alive) done = fail(std::move(alive.error()));
  if (alive && !*alive) done = fail(gone(pid, thread));
  if (done) done = awake.let_go_on();
  if (!done) {
    (void)::ptrace(PTRACE_DETACH, thread.value, nullptr, nullptr);
    return fail(std::move(done.error()));
  }
  return awake;
}

Result<void> AwakeThread::let_go_on() {
  STASIS_TRY(
      request(pid_, thread_, PTRACE_GETSIGMASK, sizeof mask_, &mask_, "ask the signal mask of"));
  auto done = set_mask(pid_, thread_, kAllButTrap);
  if (done) {
    set_options(pid_, thread_, false);
    done = request(pid_, thread_, PTRACE_CONT, 0, nullptr, "let go");
    if (!done) set_options(pid_, thread_, true);
  }
  if (!done) (void)set_mask(pid_, thread_, mask_);
  awake_ = done.has_value();
  return done;
}

bool AwakeThread::tend() {
  int status = 0;
  const int got = ::waitpid(thread_.value, &status, __WALL | WNOHANG | __WNOTHREAD);
  if (got == 0 || (got < 0 && errno == EINTR)) return awake_;
  if (got < 0 || !WIFSTOPPED(status)) {
    awake_ = false;
    return false;
  }
  // A stop signal for the whole process is told as an event: it holds the others.
  const std::uint64_t signal =
      status >> 16 != 0 ? 0 : static_cast<std::uint64_t>(WSTOPSIG(status) & 0x7f);
  (void)::ptrace(PTRACE_CONT, thread_.value, nullptr, as_pointer(signal));
  return awake_;
}

Result<bool> AwakeThread::wait_for_stop() {
  const auto start = Clock::now();
  while (Clock::now() - start < kAwakeStopLimit) {
    int status = 0;
    const int got = ::waitpid(thread_.value, &status, __WALL | WNOHANG | __WNOTHREAD);
    if (got < 0 && errno != EINTR) return false;
    if (got <= 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      continue;
    }
    if (!WIFSTOPPED(status)) return false;
    if (status >> 16 == PTRACE_EVENT_STOP) return true;
    const auto signal = status >> 16 != 0 ? 0 : static_cast<std::uint64_t>(WSTOPSIG(status) & 0x7f);
    (void)::ptrace(PTRACE_CONT, thread_.value, nullptr, as_pointer(signal));
  }
  return fail(ErrorCode::kBusy,
              fmt::format("thread {} of process {} cannot be stopped: it is in a system call that "
                          "nothing interrupts",
                          thread_.value, pid_.value),
              "try again when that has ended");
}

Result<void> AwakeThread::stop() {
  if (!std::exchange(awake_, false)) return {};
  auto done = request(pid_, thread_, PTRACE_INTERRUPT, 0, nullptr, "stop");
  if (!done) return done.error().code == ErrorCode::kProcessGone ? Result<void>() : done;
  STASIS_TRY_ASSIGN(auto alive, wait_for_stop());
  if (!alive) return {};
  set_options(pid_, thread_, !detach_);
  done = set_mask(pid_, thread_, mask_);
  if (detach_) {
    auto detached = request(pid_, thread_, PTRACE_DETACH, 0, nullptr, "let go");
    if (done) done = std::move(detached);
  }
  if (!done && done.error().code == ErrorCode::kProcessGone) return {};
  return done;
}

bool run_beside(std::vector<AwakeThread>& awake, const std::function<void()>& act,
                std::chrono::milliseconds limit) {
  // Work that ends at once is noticed at once; a thread that is stopped waits no longer than this.
  constexpr std::chrono::milliseconds kTend{5};
  struct End {
    std::mutex mutex;
    std::condition_variable came;
    bool is = false;
  };
  const auto end = std::make_shared<End>();
  const auto start = Clock::now();
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread worker;
  try {
    worker = std::thread([end, work = act] {
      work();
      const std::scoped_lock lock(end->mutex);
      end->is = true;
      end->came.notify_all();
    });
  } catch (const std::system_error&) {
    // Without a thread; below.
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!worker.joinable()) {
    act();
    return true;
  }
  std::unique_lock lock(end->mutex);
  while (!end->came.wait_for(lock, kTend, [&] { return end->is; })) {
    for (AwakeThread& thread : awake)
      (void)thread.tend();
    if (limit.count() > 0 && Clock::now() - start > limit) {
      worker.detach();
      return false;
    }
  }
  lock.unlock();
  worker.join();
  return true;
}

}  // namespace stasis::proc
