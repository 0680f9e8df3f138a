// The target's side of the checkpoint functions: a thread that every process with CUDA has, and
// that locks, checkpoints, restores and unlocks its own process when asked.
//
// It must get along while all other threads are stopped by a debugger anywhere outside the driver
// (CRIU's plugins work like that), so it takes no lock that they could hold: the gate is atomic,
// the library has a heap of its own (private_heap.cc), and Memory's part is written for it.
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>

#include "abi/descriptor_message.h"
#include "sim/driver.h"
#include "sim/private_heap.h"

namespace stasis::sim {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

constexpr const char* kThreadName = "sim-restore";

struct Server {
  Driver* driver = nullptr;
  std::uint64_t calls[5] = {};  // by Action
  CUresult restore_refusal = CUDA_SUCCESS;
  bool managed_refused = false;
  Request request;
};

Server server;

CUprocessState state() { return static_cast<CUprocessState>(control_block().state.load()); }
void set_state(CUprocessState state) { control_block().state.store(state); }

bool hung_up(int reply) {
  pollfd p{reply, POLLIN, 0};
  return ::poll(&p, 1, 0) > 0 && (p.revents & (POLLHUP | POLLERR));
}

void sleep_until(Deadline deadline, int reply) {
  while (now_ns() < deadline && !hung_up(reply)) {
    timespec t{0, 10'000'000};
    ::nanosleep(&t, nullptr);
  }
}

// The thread's name while a fault draws an action out: a test that waits for that moment need not
// guess when it is.
class HeldUp {
 public:
  explicit HeldUp(const Plan& plan)
      : really_(plan.delay_ns || plan.hang || plan.timeout || plan.rate) {
    if (really_) ::prctl(PR_SET_NAME, "sim-held-up");
  }
  ~HeldUp() {
    if (really_) ::prctl(PR_SET_NAME, kThreadName);
  }
  HeldUp(const HeldUp&) = delete;
  HeldUp& operator=(const HeldUp&) = delete;

