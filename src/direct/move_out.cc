// Long because MoveOut is one procedure, whose steps are read in order and share what they must
// undo.
#include "direct/move_out.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/threads.h"
#include "direct/agent_lookup.h"
#include "direct/gpu_precopy.h"
#include "direct/held_neighbours.h"
#include "direct/hold_back.h"
#include "direct/left_to_driver.h"
#include "direct/move_in.h"
#include "direct/neighbours.h"
#include "direct/remote_memory.h"
#include "direct/sharing.h"
#include "direct/zero_survey.h"
#include "proc/memory_cgroup.h"

namespace stasis {
namespace {

using direct::AgentClient;
using direct::AgentCommand;
using direct::AgentState;
using direct::copy_time;

// kWrongState if the memory of a process was evicted but not copied.
Result<void> refuse_half_way(const ProcessTree& tree) {
  Result<void> whole;
  Retry retry = Retry::kNone;
  for (const TreeMember& member : tree.members()) {
    if (!member.initial) continue;
    const Pid pid = member.process.pid();
    const auto seen = direct::probe_agent(pid);
    if (!seen || !*seen || !(*seen)->half_way) continue;
    const bool will_run = member.initial == CudaState::kRunning;
    if (will_run) retry = Retry::kSame;
    whole = fail(ErrorCode::kWrongState,
                 fmt::format("process {} was half-way suspended, and its GPU memory not free: the "
                             "tool that did that was killed",
                             pid.value),
                 will_run ? "it runs again: try once more"
                          : fmt::format("`stasis recover {}` makes it run", pid.value));
    whole.error().retry = retry;
  }
  return whole;
}

std::uint64_t sum_of(const std::map<Pid, std::uint64_t>& bytes) {
  std::uint64_t sum = 0;
  for (const auto& [pid, one] : bytes)
    sum += one;
  return sum;
}

// One run of move_out().
class MoveOut {
 public:
  MoveOut(MemoryState& state, const Environment& env, ProcessTree& tree, const MoveOutPlan& plan,
          const QuiesceOptions& options, Phases& phases)
      : state_(state),
        agents_(state.agents),
        env_(env),
        tree_(tree),
        options_(options),
        phases_(phases),
        plan_(plan) {}

  Result<void> run() {
    STASIS_TRY(move_out());
    if (room() == nullptr || !agents_.empty()) return {};
    Error refusal = room()->refusal;
    refusal.remedy +=
        "; of memory that an agent moves, zeros take no room: where a note says why none did, try "
        "again when that is gone";
    return fail(std::move(refusal));
  }

 private:
  Result<void> move_out() {
    for (const TreeMember& member : tree_.members())
      if (member.initial) state_.known.insert(member.process.pid());
    if (plan_.mover_when_quiesced()) state_.mover.wait_until_quiesced();
    STASIS_TRY(refuse_half_way(tree_));
    if (plan_.by_driver()) {
      if (!plan_.why_driver.empty()) tell_of_driver(env_, plan_.running, plan_.why_driver);
      return refuse_imports();
    }
    if (!env_.mover) return fail(ErrorCode::kNotSupported, "no mover is available");
    if (auto found = agents_.find_running(env_, plan_.running); !found)
      return give_up(std::move(found.error()));
    if (auto alone = refuse_shared(env_, agents_.driver_shares(), options_.ignore_obstacles);
        !alone) {
      agents_.clear();
      return alone;
    }
    if (plan_.only_agents()) {
      if (auto all = require_all(); !all) return give_up(std::move(all.error()));
    }
    tell_of_driver(env_, plan_.left, "left with the driver by a tool that was killed");
    tell_of_driver(env_, plan_.locked,
                   "locked before, by another tool, and an agent is asked before that");
    if (agents_.empty()) return {};
    if (auto noted = note_driver_threads(agents_, plan_.running, state_.driver_threads); !noted)
      return give_up(std::move(noted.error()));
    if (auto ready = get_ready(); !ready) return give_up(std::move(ready.error()));
    if (agents_.empty()) return {};
    if (options_.part != nullptr) {
      phases_.begin("meet");
      if (auto all = options_.part->wait_for_all(); !all) return give_up(std::move(all.error()));
    }
    phases_.begin("close");
    if (auto closed = hold_back_settled(); !closed) return give_up(std::move(closed.error()));
    if (agents_.empty()) return state_.content.end_image(options_.image);
    if (auto fits = check_image_room(); !fits) return give_up(std::move(fits.error()));
    if (host_room_ != HostRoom::kEnough) {
      if (auto looked = make_room_by_zeros(); !looked) return give_up(std::move(looked.error()));
      if (agents_.empty()) return {};
    }
    return evict_all();
  }

