#include "direct/mover_lease.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>

#include <fmt/format.h>

#include "base/background.h"
#include "checkpoint/suspend_record.h"
#include "direct/agent_set.h"
#include "driver/gpu_plan.h"
#include "proc/memory_cgroup.h"

namespace stasis {
namespace {

using std::chrono::milliseconds;

// The deadline for making a mover while programs stand still.
constexpr milliseconds kBesideHeld{10000};
// Host memory of a mover besides the ring: a dump takes 202 MiB with a ring of 64, a restore 257
// with one of 128 (H100, 580.159.04). On the simulated driver next to nothing.
constexpr std::uint64_t kMoverContext = 120ULL << 20;
// What must stay free under a limit.
constexpr std::uint64_t kCgroupReserve = 16ULL << 20;

}  // namespace

std::uint64_t mover_memory(const Environment& env, std::span<const GpuUuid> gpus,
                           std::uint64_t bytes) {
  return direct::options_for(gpus, env.ring_bytes, bytes).ring_bytes +
         (env.driver.info().simulated ? 0 : kMoverContext);
}

Result<void> check_mover_memory(const Environment& env, std::span<const GpuUuid> gpus,
                                std::uint64_t bytes, const HostMemoryToCome& to_come) {
  const std::uint64_t ours = mover_memory(env, gpus, bytes);
  const auto swap = proc::ProcFs().swap_free();
  for (const proc::MemoryCgroup& cgroup : proc::memory_cgroups(Pid{::getpid()})) {
    const std::uint64_t others = to_come ? to_come(cgroup.directory) : 0;
    const std::uint64_t room = cgroup.room(swap.value_or(0));
    if (ours + others + kCgroupReserve <= room) continue;
    return fail(refusal(
        {"mover-memory",
         Severity::kRed,
         {},
         fmt::format("{} of host memory to copy through (--ring){} do not fit under the memory "
                     "limit of {} ({}, of which {} are free)",
                     format_bytes(ours),
                     others == 0 ? "" : fmt::format(", besides {} to come,", format_bytes(others)),
                     cgroup.directory, format_bytes(cgroup.limit), format_bytes(room)),
         "raise the limit, or take less of it (--ring 8M)"}));
  }
  return {};
}

Error of_mover(Error error, bool into_image) {
  if (error.code == ErrorCode::kNoAnswer || error.code == ErrorCode::kTimeout)
    error.code = ErrorCode::kInternal;
  if (error.code == ErrorCode::kOutOfHostMemory || (error.code == ErrorCode::kIo && !into_image))
    error.code = ErrorCode::kNotSupported;
  return error;
}

void MoverLease::use_gpus_of(const ProcessTree& tree) {
  gpus_.clear();
  for (const auto& [pid, uses] : tree.gpu_use())
    for (const GpuUse& use : uses)
      add_gpu(use.gpu);
}

void MoverLease::use_gpus_of(const std::vector<const Process*>& processes,
                             std::span<const GpuPair> pairs) {
  gpus_.clear();
  bytes_ = 0;
  for (const Process* process : processes) {
    const auto memory = recall_suspended(*process);
    const auto uses = memory ? memory->uses : std::vector<GpuUse>();
    for (const GpuUse& use : uses)
      add_gpu(target_of(use.gpu, pairs));
    bytes_ = uses.empty() || bytes_ == direct::kAnyAmount ? direct::kAnyAmount
                                                          : bytes_ + total_bytes(uses);
  }
}

void MoverLease::add_gpu(const GpuUuid& gpu) {
  if (std::find(gpus_.begin(), gpus_.end(), gpu) == gpus_.end()) gpus_.push_back(gpu);
}

void MoverLease::begin(const Environment& env) {
  MoverRequest request{gpus_};
  request.contexts = !contexts_when_quiesced_;
  request.bytes = expected(env);
  begin([make = env.mover, request] { return make(request); }, nullptr);
}

void MoverLease::begin(std::function<Made()> work, std::shared_ptr<Interrupt> stop) {
  stop_ = std::move(stop);
  coming_ = in_background(std::move(work));
}

void MoverLease::settle() {
  if (!coming_.valid()) return;
  if (stop_) stop_->request(SIGTERM);
  coming_.wait();
}

Result<void> MoverLease::join() {
  if (!coming_.valid()) return {};
  auto begun = coming_.get();
  if (!begun) return fail(of_mover(std::move(begun.error())));
  return {};
}

MoverLease::Made MoverLease::take_begun(const Environment& env, const MoverRequest& request) {
  if (!coming_.valid()) return env.mover(request);
  if (stop_) stop_->request(SIGTERM);
  return coming_.get();
}

Result<void> MoverLease::take(const Environment& env, const MoverRequest& request) {
  MoverRequest ours = request;
  ours.gpus = gpus_;
  ours.timeout = kBesideHeld;
  ours.bytes = expected(env);
  STASIS_TRY_ASSIGN(auto mover, take_begun(env, ours));
  mover_ = std::move(mover);
  has_digests_ = false;
  return {};
}

Result<void> MoverLease::take_to_bring_back(const Environment& env,
                                            const std::vector<const Process*>& of,
                                            std::uint64_t bytes, std::uint64_t in_images) {
  if (mover_ || !env.mover) return {};
  if (gpus_.empty()) use_gpus_of(of, {});
  bytes_ = bytes;
  // Without a mover the processes would take what is in images into their own memory.
  if (!coming_.valid() && in_images <= mover_memory(env, {}, expected(env))) {
    STASIS_TRY(check_mover_memory(env, {}, expected(env), nullptr));
  }
  MoverRequest request;
  request.brings_back = true;
  return take(env, request);
}

void MoverLease::collect() {
  if (!coming_.valid()) return;
  auto mover = coming_.get();
  if (!mover) return;
  mover_ = std::move(*mover);
  has_digests_ = false;
}

Result<void> MoverLease::prepare_digests(const Environment& env) {
  auto ready = mover_->prepare_digests(env.interrupt, Clock::now() + kAtOnce);
  has_digests_ = ready.has_value();
  if (ready) return {};
  STASIS_TRY(env.interrupt.check());
  env.tell("digests are computed by the processors: " + ready.error().to_string());
  const ErrorCode code = ready.error().code;
  if (code == ErrorCode::kNotSupported || code == ErrorCode::kOutOfGpuMemory) return {};
  // The mover may be gone, or its context good for nothing.
  return replace(env);
}

Result<void> MoverLease::replace(const Environment& env) {
  end(env);
  MoverRequest request{gpus_};
  request.bytes = expected(env);
  if (contexts_when_quiesced_) request.timeout = kBesideHeld;
  auto another = env.mover(request);
  if (!another) return fail(of_mover(std::move(another.error())));
  mover_ = std::move(*another);
  return {};
}

void MoverLease::end(const Environment& env) {
  mover_.reset();
  has_digests_ = false;
  if (env.end_mover) env.end_mover();
}

void MoverLease::copy_beside(const Environment& env, std::vector<direct::Segment> segments,
                             std::shared_ptr<direct::Content> content, milliseconds time,
                             bool digests) {
  auto given = std::make_shared<std::vector<direct::Segment>>(std::move(segments));
  copying_ = in_background([mover = mover_, make = env.mover, gpus = gpus_, bytes = expected(env),
                            given, content = std::move(content), &stop = env.interrupt, time,
                            digests, has_digests = has_digests_]() mutable -> Copied {
    if (!mover) {
      auto made = make({.gpus = gpus, .timeout = kBesideHeld, .bytes = bytes});
      if (!made) return {nullptr, fail(std::move(made.error()))};
      mover = std::move(*made);
      // Without them all is copied. One that breaks down over it copies nothing, and is told so.
      has_digests = digests && mover->prepare_digests(stop, Clock::now() + kAtOnce).has_value();
    }
    auto copied = mover->copy_out(std::move(*given), *content, stop, Clock::now() + time);
    return {std::move(mover), std::move(copied), has_digests};
  });
}

void MoverLease::wait_for_copy() {
  if (!copying_.valid()) return;
  Copied copied = copying_.get();
  if (copied.mover) mover_ = std::move(copied.mover);
  has_digests_ = copied.digests;
  few_zeros_ = copied.done && copied.digests && copied.done->left_out < copied.done->bytes / 2;
  if (copied.done) {
    copied_ = Result<void>();
    return;
  }
  Error error = of_mover(std::move(copied.done.error()));
  // A mover that was silent has used up its deadline, and another would take as long once more.
  const bool was_silent = mover_ != nullptr && mover_->was_silent();
  error.retry = was_silent ? Retry::kByDriver : Retry::kCopyFirst;
  copied_ = fail(std::move(error));
}

}  // namespace stasis
