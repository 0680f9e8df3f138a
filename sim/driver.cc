#include "sim/driver.h"

#include <fcntl.h>
#include <linux/landlock.h>
#include <linux/perf_event.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "sim/idle_thread.h"

namespace stasis::sim {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

std::atomic<Driver*> the_driver{nullptr};
constexpr std::size_t kControlPagesSize = 2 * 4096;
std::atomic<bool> forked{false};
std::atomic<int> device_file{-1};
std::atomic<int> control_file{-1};
std::atomic<void*> control_pages{nullptr};
std::mutex start_mutex;

// Initialised with something else than zero, so that it lies in the file-backed part of the
// library's writable data, where callers look; the alignment puts it at the start of a page.
alignas(kControlAlignment) ControlBlock the_block = {
    {'s', 't', 'a', 's', 'i', 's', '-', 's', 'i', 'm', '-', 'c', 't', 'l', 0, 0},
    kControlVersion,
    sizeof(ControlBlock),
    {0},
    {0},
    {0},
    {-1}};

std::atomic<int> server_end{-1};

// A child has no CUDA. Only flags and descriptors: everything else may have been in the middle of a
// change when the process forked. It keeps the device's open files and their mapping, as with the
// real driver, so CRIU cannot dump it.
void after_fork_in_child() {
  forked.store(true);
  the_block.active.store(0);
  the_driver.store(nullptr);
  device_file.store(-1);
  control_file.store(-1);
  control_pages.store(nullptr);
  const int server = server_end.exchange(-1);
  if (server >= 0) ::close(server);
  const int client = the_block.client_fd.exchange(-1);
  if (client >= 0) ::close(client);
  forget_own_files();
}

}  // namespace

// Something that CRIU cannot dump, that needs no privilege and no other process. The first is
// enough; the others are for kernels and containers that refuse it.
int open_undumpable() {
#ifdef UFFD_USER_MODE_ONLY
  int fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY));
  if (fd >= 0) return fd;
#else
  int fd = -1;
#endif
  landlock_ruleset_attr rules{};
  rules.handled_access_fs = LANDLOCK_ACCESS_FS_EXECUTE;
  fd = static_cast<int>(syscall(SYS_landlock_create_ruleset, &rules, sizeof rules, 0));
  if (fd >= 0) return fd;  // close-on-exec by itself
  perf_event_attr event{};
  event.size = sizeof event;
  event.type = PERF_TYPE_SOFTWARE;
  event.config = PERF_COUNT_SW_DUMMY;
  event.exclude_kernel = 1;
  event.exclude_hv = 1;
  return static_cast<int>(syscall(SYS_perf_event_open, &event, 0, -1, -1, PERF_FLAG_FD_CLOEXEC));
}

Driver* live_driver() { return the_driver.load(std::memory_order_acquire); }
CUresult not_started_code() { return CUDA_ERROR_NOT_INITIALIZED; }
ControlBlock& control_block() { return the_block; }
std::atomic<int>& server_end_fd() { return server_end; }

void hold_device_file() {
  if (device_file.load() < 0) device_file.store(open_undumpable());
  if (control_file.load() >= 0) return;
  const int fd = ::memfd_create("nvidiactl", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, kControlPagesSize) != 0) {
    if (fd >= 0) ::close(fd);
    return;
  }
  void* pages = ::mmap(nullptr, kControlPagesSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  control_file.store(fd);
  if (pages != MAP_FAILED) control_pages.store(pages);
}

void drop_device_file() {
  if (void* pages = control_pages.exchange(nullptr)) ::munmap(pages, kControlPagesSize);
  for (auto* file : {&device_file, &control_file}) {
    const int fd = file->exchange(-1);
    if (fd >= 0) ::close(fd);
  }
}

CUresult start_driver() {
  if (forked) return CUDA_ERROR_NOT_INITIALIZED;
  std::lock_guard lock(start_mutex);
  if (live_driver()) return CUDA_SUCCESS;
  Config config;
  std::string error;
  if (!load(config, error)) return CUDA_ERROR_INVALID_SOURCE;
  std::vector<Fault> faults;
  const char* text = std::getenv("STASIS_SIM_FAULTS");
  if (text && !parse_faults(text, faults, error)) return CUDA_ERROR_INVALID_SOURCE;
  if (config.visible.empty()) return CUDA_ERROR_NO_DEVICE;
  for (const auto& gpu : config.gpus) {
    if (!sweep(config.dir, gpu.uuid)) return CUDA_ERROR_OPERATING_SYSTEM;
  }
  auto driver = std::make_unique<Driver>(std::move(config));
  driver->faults = std::move(faults);
  driver->devices.resize(driver->config.visible.size());
  for (std::size_t i = 0; i < driver->devices.size(); ++i) {
    auto& device = driver->devices[i];
    device.slot = driver->config.visible[i];
    device.default_pool.device = static_cast<int>(i);
    device.default_pool.is_default = true;
    device.current_pool = &device.default_pool;
    driver->pools.insert(&device.default_pool);
  }
  renew_nonce();
  hold_device_file();
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
  if (!start_restore_thread(*driver)) {
    drop_device_file();
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  start_idle_thread();
  the_driver.store(driver.release(), std::memory_order_release);
  the_block.state.store(CU_PROCESS_STATE_RUNNING);
  the_block.active.store(1);
  return CUDA_SUCCESS;
}

Plan Driver::next_plan(FaultAction own_call, int gpu) {
  if (faults.empty()) return {};
  const auto index = static_cast<std::size_t>(own_call) - static_cast<std::size_t>(kFirstOwnCall);
  return plan_for(faults, own_call, ++own_calls[index], static_cast<std::uint64_t>(::getpid()),
                  gpu);
}

CUresult suffer(const Plan& plan) {
  if (plan.die) ::kill(::getpid(), SIGKILL);
  if (plan.delay_ns) {
    const auto ns = static_cast<long>(plan.delay_ns);
    const timespec time{ns / 1'000'000'000, ns % 1'000'000'000};
    ::nanosleep(&time, nullptr);
  }
  while (plan.hang)
    ::pause();
  return static_cast<CUresult>(plan.error);
}

void trim_pools(Driver& driver) {
  std::vector<std::pair<Pool*, std::uint64_t>> all;
  {
    std::lock_guard lock(driver.mutex);
    for (auto* pool : driver.pools)
      all.emplace_back(pool, pool->attributes[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD]);
  }
  for (const auto& entry : all) {
    Pool* pool = entry.first;
    const std::uint64_t threshold = entry.second;
    if (!driver.memory.trim_pool(pool, threshold, true)) continue;
    (void)gated([&](Driver& entered) -> CUresult {
      entered.memory.trim_pool(pool, threshold, false);
      return CUDA_SUCCESS;
    });
  }
}

Stream* find_stream(Driver& driver, Context& context, CUstream handle) {
  if (!handle || handle == kStreamLegacy || handle == kStreamPerThread) {
    return &context.default_stream;
  }
  auto* stream = reinterpret_cast<Stream*>(handle);
  std::lock_guard lock(driver.mutex);
  return driver.streams.contains(stream) ? stream : nullptr;
}

}  // namespace stasis::sim
