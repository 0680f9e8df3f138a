// SPDX-License-Identifier: GPL-2.0-or-later
#include "held_tree.h"

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <fmt/format.h>

#include "criu_api.h"
#include "direct/unrestorable_memory.h"

namespace stasis::plugin {

Result<std::vector<proc::AwakeThread>> wake_tree(Driver& driver, Pid root, Acting acting) {
  const proc::ProcFs procfs;
  STASIS_TRY_ASSIGN(auto tree, procfs.tree(root));
  const int self = static_cast<int>(::syscall(SYS_gettid));
  std::vector<proc::AwakeThread> awake;
  for (const proc::ProcessInfo& info : tree) {
    if (info.has_ended()) continue;
    auto process = Process::open(driver, info.pid, procfs);
    if (!process) {
      const ErrorCode code = process.error().code;
      if (code == ErrorCode::kNoSuchProcess || code == ErrorCode::kZombie) continue;
      return fail(std::move(process.error()));
    }
    // This question is answered without the process (see Process::can_answer).
    auto thread = process->restore_thread_id();
    if (!thread) {
      const ErrorCode code = thread.error().code;
      if (code == ErrorCode::kNotCuda || code == ErrorCode::kProcessGone) continue;
      return fail(std::move(thread.error()));
    }
    const auto status = procfs.thread_status(info.pid, *thread);
    if (!status && process->alive()) {
      return fail(ErrorCode::kInternal,
                  fmt::format("the driver says that thread {} restores process {}, which has none "
                              "such",
                              thread->value, info.pid.value),
                  "run criu in the PID namespace of the process, or outside of it");
    }
    if (!status || status->tracer != self) continue;
    STASIS_TRY_ASSIGN(auto woken, proc::AwakeThread::wake(info.pid, *thread));
    awake.push_back(std::move(woken));
    if (acting == Acting::kDriver) continue;
    for (const Tid agents : threads_that_take_back(info.pid)) {
      STASIS_TRY_ASSIGN(auto another, proc::AwakeThread::wake(info.pid, agents));
      awake.push_back(std::move(another));
    }
  }
  return awake;
}

Result<void> put_to_sleep(std::vector<proc::AwakeThread>& awake) {
  Result<void> worst;
  for (proc::AwakeThread& thread : awake) {
    if (auto done = thread.stop(); !done && worst) worst = std::move(done);
  }
  awake.clear();
  return worst;
}

void kill_tree(Pid root) {
  using namespace std::chrono_literals;
  const proc::ProcFs procfs;
  std::vector<int> ours;
  if (auto tree = procfs.tree(root)) {
    for (const proc::ProcessInfo& info : *tree) {
      for (const Tid thread : procfs.threads(info.pid)) {
        if (thread.value != root.value) ours.push_back(thread.value);
      }
      (void)::kill(info.pid.value, SIGKILL);
    }
  }
  (void)::kill(root.value, SIGKILL);
  // The first thread of a process can be collected only when the others have been.
  // One that has much pinned memory takes a while to give it back.
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (!ours.empty() && std::chrono::steady_clock::now() < deadline) {
    std::erase_if(ours, [](int thread) {
      const int got = ::waitpid(thread, nullptr, WNOHANG | __WALL);
      return got == thread || (got < 0 && errno == ECHILD);
    });
    if (!ours.empty()) std::this_thread::sleep_for(1ms);
  }
  if (!ours.empty()) {
    log_warning(
        fmt::format("{} thread(s) of process {} do not end, {} the first; CRIU may wait for "
                    "them",
                    ours.size(), root.value, ours.front()));
  }
}

std::uint64_t bytes_on_gpus(Driver& driver, Pid root) {
  std::uint64_t bytes = 0;
  const auto tree = proc::ProcFs().tree(root);
  if (const auto use = driver.memory_by_process(); use && tree) {
    for (const proc::ProcessInfo& info : *tree) {
      if (const auto found = use->find(info.pid); found != use->end())
        bytes += total_bytes(found->second);
    }
  }
  if (bytes > 0) return bytes;
  if (const auto gpus = driver.gpus()) {
    for (const Gpu& gpu : *gpus)
      bytes += gpu.memory_total;
  }
  return bytes;
}

std::uint64_t bytes_in_host_memory(Pid root) {
  const proc::ProcFs procfs;
  std::uint64_t bytes = 0;
  if (const auto tree = procfs.tree(root)) {
    for (const proc::ProcessInfo& info : *tree)
      bytes += procfs.resident_bytes(info.pid).value_or(0);
  }
  return bytes;
}

std::optional<std::chrono::milliseconds> asked_driver_timeout() {
  constexpr std::uint64_t kAtMost = 86'400'000;
  const char* set = std::getenv(kDriverTimeoutVariable);
  if (set == nullptr || *set == '\0') return std::nullopt;
  const char* const end = set + std::strlen(set);
  std::uint64_t asked = 0;
  const auto [stopped, error] = std::from_chars(set, end, asked);
  if (error != std::errc() || stopped != end || asked == 0 || asked > kAtMost) {
    log_warning(fmt::format("{}={} is no number of milliseconds up to {}; it counts as not set",
                            kDriverTimeoutVariable, set, kAtMost));
    return std::nullopt;
  }
  return std::chrono::milliseconds(asked);
}

std::chrono::milliseconds timeout(std::uint64_t bytes) {
  constexpr std::chrono::milliseconds kByDefault(60'000);
  constexpr std::uint64_t kBytesPerMs = 200'000;
  return asked_driver_timeout().value_or(kByDefault) +
         std::chrono::milliseconds(bytes / kBytesPerMs);
}

}  // namespace stasis::plugin
