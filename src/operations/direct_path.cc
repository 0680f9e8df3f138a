#include "operations/direct_path.h"

#include <algorithm>
#include <random>
#include <thread>

#include <fmt/format.h>

#include "direct/remote_memory.h"

namespace stasis {

namespace {

using direct::AgentClient;
using direct::AgentCommand;
using direct::AgentState;
using direct::copy_time;
using direct::is_away;
using std::chrono::milliseconds;

// What an agent is given for what it does at once, and for what takes the driver's time: mapping 16
// GiB takes 4 ms, unmapping 10 (H100, 580.159.04).
constexpr milliseconds kAtOnce{5000};
constexpr milliseconds kMapping = direct::kMappingPatience;
// The share of a try to close all gates, as of a try to lock.
constexpr milliseconds kSlice{250};
constexpr milliseconds kPause{5};
// The buffers of several processes as one Content: a process begins at a multiple of this, so that
// no piece lies in two.
constexpr std::uint64_t kGap = std::uint64_t{1} << 40;

class Buffers final : public direct::Content {
 public:
  void add(const AgentClient& agent) {
    parts_.emplace_back(agent.pid(), agent.pidfd(), agent.buffer_address(), agent.bytes());
  }
  Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    return parts_.at(offset / kGap).write(offset % kGap, bytes);
  }
  Result<void> read(std::uint64_t offset, std::span<std::byte> bytes) override {
    return parts_.at(offset / kGap).read(offset % kGap, bytes);
  }

 private:
  std::vector<direct::RemoteMemory> parts_;
};

// Failures that the driver's own way would meet as well: there is no point in trying it.
bool final_for_both(ErrorCode code) {
  return code == ErrorCode::kTimeout || code == ErrorCode::kInterrupted ||
         code == ErrorCode::kProcessGone || code == ErrorCode::kOutOfHostMemory ||
         code == ErrorCode::kNoAnswer;
}

}  // namespace

std::uint64_t DirectPath::bytes() const {
  std::uint64_t sum = 0;
  for (const auto& agent : agents_)
    sum += agent.bytes();
  return sum;
}

Result<void> DirectPath::find(const Environment& env, std::vector<const Process*> processes,
                              bool away) {
  for (const Process* process : processes) {
    if (!process->alive()) continue;
    auto agent = AgentClient::find(process->pid(), process->pidfd());
    if (!agent) {
      if (away || agent.error().code == ErrorCode::kBusy) return fail(std::move(agent.error()));
      env.tell("the driver's path is taken: " + agent.error().to_string());
      continue;
    }
    if (!*agent) continue;
    // Its last peer may have been killed, and the agent be at work to make the program run: what it
    // does then is done first. One that is held does nothing, and is not asked to while the driver
    // may hold it.
    if (away || (*agent)->state() != AgentState::kHeld) {
      auto settled = (*agent)->ask(AgentCommand::kNone, 0, copy_time((*agent)->bytes()));
      if (!settled && (away || final_for_both(settled.error().code)))
        return fail(std::move(settled.error()));
      if (!settled) {
        env.tell("the driver's path is taken: " + settled.error().to_string());
        continue;
      }
    }
    if (is_away((*agent)->state()) == away) agents_.push_back(std::move(**agent));
  }
  return {};
}

Result<void> DirectPath::prepare(const Environment& env, Group& group) {
  if (auto room = group.check_host_memory(); !room) return room;
  for (auto& agent : agents_)
    agent.begin(AgentCommand::kPrepare, 0);
  Result<void> worst;
  for (auto& agent : agents_) {
    auto done = agent.finish(kAtOnce);
    if (!done) worst = std::move(done);
  }
  if (!worst) return worst;
  std::erase_if(agents_, [](const AgentClient& agent) { return agent.bytes() == 0; });
  if (agents_.empty()) return {};
  std::vector<GpuUuid> gpus;
  for (const auto& [pid, uses] : group.gpu_use())
    for (const GpuUse& use : uses)
      if (std::find(gpus.begin(), gpus.end(), use.gpu) == gpus.end()) gpus.push_back(use.gpu);
  // A context takes as long as touching gigabytes, so both at once.
  coming_ = std::async(std::launch::async, env.mover, gpus);
  for (auto& agent : agents_) {
    direct::RemoteMemory buffer(agent.pid(), agent.pidfd(), agent.buffer_address(), agent.bytes());
    auto done = buffer.fault_in(0, env.interrupt);
    if (!done && worst) worst = std::move(done);
  }
  auto mover = take_mover(env, gpus);
  if (!mover) return fail(std::move(mover.error()));
  mover_ = std::move(*mover);
  return worst;
}

Result<void> DirectPath::require_all(const std::vector<const Process*>& running) const {
  std::string list;
  for (const Process* process : running) {
    const bool found = std::any_of(agents_.begin(), agents_.end(), [&](const AgentClient& agent) {
      return agent.pid() == process->pid();
    });
    if (!found && process->alive())
      list += fmt::format("{}{} ({})", list.empty() ? "" : ", ", process->pid().value,
                          process->info().comm);
  }
  if (list.empty()) return {};
  return fail(ErrorCode::kNotSupported,
              fmt::format("no agent that has GPU memory to give away is in process {}", list),
              "start it with `stasis run`; without --path direct the driver moves its memory");
}

