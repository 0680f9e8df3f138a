#include "direct/prefetch.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "direct/agent_set.h"
#include "driver/gpu_plan.h"

namespace stasis {

using direct::copy_time;

void Prefetch::begin(const Environment& env, std::vector<direct::PrefetchRequest> requests) {
  stop_ = std::make_shared<Interrupt>();
  on_gpus_ = !requests.empty() && reservation_.reserve_prefetch();
  if (!on_gpus_) requests.clear();
  auto work = [make = env.mover, gpus = mover_.gpus(), expected = mover_.expected(env),
               content = content_.composite(), requests = std::move(requests),
               stop = stop_]() -> MoverLease::Made {
    auto mover = make({.gpus = gpus, .brings_back = true, .bytes = expected});
    // The copy in will see how far it has come.
    if (mover && !requests.empty() && !stop->requested()) {
      std::uint64_t bytes = 0;
      for (const direct::PrefetchRequest& one : requests)
        for (const direct::PrefetchRequest::Part& part : one.parts)
          bytes += part.bytes;
      (void)(*mover)->prefetch(requests, *content, *stop,
                               Clock::now() + kSlowDisk * copy_time(bytes));
    }
    return mover;
  };
  mover_.begin(std::move(work), stop_);
}

void Prefetch::begin(const Environment& env, const std::vector<const Process*>& processes,
                     std::span<const GpuPair> pairs) {
  if (!mover_.begun()) mover_.use_gpus_of(processes, pairs);
  const std::uint64_t expected = mover_.expected(env);
  if (!env.mover || mover_.begun() || !check_mover_memory(env, {}, expected, nullptr)) return;
  const bool any = std::any_of(processes.begin(), processes.end(), [](const Process* process) {
    const auto agent = direct::probe_agent(process->pid());
    return agent && *agent && direct::is_away((*agent)->state);
  });
  if (any) begin(env, {});
}

void Prefetch::begin(const Environment& env, const std::vector<Pid>& pids,
                     const PrefetchRoom& room) {
  std::uint64_t bytes = 0;
  for (const auto& image : content_.images()) {
    for (const Pid pid : pids) {
      const auto stream = image->stream_of(pid);
      if (!stream) continue;
      for (const ContentRange& range : image->ranges_of(*stream))
        bytes += range.bytes;
    }
  }
  const auto theirs = [&](const std::string&) { return room.host_bytes; };
  if (!env.mover || mover_.begun()) return;
  mover_.expect(bytes);
  if (!check_mover_memory(env, {}, mover_.expected(env), theirs)) return;
  content_.begin_composite();
  mover_.use_no_gpus();
  std::map<GpuUuid, direct::PrefetchRequest> requests;
  for (const auto& image : content_.images()) {
    for (const Pid pid : pids) {
      const auto stream = image->stream_of(pid);
      if (!stream) continue;
      const std::uint64_t base = content_.composite()->add_stream(image, *stream);
      for (const ContentRange& range : image->ranges_of(*stream)) {
        const GpuUuid target = target_of(range.gpu, room.pairs);
        mover_.add_gpu(target);
        const auto free = room.room.find(target);
        // What the image says may be wrong.
        const bool sound = range.offset <= CompositeContent::kGap &&
                           range.bytes <= CompositeContent::kGap - range.offset;
        if (free == room.room.end() || !sound) continue;
        auto& one = requests.try_emplace(target, direct::PrefetchRequest{target, free->second, {}})
                        .first->second;
        one.parts.push_back({base + range.offset, range.bytes});
      }
    }
  }
  std::vector<direct::PrefetchRequest> all;
  for (auto& [gpu, one] : requests)
    all.push_back(std::move(one));
  begin(env, std::move(all));
}

void Prefetch::keep_on_gpus(Driver& driver, const ProcessTree& tree) {
  // The processes will need again what they have now, and make_room() asks for it.
  const bool all_known =
      std::all_of(tree.members().begin(), tree.members().end(), [&](const TreeMember& member) {
        return !member.initial || member.initial == CudaState::kCheckpointed ||
               tree.gpu_use().contains(member.process.pid());
      });
  const auto gpus = driver.gpus();
  if (!all_known || !gpus) return;
  std::vector<direct::SpareRoom> room;
  for (const auto& [gpu, bytes] : spare_gpu_memory({}, {}, *gpus)) {
    const auto& used = mover_.gpus();
    if (std::find(used.begin(), used.end(), gpu) != used.end()) room.push_back({gpu, bytes});
  }
  if (room.empty() || !reservation_.reserve_prefetch()) return;
  mover_->keep(std::move(room));
  stop_ = std::make_shared<Interrupt>();
  on_gpus_ = true;
}

void Prefetch::collect() {
  stop_->request(SIGTERM);
  mover_.collect();
}

bool Prefetch::release() {
  if (!stop_) return false;
  collect();
  stop_.reset();
  if (mover_) {
    const Interrupt never;
    (void)mover_->prefetch({}, *content_.composite(), never, Clock::now() + kMapping);
  }
  on_gpus_ = false;
  reservation_.leave_prefetch();
  return true;
}

void Prefetch::reserve_both() {
  if (!stop_ || !on_gpus_)
    reservation_.leave();
  else if (!reservation_.reserve_twice())
    (void)release();
}

void Prefetch::make_room(Driver& driver, std::span<const GpuUse> needed,
                         std::span<const GpuPair> pairs) {
  if (!stop_ || !on_gpus_) return;
  const auto gpus = driver.gpus();
  if (gpus && check_gpu_memory(needed, pairs, *gpus)) return;
  (void)release();
}

}  // namespace stasis