  const ImageRoom* room() const {
    return options_.image != nullptr && options_.image->room ? &*options_.image->room : nullptr;
  }

  // With the gates closed: the GPU computes as many digests as for a copy, before anything is
  // copied.
  Result<void> check_image_room() {
    if (room() == nullptr) return {};
    const std::uint64_t by_driver =
        room()->gpu_bytes - std::min(room()->gpu_bytes, agents_.bytes());
    if (by_driver > room()->bytes) return fail(room()->refusal);
    STASIS_TRY_ASSIGN(const auto zeros, find_zeros());
    if (agents_.bytes() - std::min(agents_.bytes(), sum_of(zeros)) > room()->bytes - by_driver)
      return fail(room()->refusal);
    return {};
  }

  // The driver would lose them.
  Result<void> refuse_imports() {
    AgentSet asked;
    for (const Process* process : plan_.running) {
      if (!process->alive()) continue;
      auto agent = find_agent(env_, *process, true);
      if (agent && !*agent) {
        if (!options_.ignore_obstacles) STASIS_TRY(refuse_lost_agent(*process));
        continue;
      }
      if (agent) (*agent)->heed(&env_.interrupt, AgentClient::Heeds::kFirst);
      auto answered = agent ? (*agent)->ask(AgentCommand::kNone, 0, kAtOnce)
                            : Result<void>(fail(std::move(agent.error())));
      if (!answered && is_held_up(answered.error())) return answered;
      if (answered)
        asked.add(std::move(**agent));
      else if (!options_.ignore_obstacles && direct::says_it_shares(process->pid()))
        return answered;
    }
    if (!options_.ignore_obstacles) STASIS_TRY(refuse_managed(asked));
    bool lost = false;
    for (AgentClient& agent : asked) {
      STASIS_TRY_ASSIGN(const bool one_is, is_lost_by_driver(agent));
      lost = lost || one_is;
    }
    if (!lost) return {};
    if (options_.ignore_obstacles) {
      env_.tell(
          "ignored, as asked: the driver cannot restore the GPU memory that processes share, nor "
          "memory of the host's from cuMemCreate");
      return {};
    }
    return fail(
        refusal({"shared-memory", Severity::kRed, plan_.running.front()->pid(),
                 "GPU memory that processes share (NCCL, CUDA IPC), or memory of the host's from "
                 "cuMemCreate, which the driver cannot restore (the job would be lost): only the "
                 "agents can give it up and take it again",
                 "leave --path driver out", Override::kIgnoreObstacles}));
  }

  // Also of processes whose agents could not be asked.
  bool shares_memory() const {
    return std::any_of(plan_.running.begin(), plan_.running.end(), [](const Process* process) {
      return direct::says_it_shares(process->pid());
    });
  }

  // Brings all back to how it was, so that the driver moves the memory. An error: the driver path
  // is closed as well, or was not asked for.
  Result<void> give_up(Error why) {
    state_.neighbours.reset();
    const bool only_agents = plan_.only_agents() || shares_memory();
    // The driver now needs the memory that was kept for the next closing of the gate.
    for (AgentClient& agent : agents_)
      if (!final_for_both(why.code) && agent.state() == AgentState::kRunning)
        (void)agent.ask(AgentCommand::kPrepare, 1, kAtOnce);
    STASIS_TRY(roll_back(state_));
    phases_.runs();
    // This is why the rest failed.
    if (auto gone = std::exchange(state_.gone, std::nullopt)) return fail(std::move(*gone));
    if (final_for_both(why.code)) return fail(std::move(why));
    // If a stop was requested, the mover's error is no reason to try another way.
    STASIS_TRY(env_.interrupt.check());
    if (only_agents) return fail(std::move(why));
    STASIS_TRY(state_.content.end_image(options_.image));
    state_.mover.forget_copy();
    tree_.forget_gates();
    // The driver needs its memory.
    state_.mover.end(env_);
    tell_of_driver(env_, why.to_string());
    return {};
  }

