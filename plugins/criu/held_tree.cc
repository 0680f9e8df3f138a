// SPDX-License-Identifier: GPL-2.0-or-later
#include "held_tree.h"

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <thread>

#include <fmt/format.h>

#include "criu_api.h"

namespace stasis::plugin {

Result<std::vector<proc::AwakeThread>> wake_tree(Driver& driver, Pid root) {
  const proc::ProcFs procfs;
  auto tree = procfs.tree(root);
  if (!tree) return fail(std::move(tree.error()));
  const int self = static_cast<int>(::syscall(SYS_gettid));
  std::vector<proc::AwakeThread> awake;
  for (const proc::ProcessInfo& info : *tree) {
    if (info.state == 'Z' || info.state == 'X') continue;
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
    if (!status || status->tracer != self) continue;
    auto woken = proc::AwakeThread::wake(info.pid, *thread);
    if (!woken) return fail(std::move(woken.error()));
    awake.push_back(std::move(*woken));
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

std::chrono::milliseconds patience(std::uint64_t bytes) {
  constexpr std::chrono::seconds kAtLeast{60};
  constexpr std::uint64_t kBytesPerMs = 200'000;
  return kAtLeast + std::chrono::milliseconds(bytes / kBytesPerMs);
}

}  // namespace stasis::plugin
