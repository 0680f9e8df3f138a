#include "direct/gpu_memory.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <deque>
#include <functional>
#include <map>
#include <set>

#include <fmt/format.h>

#include "base/background.h"
#include "base/fault_point.h"
#include "checkpoint/suspend_record.h"
#include "direct/agent_lookup.h"
#include "direct/composite_content.h"
#include "direct/gate_rank.h"
#include "direct/remote_memory.h"
#include "driver/gpu_plan.h"
#include "proc/memory_cgroup.h"

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
// For a mover to be made while programs stand still.
constexpr milliseconds kBesideHeld{10000};
// Of host memory, besides the ring: a dump of ours takes 202 MiB with a ring of 64, a restore 257
// with one of 128 (H100, 580.159.04). On the simulated driver next to nothing.
constexpr std::uint64_t kMoverContext = 120ULL << 20;
// What must stay free under a limit.
constexpr std::uint64_t kCgroupReserve = 16ULL << 20;
// A disk may be this much slower than memory at its worst: 20 MB/s.
constexpr int kSlowDisk = 10;

// The pieces of an agent, in a place that begins at `base`. What the page says is the target's to
// write.
Result<std::vector<direct::Segment>> take_checked(AgentClient& agent, bool buffer,
                                                  std::vector<direct::SegmentPlace>* places) {
  auto taken = agent.take_segments(kMapping, places);
  if (!taken) return taken;
  for (const auto& segment : *taken) {
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

// Each is a descriptor until the mover has it.
Result<void> allow_pieces(const std::vector<AgentClient>& agents) {
  constexpr std::uint64_t kSpare = 32;
  std::uint64_t pieces = 0;
  for (const AgentClient& agent : agents)
    pieces += agent.segment_count();
  auto allowed = allow_descriptors(pieces + kSpare);
  // The driver needs none.
  if (!allowed) allowed.error().code = ErrorCode::kNotSupported;
  return allowed;
}

void append(std::vector<direct::Segment>& all, std::vector<direct::Segment> more,
            std::uint64_t base) {
  for (auto& segment : more) {
    segment.offset += base;
    all.push_back(std::move(segment));
  }
}

// A mover that is lost, or not done in the time that we give it, says nothing of the program, which
// the driver may still hold. What it lacks, be it memory, a thread or a descriptor, the driver does
// without; but the files of an image, into which it copies, fail for both.
Error of_mover(Error error, bool into_image = false) {
  if (error.code == ErrorCode::kNoAnswer || error.code == ErrorCode::kTimeout)
    error.code = ErrorCode::kInternal;
  if (error.code == ErrorCode::kOutOfHostMemory || (error.code == ErrorCode::kIo && !into_image))
    error.code = ErrorCode::kNotSupported;
  return error;
}

// Failures that the driver's own way would meet as well: there is no point in trying it.
bool final_for_both(ErrorCode code) {
  return code == ErrorCode::kTimeout || code == ErrorCode::kInterrupted ||
         code == ErrorCode::kProcessGone || code == ErrorCode::kOutOfHostMemory ||
         code == ErrorCode::kNoAnswer || code == ErrorCode::kNoSpace || code == ErrorCode::kIo;
}

// `to_come`: bytes that will be taken in a cgroup of that directory meanwhile.
using ToCome = std::function<std::uint64_t(const std::string& directory)>;

// There is room for the mover under the limits of our own memory cgroups. Otherwise the kernel
// would kill somebody, and who is largest is the job: kNotSupported.
Result<void> check_mover_memory(const Environment& env, std::span<const GpuUuid> gpus,
                                const ToCome& to_come) {
  const std::uint64_t ours = mover_memory(env, gpus);
  const auto swap = proc::ProcFs().swap_free();
  for (const proc::MemoryCgroup& group : proc::memory_cgroups(Pid{::getpid()})) {
    const std::uint64_t others = to_come ? to_come(group.directory) : 0;
    const std::uint64_t room = group.room(swap.value_or(0));
    if (ours + others + kCgroupReserve <= room) continue;
    return fail(
        ErrorCode::kNotSupported,
        fmt::format("{} of host memory to copy through (--ring){} do not fit under the memory "
                    "limit of {} ({}, of which {} are free)",
                    format_bytes(ours),
                    others == 0 ? "" : fmt::format(", besides {} to come,", format_bytes(others)),
                    group.directory, format_bytes(group.limit), format_bytes(room)),
        "raise the limit, or take less of it (--ring 8M)");
  }
  return {};
}

Result<void> check_size(const AgentClient& agent, Driver& driver) {
  return agent.check_size([&] { return memory_of_all_gpus(driver); });
}

void tell_of_driver(const Environment& env, const std::string& why) {
  env.tell("the driver's path is taken: " + why);
}

// Of those that have the agent.
void tell_of_driver(const Environment& env, std::vector<const Process*> processes,
                    const std::string& why) {
  std::erase_if(processes, [](const Process* one) { return !one->alive() || !has_agent(*one); });
  if (!processes.empty()) tell_of_driver(env, list_of(processes) + ": " + why);
}

// An agent of another version, in a process that went by the driver's way.
bool has_nothing_to_bring_back(Pid pid) {
  const auto seen = AgentClient::look(pid);
  return seen && *seen && !(*seen)->of_our_version && (*seen)->state == AgentState::kRunning;
}

}  // namespace

GpuMemory::GpuMemory() : content_at_(std::make_shared<CompositeContent>()) {}

std::uint64_t GpuMemory::bytes() const {
  std::uint64_t sum = 0;
  for (const auto& agent : agents_)
    sum += agent.bytes();
  return sum;
}

Result<std::optional<AgentClient>> find_agent(const Environment& env, const Process& process,
                                              bool may_stop) {
  constexpr std::chrono::milliseconds kPart{100};
  const auto deadline = Clock::now() + direct::kPeerEnds;
  for (Waiting waiting(env.progress);; waiting.tell()) {
    auto agent = AgentClient::find(process.pid(), process.pidfd(), kPart);
    if (agent && *agent) (*agent)->heed(&env.interrupt, AgentClient::Heeds::kSecond);
    if (agent || agent.error().code != ErrorCode::kBusy || Clock::now() > deadline) return agent;
    if (!may_stop) continue;
    if (auto stop = env.interrupt.check(); !stop) return fail(std::move(stop.error()));
  }
}

bool is_held_up(const Error& error) {
  return error.code == ErrorCode::kBusy || error.code == ErrorCode::kInterrupted;
}

Result<void> GpuMemory::find(const Environment& env, const std::vector<const Process*>& processes,
                             bool away) {
  const auto deadline = Clock::now() + kAtOnce;
  for (const Process* process : processes) {
    if (!process->alive()) continue;
    auto agent =
        away ? find_agent(env, *process, false) : find_begun_agent(env, *process, deadline);
    if (!agent) {
      if (away && has_nothing_to_bring_back(process->pid())) continue;
      if (away || is_held_up(agent.error())) return fail(std::move(agent.error()));
      tell_of_driver(env, agent.error().to_string());
      continue;
    }
    if (!*agent && !away) {
      if (const auto why = why_no_agent(*process)) tell_of_driver(env, *why);
    }
    if (!*agent) continue;
    if (!away) (*agent)->heed(&env.interrupt, AgentClient::Heeds::kFirst);
    // Its last peer may have been killed, and the agent be at work to make the program run: what it
    // does then is done first. One that is held does nothing, and is not asked to while the driver
    // may hold it.
    auto settled = check_size(**agent, env.driver);
    if (settled && (away || (*agent)->state() != AgentState::kHeld)) {
      settled = (*agent)->ask(AgentCommand::kNone, 0, copy_time((*agent)->bytes()));
      if (settled) settled = check_size(**agent, env.driver);
    }
    if (!settled && (away || final_for_both(settled.error().code)))
      return fail(std::move(settled.error()));
    if (!settled) {
      tell_of_driver(env, settled.error().to_string());
      continue;
    }
    if (is_away((*agent)->state()) == away)
      agents_.push_back(std::move(**agent));
    else if (!away)
      tell_of_driver(env, list_of({process}) + ": its GPU memory is away already");
  }
  return {};
}

Result<void> GpuMemory::prepare(const Environment& env, Group& group, bool buffers) {
  // Before the buffers, which count as memory that is free until they are touched.
  if (buffers) {
    if (auto room = group.check_host_memory(); !room) return room;
  }
  for (auto& agent : agents_)
    agent.begin(AgentCommand::kPrepare, buffers ? 0 : 1);
  Result<void> worst;
  for (auto& agent : agents_) {
    auto done = agent.finish(kAtOnce);
    if (done) done = check_size(agent, env.driver);
    if (!done) worst = std::move(done);
  }
  if (!worst) return worst;
  std::erase_if(agents_, [this](const AgentClient& agent) {
    return agent.bytes() == 0 && without_memory_.insert(agent.pid()).second;
  });
  if (agents_.empty()) return {};
  if (!buffers) {
    std::map<Pid, std::uint64_t> elsewhere;
    for (const auto& agent : agents_)
      elsewhere[agent.pid()] = agent.bytes();
    if (auto room = group.check_host_memory(elsewhere); !room) return room;
  }
  gpus_.clear();
  for (const auto& [pid, uses] : group.gpu_use())
    for (const GpuUse& use : uses)
      add_gpu(use.gpu);
  std::map<std::string, std::uint64_t> to_come;
  for (const auto& agent : agents_) {
    if (!buffers) break;
    for (const proc::MemoryCgroup& one : proc::memory_cgroups(agent.pid()))
      to_come[one.directory] += agent.bytes();
  }
  const auto in_buffers = [&](const std::string& directory) { return to_come[directory]; };
  if (auto room = check_mover_memory(env, gpus_, in_buffers); !room) return room;
  // A context takes as long as touching gigabytes, so both at once.
  MoverRequest needs{gpus_};
  needs.contexts = !held_before_;
  coming_ = in_background([make = env.mover, needs] { return make(needs); });
  for (auto& agent : agents_) {
    if (!buffers) break;
    direct::RemoteMemory buffer(agent.address_space(), agent.buffer_address(), agent.bytes());
    auto done = buffer.fault_in(0, env.interrupt);
    if (!done && worst) worst = std::move(done);
    ready_[agent.pid()] = agent.buffer_address();
  }
  return worst;
}

Result<void> GpuMemory::have_mover(const Environment& env, Group& group,
                                   const QuiesceOptions& options) {
  auto mover = take_mover(env, {gpus_, false, kBesideHeld});
  if (!mover) return fail(of_mover(std::move(mover.error())));
  mover_ = std::move(*mover);
  if (options.image == nullptr) return {};
  if (options.image->options.base != nullptr) {
    if (auto ready = prepare_digests(env); !ready) return ready;
  }
  if (options.comes_back) keep_on_gpus(env.driver, group);
  return {};
}

Result<void> GpuMemory::check_growth(Group& group) const {
  std::map<Pid, std::uint64_t> there;
  bool any = false;
  for (const AgentClient& agent : agents_) {
    const auto ready = ready_.find(agent.pid());
    // One that was too small was replaced, and nothing of the new one is there.
    if (ready != ready_.end() && agent.buffer_address() != ready->second)
      any = true;
    else
      there[agent.pid()] = agent.bytes();
  }
  return any ? group.check_host_memory(there) : Result<void>();
}

Result<void> GpuMemory::prepare_digests(const Environment& env) {
  auto ready = mover_->prepare_digests(env.interrupt, Clock::now() + kAtOnce);
  if (ready) return {};
  if (auto stop = env.interrupt.check(); !stop) return stop;
  env.tell("digests are computed by the processors: " + ready.error().to_string());
  const ErrorCode code = ready.error().code;
  if (code == ErrorCode::kNotSupported || code == ErrorCode::kOutOfGpuMemory) return {};
  // It may be gone, or its context good for nothing.
  MoverRequest needs{gpus_};
  if (held_before_) needs.patience = kBesideHeld;
  auto another = env.mover(needs);
  if (!another) return fail(of_mover(std::move(another.error())));
  mover_ = std::move(*another);
  return {};
}

void GpuMemory::keep_on_gpus(Driver& driver, const Group& group) {
  // What they have now they will need again, and make_room() asks for it.
  const bool all_known =
      std::all_of(group.members().begin(), group.members().end(), [&](const GroupMember& member) {
        return !member.initial || member.initial == CudaState::kCheckpointed ||
               group.gpu_use().contains(member.process.pid());
      });
  const auto gpus = driver.gpus();
  if (!all_known || !gpus) return;
  std::vector<direct::SpareRoom> room;
  for (const auto& [gpu, bytes] : spare_gpu_memory({}, {}, *gpus)) {
    if (std::find(gpus_.begin(), gpus_.end(), gpu) != gpus_.end()) room.push_back({gpu, bytes});
  }
  if (room.empty() || !room_.claim_ahead()) return;
  mover_->keep(std::move(room));
  enough_ = std::make_shared<Interrupt>();
  ahead_ = true;
}

bool GpuMemory::all_behind_gates(const Group& group) const {
  const auto& members = group.members();
  return std::all_of(members.begin(), members.end(), [&](const GroupMember& member) {
    const bool runs = member.initial == CudaState::kRunning && member.process.alive();
    return !runs || std::any_of(agents_.begin(), agents_.end(), [&](const AgentClient& agent) {
      return agent.pid() == member.process.pid();
    });
  });
}

Result<void> GpuMemory::refuse_half_way(const Group& group) {
  Result<void> whole;
  for (const GroupMember& member : group.members()) {
    if (!member.initial) continue;
    const Pid pid = member.process.pid();
    const auto seen = AgentClient::look(pid);
    if (!seen || !*seen || !(*seen)->half_way) continue;
    const bool will_run = member.initial == CudaState::kRunning;
    half_way_ = half_way_ || will_run;
    whole = fail(ErrorCode::kWrongState,
                 fmt::format("process {} was half-way suspended, and its GPU memory not free: who "
                             "did that was killed",
                             pid.value),
                 will_run ? "it runs again: try once more"
                          : fmt::format("`stasis recover {}` makes it run", pid.value));
  }
  return whole;
}

Result<void> GpuMemory::require_all(const std::vector<const Process*>& running) const {
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

Result<void> GpuMemory::require_nothing_stays() const {
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

Result<void> GpuMemory::hold_back(const Environment& env, Group& group, milliseconds timeout,
                                  Phases& phases) {
  std::deque<GateRank> ranks;
  Group::Gates gates;
  for (AgentClient& agent : agents_)
    gates[agent.pid()] = &ranks.emplace_back(agent);
  auto done = group.hold_back(gates, timeout, env.interrupt, [&](bool still) {
    if (still)
      phases.stands_still();
    else
      phases.runs();
  });
  if (!done) return done;
  std::erase_if(agents_, [](const AgentClient& agent) { return !agent.pidfd().alive(); });
  for (const AgentClient& agent : agents_)
    if (auto sound = check_size(agent, env.driver); !sound) return sound;
  return {};
}

Result<std::vector<direct::Segment>> GpuMemory::take_all(const IntoImage* image) {
  if (auto allowed = allow_pieces(agents_); !allowed) return fail(std::move(allowed.error()));
  std::vector<direct::Segment> segments;
  content_at_ = std::make_shared<CompositeContent>();
  CompositeContent& places = *content_at_;
  for (auto& agent : agents_) {
    std::vector<direct::SegmentPlace> pieces;
    auto taken = take_checked(agent, !image, &pieces);
    if (!taken) return fail(std::move(taken.error()));
    std::uint64_t base = 0;
    if (image) {
      auto stream = into_->add(agent.pid(), agent.bytes(), pieces);
      if (!stream) return fail(std::move(stream.error()));
      base = places.add_stream(into_, *stream);
    } else {
      base = places.add_buffer(agent.address_space(), agent.buffer_address(), agent.bytes());
    }
    append(segments, std::move(*taken), base);
  }
  return segments;
}

Result<void> GpuMemory::begin_image(const Environment& env, const IntoImage& image) {
  auto made = ImageContent::create(image.image_dir, image.options);
  if (!made) return fail(std::move(made.error()));
  into_ = std::move(*made);
  if (const auto& why = into_->without_base())
    env.tell("all GPU memory is written, and nothing taken over: " + why->to_string());
  return {};
}

Result<void> GpuMemory::end_image(const IntoImage* image) {
  if (!into_) return {};
  into_.reset();
  contents_.clear();
  content_at_ = std::make_shared<CompositeContent>();
  return discard_content(image->image_dir);
}

Result<void> GpuMemory::copy_out(const Environment& env, const IntoImage* image) {
  auto segments = take_all(image);
  if (!segments) return fail(std::move(segments.error()));
  const auto deadline = Clock::now() + (image ? kSlowDisk : 1) * copy_time(bytes());
  auto copied = mover_->copy_out(std::move(*segments), *content_at_, env.interrupt, deadline);
  if (copied) return {};
  return fail(of_mover(std::move(copied.error()), image != nullptr));
}

bool GpuMemory::keep() {
  for (auto& agent : agents_)
    agent.begin(AgentCommand::kKeep, 0);
  bool all = true;
  for (auto& agent : agents_)
    all = agent.finish(kMapping) && all;
  if (!all) (void)drop_kept();
  return all;
}

Result<void> GpuMemory::drop_kept() {
  for (auto& agent : agents_)
    agent.begin(AgentCommand::kDrop, 0);
  Result<void> done;
  for (auto& agent : agents_) {
    auto dropped = agent.finish(kMapping);
    if (!dropped) done = std::move(dropped);
  }
  return done;
}

Result<void> GpuMemory::copy_beside(const Environment& env) {
  auto segments = take_all(nullptr);
  if (!segments) return fail(std::move(segments.error()));
  auto given = std::make_shared<std::vector<direct::Segment>>(std::move(*segments));
  copying_ =
      in_background([mover = mover_, make = env.mover, gpus = gpus_, given, places = content_at_,
                     &stop = env.interrupt, time = copy_time(bytes())]() mutable -> Copied {
        if (!mover) {
          auto made = make({gpus, false, kBesideHeld});
          if (!made) return {nullptr, fail(std::move(made.error()))};
          mover = std::move(*made);
        }
        auto copied = mover->copy_out(std::move(*given), *places, stop, Clock::now() + time);
        if (!copied) return {std::move(mover), fail(std::move(copied.error()))};
        return {std::move(mover), {}};
      });
  return empty();
}

void GpuMemory::wait_for_copy() {
  if (!copying_.valid()) return;
  Copied copied = copying_.get();
  if (copied.mover) mover_ = std::move(copied.mover);
  if (!copied.done) copied.done = fail(of_mover(std::move(copied.done.error())));
  copied_ = std::move(copied.done);
}

Result<void> GpuMemory::finish_out(Phases& phases) {
  if (!copying_.valid()) return {};
  phases.begin("copy out");
  wait_for_copy();
  Result<void> done = *copied_;
  if (done) done = fault(FaultPoint::kDirectCopied);
  if (done) done = drop_kept();
  if (done) done = fault(FaultPoint::kDirectDropped);
  return done;
}

Result<GpuMemory::Found> GpuMemory::content_of(const AgentClient& agent) const {
  if (!agent.content_is_elsewhere()) return Found{};
  for (const auto& content : contents_) {
    if (content->id() != agent.content_id()) continue;
    auto stream = content->stream_of(agent.pid(), agent.bytes());
    if (!stream) return fail(std::move(stream.error()));
    return Found{content, *stream};
  }
  return fail(ErrorCode::kWrongState,
              fmt::format("the content of process {}'s GPU memory is in an image that is not where "
                          "it was",
                          agent.pid().value),
              fmt::format("move the image back, then `stasis recover {0}`; or say where it is: "
                          "`stasis resume {0} --images-dir DIR`",
                          agent.pid().value));
}

Result<void> GpuMemory::check_found(const Environment& env,
                                    const std::vector<const Process*>& processes) const {
  for (const Process* process : processes) {
    if (!process->alive()) continue;
    auto agent = find_agent(env, *process, true);
    if (!agent && has_nothing_to_bring_back(process->pid())) continue;
    if (!agent) return fail(std::move(agent.error()));
    if (!*agent) continue;
    if (auto found = content_of(**agent); !found) return fail(std::move(found.error()));
  }
  return {};
}

Result<void> GpuMemory::copy_in(const Interrupt& interrupt) {
  if (auto allowed = allow_pieces(agents_); !allowed) return allowed;
  std::vector<direct::Segment> segments;
  // Should we be killed, no agent copies by itself beside the mover.
  std::vector<UniqueFd> locks;
  bool from_image = false;
  for (auto& agent : agents_) {
    if (agent.state() != AgentState::kFilling) continue;
    locks.push_back(agent.lock());
    if (!locks.back().valid()) return fail(errno_error("cannot copy a descriptor", errno));
    auto content = content_of(agent);
    if (!content) return fail(std::move(content.error()));
    if (content->image) from_image = true;
    auto taken = take_checked(agent, !content->image, nullptr);
    if (!taken) return fail(std::move(taken.error()));
    if (content->image) {
      append(segments, std::move(*taken), content_at_->add_stream(content->image, content->stream));
      continue;
    }
    append(segments, std::move(*taken),
           content_at_->add_buffer(agent.address_space(), agent.buffer_address(), agent.bytes()));
  }
  const auto deadline = Clock::now() + (from_image ? kSlowDisk : 1) * copy_time(bytes());
  const bool any = !segments.empty();
  mover_->hold(std::move(locks));
  auto copied = mover_->copy_in(std::move(segments), *content_at_, interrupt, deadline);
  // What came ahead went with it, if it has come so far as to begin.
  if (copied && any)
    enough_.reset();
  else
    (void)let_go_ahead();
  room_.leave();
  if (!copied) return fail(std::move(copied.error()));
  return {};
}

Result<void> GpuMemory::empty() {
  Result<void> done;
  if (into_) {
    contents_.push_back(into_);
    needs_image_ = true;
  }
  for (auto& agent : agents_)
    agent.begin(AgentCommand::kEmpty, into_ ? into_->id() : direct::ContentId{});
  for (auto& agent : agents_) {
    auto emptied = agent.finish(kMapping);
    if (!emptied) done = std::move(emptied);
  }
  if (done) done = fault(FaultPoint::kDirectEmptied);
  for (auto& agent : agents_)
    if (done) done = agent.ask(AgentCommand::kHold, 0, kAtOnce);
  if (done) done = fault(FaultPoint::kDirectHeld);
  return done;
}

// The agent alone, which needs no mover and takes its time.
Result<void> GpuMemory::bring_back(AgentClient& agent) const {
  // A page answers, too, when another process has it.
  if (auto there = agent.address_space()->check_current(); !there) return there;
  return agent.bring_back([this](const AgentClient& held) -> Result<void> {
    constexpr std::uint64_t kPiece = std::uint64_t{16} << 20;
    auto content = content_of(held);
    if (!content) return fail(std::move(content.error()));
    direct::RemoteMemory buffer(held.address_space(), held.buffer_address(), held.bytes());
    std::vector<std::byte> piece(std::min(kPiece, held.bytes()));
    for (std::uint64_t offset = 0; offset < held.bytes(); offset += kPiece) {
      const std::span<std::byte> part(piece.data(), std::min(kPiece, held.bytes() - offset));
      auto done = content->image->read(content->stream * ImageContent::kGap + offset, part);
      if (done) done = buffer.write(offset, part);
      if (!done) return done;
    }
    return {};
  });
}

GpuMemory::MoverResult GpuMemory::take_mover(const Environment& env, const MoverRequest& needs) {
  if (enough_) enough_->request(SIGTERM);
  return coming_.valid() ? coming_.get() : env.mover(needs);
}

void GpuMemory::settle() {
  if (!coming_.valid()) return;
  if (enough_) enough_->request(SIGTERM);
  coming_.wait();
}

GpuMemory::MoverResult GpuMemory::take_mover_back(const Environment& env, std::uint64_t in_images) {
  // Without a mover the processes would take what is in images into their own memory.
  if (!coming_.valid() && in_images <= mover_memory(env, {})) {
    auto room = check_mover_memory(env, {}, nullptr);
    if (!room) return fail(std::move(room.error()));
  }
  return take_mover(env, {gpus_, true, kBesideHeld});
}

void GpuMemory::begin(const Environment& env, std::vector<direct::Ahead> ahead) {
  enough_ = std::make_shared<Interrupt>();
  ahead_ = !ahead.empty() && room_.claim_ahead();
  if (!ahead_) ahead.clear();
  coming_ = in_background([make = env.mover, gpus = gpus_, places = content_at_,
                           ahead = std::move(ahead), enough = enough_] {
    auto mover = make({gpus, true});
    // What becomes of it, copy_in() will see.
    if (mover && !ahead.empty() && !enough->requested()) {
      std::uint64_t bytes = 0;
      for (const direct::Ahead& one : ahead)
        for (const direct::Ahead::Part& part : one.parts)
          bytes += part.bytes;
      (void)(*mover)->copy_ahead(ahead, *places, *enough,
                                 Clock::now() + kSlowDisk * copy_time(bytes));
    }
    return mover;
  });
}

void GpuMemory::take_gpus(const std::vector<const Process*>& processes,
                          std::span<const GpuPair> pairs) {
  gpus_.clear();
  for (const Process* process : processes) {
    const auto memory = recall_suspended(*process);
    for (const GpuUse& use : memory ? memory->uses : std::vector<GpuUse>())
      add_gpu(target_of(use.gpu, pairs));
  }
}

void GpuMemory::add_gpu(const GpuUuid& gpu) {
  if (std::find(gpus_.begin(), gpus_.end(), gpu) == gpus_.end()) gpus_.push_back(gpu);
}

void GpuMemory::get_ready(const Environment& env, const std::vector<const Process*>& processes,
                          std::span<const GpuPair> pairs) {
  if (!coming_.valid()) take_gpus(processes, pairs);
  if (!env.mover || coming_.valid() || !check_mover_memory(env, {}, nullptr)) return;
  const bool any = std::any_of(processes.begin(), processes.end(), [](const Process* process) {
    const auto agent = AgentClient::look(process->pid());
    return agent && *agent && is_away((*agent)->state);
  });
  if (any) begin(env, {});
}

void GpuMemory::get_ready(const Environment& env, const std::vector<Pid>& pids,
                          const HeadStart& start) {
  const auto theirs = [&](const std::string&) { return start.host_bytes; };
  if (!env.mover || coming_.valid() || !check_mover_memory(env, {}, theirs)) return;
  content_at_ = std::make_shared<CompositeContent>();
  gpus_.clear();
  std::map<GpuUuid, direct::Ahead> ahead;
  for (const auto& content : contents_) {
    for (const Pid pid : pids) {
      const auto stream = content->stream_of(pid);
      if (!stream) continue;
      const std::uint64_t base = content_at_->add_stream(content, *stream);
      for (const ContentRange& range : content->ranges_of(*stream)) {
        const GpuUuid target = target_of(range.gpu, start.pairs);
        add_gpu(target);
        const auto room = start.room.find(target);
        // Who wrote that down may be wrong.
        const bool sound = range.offset <= CompositeContent::kGap &&
                           range.bytes <= CompositeContent::kGap - range.offset;
        if (room == start.room.end() || !sound) continue;
        auto& one =
            ahead.try_emplace(target, direct::Ahead{target, room->second, {}}).first->second;
        one.parts.push_back({base + range.offset, range.bytes});
      }
    }
  }
  std::vector<direct::Ahead> all;
  for (auto& [gpu, one] : ahead)
    all.push_back(std::move(one));
  begin(env, std::move(all));
}

void GpuMemory::collect_mover() {
  enough_->request(SIGTERM);
  if (!coming_.valid()) return;
  if (auto mover = coming_.get()) mover_ = std::move(*mover);
}

bool GpuMemory::let_go_ahead() {
  if (!enough_) return false;
  collect_mover();
  enough_.reset();
  if (mover_) {
    const Interrupt never;
    (void)mover_->copy_ahead({}, *content_at_, never, Clock::now() + kMapping);
  }
  ahead_ = false;
  room_.leave_ahead();
  return true;
}

void GpuMemory::claim_both() {
  if (!enough_ || !ahead_)
    room_.leave();
  else if (!room_.claim_twice())
    (void)let_go_ahead();
}

void GpuMemory::make_room(Driver& driver, std::span<const GpuUse> needed,
                          std::span<const GpuPair> pairs) {
  if (!enough_ || !ahead_) return;
  const auto gpus = driver.gpus();
  if (gpus && check_gpu_memory(needed, pairs, *gpus)) return;
  (void)let_go_ahead();
}

Result<void> GpuMemory::refill() {
  for (;;) {
    std::vector<AgentClient*> asked;
    for (auto& agent : agents_) {
      const bool empty =
          agent.state() == AgentState::kHeld || agent.state() == AgentState::kEmptied;
      if (!empty) continue;
      agent.begin(AgentCommand::kRefill, 0);
      asked.push_back(&agent);
    }
    Result<void> done;
    for (AgentClient* agent : asked) {
      // It may have to copy first, if it kept its memory.
      auto refilled = agent->finish(kMapping + copy_time(agent->bytes()));
      if (!refilled) done = std::move(refilled);
    }
    // What was brought ahead may be what is missing, whatever the driver calls that.
    if (done || !let_go_ahead()) return done;
    room_.leave();
  }
}

std::uint64_t mover_memory(const Environment& env, std::span<const GpuUuid> gpus) {
  return direct::options_for(gpus, env.ring_bytes).ring_bytes +
         (env.driver.info().simulated ? 0 : kMoverContext);
}

Result<void> refuse_shared(const Environment& env,
                           const std::vector<std::pair<Pid, std::uint32_t>>& pieces, bool ignore) {
  std::string list;
  for (const auto& [pid, count] : pieces) {
    if (count == 0) continue;
    list += fmt::format("{}{} ({})", list.empty() ? "" : ", ", pid.value,
                        count == 1 ? "1 piece" : fmt::format("{} pieces", count));
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

std::vector<std::pair<Pid, std::uint32_t>> GpuMemory::shared_pieces() const {
  std::vector<std::pair<Pid, std::uint32_t>> pieces;
  for (const auto& agent : agents_)
    pieces.emplace_back(agent.pid(), agent.shared_count());
  return pieces;
}

Result<void> GpuMemory::move_out(const Environment& env, Group& group,
                                 const QuiesceOptions& options, Phases& phases) {
  const IntoImage* image = options.image;
  const bool forced = options.path == MemoryPath::kDirect;
  std::vector<const Process*> running;
  std::vector<const Process*> locked;
  for (const GroupMember& member : group.members()) {
    if (member.initial) known_.insert(member.process.pid());
    if (member.initial == CudaState::kRunning) running.push_back(&member.process);
    if (member.initial == CudaState::kLocked) locked.push_back(&member.process);
  }
  for (const Process* process : running) {
    const auto seen = AgentClient::look(process->pid());
    if (seen && *seen && (*seen)->held_before) held_before_ = true;
  }
  if (auto whole = refuse_half_way(group); !whole) return whole;
  if (options.path == MemoryPath::kDriver || (!env.mover && !forced)) {
    const bool chosen = options.path == MemoryPath::kDriver;
    if (!options.reason_is_told)
      tell_of_driver(env, running, chosen ? "asked for (--path driver)" : "no mover is available");
    return {};
  }
  if (!env.mover) return fail(ErrorCode::kNotSupported, "nobody is there who copies GPU memory");
  const auto give_up = [&](Error why) -> Result<void> {
    // What is kept for the next closing of the gate, the driver wants now.
    for (AgentClient& agent : agents_)
      if (!final_for_both(why.code) && agent.state() == AgentState::kRunning)
        (void)agent.ask(AgentCommand::kPrepare, 1, kAtOnce);
    auto back = roll_back();
    if (!back) return back;
    phases.runs();
    // Which is why the rest went wrong.
    if (auto gone = take_gone()) return fail(std::move(*gone));
    if (final_for_both(why.code)) return fail(std::move(why));
    // What the mover made of that is no reason to try another way.
    if (auto stop = env.interrupt.check(); !stop) return stop;
    if (forced) return fail(std::move(why));
    if (auto gone = end_image(image); !gone) return gone;
    copied_.reset();
    group.forget_gates();
    // The driver wants its memory.
    mover_.reset();
    if (env.end_mover) env.end_mover();
    tell_of_driver(env, why.to_string());
    return {};
  };
  if (auto found = find(env, running, false); !found) return give_up(std::move(found.error()));
  if (auto alone = refuse_shared(env, shared_pieces(), options.ignore_obstacles); !alone) {
    dismiss();
    return alone;
  }
  if (forced) {
    if (auto all = require_all(running); !all) return give_up(std::move(all.error()));
  }
  tell_of_driver(env, locked, "locked before, by another tool, and an agent is asked before that");
  if (agents_.empty()) return {};
  phases.begin("prepare");
  auto done = prepare(env, group, image == nullptr);
  if (done && forced) done = require_all(running);
  if (done) {
    std::erase_if(running,
                  [this](const Process* one) { return !without_memory_.contains(one->pid()); });
    tell_of_driver(env, running, "no GPU memory that an agent can move");
  }
  if (done && agents_.empty()) return {};
  if (held_before_ && coming_.valid()) {
    auto begun = coming_.get();
    if (done && !begun) done = fail(of_mover(std::move(begun.error())));
  }
  if (done && !held_before_)
    done = have_mover(env, group, options);
  else
    settle();
  if (done && image) done = begin_image(env, *image);
  if (done) done = fault(FaultPoint::kDirectPrepared);
  phases.begin("close");
  if (done) done = hold_back(env, group, options.timeout, phases);
  if (done && agents_.empty()) return end_image(image);
  const bool beside = !options.for_dump && !options.copies_first && !options.at_rest;
  // Its contexts must be there before anybody runs again (ADR 31), or is told that all stand still:
  // who has no gate runs as soon as the driver's lock comes to nothing.
  bool mover_to_come = done && held_before_;
  if (mover_to_come && !(beside && all_behind_gates(group))) {
    phases.begin("mover");
    done = have_mover(env, group, options);
    mover_to_come = false;
  }
  if (done && options.at_rest) options.at_rest();
  if (done && image == nullptr) done = check_growth(group);
  if (done && forced) done = require_nothing_stays();
  if (done) done = fault(FaultPoint::kDirectClosed);
  // What was opened while they ran on. The driver's path would be no way out.
  if (auto alone = done ? refuse_shared(env, shared_pieces(), options.ignore_obstacles) : done;
      done && !alone) {
    auto back = roll_back();
    phases.runs();
    return back ? alone : back;
  }
  if (done && beside && keep()) {
    phases.begin("empty");
    done = fault(FaultPoint::kDirectKept);
    if (done) done = copy_beside(env);
    if (!done) return give_up(std::move(done.error()));
    std::set<Pid> at_work;
    for (const AgentClient& agent : agents_)
      at_work.insert(agent.pid());
    group.let_agents_work(std::move(at_work));
    return {};
  }
  if (done && mover_to_come) {
    phases.begin("mover");
    done = have_mover(env, group, options);
  }
  phases.begin("copy out");
  if (done) done = copy_out(env, image);
  if (done) done = fault(FaultPoint::kDirectCopied);
  // Before any memory is given up: from then on it is all there is.
  if (done && image) {
    phases.begin("content");
    done = into_->finish(env.progress, env.interrupt);
    if (done) done = fault(FaultPoint::kDirectContent);
  }
  if (done) done = env.interrupt.check();
  if (!done) return give_up(std::move(done.error()));
  phases.begin("empty");
  if (done = empty(); !done) return give_up(std::move(done.error()));
  return {};
}

Result<std::uint64_t> GpuMemory::move_in(const Environment& env,
                                         const std::vector<const Process*>& processes,
                                         Phases& phases, bool stops) {
  agents_.clear();
  if (auto found = find(env, processes, true); !found) return fail(std::move(found.error()));
  // Stopped before anything had left: what is in the buffer is not what is in its memory.
  for (auto& agent : agents_) {
    if (agent.state() != AgentState::kClosed) continue;
    if (auto opened = agent.ask(AgentCommand::kOpen, 0, kMapping); !opened)
      return fail(std::move(opened.error()));
  }
  std::erase_if(agents_,
                [](const AgentClient& agent) { return agent.state() == AgentState::kRunning; });
  if (agents_.empty()) return 0;
  std::uint64_t in_images = 0;
  for (const auto& agent : agents_) {
    auto content = content_of(agent);
    if (content) {
      needs_image_ = needs_image_ || content->image;
      in_images += content->image ? agent.bytes() : 0;
      continue;
    }
    Error why = std::move(content.error());
    dismiss();
    return fail(std::move(why));
  }
  const std::uint64_t moved = bytes();
  phases.begin("refill");
  if (auto allowed = fault(FaultPoint::kDirectRefill); !allowed) {
    dismiss();
    return fail(std::move(allowed.error()));
  }
  claim_both();
  Result<void> done = refill();
  if (!done) {
    // Without a peer they try it again by themselves.
    dismiss();
    return fail(std::move(done.error()));
  }
  fault_only(FaultPoint::kDirectRefilled);
  phases.begin("copy in");
  if (!mover_ && env.mover) {
    if (gpus_.empty()) take_gpus(processes, {});
    auto mover = take_mover_back(env, in_images);
    if (mover)
      mover_ = std::move(*mover);
    else
      done = fail(std::move(mover.error()));
  }
  const Interrupt never;
  // There may be nothing left to copy at which it would be heard.
  if (done && stops) done = env.interrupt.check();
  if (done && mover_) done = copy_in(stops ? env.interrupt : never);
  // What the image says will not be different for the agents; and who asked to stop is heard.
  if (!done && (done.error().code == ErrorCode::kImageCorrupt ||
                done.error().code == ErrorCode::kInterrupted)) {
    dismiss();
    return fail(std::move(done.error()));
  }
  if (!done) env.tell("the processes copy by themselves: " + done.error().to_string());
  if (!mover_ || !done) {
    auto alone = bring_back_all(stops);
    if (!alone) return fail(std::move(alone.error()));
    if (auto gone = take_gone()) return fail(std::move(*gone));
    return moved;
  }
  fault_only(FaultPoint::kDirectFilled);
  phases.begin("open");
  for (auto& agent : agents_)
    agent.begin(AgentCommand::kOpen, 0);
  for (auto& agent : agents_) {
    auto opened = agent.finish(kMapping);
    if (!opened) done = std::move(opened);
  }
  phases.runs();
  dismiss();
  fault_only(FaultPoint::kDirectOpened);
  if (!done) return fail(std::move(done.error()));
  needs_image_ = false;
  return moved;
}

Result<void> GpuMemory::roll_back() {
  // If it was copied it is as if that had been done first; if not, the agents take it from what
  // they keep.
  wait_for_copy();
  if (copied_ && *copied_) (void)drop_kept();
  return bring_back_all(false);
}

void GpuMemory::tell_of_new(const Environment& env, const Group& group) {
  std::vector<const Process*> fresh;
  for (const GroupMember& member : group.members()) {
    if (member.initial == CudaState::kRunning && known_.insert(member.process.pid()).second)
      fresh.push_back(&member.process);
  }
  tell_of_driver(env, std::move(fresh), "new in the tree since the agents were asked");
}

Result<void> GpuMemory::expect_agents() {
  for (const AgentClient& agent : agents_) {
    if (!agent.pidfd().alive() || agent.can_be_found()) continue;
    lost_agent_ = true;
    return fail(ErrorCode::kNotSupported,
                fmt::format("process {} has closed the descriptor by which its agent is found",
                            agent.pid().value),
                "try again: the driver moves its GPU memory now");
  }
  return {};
}

void GpuMemory::take_held(const Environment& env, const Group& group) {
  for (const GroupMember& member : group.members()) {
    if (member.initial != CudaState::kRunning || !member.process.alive()) continue;
    const Pid pid = member.process.pid();
    const bool known = std::any_of(agents_.begin(), agents_.end(),
                                   [&](const AgentClient& agent) { return agent.pid() == pid; });
    if (known) continue;
    auto agent = find_agent(env, member.process, false);
    if (!agent || !*agent || !check_size(**agent, env.driver)) continue;
    // One that waits for what is in an image does nothing by itself.
    const bool waits = is_away((*agent)->state()) && (*agent)->content_is_elsewhere();
    if ((*agent)->state() == AgentState::kHeld || (waits && content_of(**agent)))
      agents_.push_back(std::move(**agent));
  }
}

Result<void> GpuMemory::bring_back_all(bool ends_them) {
  std::string messages;
  std::string remedies;
  if (enough_ && needs_image_) collect_mover();
  // By the mover, which needs no host memory; what it cannot do, the agents do. Only of an image:
  // the content of their own buffers they are quick with, and sooner.
  if (mover_ && needs_image_) {
    claim_both();
    (void)refill();
    const Interrupt never;
    if (copy_in(never)) {
      for (auto& agent : agents_)
        if (agent.state() == AgentState::kFilling)
          (void)agent.ask(AgentCommand::kOpen, 0, kMapping);
    }
  }
  // The agents want that room.
  (void)let_go_ahead();
  for (auto& agent : agents_) {
    if (!agent.pidfd().alive()) continue;
    auto back = bring_back(agent);
    // An agent maps once more what it copies, which needs address space; a mover does so elsewhere.
    const Interrupt never;
    if (!back && mover_ && agent.state() == AgentState::kFilling && copy_in(never))
      back = agent.ask(AgentCommand::kOpen, 0, kMapping);
    if (back || !agent.pidfd().alive()) continue;
    // Another program is there in its place, which runs.
    if (back.error().code == ErrorCode::kProcessGone) {
      gone_ = std::move(back.error());
      continue;
    }
    if (ends_them && back.error().code == ErrorCode::kImageCorrupt) {
      dismiss();
      return back;
    }
    messages += (messages.empty() ? "" : "; ") + back.error().message;
    remedies = fmt::format("`stasis recover {}`", agent.pid().value);
    if (!back.error().remedy.empty())
      remedies = fmt::format("{}; then {}", back.error().remedy, remedies);
  }
  agents_.clear();
  if (messages.empty()) {
    needs_image_ = false;
    return {};
  }
  return fail(ErrorCode::kNotRolledBack, std::move(messages), std::move(remedies));
}

}  // namespace stasis