  // Does all that takes time and can be done while the programs run.
  Result<void> get_ready() {
    phases_.begin("prepare");
    auto done = prepare();
    if (done && plan_.only_agents()) done = require_all();
    if (done) tell_of_those_without_memory();
    if (done && agents_.empty()) return {};
    if (plan_.mover_when_quiesced()) {
      auto begun = state_.mover.join();
      if (done) done = std::move(begun);
    } else if (done) {
      done = have_mover();
    }
    state_.mover.settle();
    if (done && options_.image) done = state_.content.begin_image(env_, *options_.image);
    if (done) done = fault(FaultPoint::kDirectPrepared);
    if (done && precopies()) done = precopy();
    if (done && state_.mover) keep_on_gpus();
    return done;
  }

  // The mover works beside the programs then: not where its context is made when they stand still.
  bool precopies() const {
    return options_.image != nullptr && !plan_.mover_when_quiesced() &&
           is_worth_precopying(env_, *options_.image, agents_.bytes());
  }

  // The gates close for a moment, so that the agents can name all memory.
  Result<void> precopy() {
    phases_.begin("GPU pre-copy");
    STASIS_TRY(state_.mover.prepare_digests(env_));
    STASIS_TRY(hold_back(env_, tree_, agents_, options_.timeout, standing()));
    STASIS_TRY(agents_.allow_pieces());
    STASIS_TRY_ASSIGN(auto begun, GpuPrecopy::begin(agents_));
    for (AgentClient& agent : agents_)
      STASIS_TRY(agent.ask(AgentCommand::kOpen, direct::kKeepBuffer, kAtOnce));
    phases_.runs();
    tree_.forget_gates();
    if (begun) STASIS_TRY(begun->run(env_, state_.mover, *state_.content.into()));
    return fault(FaultPoint::kDirectPrecopied);
  }

  std::function<void(bool)> standing() {
    return [this](bool still) {
      if (still)
        phases_.stands_still();
      else
        phases_.runs();
    };
  }

  Result<void> prepare() {
    const bool buffers = options_.image == nullptr;
    // Before the buffers, which count as memory that is free until they are touched.
    auto room_for_all = buffers ? tree_.check_host_memory() : Result<void>();
    STASIS_TRY(agents_.prepare(env_.driver, buffers));
    if (agents_.empty()) return {};
    // A buffer is as large as what its program has by then, which may have taken more in between.
    if (buffers && room_for_all) {
      std::map<Pid, std::uint64_t> sizes;
      for (const auto& agent : agents_)
        sizes[agent.pid()] = agent.bytes();
      room_for_all = tree_.check_host_memory({}, sizes);
    }
    if (!room_for_all) {
      if (options_.part != nullptr) return room_for_all;
      host_room_ = HostRoom::kTight;
    } else if (buffers && is_worth_survey()) {
      host_room_ = HostRoom::kSurvey;
    }
    const bool touches = buffers && host_room_ == HostRoom::kEnough;
    std::map<Pid, std::uint64_t> elsewhere;
    std::map<std::string, std::uint64_t> to_come;
    for (const auto& agent : agents_) {
      elsewhere[agent.pid()] = agent.bytes();
      if (!touches) continue;
      for (const proc::MemoryCgroup& one : proc::memory_cgroups(agent.pid()))
        to_come[one.directory] += agent.bytes();
    }
    if (!buffers) {
      STASIS_TRY(tree_.check_host_memory(elsewhere));
    }
    state_.mover.use_gpus_of(tree_);
    // While the parts of a group wait for each other, they may take more.
    state_.mover.expect(options_.part != nullptr ? direct::kAnyAmount : agents_.bytes());
    const auto in_buffers = [&](const std::string& directory) { return to_come[directory]; };
    STASIS_TRY(
        check_mover_memory(env_, state_.mover.gpus(), state_.mover.expected(env_), in_buffers));
    // A context takes as long as touching gigabytes, so the tool does both at once.
    state_.mover.begin(env_);
    return touches ? touch_buffers() : Result<void>();
  }