 private:
  bool really_;
};

CUresult lock(Driver& driver, const Plan& plan, int reply) {
  const auto timeout = server.request.timeout_ms;
  const Deadline deadline = timeout ? now_ns() + std::int64_t{timeout} * 1'000'000 : kNever;
  const auto abandoned = [&] { return hung_up(reply); };
  if (plan.timeout) {
    if (timeout) sleep_until(deadline, reply);
    return CUDA_ERROR_NOT_READY;
  }
  if (!driver.gate.close(deadline, abandoned)) return CUDA_ERROR_NOT_READY;
  if (!driver.outstanding.wait_for_none(deadline, abandoned)) {
    driver.gate.open();
    return CUDA_ERROR_NOT_READY;
  }
  set_state(CU_PROCESS_STATE_LOCKED);
  return CUDA_SUCCESS;
}

CUresult checkpoint(Driver& driver, const Plan& plan) {
  // The first refusal says why; driver 580 answers a second attempt with "unknown".
  if (driver.memory.managed() > 0) {
    const bool again = server.managed_refused;
    server.managed_refused = true;
    return again ? CUDA_ERROR_UNKNOWN : CUDA_ERROR_NOT_SUPPORTED;
  }
  Pace pace;
  pace.bytes_per_second = plan.rate;
  if (plan.die) pace.at_half = [] { ::kill(::getpid(), SIGKILL); };
  const auto rc = driver.memory.save(pace);
  if (plan.die) ::kill(::getpid(), SIGKILL);
  if (rc != CUDA_SUCCESS) {
    driver.memory.discard_image();
    return rc;
  }
  // Shared memory is only noticed to be impossible when it is too late, as on driver 580.
  server.restore_refusal = driver.memory.foreign_refusal();
  for (const Context* context : driver.contexts)
    note_switch(driver.memory.dir(), driver.gpu(context->device).uuid);
  driver.memory.let_go();
  drop_device_file();
  set_state(CU_PROCESS_STATE_CHECKPOINTED);
  return CUDA_SUCCESS;
}

const WireGpu* find_gpu(const CUuuid& uuid) {
  for (std::uint32_t i = 0; i < server.request.gpu_count; ++i) {
    if (same(server.request.gpus[i].uuid, uuid)) return &server.request.gpus[i];
  }
  return nullptr;
}

// The new GPU of each of the process's; all of the machine's must be named, each once.
CUresult map_gpus(const Memory& memory, std::vector<GpuSpec>& target) {
  const auto& request = server.request;
  const auto count = static_cast<std::uint32_t>(memory.gpus());
  if (request.pair_count && request.pair_count != count) return CUDA_ERROR_INVALID_VALUE;
  std::uint64_t taken = 0;
  for (int slot = 0; slot < memory.gpus(); ++slot) {
    const auto& old = memory.gpu(slot).uuid;
    const WireGpu* found = nullptr;
    if (request.pair_count) {
      for (std::uint32_t i = 0; i < request.pair_count; ++i) {
        if (!same(request.pairs[i].oldUuid, old)) continue;
        if (found) return CUDA_ERROR_INVALID_VALUE;
        found = find_gpu(request.pairs[i].newUuid);
        if (!found) return CUDA_ERROR_INVALID_VALUE;
      }
      if (!found) return CUDA_ERROR_INVALID_VALUE;
    } else {
      found = find_gpu(old);
      // On another machine, without a map: the GPU in the same place.
      if (!found && static_cast<std::uint32_t>(slot) < request.gpu_count) {
        found = &request.gpus[slot];
      }
      if (!found) return CUDA_ERROR_INVALID_DEVICE;
    }
    const auto bit = std::uint64_t{1} << (found - request.gpus);
    if (taken & bit) return CUDA_ERROR_INVALID_VALUE;
    taken |= bit;
    GpuSpec spec;
    spec.uuid = found->uuid;
    spec.capacity = found->capacity;
    spec.pci_bus = found->pci_bus;
    spec.name = found->name;
    target.push_back(std::move(spec));
  }
  return CUDA_SUCCESS;
}

CUresult restore(Driver& driver, const Plan& plan) {
  std::vector<GpuSpec> target;
  if (auto rc = map_gpus(driver.memory, target); rc != CUDA_SUCCESS) return rc;
  if (server.restore_refusal != CUDA_SUCCESS) return server.restore_refusal;
  Pace pace;
  pace.bytes_per_second = plan.rate;
  if (plan.die) pace.at_half = [] { ::kill(::getpid(), SIGKILL); };
  const auto rc = driver.memory.bring_back(server.request.dir, target, pace);
  if (plan.die) ::kill(::getpid(), SIGKILL);
  if (rc != CUDA_SUCCESS) return rc;
  for (Context* context : driver.contexts) {
    context->restored = true;
    const int slot = driver.devices[Driver::ordinal_index(context->device)].slot;
    note_switch(driver.memory.dir(), driver.memory.gpu(slot).uuid);
  }
  hold_device_file();
  set_state(CU_PROCESS_STATE_LOCKED);
  return CUDA_SUCCESS;
}

CUresult unlock(Driver& driver) {
  server.managed_refused = false;
  set_state(CU_PROCESS_STATE_RUNNING);
  driver.gate.open();
  return CUDA_SUCCESS;
}

CUresult perform(Driver& driver, int reply) {
  auto& request = server.request;
  if (request.action == Action::kState) return CUDA_SUCCESS;
  struct Step {
    FaultAction fault;
    CUprocessState from;
  };
  Step step;
  switch (request.action) {
    case Action::kLock:
      step = {FaultAction::kLock, CU_PROCESS_STATE_RUNNING};
      break;
    case Action::kCheckpoint:
      step = {FaultAction::kCheckpoint, CU_PROCESS_STATE_LOCKED};
      break;
    case Action::kRestore:
      step = {FaultAction::kRestore, CU_PROCESS_STATE_CHECKPOINTED};
      break;
    case Action::kUnlock:
      step = {FaultAction::kUnlock, CU_PROCESS_STATE_LOCKED};
      break;
    default:
      return CUDA_ERROR_UNKNOWN;
  }
  const auto nth = ++server.calls[static_cast<std::uint32_t>(request.action)];
  if (state() != step.from) return CUDA_ERROR_ILLEGAL_STATE;

  std::vector<Fault> faults;
  std::string error;
  request.faults[sizeof request.faults - 1] = 0;
  if (!parse_faults(request.faults, faults, error)) return CUDA_ERROR_INVALID_SOURCE;
  faults.insert(faults.end(), driver.faults.begin(), driver.faults.end());
  const auto plan = plan_for(faults, step.fault, nth, static_cast<std::uint64_t>(::getpid()));
  const HeldUp seen(plan);
  if (plan.delay_ns) sleep_until(now_ns() + static_cast<std::int64_t>(plan.delay_ns), reply);
  if (plan.hang) sleep_until(kNever, reply);
  if (plan.hang || hung_up(reply)) return CUDA_ERROR_UNKNOWN;  // the tool has gone
  if (plan.error) return static_cast<CUresult>(plan.error);
  if (plan.failed) {
    set_state(CU_PROCESS_STATE_FAILED);
    return CUDA_ERROR_UNKNOWN;
  }
  switch (request.action) {
    case Action::kLock:
      if (plan.die) ::kill(::getpid(), SIGKILL);
      return lock(driver, plan, reply);
    case Action::kCheckpoint:
      return checkpoint(driver, plan);
    case Action::kRestore:
      return restore(driver, plan);
    case Action::kUnlock:
      if (plan.die) ::kill(::getpid(), SIGKILL);
      return unlock(driver);
    case Action::kState:
      break;
  }
  return CUDA_ERROR_UNKNOWN;
}

// The next request and the descriptor to answer on.
Fd receive(int socket) {
  int fd = -1;
  const auto n = receive_with_descriptor(socket, &server.request, sizeof server.request, fd);
  Fd reply(fd);
  // The program closed our descriptors: no request can arrive any more.
  while (n <= 0)
    ::pause();
  const bool complete = n == sizeof server.request && server.request.version == kControlVersion;
  return complete ? std::move(reply) : Fd();
}

void* thread_main(void*) {
  never_wait_for_the_heap();
  control_block().restore_tid.store(::gettid());
  for (;;) {
    const int socket = server_end_fd().load();
    const Fd reply = receive(socket);
    if (!reply) continue;
    Reply answer{};
    try {
      answer.result = perform(*server.driver, reply.get());
    } catch (const std::bad_alloc&) {
      answer.result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    answer.state = state();
    ::send(reply.get(), &answer, sizeof answer, MSG_NOSIGNAL);
  }
}

}  // namespace

bool start_restore_thread(Driver& driver) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0) return false;
  server.driver = &driver;
  server_end_fd().store(ends[0]);
  control_block().client_fd.store(ends[1]);
  sigset_t all;
  sigset_t old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  pthread_t thread;
  const int rc = pthread_create(&thread, nullptr, thread_main, nullptr);
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  if (rc != 0) return false;
  pthread_setname_np(thread, kThreadName);
  pthread_detach(thread);
  while (control_block().restore_tid.load() == 0)
    ::usleep(50);
  return true;
}

}  // namespace stasis::sim
