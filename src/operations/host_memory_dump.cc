#include "operations/host_memory_dump.h"

#include <chrono>
#include <csignal>
#include <thread>
#include <utility>

#include "base/background.h"
#include "base/call_within.h"
#include "base/fault_point.h"
#include "operations/dump_checks.h"

namespace stasis {

namespace {

std::string no_library(const Criu& criu) { return criu.path() + " loads no library of ours"; }

}  // namespace

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

// CRIU stops the tree and reads its tables while the memory is looked for: either takes the kernel
// some 11 ms for each GiB of small pages, in which the job stands still.
Result<void> HostMemoryDump::begin(ProcessTree& tree, const UniqueFd& image_dir, const Criu& criu) {
  if (!may_hide()) return {};
  if (auto still = tree.park_agents(); !still)
    return leave_to_criu(image_dir, still.error().message);
  memory_.choose(tree);
  if (!inside_criu_->is_heard()) {
    if (!find()) return memory_.leave_to_criu(image_dir);
    return leave_to_criu(image_dir, no_library(criu));
  }
  inside_criu_->await();
  hiding_ = in_background([this] { return hide(); }).share();
  // There was no thread for it.
  if (hiding_.wait_for(std::chrono::seconds(0)) == std::future_status::deferred) hiding_.wait();
  saving_ = in_background([this, &image_dir]() -> Result<void> {
    const auto& hidden = hiding_.get();
    if (!hidden || !*hidden) return memory_.leave_to_criu(image_dir);
    wait_until_stopped();
    if (!inside_criu_->is_asked()) return memory_.leave_to_criu(image_dir);
    NoProgress quiet;
    const Environment here{env_.driver, stop_, quiet, {}};
    return memory_.save(here, image_dir, into_);
  });
  return {};
}

Result<void> HostMemoryDump::leave_to_criu(const UniqueFd& image_dir, const std::string& why) {
  env_.tell("CRIU saves all host memory: " + why);
  return memory_.leave_to_criu(image_dir);
}

// False if there is not enough of it.
Result<bool> HostMemoryDump::hide() {
  // It waits, whatever becomes of this.
  const ScopeGuard go_on([this] { inside_criu_->hide_none(); });
  const KeptCallThread calls;
  if (!find() || stop_.requested()) return false;
  return memory_.hide(*inside_criu_);
}

// Until CRIU has stopped the whole tree, processes without CUDA may write into the memory of those
// that stand still (process_vm_writev(2), as MPI does), and go on as if it had arrived.
void HostMemoryDump::wait_until_stopped() const {
  while (!all_stand_still_ && !stop_.requested() && !inside_criu_->is_asked())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

Result<std::optional<ContentRecord>> HostMemoryDump::finish(const Criu& criu, Phases& phases) {
  if (!saving_.valid()) return std::nullopt;
  all_stand_still_ = true;
  const auto& hidden = hiding_.get();
  // What has read the table may have been a script that has started this criu: then CRIU has seen,
  // and saved, all there is.
  if (!hidden || !*hidden || !inside_criu_->is_asked()) {
    STASIS_TRY(saving_.get());
    if (hidden && !*hidden) return std::nullopt;
    if (!hidden && hidden.error().code != ErrorCode::kNotSupported) return fail(hidden.error());
    env_.tell("CRIU saves all host memory: " +
              (hidden ? no_library(criu) : hidden.error().message));
    return std::nullopt;
  }
  constexpr std::chrono::milliseconds kLook{50};
  phases.begin("host memory");
  while (saving_.wait_for(kLook) == std::future_status::timeout)
    if (!env_.interrupt.check()) request_stop();
  STASIS_TRY(env_.interrupt.check());
  STASIS_TRY(saving_.get());
  phases.end();
  return memory_.record();
}

void HostMemoryDump::request_stop() {
  stop_.request(SIGTERM);
  if (hiding_.valid()) hiding_.wait();
}

void HostMemoryDump::stop() {
  if (!saving_.valid()) return;
  request_stop();
  (void)saving_.get();
}

}  // namespace stasis