  // For one process: several would be stopped together once more, as would the parts of a group.
  bool is_worth_survey() const {
    return options_.part == nullptr && agents_.size() == 1 && agents_.bytes() >= survey_from() &&
           !agents_.have_few_zeros();
  }

  // With the gates closed. If much of the memory is zeros, only the rest of it needs host memory,
  // and the copy touches that. If not, the program runs on while all of it is touched.
  Result<void> make_room_by_zeros() {
    STASIS_TRY_ASSIGN(const auto zeros, find_zeros());
    const bool few = sum_of(zeros) < agents_.bytes() / 2;
    if (agents_.size() == 1) agents_.note_few_zeros(few);
    if (host_room_ == HostRoom::kTight || !few) return tree_.check_host_memory(zeros);
    STASIS_TRY(agents_.begin()->ask(AgentCommand::kOpen, direct::kKeepBuffer, kAtOnce));
    phases_.runs();
    tree_.forget_gates();
    phases_.begin("prepare");
    STASIS_TRY(tree_.check_host_memory());
    STASIS_TRY(touch_buffers());
    phases_.begin("close");
    return hold_back_settled();
  }

  // In bytes. None where the GPU computes no digests: all has to be taken for content.
  Result<std::map<Pid, std::uint64_t>> find_zeros() {
    if (!state_.mover) STASIS_TRY(make_mover());
    phases_.begin("zeros");
    if (!state_.mover.has_digests()) STASIS_TRY(state_.mover.prepare_digests(env_));
    std::map<Pid, std::uint64_t> zeros;
    if (!state_.mover.has_digests()) return zeros;
    STASIS_TRY(agents_.allow_pieces());
    for (AgentClient& agent : agents_) {
      STASIS_TRY_ASSIGN(auto taken, take_checked(agent, options_.image == nullptr, nullptr));
      ZeroSurvey survey;
      auto seen = state_.mover->copy_out(std::move(taken), survey, env_.interrupt,
                                         Clock::now() + copy_time(agents_.bytes()));
      if (!seen) return fail(of_mover(std::move(seen.error())));
      zeros[agent.pid()] = survey.zero_bytes();
    }
    return zeros;
  }

  // Side by side: more than 16 threads do not fill one process's memory faster.
  Result<void> touch_buffers() {
    std::vector<direct::RemoteMemory> buffers;
    for (const auto& agent : agents_) {
      buffers.emplace_back(agent.address_space(), agent.buffer_address(), agent.bytes());
      touched_[agent.pid()] = agent.buffer_address();
    }
    const auto at_a_time = std::min<std::size_t>(buffers.size(), kMostSharers);
    const unsigned threads = default_threads(static_cast<unsigned>(at_a_time));
    std::vector<Result<void>> done(buffers.size());
    share_out(buffers.size(),
              [&](std::size_t i) { done[i] = buffers[i].fault_in(threads, env_.interrupt); });
    for (auto& one : done)
      STASIS_TRY(std::move(one));
    return {};
  }

  void tell_of_those_without_memory() {
    auto without = plan_.running;
    std::erase_if(without,
                  [this](const Process* one) { return !agents_.is_without_memory(one->pid()); });
    tell_of_driver(env_, std::move(without), "no GPU memory that an agent can move");
  }

  // Zeros are left where they are, if there is much that may be some.
  bool wants_digests() const {
    return agents_.bytes() >= digests_from() && !agents_.have_few_zeros();
  }

