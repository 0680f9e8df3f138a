#include "direct/agent_set.h"

#include <algorithm>
#include <map>
#include <mutex>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/threads.h"
#include "direct/agent_lookup.h"
#include "direct/composite_content.h"
#include "proc/procfs.h"

namespace stasis {

using direct::AgentClient;
using direct::AgentCommand;
using direct::AgentState;
using direct::copy_time;
using direct::Direction;
using direct::is_away;

namespace {

// Also one whose threads a tracer has.
bool has_ended(const AgentClient& agent) {
  return !agent.pidfd().alive() || proc::ProcFs().has_ended(agent.pid());
}

// Several steps of one operation look for an agent, and its roll-back does. What has just been
// waited for to no avail is not waited for again.
constexpr Seconds kJustNow{30};
struct Waited {
  std::mutex mutex;
  std::map<Pid, Clock::time_point> until;
};
Waited& waited() {
  static Waited all;
  return all;
}

bool was_waited_for(Pid pid) {
  Waited& all = waited();
  const std::scoped_lock lock(all.mutex);
  const auto found = all.until.find(pid);
  return found != all.until.end() && since(found->second) < kJustNow;
}

void note_waited_for(Pid pid) {
  Waited& all = waited();
  const std::scoped_lock lock(all.mutex);
  std::erase_if(all.until, [](const auto& one) { return since(one.second) >= kJustNow; });
  all.until[pid] = Clock::now();
}

}  // namespace

void tell_of_driver(const Environment& env, const std::string& why) {
  env.tell("the driver's path is taken: " + why);
}

void tell_of_driver(const Environment& env, std::vector<const Process*> processes,
                    const std::string& why) {
  std::erase_if(processes, [](const Process* one) { return !one->alive() || !has_agent(*one); });
  if (!processes.empty()) tell_of_driver(env, list_of(processes) + ": " + why);
}

Result<std::optional<AgentClient>> find_agent(const Environment& env, const Process& process,
                                              bool may_stop) {
  constexpr std::chrono::milliseconds kPart{100};
  constexpr Seconds kNoTool{1};  // so long the agent itself may have it on a busy machine
  const auto start = Clock::now();
  const auto deadline = start + (was_waited_for(process.pid()) ? kPart : direct::kPeerEnds);
  for (Waiting waiting(env.progress);; waiting.tell()) {
    auto agent = AgentClient::find(process.pid(), process.pidfd(), kPart);
    if (agent && *agent) (*agent)->heed(&env.interrupt, AgentClient::Heeds::kSecond);
    if (agent || agent.error().code != ErrorCode::kBusy) return agent;
    const bool is_over = Clock::now() > deadline ||
                         (since(start) > kNoTool && direct::is_held_by_no_tool(process.pid()));
    if (is_over) {
      note_waited_for(process.pid());
      return agent;
    }
    if (!may_stop) continue;
    STASIS_TRY(env.interrupt.check());
  }
}

bool is_held_up(const Error& error) {
  return error.code == ErrorCode::kBusy || error.code == ErrorCode::kInterrupted;
}

bool final_for_both(ErrorCode code) {
  return code == ErrorCode::kTimeout || code == ErrorCode::kInterrupted ||
         code == ErrorCode::kProcessGone || code == ErrorCode::kOutOfHostMemory ||
         code == ErrorCode::kNoAnswer || code == ErrorCode::kNoSpace || code == ErrorCode::kIo;
}

bool has_nothing_to_bring_back(Pid pid) {
  const auto seen = direct::probe_agent(pid);
  return seen && *seen && !(*seen)->of_our_version && (*seen)->state == AgentState::kRunning;
}

Result<void> check_size(const AgentClient& agent, Driver& driver) {
  return agent.check_size([&] { return memory_of_all_gpus(driver); });
}

Result<void> refuse_shared(const Environment& env,
                           const std::vector<std::pair<Pid, std::uint32_t>>& pieces, bool ignore) {
  std::string list;
  Pid first;
  for (const auto& [pid, count] : pieces) {
    if (count == 0) continue;
    if (list.empty()) first = pid;
    list += fmt::format("{}{} ({})", list.empty() ? "" : ", ", pid.value,
                        count == 1 ? "1 piece" : fmt::format("{} pieces", count));
  }
  if (list.empty()) return {};
  auto what = fmt::format(
      "GPU memory that the driver serves and two processes have open (CUDA IPC), which it "
      "checkpoints and cannot restore (the job would be lost): process {}",
      list);
  if (ignore) {
    env.tell("ignored, as asked: " + what);
    return {};
  }
  return fail(refusal(
      {"small-shared-memory", Severity::kRed, first, std::move(what),
       "try again when the processes have closed what they share (cudaIpcCloseMemHandle; "
       "PyTorch: when the last tensor of another process is gone); if one of them has no agent, "
       "start both with `stasis run`",
       Override::kIgnoreObstacles}));
}

Result<std::vector<direct::Segment>> take_checked(AgentClient& agent, bool buffer,
                                                  std::vector<direct::SegmentPlace>* places) {
  STASIS_TRY_ASSIGN(auto taken, agent.take_segments(kMapping, places));
  for (const auto& segment : taken) {
    if (segment.offset <= agent.bytes() && segment.bytes <= agent.bytes() - segment.offset &&
        (!buffer || agent.bytes() <= agent.buffer_bytes()) &&
        agent.bytes() <= CompositeContent::kGap)
      continue;
    return fail(
        ErrorCode::kInternal,
        fmt::format("the agent in process {} names memory that is not there", agent.pid().value));
  }
  return taken;
}

Result<std::vector<Pieces>> take_checked(const std::vector<PiecesAsked>& asked) {
  std::vector<Pieces> all(asked.size());
  std::vector<Result<void>> done(asked.size());
  share_out(asked.size(), [&](std::size_t i) {
    auto taken = take_checked(*asked[i].agent, asked[i].buffer, &all[i].places);
    if (taken)
      all[i].segments = std::move(*taken);
    else
      done[i] = fail(std::move(taken.error()));
  });
  for (auto& one : done)
    STASIS_TRY(std::move(one));
  return all;
}

void append(std::vector<direct::Segment>& all, std::vector<direct::Segment> more,
            std::uint64_t base) {
  for (auto& segment : more) {
    segment.offset += base;
    all.push_back(std::move(segment));
  }
}

std::uint64_t AgentSet::bytes() const {
  std::uint64_t sum = 0;
  for (const auto& agent : agents_)
    sum += agent.bytes();
  return sum;
}

bool AgentSet::has(Pid pid) const {
  return std::any_of(agents_.begin(), agents_.end(),
                     [&](const AgentClient& agent) { return agent.pid() == pid; });
}

void AgentSet::drop_ended() { std::erase_if(agents_, has_ended); }

Result<void> AgentSet::check_sharers_live() const {
  for (const AgentClient& agent : agents_) {
    if (agent.share_count() == 0 || !has_ended(agent)) continue;
    return fail(ErrorCode::kProcessGone,
                fmt::format("process {}, which shares GPU memory with others, has ended meanwhile",
                            agent.pid().value),
                "start the job again, or restore it from an image");
  }
  return {};
}

void AgentSet::drop_running() {
  std::erase_if(agents_,
                [](const AgentClient& agent) { return agent.state() == AgentState::kRunning; });
}

// The agent's last peer may have been killed, and the agent be at work to make the program run:
// that comes first. An agent whose process is held does nothing, and the tool does not ask it while
// the driver may hold the process. False: the driver moves the memory of that process, and the tool
// says why.
Result<bool> AgentSet::settle(AgentClient& agent, const Environment& env, Direction direction) {
  const bool evicted = direction == Direction::kIn;
  auto settled = check_size(agent, env.driver);
  if (settled && (evicted || agent.state() != AgentState::kHeld)) {
    settled = agent.ask(AgentCommand::kNone, 0, copy_time(agent.bytes()));
    if (settled) settled = check_size(agent, env.driver);
  }
  if (settled) return true;
  if (evicted || final_for_both(settled.error().code) || direct::says_it_shares(agent.pid()))
    return fail(std::move(settled.error()));
  tell_of_driver(env, settled.error().to_string());
  return false;
}

Result<void> AgentSet::find_running(const Environment& env,
                                    const std::vector<const Process*>& processes) {
  const auto deadline = Clock::now() + kAtOnce;
  for (const Process* process : processes) {
    if (!process->alive()) continue;
    auto agent = find_begun_agent(env, *process, deadline);
    // It has begun since.
    if (agent && !*agent && direct::says_it_shares(process->pid()))
      agent = find_begun_agent(env, *process, deadline);
    if (!agent && (is_held_up(agent.error()) || direct::says_it_shares(process->pid())))
      return fail(std::move(agent.error()));
    if (!agent) {
      tell_of_driver(env, agent.error().to_string());
      continue;
    }
    if (!*agent) {
      STASIS_TRY(refuse_lost_agent(*process));
      if (const auto why = why_no_agent(*process)) tell_of_driver(env, *why);
      continue;
    }
    (*agent)->heed(&env.interrupt, AgentClient::Heeds::kFirst);
    STASIS_TRY_ASSIGN(auto settled, settle(**agent, env, Direction::kOut));
    if (!settled) continue;
    if (is_away((*agent)->state()))
      tell_of_driver(env, list_of({process}) + ": its GPU memory is away already");
    else
      add(std::move(**agent));
  }
  return {};
}

Result<void> AgentSet::find_evicted(const Environment& env,
                                    const std::vector<const Process*>& processes) {
  for (const Process* process : processes) {
    if (!process->alive()) continue;
    auto agent = find_agent(env, *process, false);
    if (!agent && has_nothing_to_bring_back(process->pid())) continue;
    if (!agent) return fail(std::move(agent.error()));
    if (!*agent) continue;
    STASIS_TRY(settle(**agent, env, Direction::kIn));
    if (is_away((*agent)->state())) add(std::move(**agent));
  }
  return {};
}

Result<void> AgentSet::prepare(Driver& driver, bool buffers) {
  for (auto& agent : agents_)
    agent.begin(AgentCommand::kPrepare, buffers ? 0 : 1);
  Result<void> worst;
  for (auto& agent : agents_) {
    auto done = agent.finish(kAtOnce);
    if (done) done = check_size(agent, driver);
    if (!done) worst = std::move(done);
  }
  if (!worst) return worst;
  // What another shares such a process may take while it runs on.
  const bool any_shares = std::any_of(agents_.begin(), agents_.end(), [](const AgentClient& agent) {
    return agent.share_count() != 0;
  });
  if (any_shares) return {};
  std::erase_if(agents_, [this](const AgentClient& agent) {
    return agent.bytes() == 0 && agent.share_count() == 0 &&
           without_memory_.insert(agent.pid()).second;
  });
  return {};
}

Result<void> AgentSet::check_sizes(Driver& driver) const {
  for (const AgentClient& agent : agents_)
    STASIS_TRY(check_size(agent, driver));
  return {};
}

Result<void> AgentSet::allow_pieces() const {
  constexpr std::uint64_t kSpare = 32;
  std::uint64_t pieces = 0;
  for (const AgentClient& agent : agents_)
    pieces += agent.segment_count();
  auto allowed = allow_descriptors(pieces + kSpare);
  // The driver needs no descriptors.
  if (!allowed) allowed.error().code = ErrorCode::kNotSupported;
  return allowed;
}

std::vector<std::pair<Pid, std::uint32_t>> AgentSet::driver_shares() const {
  std::vector<std::pair<Pid, std::uint32_t>> pieces;
  for (const auto& agent : agents_)
    pieces.emplace_back(agent.pid(), agent.driver_share_count());
  return pieces;
}

Result<void> AgentSet::ask_all(AgentCommand command, const direct::ContentId& arguments) {
  for (auto& agent : agents_)
    agent.begin(command, arguments);
  Result<void> done;
  for (auto& agent : agents_) {
    auto answered = agent.finish(kMapping);
    if (!answered) done = std::move(answered);
  }
  return done;
}

bool AgentSet::pin() {
  const bool all = ask_all(AgentCommand::kPin).has_value();
  if (!all) (void)unpin();
  return all;
}

Result<void> AgentSet::unpin() { return ask_all(AgentCommand::kUnpin); }

Result<void> AgentSet::evict(const direct::ContentId& content) {
  auto done = ask_all(AgentCommand::kEvict, content);
  if (done) done = fault(FaultPoint::kDirectEvicted);
  for (auto& agent : agents_)
    if (done) done = agent.ask(AgentCommand::kHold, 0, kAtOnce);
  if (done) done = fault(FaultPoint::kDirectHeld);
  return done;
}

Result<void> AgentSet::repopulate() {
  std::vector<AgentClient*> asked;
  for (auto& agent : agents_) {
    const bool evicted =
        agent.state() == AgentState::kHeld || agent.state() == AgentState::kEvicted;
    if (!evicted) continue;
    agent.begin(AgentCommand::kRepopulate, 0);
    asked.push_back(&agent);
  }
  Result<void> done;
  for (AgentClient* agent : asked) {
    // It may have to copy first, if it has pinned its memory.
    auto repopulated = agent->finish(kMapping + copy_time(agent->bytes()));
    if (!repopulated) done = std::move(repopulated);
  }
  return done;
}

bool AgentSet::have_few_zeros() const {
  return std::all_of(agents_.begin(), agents_.end(),
                     [](const AgentClient& agent) { return agent.has_few_zeros(); });
}

void AgentSet::note_few_zeros(bool few) {
  for (AgentClient& agent : agents_)
    agent.note_few_zeros(few);
}

Result<void> AgentSet::open() { return ask_all(AgentCommand::kOpen); }

}  // namespace stasis