Result<void> DirectPath::require_nothing_stays() const {
  for (const auto& agent : agents_) {
    if (agent.staying_bytes() == 0) continue;
    return fail(
        ErrorCode::kNotSupported,
        fmt::format("{} of the GPU memory of process {} cannot leave by the direct path: the "
                    "program has exported it",
                    format_bytes(agent.staying_bytes()), agent.pid().value),
        "without --path direct the driver moves that");
  }
  return {};
}

Result<void> DirectPath::close_all(const Environment& env, milliseconds timeout, Phases& phases) {
  const auto start = Clock::now();
  std::minstd_rand random(std::random_device{}());
  for (;;) {
    auto slice = agents_.size() == 1 && timeout.count() > 0 ? timeout : kSlice;
    if (timeout.count() > 0) {
      const auto left = std::chrono::duration_cast<milliseconds>(start + timeout - Clock::now());
      slice = std::clamp(slice, milliseconds(1), std::max(left, milliseconds(1)));
    }
    phases.stands_still();
    for (auto& agent : agents_)
      agent.begin(AgentCommand::kClose, static_cast<std::uint64_t>(slice.count()));
    Result<void> worst;
    for (auto& agent : agents_) {
      auto done = agent.finish(slice + kAtOnce);
      if (!done && (worst || worst.error().code == ErrorCode::kTimeout)) worst = std::move(done);
    }
    if (worst) return worst;
    // Processes that wait for each other on the GPU: those that stand still must run for the others
    // to get there.
    for (auto& agent : agents_) {
      if (agent.state() != AgentState::kClosed) continue;
      if (auto opened = agent.ask(AgentCommand::kOpen, 0, kMapping); !opened) return opened;
    }
    if (worst.error().code != ErrorCode::kTimeout) return worst;
    if (timeout.count() > 0 && Clock::now() - start >= timeout) return worst;
    if (auto stop = env.interrupt.check(); !stop) return stop;
    std::this_thread::sleep_for(kPause * (1 + random() % 8));
  }
}

Result<void> DirectPath::copy(const Environment& env, bool out) {
  std::vector<direct::Segment> segments;
  Buffers buffers;
  std::uint64_t base = 0;
  for (auto& agent : agents_) {
    auto taken = agent.take_segments(kMapping);
    if (!taken) return fail(std::move(taken.error()));
    for (auto& segment : *taken) {
      // What the page says is the target's to write.
      if (segment.offset > agent.bytes() || segment.bytes > agent.bytes() - segment.offset ||
          agent.bytes() > agent.buffer_bytes() || agent.bytes() > kGap) {
        return fail(ErrorCode::kInternal, fmt::format("the agent in process {} names memory that "
                                                      "is not there",
                                                      agent.pid().value));
      }
      segment.offset += base;
      segments.push_back(std::move(segment));
    }
    buffers.add(agent);
    base += kGap;
  }
  const auto deadline = Clock::now() + copy_time(bytes());
  auto copied = out ? mover_->copy_out(std::move(segments), buffers, env.interrupt, deadline)
                    : mover_->copy_in(std::move(segments), buffers, env.interrupt, deadline);
  if (copied) return {};
  // A mover that is lost says nothing of the program, which the driver may still hold.
  if (copied.error().code == ErrorCode::kNoAnswer) copied.error().code = ErrorCode::kInternal;
  return fail(std::move(copied.error()));
}

DirectPath::MoverResult DirectPath::take_mover(const Environment& env,
                                               std::span<const GpuUuid> gpus) {
  return coming_.valid() ? coming_.get() : env.mover(gpus);
}

void DirectPath::get_ready(const Environment& env, const std::vector<const Process*>& processes) {
  if (!env.mover) return;
  std::uint64_t sum = 0;
  for (const Process* process : processes) {
    auto agent = AgentClient::find(process->pid(), process->pidfd());
    if (agent && *agent && is_away((*agent)->state())) sum += (*agent)->bytes();
  }
  if (sum == 0) return;
  coming_ = std::async(std::launch::async, env.mover, std::span<const GpuUuid>());
}

Result<void> DirectPath::refuse_shared(const Environment& env, bool ignore) const {
  std::string list;
  for (const auto& agent : agents_) {
    if (agent.shared_count() == 0) continue;
    list += fmt::format(
        "{}{} ({})", list.empty() ? "" : ", ", agent.pid().value,
        agent.shared_count() == 1 ? "1 piece" : fmt::format("{} pieces", agent.shared_count()));
  }
  if (list.empty()) return {};
  auto what = fmt::format(
      "GPU memory that is open in two processes (CUDA IPC), which the driver checkpoints and "
      "cannot "
      "restore (the job would be lost): process {}",
      list);
  if (ignore) {
    env.tell("going on as told, in spite of " + what);
    return {};
  }
  return fail(ErrorCode::kNotSupported, std::move(what),
              "try again when the processes have closed what they share (cudaIpcCloseMemHandle; "
              "PyTorch: when the last tensor of another process is gone); if you know better: "
              "--ignore-obstacles");
}

