#include "agent.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "abi/agent_protocol.h"
#include "abi/agent_thread.h"
#include "activation.h"
#include "copiers.h"
#include "deepbind_scan.h"
#include "eviction.h"
#include "exported_fds.h"
#include "gate.h"
#include "intercept.h"
#include "ipc_broker.h"
#include "managed.h"
#include "precopy.h"
#include "session.h"
#include "sharing.h"
#include "thread.h"

namespace stasis::preload {
namespace {

using direct::ControlPage;

std::atomic<ControlPage*> g_page{nullptr};
int g_fd = -1;
std::atomic<bool> g_started{false};

void* run_agent(void*) {
  ::prctl(PR_SET_NAME, kAgentThread);
  // The driver has memory of its own for each thread, and a program that has none left for it would
  // be ended by the C library. One that is attached to makes its first call later.
  cuda::CUcontext none = nullptr;
  if (is_attached()) (void)driver().cuCtxGetCurrent(&none);
  auto* page = g_page.load();
  page->tid = static_cast<std::int32_t>(::syscall(SYS_gettid));
  // A tool that finds the magic finds an agent that listens.
  std::atomic_thread_fence(std::memory_order_release);
  page->magic = direct::kAgentMagic;
  Session(*page, g_fd).run();
}

// How many forks this thread is in: a handler of a signal may come in one, and fork.
thread_local int g_forks __attribute__((tls_model("initial-exec"))) = 0;

thread_local bool g_fork_has_pass __attribute__((tls_model("initial-exec"))) = false;
alignas(Gate::Pass) thread_local std::byte g_fork_pass[sizeof(Gate::Pass)]
    __attribute__((tls_model("initial-exec")));

// A child finds the tables whole, and all descriptors that it is to close.
void before_fork() {
  const SignalsBlocked blocked;
  if (g_forks++ > 0) return;
  g_fork_has_pass = g_forks_pass.load();
  if (g_fork_has_pass) new (g_fork_pass) Gate::Pass;
  lock_memory_for_fork();
  ::pthread_mutex_lock(&g_exporting);
  lock_looking_for_fork();
}

void after_fork() {
  const SignalsBlocked blocked;
  if (--g_forks > 0) return;
  unlock_looking_after_fork();
  ::pthread_mutex_unlock(&g_exporting);
  unlock_memory_after_fork();
  if (g_fork_has_pass) std::launder(reinterpret_cast<Gate::Pass*>(g_fork_pass))->~Pass();
}

// The child has this process's memory and descriptors, and no agent. What it inherits belongs to
// its parent; if it comes to use CUDA itself, it gets its own.
void in_forked_child() {
  const Uncancelled uncancelled;
  g_exported.close_held();
  g_pinned.close_held();
  after_fork();
  if (holds_page(g_fd)) ::close(g_fd);
  g_fd = -1;
  g_page.store(nullptr);  // not mapped here: MADV_DONTFORK
  heed_precopy(nullptr);
  g_started.store(false);
  g_ending.store(false);
  g_forks_pass.store(false);
  Gate::reset_after_fork();
  Copiers::forget();
  forget_memory_after_fork();
}

// Registered after the driver's own, which came with cuInit, so it runs before: a program that ends
// while its memory is away waits here, and from then on its gate is not closed any more.
void at_exit() {
  const Gate::Pass pass;
  g_ending.store(true);
}

bool make_page() {
  g_fd = static_cast<int>(
      ::syscall(SYS_memfd_create, direct::kAgentMemfd, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (g_fd < 0) return false;
  if (::fchmod(g_fd, 0600) != 0 || ::ftruncate(g_fd, sizeof(ControlPage)) != 0 ||
      ::fcntl(g_fd, F_ADD_SEALS, direct::kAgentSeals) != 0)
    return false;
  void* at = ::mmap(nullptr, sizeof(ControlPage), PROT_READ | PROT_WRITE, MAP_SHARED, g_fd, 0);
  if (at == MAP_FAILED) return false;
  ::madvise(at, sizeof(ControlPage), MADV_DONTFORK);
  auto* page = new (at) ControlPage{};
  page->version = direct::kAgentVersion;
  page->bytes = sizeof(ControlPage);
  page->pid = ::getpid();
  page->precopy_state = direct::PrecopyState::kNo;
  page->services = services_made();
  heed_precopy(&page->precopy_state);
  page->origin = is_attached() ? direct::AgentOrigin::kHooked : direct::AgentOrigin::kStarted;
  g_page.store(page);
  return true;
}

}  // namespace

void Agent::start() {
  if (g_started.load(std::memory_order_relaxed) || g_started.exchange(true)) return;
  static const int registered =
      ::pthread_atfork(&before_fork, &after_fork, &in_forked_child) + std::atexit(&at_exit);
  if (registered != 0) return;
  if (make_page() && start_thread(&run_agent, nullptr)) return;
  heed_precopy(nullptr);
  if (auto* page = g_page.exchange(nullptr)) ::munmap(page, sizeof *page);
  if (g_fd >= 0) ::close(g_fd);
  g_fd = -1;
  // What was short, a descriptor or a thread, need not be at the next allocation.
  g_started.store(false);
}

void Agent::start_with_import() {
  start();
  if (auto* page = g_page.load()) add_shared(page->share_count);
}

void Agent::note_services(std::uint32_t made) {
  if (auto* page = g_page.load()) __atomic_store_n(&page->services, made, __ATOMIC_RELAXED);
}

void Agent::start_with_managed() {
  start_with_import();
  note_managed();
}

void Agent::note_managed() {
  auto* page = g_page.load();
  if (!page) return;
  write_managed_areas(page->managed_areas, g_forks_pass);
}

}  // namespace stasis::preload
