// Cases about the six checkpoint functions on one process.
// Long because it is a list of cases, each a few lines, in the order of the table that they make.
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>

#include "api.h"
#include "checkpoint_calls.h"
#include "report.h"
#include "target.h"

namespace stasis::conformance {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// Whether something becomes true within a generous time.
template <class F>
bool soon(F&& condition, std::chrono::milliseconds limit = 30s) {
  for (const auto end = Clock::now() + limit; Clock::now() < end;) {
    if (condition()) return true;
    std::this_thread::sleep_for(5ms);
  }
  return false;
}

void round_trip(Report& r, Target& t, const std::string& round = {}) {
  r.note(round + "lock", lock(t.pid()));
  r.note(round + "state_locked", state(t.pid()));
  r.note(round + "checkpoint", checkpoint(t.pid()));
  r.note(round + "state_checkpointed", state(t.pid()));
  r.note(round + "restore", restore(t.pid()));
  r.note(round + "state_restored", state(t.pid()));
  r.note(round + "unlock", unlock(t.pid()));
  r.note(round + "state_running", state(t.pid()));
}

void lifecycle(Report& r) {
  Target t;
  r.note("init", t.ask("init"));
  r.note("alloc", t.ask("alloc device"));
  r.note("state_before", state(t.pid()));
  round_trip(r, t);
  r.note("wrong", t.ask("check"));
  r.note("add", t.ask("add"));
  r.note("wrong_after_kernel", t.ask("check"));
  round_trip(r, t, "second_");
  r.note("wrong_second", t.ask("check"));
}

void without_context(Report& r) {
  Target t;
  r.note("state_before_init", state(t.pid()));
  r.note("init", t.ask("cuinit"));
  round_trip(r, t);
  r.note("init_later", t.ask("init"));
  r.note("alloc", t.ask("alloc device"));
  r.note("wrong", t.ask("check"));
}

// Every action in every state that it does not belong to.
void wrong_states(Report& r) {
  Target t;
  t.ask("init");
  t.ask("alloc device");
  const pid_t pid = t.pid();
  r.note("running_checkpoint", checkpoint(pid));
  r.note("running_restore", restore(pid));
  r.note("running_unlock", unlock(pid));
  r.note("running_state", state(pid));
  r.note("lock", lock(pid));
  r.note("locked_lock", lock(pid));
  r.note("locked_restore", restore(pid));
  r.note("locked_state", state(pid));
  r.note("checkpoint", checkpoint(pid));
  r.note("checkpointed_lock", lock(pid));
  r.note("checkpointed_checkpoint", checkpoint(pid));
  r.note("checkpointed_unlock", unlock(pid));
  r.note("checkpointed_state", state(pid));
  r.note("restore", restore(pid));
  r.note("restored_restore", restore(pid));
  r.note("restored_lock", lock(pid));
  r.note("checkpoint_again", checkpoint(pid));
  r.note("restore_again", restore(pid));
  r.note("unlock", unlock(pid));
  r.note("unlocked_unlock", unlock(pid));
  r.note("wrong", t.ask("check"));
}

void who_can_be_asked(Report& r) {
  Target t;
  t.ask("init");
  const long tid = t.ask("tid");
  int out = 0;
  const pid_t plain = ::fork();
  if (plain == 0) {
    ::execlp("sleep", "sleep", "60", nullptr);
    ::_exit(127);
  }
  std::this_thread::sleep_for(200ms);
  r.note("plain_state", state(plain));
  r.note("plain_lock", lock(plain, 1000));
  r.note("plain_checkpoint", checkpoint(plain));
  r.note("plain_unlock", unlock(plain));
  r.note("plain_restore_thread", api().cuCheckpointProcessGetRestoreThreadId(plain, &out));
  ::kill(plain, SIGKILL);
  std::this_thread::sleep_for(200ms);
  r.note("zombie_state", state(plain));
  r.note("zombie_lock", lock(plain, 1000));
  ::waitpid(plain, nullptr, 0);
  r.note("gone_state", state(plain));
  r.note("gone_lock", lock(plain, 1000));
  r.note("gone_restore_thread", api().cuCheckpointProcessGetRestoreThreadId(plain, &out));
  r.note("zero_state", state(0));
  r.note("negative_state", state(-1));
  r.note("thread_state", state(static_cast<pid_t>(tid)));
  r.note("null_state", api().cuCheckpointProcessGetState(t.pid(), nullptr));
  r.note("null_restore_thread", api().cuCheckpointProcessGetRestoreThreadId(t.pid(), nullptr));
  CUcheckpointLockArgs reserved{};
  reserved.reserved1[3] = 1;
  r.note("reserved_lock", api().cuCheckpointProcessLock(t.pid(), &reserved));
  r.note("reserved_state", state(t.pid()));
  r.note("null_args_lock", api().cuCheckpointProcessLock(t.pid(), nullptr));
  r.note("null_args_state", state(t.pid()));
  r.note("unlock", unlock(t.pid()));
  t.kill();
  std::this_thread::sleep_for(500ms);
  r.note("killed_state", state(t.pid()));
}

void restore_thread(Report& r) {
  Target t;
  t.ask("init");
  int before = 0;
  int after = 0;
  r.note("get", api().cuCheckpointProcessGetRestoreThreadId(t.pid(), &before));
  const auto task = "/proc/" + std::to_string(t.pid()) + "/task/" + std::to_string(before);
  r.yes_no("is_its_thread", ::access(task.c_str(), F_OK) == 0);
  r.yes_no("is_not_the_first", before != t.pid());
  lock(t.pid());
  checkpoint(t.pid());
  r.note("get_checkpointed", api().cuCheckpointProcessGetRestoreThreadId(t.pid(), &after));
  r.yes_no("the_same", before == after);
  restore(t.pid());
  unlock(t.pid());
  r.note("wrong", t.ask("check"));
}

// A lock while work is in flight, of which the target alone decides when it ends.
void lock_timeout(Report& r, const char* work) {
  Target t;
  t.ask("init");
  t.ask("alloc device");
  r.note("start", t.ask(work));
  const auto begin = Clock::now();
  r.note("lock", lock(t.pid(), 700));
  r.yes_no("waited", Clock::now() - begin >= 600ms);
  r.note("state", state(t.pid()));
  r.note("api_goes_on", t.ask("alloc small"));
  r.note("lock_again", lock(t.pid(), 300));
  t.ask("release");
  r.note("sync", t.ask("sync"));
  r.note("lock_idle", lock(t.pid()));
  r.note("state_idle", state(t.pid()));
  r.note("unlock", unlock(t.pid()));
  r.note("wrong", t.ask("check"));
}
void lock_timeout_kernel(Report& r) { lock_timeout(r, "flagkernel"); }
void lock_timeout_host(Report& r) { lock_timeout(r, "flaghost"); }

// A lock that has to wait for work which ends by itself. `helper`: what a thread of the target is
// doing meanwhile; empty for nothing.
void lock_waits_for(Report& r, const std::string& key, const char* work, const char* helper) {
  Target t;
  t.ask("init");
  t.ask("alloc device");
  t.ask(work);
  if (*helper) t.ask(std::string("call ") + helper);
  std::atomic<bool> returned{false};
  std::atomic<int> code{-1};
  std::thread locker([&] {
    code = static_cast<int>(lock(t.pid(), 6'000));
    returned = true;
  });
  std::this_thread::sleep_for(500ms);
  r.yes_no(key + "waits", !returned);
  t.ask("release");
  r.yes_no(key + "returns_soon", soon([&] { return returned.load(); }, 2s));
  locker.join();
  r.note(key + "lock", code);
  r.note(key + "state", state(t.pid()));
  r.note(key + "sync", code == 0 ? 0 : t.ask("sync"));
  if (code != 0) r.note(key + "lock_after_sync", lock(t.pid()));
  r.note(key + "unlock", unlock(t.pid()));
  r.note(key + "wrong", t.ask("check"));
}

void lock_waits(Report& r) {
  lock_waits_for(r, "kernel_", "flagkernel", "");
  lock_waits_for(r, "kernel_and_sync_", "flagkernel", "cuStreamSynchronize");
  lock_waits_for(r, "host_", "flaghost", "");
  lock_waits_for(r, "host_and_sync_", "flaghost", "cuStreamSynchronize");
}

// The restore thread answers one question after the other: while it waits for a lock, others wait.
void questions_while_lock_waits(Report& r) {
  Target t;
  t.ask("init");
  t.ask("flagkernel");
  std::thread locker([&] { lock(t.pid(), 1'500); });
  std::this_thread::sleep_for(300ms);
  int tid = 0;
  auto begin = Clock::now();
  r.note("restore_thread", api().cuCheckpointProcessGetRestoreThreadId(t.pid(), &tid));
  r.yes_no("restore_thread_waits", Clock::now() - begin > 500ms);
  begin = Clock::now();
  r.note("state", state(t.pid()));
  r.yes_no("state_waits", Clock::now() - begin > 500ms);
  locker.join();
  std::thread second([&] { lock(t.pid(), 1'500); });
  std::this_thread::sleep_for(300ms);
  begin = Clock::now();
  r.note("unlock", unlock(t.pid()));
  r.yes_no("unlock_waits", Clock::now() - begin > 500ms);
  second.join();
  t.ask("release");
  r.note("sync", t.ask("sync"));
}

// What happens to calls while a lock waits for work.
void calls_while_lock_waits(Report& r) {
  for (const char* name : {"cuMemAlloc", "cuLaunchKernel", "cuMemGetInfo", "cuStreamCreate"}) {
    Target t;
    t.ask("init");
    t.ask("alloc device");
    t.ask("flagkernel");
    t.ask(std::string("prepare ") + name);
    std::thread locker([&] { lock(t.pid(), 1'500); });
    std::this_thread::sleep_for(500ms);
    t.ask("go");
    std::this_thread::sleep_for(300ms);
    r.yes_no(std::string(name) + "_passes", t.ask("done") == 1);
    locker.join();
    t.ask("release");
    r.yes_no(std::string(name) + "_returns", soon([&] { return t.ask("done") == 1; }));
  }
}

constexpr const char* kCalls[] = {"cuMemAlloc",
                                  "cuMemFree",
                                  "cuMemHostAlloc",
                                  "cuMemAllocAsync",
                                  "cuMemCreate",
                                  "cuMemAddressReserve",
                                  "cuMemGetInfo",
                                  "cuMemGetAddressRange",
                                  "cuPointerGetAttribute",
                                  "cuMemcpyHtoD",
                                  "cuMemcpyDtoH",
                                  "cuMemsetD32Async",
                                  "cuLaunchKernel",
                                  "cuLaunchHostFunc",
                                  "cuModuleLoadData",
                                  "cuStreamCreate",
                                  "cuStreamQuery",
                                  "cuStreamSynchronize",
                                  "cuStreamWaitEvent",
                                  "cuEventCreate",
                                  "cuEventRecord",
                                  "cuEventQuery",
                                  "cuEventSynchronize",
                                  "cuCtxSynchronize",
                                  "cuCtxGetCurrent",
                                  "cuCtxSetCurrent",
                                  "cuCtxGetDevice",
                                  "cuDeviceGetCount",
                                  "cuDeviceGet",
                                  "cuDeviceGetUuid",
                                  "cuDeviceTotalMem",
                                  "cuDeviceGetAttribute",
                                  "cuDevicePrimaryCtxRetain",
                                  "cuInit",
                                  "cuDriverGetVersion",
                                  "cuGetErrorName",
                                  "cuGetProcAddress"};

// One target per function, so that one that blocks cannot hide another. `checkpointed`: in which of
// the two states it is called.
void blocking(Report& r, bool checkpointed) {
  for (const std::string name : kCalls) {
    Target t;
    t.ask("init");
    t.ask("alloc device");
    t.ask("prepare " + name);
    lock(t.pid());
    if (checkpointed) api().cuCheckpointProcessCheckpoint(t.pid(), nullptr);
    t.ask("go");
    soon([&] { return t.died() || t.ask("done") == 1; }, 1s);
    const bool died = t.died();
    r.yes_no(name + "_kills", died);
    if (died) continue;
    r.yes_no(name + "_blocks", t.ask("done") == 0);
    if (checkpointed) restore(t.pid());
    unlock(t.pid());
    r.yes_no(name + "_returns", soon([&] { return t.ask("done") == 1; }));
  }
}
void calls_while_locked(Report& r) { blocking(r, false); }
void calls_while_checkpointed(Report& r) { blocking(r, true); }

void queued_calls(Report& r) {
  Target t;
  t.ask("init");
  t.ask("alloc device");
  for (int i = 0; i < 3; ++i)
    t.ask("prepare cuMemAlloc");
  lock(t.pid());
  t.ask("go");
  std::this_thread::sleep_for(300ms);
  r.note("done_locked", t.ask("done"));
  r.note("unlock", unlock(t.pid()));
  r.note("lock_at_once", lock(t.pid()));
  // Who comes first, the queue or the second lock, is a race on the real driver and not compared.
  r.note("unlock_second", unlock(t.pid()));
  r.yes_no("all_return", soon([&] { return t.ask("done") == 3; }));
  r.note("wrong", t.ask("check"));
}

void busy_thread(Report& r) {
  Target t;
  t.ask("init");
  t.ask("alloc device");
  t.ask("busy 1");
  r.yes_no("runs", soon([&] { return t.ask("progress") > 100; }));
  r.note("lock", lock(t.pid()));
  // A wait that was already on its way may still return: waiting passes the lock.
  std::this_thread::sleep_for(200ms);
  const long at_lock = t.ask("progress");
  std::this_thread::sleep_for(300ms);
  r.yes_no("stands_still", t.ask("progress") == at_lock);
  r.note("checkpoint", checkpoint(t.pid()));
  r.note("restore", restore(t.pid()));
  r.note("unlock", unlock(t.pid()));
  r.yes_no("goes_on", soon([&] { return t.ask("progress") > at_lock + 100; }));
  r.yes_no("stops", t.ask("stop") > 0);
  r.note("wrong", t.ask("check"));
}

void waiting_thread(Report& r) {
  Target t;
  t.ask("init");
  t.ask("alloc device");
  t.ask("flagkernel");
  t.ask("call cuStreamSynchronize");
  std::this_thread::sleep_for(300ms);
  r.note("lock", lock(t.pid(), 500));
  r.note("state", state(t.pid()));
  t.ask("release");
  r.yes_no("returns", soon([&] { return t.ask("done") == 1; }));
  r.note("lock_idle", lock(t.pid()));
  r.note("unlock", unlock(t.pid()));
}

// The caller of a lock is killed while it waits.
void killed_locker(Report& r) {
  Target t;
  t.ask("init");
  t.ask("alloc device");
  t.ask("flagkernel");
  const pid_t caller = ::fork();
  if (caller == 0) {
    lock(t.pid(), 0);
    ::_exit(0);
  }
  std::this_thread::sleep_for(500ms);
  ::kill(caller, SIGKILL);
  ::waitpid(caller, nullptr, 0);
  std::this_thread::sleep_for(300ms);
  r.note("state_after_kill", state(t.pid()));
  t.ask("release");
  std::this_thread::sleep_for(700ms);
  const long after = state(t.pid());
  r.note("state_after_work", after);
  if (after == CU_PROCESS_STATE_RUNNING) r.note("lock", lock(t.pid()));
  r.note("unlock", unlock(t.pid()));
  r.note("sync", t.ask("sync"));
  r.note("wrong", t.ask("check"));
}

void target_dies(Report& r) {
  {
    Target t;
    t.ask("init");
    t.ask("flagkernel");
    std::atomic<int> code{-1};
    std::thread locker([&] { code = static_cast<int>(lock(t.pid(), 60'000)); });
    std::this_thread::sleep_for(300ms);
    t.kill();
    locker.join();
    r.note("lock", code);
  }
  Target t;
  t.ask("init");
  t.ask("alloc device");
  lock(t.pid());
  checkpoint(t.pid());
  t.kill();
  std::this_thread::sleep_for(300ms);
  r.note("zombie_restore", restore(t.pid()));
}

void memory_survives(Report& r) {
  for (const char* kind : {"device", "small", "pinned", "registered", "pool", "vmm"}) {
    Target t;
    t.ask("init");
    const std::string name = kind;
    r.note(name + "_alloc", t.ask("alloc " + name));
    r.note(name + "_alloc_second", t.ask("alloc " + name));
    r.note(name + "_lock", lock(t.pid()));
    r.note(name + "_checkpoint", checkpoint(t.pid()));
    r.note(name + "_restore", restore(t.pid()));
    r.note(name + "_unlock", unlock(t.pid()));
    r.note(name + "_wrong", t.ask("check"));
    r.note(name + "_add", t.ask("add"));
    r.note(name + "_wrong_after", t.ask("check"));
  }
}

void managed(Report& r) {
  Target t;
  t.ask("init");
  r.note("alloc", t.ask("alloc managed"));
  r.note("alloc_device", t.ask("alloc device"));
  r.note("lock", lock(t.pid()));
  r.note("checkpoint", checkpoint(t.pid()));
  r.note("state", state(t.pid()));
  r.note("checkpoint_again", checkpoint(t.pid()));
  r.note("unlock", unlock(t.pid()));
  r.note("state_after", state(t.pid()));
  r.note("add", t.ask("add"));
  r.note("wrong", t.ask("check"));
}

void gpu_is_free(Report& r) {
  Target t;
  Target observer;
  observer.ask("init");
  t.ask("init");
  const long before = observer.ask("freemib");
  r.note("alloc", t.ask("big 512"));
  const long used = observer.ask("freemib");
  r.yes_no("seen_used", before - used >= 500);
  lock(t.pid());
  checkpoint(t.pid());
  r.yes_no("freed_by_checkpoint", observer.ask("freemib") - used >= 500);
  restore(t.pid());
  r.yes_no("used_after_restore", before - observer.ask("freemib") >= 500);
  unlock(t.pid());
  t.kill();
  t.reap();
  r.yes_no("freed_by_death", soon([&] { return observer.ask("freemib") - used >= 500; }));
}

}  // namespace

std::vector<Case> checkpoint_cases() {
  return {
      {"lifecycle", "lock, checkpoint, restore, unlock, twice; states 1 2 1 0; data right",
       lifecycle},
      {"without_context", "the same for a process that only called cuInit", without_context},
      {"wrong_states", "every action in a wrong state is refused and changes nothing",
       wrong_states},
      {"who_can_be_asked", "no CUDA, zombie, no such process, thread id, null and reserved args",
       who_can_be_asked},
      {"restore_thread", "the restore thread is a thread of the target, the same all along",
       restore_thread},
      {"lock_timeout_kernel", "a lock times out behind a kernel; the target runs on",
       lock_timeout_kernel},
      {"lock_timeout_host", "a lock times out behind a host function; the target runs on",
       lock_timeout_host},
      {"lock_waits", "a lock waits for submitted work, and then succeeds", lock_waits},
      {"questions_while_lock_waits", "a question for the state waits behind a pending lock",
       questions_while_lock_waits},
      {"calls_while_lock_waits", "which functions wait while a lock waits for work",
       calls_while_lock_waits},
      {"calls_while_locked", "which functions wait while the process is locked",
       calls_while_locked},
      {"calls_while_checkpointed", "which functions wait while it is checkpointed",
       calls_while_checkpointed},
      {"queued_calls", "calls that queue at the lock all pass before a new lock", queued_calls},
      {"busy_thread", "a thread that launches without pause is locked and goes on", busy_thread},
      {"waiting_thread", "a thread in a synchronize holds the lock up as its work does",
       waiting_thread},
      {"killed_locker", "the caller of a pending lock is killed", killed_locker},
      {"target_dies", "the target dies under a pending lock, or checkpointed", target_dies},
      {"memory_survives", "content and addresses of every kind of memory survive", memory_survives},
      {"managed", "managed memory: 801 at the checkpoint, stays locked, runs on", managed},
      {"gpu_is_free", "another process sees the memory free while checkpointed", gpu_is_free},
  };
}

}  // namespace stasis::conformance
