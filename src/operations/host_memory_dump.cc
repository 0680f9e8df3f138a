#include "operations/host_memory_dump.h"

#include <chrono>
#include <csignal>
#include <thread>
#include <utility>

#include "base/background.h"
#include "base/fault_point.h"
#include "operations/dump_checks.h"

namespace stasis {

Result<void> HostMemoryDump::open_base() {
  STASIS_TRY_ASSIGN(base_, open_host_base(env_, options_));
  return {};
}

Result<void> HostMemoryDump::precopy(const ProcessTree& tree, const UniqueFd& image_dir,
                                     ContentOptions options, std::uint64_t bytes, Phases& phases) {
  // Less is copied in the time that CRIU takes anyhow.
  constexpr std::uint64_t kWorthPrecopy = 256U << 20;
  into_ = std::move(options);
  into_.base = base_;
  if (auto made = InsideCriu::create(); made)
    inside_criu_.emplace(std::move(*made));
  else if (options_.host_memory != HostMemoryWay::kCriu)
    env_.tell("CRIU saves all host memory: " + made.error().message);
  const bool goes_on = options_.after == AfterDump::kRunning;
  if (!goes_on || !may_hide() || options_.precopy == Precopy::kNever) return {};
  phases.begin("pre-copy");
  auto done = memory_.precopy(env_, tree, image_dir, into_,
                              {options_.precopy == Precopy::kAlways ? 0 : kWorthPrecopy, bytes});
  phases.end();
  return done ? fault(FaultPoint::kHostPrecopied) : done;
}

Result<void> HostMemoryDump::begin(ProcessTree& tree, const UniqueFd& image_dir, const Criu& criu) {
  if (!may_hide()) return {};
  auto hidden = hide(tree, criu);
  if (!hidden && hidden.error().code == ErrorCode::kNotSupported) {
    env_.tell("CRIU saves all host memory: " + hidden.error().message);
    hidden = false;
  }
  STASIS_TRY(hidden);
  if (!*hidden) return memory_.leave_to_criu(image_dir);
  // While CRIU works: it does not see that memory.
  saving_ = in_background([this, &image_dir]() -> Result<void> {
    wait_until_stopped();
    NoProgress quiet;
    const Environment here{env_.driver, stop_, quiet, {}};
    return memory_.save(here, image_dir, into_);
  });
  return {};
}

// False if there is not enough of it. kNotSupported: CRIU has to save it.
Result<bool> HostMemoryDump::hide(ProcessTree& tree, const Criu& criu) {
  if (auto still = tree.park_agents(); !still)
    return fail(ErrorCode::kNotSupported, still.error().message);
  if (!memory_.find(tree, options_.host_memory == HostMemoryWay::kParallel)) return false;
  if (!inside_criu_->is_heard())
    return fail(ErrorCode::kNotSupported, criu.path() + " loads no library of ours");
  return memory_.hide(*inside_criu_);
}

// Until CRIU has stopped the whole tree, processes without CUDA may write into the memory of those
// that stand still (process_vm_writev(2), as MPI does), and go on as if it had arrived.
void HostMemoryDump::wait_until_stopped() const {
  while (!all_stand_still_ && !stop_.requested() && !inside_criu_->is_asked())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

Result<std::optional<ContentRecord>> HostMemoryDump::finish(Phases& phases) {
  if (!saving_.valid()) return std::nullopt;
  all_stand_still_ = true;
  constexpr std::chrono::milliseconds kLook{50};
  phases.begin("host memory");
  while (saving_.wait_for(kLook) == std::future_status::timeout)
    if (!env_.interrupt.check()) request_stop();
  STASIS_TRY(env_.interrupt.check());
  STASIS_TRY(saving_.get());
  phases.end();
  return memory_.record();
}

void HostMemoryDump::stop() {
  if (!saving_.valid()) return;
  request_stop();
  (void)saving_.get();
}

}  // namespace stasis