  // Makes the mover ready for all its work.
  Result<void> have_mover() {
    if (auto taken = state_.mover.take(env_, {}); !taken)
      return fail(of_mover(std::move(taken.error())));
    const bool base = options_.image != nullptr && options_.image->options.base != nullptr;
    if (base || wants_digests()) {
      STASIS_TRY(state_.mover.prepare_digests(env_));
    }
    return {};
  }

  // What the next copy out moves is still on the GPUs when it has to come back.
  void keep_on_gpus() {
    if (options_.image != nullptr && options_.purpose == Purpose::kDumpAndGoOn)
      state_.prefetch.keep_on_gpus(env_.driver, tree_);
  }

  Result<void> hold_back_settled() {
    if (options_.part != nullptr) {
      return hold_back_together(env_, tree_, agents_, *options_.part, !options_.ignore_obstacles,
                                standing());
    }
    return options_.ignore_obstacles
               ? hold_back(env_, tree_, agents_, options_.timeout, standing())
               : stasis::hold_back_settled(env_, tree_, agents_, options_.timeout, standing());
  }

  // With the gates closed.
  Result<void> evict_all() {
    // A mover's contexts must be there before any process runs again (ADR 31), or is told that all
    // stand still: one without a gate runs as soon as the driver's lock fails.
    const bool while_copying =
        plan_.order == CopyOrder::kBeside && all_behind_gates() && !plan_.beside_restored();
    Result<void> done;
    if (plan_.mover_when_quiesced() && !while_copying && !state_.mover) done = make_mover();
    if (done && options_.on_quiesced) options_.on_quiesced();
    if (done && options_.image == nullptr) done = check_growth();
    if (done && plan_.only_agents()) done = require_nothing_stays();
    if (done) done = fault(FaultPoint::kDirectClosed);
    // Memory was shared while the programs ran on. The driver path would not help.
    if (done) {
      auto alone = refuse_shared(env_, agents_.driver_shares(), options_.ignore_obstacles);
      if (alone && !options_.ignore_obstacles) alone = check_sharing();
      if (!alone) {
        // Before the programs ran on, it was as it should be.
        alone.error().retry = Retry::kSame;
        auto back = roll_back(state_);
        phases_.runs();
        return back ? alone : back;
      }
    }
    if (done && plan_.order == CopyOrder::kBeside && agents_.pin()) {
      done = copy_beside();
      return done ? done : give_up(std::move(done.error()));
    }
    if (done && plan_.mover_when_quiesced() && while_copying && !state_.mover) done = make_mover();
    if (done) done = copy_out();
    if (done) done = env_.interrupt.check();
    if (done) {
      phases_.begin("evict");
      done = evict();
    }
    return done ? done : give_up(std::move(done.error()));
  }

  Result<void> check_sharing() {
    STASIS_TRY(refuse_multicast(agents_));
    STASIS_TRY(refuse_late_sharing(env_, tree_, agents_, MemoryPath::kDirect));
    STASIS_TRY_ASSIGN(const auto shares, ask_for_shares(agents_));
    return stasis::check_sharing(shares);
  }

  Result<void> make_mover() {
    phases_.begin("mover");
    if (plan_.beside_restored()) {
      const auto& gpus = state_.mover.gpus();
      STASIS_TRY(hold_neighbours(state_, env_, tree_.infos(), {gpus.begin(), gpus.end()},
                                 options_.timeout));
    }
    STASIS_TRY(have_mover());
    keep_on_gpus();
    return {};
  }

  // No process that ran can run as long as the gates are closed.
  bool all_behind_gates() const {
    const auto& members = tree_.members();
    return std::all_of(members.begin(), members.end(), [&](const TreeMember& member) {
      const bool runs = member.initial == CudaState::kRunning && member.process.alive();
      return !runs || agents_.has(member.process.pid());
    });
  }

  // Checks that the host has memory for what was allocated since prepare(), if anything was.
  Result<void> check_growth() {
    std::map<Pid, std::uint64_t> there;
    bool any = false;
    for (const AgentClient& agent : agents_) {
      const auto touched = touched_.find(agent.pid());
      // A buffer that was too small was replaced, and the new one is not touched yet.
      if (touched != touched_.end() && agent.buffer_address() != touched->second)
        any = true;
      else
        there[agent.pid()] = agent.bytes();
    }
    return any ? tree_.check_host_memory(there) : Result<void>();
  }