Result<void> DirectPath::move_out(const Environment& env, Group& group,
                                  const QuiesceOptions& options, Phases& phases) {
  const bool forced = options.path == MemoryPath::kDirect;
  if (options.path == MemoryPath::kDriver || (!env.mover && !forced)) return {};
  if (!env.mover) return fail(ErrorCode::kNotSupported, "nobody is there who copies GPU memory");
  std::vector<const Process*> running;
  for (const GroupMember& member : group.members())
    if (member.initial == CudaState::kRunning) running.push_back(&member.process);
  const auto give_up = [&](Error why) -> Result<void> {
    auto back = roll_back();
    if (!back) return back;
    phases.runs();
    if (forced || final_for_both(why.code)) return fail(std::move(why));
    env.tell("the driver's path is taken: " + why.to_string());
    return {};
  };
  if (auto found = find(env, running, false); !found) return give_up(std::move(found.error()));
  if (auto alone = refuse_shared(env, options.ignore_obstacles); !alone) {
    dismiss();
    return alone;
  }
  if (forced) {
    if (auto all = require_all(running); !all) return give_up(std::move(all.error()));
  }
  if (agents_.empty()) return {};
  phases.begin("prepare");
  auto done = prepare(env, group);
  if (done && forced) done = require_all(running);
  if (done && agents_.empty()) return {};
  phases.begin("close");
  if (done) done = close_all(env, options.timeout, phases);
  if (done && forced) done = require_nothing_stays();
  phases.begin("copy out");
  if (done) done = copy(env, true);
  if (done) done = env.interrupt.check();
  if (!done) return give_up(std::move(done.error()));
  phases.begin("empty");
  for (auto& agent : agents_)
    agent.begin(AgentCommand::kEmpty, 0);
  for (auto& agent : agents_) {
    auto emptied = agent.finish(kMapping);
    if (!emptied) done = std::move(emptied);
  }
  for (auto& agent : agents_)
    if (done) done = agent.ask(AgentCommand::kHold, 0, kAtOnce);
  if (!done) return give_up(std::move(done.error()));
  return {};
}

Result<std::uint64_t> DirectPath::move_in(const Environment& env,
                                          std::vector<const Process*> processes, Phases& phases) {
  agents_.clear();
  if (auto found = find(env, std::move(processes), true); !found)
    return fail(std::move(found.error()));
  // Stopped before anything had left: what is in the buffer is not what is in its memory.
  for (auto& agent : agents_) {
    if (agent.state() != AgentState::kClosed) continue;
    if (auto opened = agent.ask(AgentCommand::kOpen, 0, kMapping); !opened)
      return fail(std::move(opened.error()));
  }
  std::erase_if(agents_,
                [](const AgentClient& agent) { return agent.state() == AgentState::kRunning; });
  if (agents_.empty()) return 0;
  const std::uint64_t moved = bytes();
  phases.begin("refill");
  for (auto& agent : agents_) {
    const bool empty = agent.state() == AgentState::kHeld || agent.state() == AgentState::kEmptied;
    agent.begin(empty ? AgentCommand::kRefill : AgentCommand::kNone, 0);
  }
  Result<void> done;
  for (auto& agent : agents_) {
    auto refilled = agent.finish(kMapping);
    if (!refilled) done = std::move(refilled);
  }
  if (!done) {
    // Without a peer they try it again by themselves.
    dismiss();
    return fail(std::move(done.error()));
  }
  phases.begin("copy in");
  if (!mover_ && env.mover) {
    auto mover = take_mover(env, {});
    if (mover)
      mover_ = std::move(*mover);
    else
      done = fail(std::move(mover.error()));
  }
  if (mover_) done = copy(env, false);
  if (!done) env.tell("the processes copy by themselves: " + done.error().to_string());
  if (!mover_ || !done) {
    auto alone = roll_back();
    if (!alone) return fail(std::move(alone.error()));
    return moved;
  }
  phases.begin("open");
  for (auto& agent : agents_)
    agent.begin(AgentCommand::kOpen, 0);
  for (auto& agent : agents_) {
    auto opened = agent.finish(kMapping);
    if (!opened) done = std::move(opened);
  }
  dismiss();
  if (!done) return fail(std::move(done.error()));
  return moved;
}

Result<void> DirectPath::roll_back() {
  std::string messages;
  std::string remedies;
  for (auto& agent : agents_) {
    if (!agent.pidfd().alive()) continue;
    auto back = agent.bring_back();
    if (back || !agent.pidfd().alive()) continue;
    messages += (messages.empty() ? "" : "; ") + back.error().message;
    remedies = fmt::format("then `stasis recover {}`", agent.pid().value);
    if (!back.error().remedy.empty()) remedies = back.error().remedy + "; " + remedies;
  }
  agents_.clear();
  if (messages.empty()) return {};
  return fail(ErrorCode::kNotRolledBack, std::move(messages), std::move(remedies));
}

}  // namespace stasis
