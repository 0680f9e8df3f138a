#include "copiers.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "abi/agent_thread.h"
#include "abi/futex.h"
#include "eviction_internal.h"
#include "intercept.h"
#include "thread.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

bool Bounce::have() {
  if (at_) return true;
  void* at = nullptr;
  pinned_ =
      driver().cuMemAllocHost_v2 && driver().cuMemAllocHost_v2(&at, kManagedBlock) == CUDA_SUCCESS;
  if (!pinned_) {
    at = ::mmap(nullptr, kManagedBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return false;
  }
  at_ = static_cast<std::byte*>(at);
  return true;
}

void Bounce::let_go() {
  if (pinned_)
    driver().cuMemFreeHost(at_);
  else if (at_)
    ::munmap(at_, kManagedBlock);
  at_ = nullptr;
  pinned_ = false;
}

Outcome Bounce::out(CUdeviceptr from, std::size_t bytes, const std::byte*& found) {
  if (!have()) return {CUDA_ERROR_OUT_OF_MEMORY, "mmap"};
  found = at_;
  return {driver().cuMemcpyDtoH_v2(at_, from, bytes), "cuMemcpyDtoH"};
}

Outcome Bounce::in(CUdeviceptr to, const std::byte* from, std::size_t bytes) {
  if (!have()) return {CUDA_ERROR_OUT_OF_MEMORY, "mmap"};
  std::memcpy(at_, from, bytes);
  // It returns when the memory may be used again.
  return {driver().cuMemcpyHtoD_v2(to, at_, bytes), "cuMemcpyHtoD"};
}

namespace {

constexpr std::size_t kMostThreads = 8;  // threads, the agent's own among them

struct Work {
  const Copiers::Act* act = nullptr;
  CUcontext context = nullptr;
  std::size_t count = 0;
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  Outcome failure;  // of the thread that has set `failed`
};

Work g_work;
std::atomic<bool> g_open{false};         // there is work
std::atomic<std::uint32_t> g_calls{0};   // changes when there is; a futex
std::atomic<std::uint32_t> g_inside{0};  // threads that may be at it; a futex
std::atomic<std::uint32_t> g_named{0};   // threads that have their name; a futex
std::atomic<std::size_t> g_threads{0};   // besides the agent's own
std::array<Bounce, kMostThreads> g_bounces;

void work(Bounce& bounce) {
  while (!g_work.failed.load(std::memory_order_relaxed)) {
    const auto index = g_work.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= g_work.count) return;
    const auto outcome = (*g_work.act)(index, bounce);
    if (!outcome.ok() && !g_work.failed.exchange(true)) g_work.failure = outcome;
  }
}

void* copier(void* bounce) {
  ::prctl(PR_SET_NAME, kAgentThread);
  // What a first call of the C library's allocator and of the driver makes for a thread is made
  // now: later a thread of the program's may be parked with the locks that it takes.
  std::free(std::malloc(1));
  driver().cuCtxSetCurrent(nullptr);
  ++g_named;
  futex::wake_all(g_named, false);
  for (std::uint32_t seen = 0;;) {
    while (g_calls.load() == seen)
      futex::wait(g_calls, seen, false);
    seen = g_calls.load();
    ++g_inside;
    // What is closed by now may be opened for the next only when this has seen it.
    if (g_open.load() && driver().cuCtxSetCurrent(g_work.context) == CUDA_SUCCESS) {
      work(*static_cast<Bounce*>(bounce));
      driver().cuCtxSetCurrent(nullptr);
    }
    --g_inside;
    futex::wake_all(g_inside, false);
  }
}

// Processors that this process may use.
std::size_t processors() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? static_cast<std::size_t>(CPU_COUNT(&set))
                                                       : 1;
}

}  // namespace

void Copiers::start() {
  if (g_threads.load() > 0) return;
  const std::size_t wanted = std::min(kMostThreads, processors()) - 1;
  std::size_t started = 0;
  g_named = 0;
  while (started < wanted && start_thread(&copier, &g_bounces[started + 1]))
    ++started;
  g_threads = started;
  // Until then the tool takes them for the program's; one that it parks does not copy.
  constexpr int kTimes = 100;
  for (int i = 0; i < kTimes && g_named.load() < started; ++i)
    futex::wait(g_named, g_named.load(), false, std::chrono::milliseconds(10));
}

void Copiers::forget() {
  g_threads = 0;
  g_open = false;
  g_calls = 0;
  g_inside = 0;
}

Outcome Copiers::run(std::size_t count, CUcontext context, const Act& act) {
  // To wake the others takes as long as to copy some.
  constexpr std::size_t kFew = 4;
  g_work.act = &act;
  g_work.context = context;
  g_work.count = count;
  g_work.next = 0;
  g_work.failed = false;
  g_work.failure = {};
  const bool together = count > kFew && g_threads.load() > 0;
  if (together) {
    g_open = true;
    ++g_calls;
    futex::wake_all(g_calls, false);
  }
  {
    const CurrentContext current(context);
    work(g_bounces[0]);
  }
  if (together) {
    g_open = false;
    for (auto inside = g_inside.load(); inside > 0; inside = g_inside.load())
      futex::wait(g_inside, inside, false);
  }
  return g_work.failure;
}

void Copiers::let_go() {
  for (auto& bounce : g_bounces)
    bounce.let_go();
}

}  // namespace stasis::preload