  Result<void> require_all() const {
    if (!plan_.left.empty()) {
      const Pid left = plan_.left.front()->pid();
      return fail(ErrorCode::kBusy,
                  fmt::format("a tool that was killed has left the GPU memory of process {} with "
                              "the driver",
                              left.value),
                  fmt::format("make it run first: `stasis recover {}`", left.value));
    }
    std::string list;
    Pid first;
    for (const Process* process : plan_.running) {
      if (agents_.has(process->pid()) || !process->alive()) continue;
      if (list.empty()) first = process->pid();
      list += fmt::format("{}{} ({})", list.empty() ? "" : ", ", process->pid().value,
                          process->info().comm);
    }
    if (list.empty()) return {};
    return fail(
        refusal({"no-agent", Severity::kRed, first,
                 fmt::format("no agent with GPU memory that it can move in process {}", list),
                 "start it with `stasis run`; without --path direct the driver moves its memory"}));
  }

  Result<void> require_nothing_stays() const {
    for (const auto& agent : agents_) {
      if (agent.staying_bytes() == 0) continue;
      return fail(refusal(
          {"staying-memory", Severity::kRed, agent.pid(),
           fmt::format("{} of the GPU memory of process {} cannot leave by the direct path: it was "
                       "bound to hardware (multicast, sparse arrays), given out past the agent or "
                       "by a descriptor that the driver refuses now, or inherited",
                       format_bytes(agent.staying_bytes()), agent.pid().value),
           "without --path direct the driver moves that"}));
    }
    return {};
  }

  // The pieces of all agents, and the places where their content goes.
  Result<std::vector<direct::Segment>> take_all() {
    STASIS_TRY(agents_.allow_pieces());
    std::vector<direct::Segment> segments;
    ContentSources& content = state_.content;
    content.begin_composite();
    std::vector<PiecesAsked> asked;
    for (auto& agent : agents_)
      asked.push_back({&agent, !options_.image});
    STASIS_TRY_ASSIGN(auto taken, take_checked(asked));
    for (std::size_t i = 0; i < asked.size(); ++i) {
      AgentClient& agent = *asked[i].agent;
      std::uint64_t base = 0;
      if (options_.image) {
        STASIS_TRY_ASSIGN(auto stream,
                          content.into()->add(agent.pid(), agent.bytes(), taken[i].places));
        base = content.composite()->add_stream(content.into(), stream);
      } else {
        base = content.add_buffer(agent, BufferPages::kFresh);
      }
      append(segments, std::move(taken[i].segments), base);
    }
    return segments;
  }

  Result<void> copy_out() {
    phases_.begin("copy out");
    STASIS_TRY_ASSIGN(auto segments, take_all());
    const auto deadline =
        Clock::now() + (options_.image ? kSlowDisk : 1) * copy_time(agents_.bytes());
    auto copied = state_.mover->copy_out(std::move(segments), *state_.content.composite(),
                                         env_.interrupt, deadline);
    if (!copied) return fail(of_mover(std::move(copied.error()), options_.image != nullptr));
    const bool base = options_.image != nullptr && options_.image->options.base != nullptr;
    if (state_.mover.has_digests() && !base)
      agents_.note_few_zeros(copied->left_out < copied->bytes / 2);
    STASIS_TRY(fault(FaultPoint::kDirectCopied));
    if (!options_.image) return {};
    // Before any memory is evicted: from then on the image alone has the content.
    phases_.begin("content");
    auto done = state_.content.into()->finish(env_.progress, env_.interrupt);
    if (done) tell_of_changes(env_, *state_.content.into());
    return done ? fault(FaultPoint::kDirectContent) : done;
  }

  // Copies what the agents have pinned in a thread of its own, and lets them give it up.
  Result<void> copy_beside() {
    phases_.begin("evict");
    STASIS_TRY(fault(FaultPoint::kDirectPinned));
    STASIS_TRY_ASSIGN(auto segments, take_all());
    const auto copy = [&] {
      state_.mover.copy_beside(env_, std::move(segments), state_.content.composite(),
                               copy_time(agents_.bytes()), wants_digests());
    };
    // While it makes contexts, the driver takes five times as long to give memory up (two ranks of
    // NCCL on two H200s: 0.08 s), and there is time for that until the driver's checkpoint ends.
    const bool has_contexts = static_cast<bool>(state_.mover);
    if (has_contexts) copy();
    STASIS_TRY(evict());
    if (!has_contexts) copy();
    std::set<Pid> at_work;
    for (const AgentClient& agent : agents_)
      at_work.insert(agent.pid());
    tree_.let_agents_work(std::move(at_work));
    return {};
  }

  Result<void> evict() {
    // Once more, of those that had no managed memory before.
    STASIS_TRY(note_driver_threads(agents_, plan_.running, state_.driver_threads));
    STASIS_TRY(detach_all(agents_, state_.driver_threads));
    state_.content.commit_image();
    const auto& into = state_.content.into();
    return agents_.evict(into ? into->id() : direct::ContentId{});
  }

  MemoryState& state_;
  AgentSet& agents_;
  const Environment& env_;
  ProcessTree& tree_;
  const QuiesceOptions& options_;
  Phases& phases_;
  const MoveOutPlan& plan_;
  std::map<Pid, std::uint64_t> touched_;  // where the buffers are
  // What the host has for the content. Unless that is enough, the zeros are counted behind closed
  // gates, and no buffer is touched before that.
  enum class HostRoom {
    kEnough,
    kSurvey,  // it is, and much of it may not be needed
    kTight,   // not for all, but perhaps for what is not zeros
  };
  HostRoom host_room_ = HostRoom::kEnough;
};

// The driver holds it, as a killed tool has left it, and its agent has its memory still: that may
// be parked, and can call no driver.
bool is_left_to_driver(const Process& process) {
  const auto state = process.cuda_state();
  if (!state || !*state || **state == CudaState::kRunning) return false;
  const auto agent = direct::probe_agent(process.pid());
  return agent && *agent && !direct::is_away((*agent)->state);
}

}  // namespace

MoveOutPlan MoveOutPlan::make(const Environment& env, const ProcessTree& tree,
                              const QuiesceOptions& options) {
  MoveOutPlan plan;
  for (const TreeMember& member : tree.members()) {
    if (member.initial == CudaState::kRunning)
      (is_left_to_driver(member.process) ? plan.left : plan.running).push_back(&member.process);
    if (member.initial == CudaState::kLocked) plan.locked.push_back(&member.process);
  }
  if (options.again == Retry::kByDriver) {
    plan.path = MemoryPath::kDriver;
  } else if (options.path == MemoryPath::kDirect) {
    plan.path = MemoryPath::kDirect;
  } else if (options.path == MemoryPath::kDriver || !env.mover) {
    plan.path = MemoryPath::kDriver;
    plan.why_driver =
        options.path == MemoryPath::kDriver ? "asked for (--path driver)" : "no mover is available";
  }
  const bool held_before =
      std::any_of(plan.running.begin(), plan.running.end(), [](const Process* process) {
        const auto seen = direct::probe_agent(process->pid());
        return seen && *seen && (*seen)->held_before;
      });
  if (!restored_neighbours(env, tree.infos(), {}).empty())
    plan.contexts = Contexts::kBesideRestored;
  else if (held_before)
    plan.contexts = Contexts::kWhenQuiesced;
  const bool first =
      options.for_dump() || options.again == Retry::kCopyFirst || options.on_quiesced != nullptr;
  plan.order = first ? CopyOrder::kFirst : CopyOrder::kBeside;
  return plan;
}

Result<void> move_out(MemoryState& state, const Environment& env, ProcessTree& tree,
                      const MoveOutPlan& plan, const QuiesceOptions& options, Phases& phases) {
  return MoveOut(state, env, tree, plan, options, phases).run();
}

}  // namespace stasis
