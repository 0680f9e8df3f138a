#include "driver/bounded_driver.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include <fmt/format.h>

#include "base/units.h"
#include "driver/driver_worker.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

using std::chrono::milliseconds;

// How long a lock may take beyond its own time-out: the answer is due then.
constexpr milliseconds kLockGrace{5000};
// The deadline for a process that has not answered once: a roll-back asks several times.
constexpr milliseconds kLittleTimeout{1000};
constexpr milliseconds kPoll{50};
constexpr milliseconds kForEver{1000};  // the poll interval

// Signs of work: the driver works in a thread of the target, whose others are kept still. A thread
// that waits in a loop for something that does not come takes a little processor time too, so the
// threshold is not zero.
class Signs {
 public:
  explicit Signs(Pid pid) : pid_(pid) { last_ = probe(); }

  bool any() {
    constexpr std::uint64_t kMoved = 1 << 20;
    constexpr std::uint64_t kTicksPerSecond = 5;  // of 100
    const Seen now = probe();
    const auto seconds = static_cast<std::uint64_t>(since(since_).count());
    const bool computes = now.ticks - last_.ticks >= 2 + kTicksPerSecond * seconds;
    const bool moves = distance(now.resident, last_.resident) >= kMoved ||
                       distance(now.anonymous, last_.anonymous) >= kMoved;
    if (!computes && !moves) return false;
    last_ = now;
    since_ = Clock::now();
    return true;
  }

 private:
  struct Seen {
    std::uint64_t ticks = 0;
    std::uint64_t resident = 0;
    std::uint64_t anonymous = 0;
  };
  static std::uint64_t distance(std::uint64_t a, std::uint64_t b) {
    return std::max(a, b) - std::min(a, b);
  }
  Seen probe() const {
    Seen now = last_;  // what cannot be read counts as unchanged
    if (auto info = procfs_.process(pid_)) now.ticks = std::max(now.ticks, info->cpu_ticks);
    if (auto bytes = procfs_.resident_bytes(pid_)) now.resident = *bytes;
    if (auto bytes = procfs_.anonymous_bytes(pid_)) now.anonymous = *bytes;
    return now;
  }

  Pid pid_;
  proc::ProcFs procfs_;
  Clock::time_point since_ = Clock::now();
  Seen last_;
};

class BoundedDriver final : public Driver {
 public:
  // `lasting`: it lives as long as a program that is not ours. A caller that has restored has the
  // driver initialised, and would be a CUDA process below that program for all the time.
  BoundedDriver(std::unique_ptr<Driver> inner, CallerSource source, const DriverTimeouts& timeouts,
                bool lasting)
      : inner_(std::move(inner)),
        source_(std::move(source)),
        timeouts_(timeouts),
        lasting_(lasting) {}

  const DriverInfo& info() const override { return inner_->info(); }

  DriverResult<CudaState> state(Pid pid) override {
    auto value = call(request(Action::kGetState, pid));
    if (!value) return tl::unexpected<DriverFailure>(value.error());
    return static_cast<CudaState>(*value);
  }
  DriverResult<Tid> restore_thread_id(Pid pid) override {
    auto value = call(request(Action::kGetRestoreThreadId, pid));
    if (!value) return tl::unexpected<DriverFailure>(value.error());
    return Tid{*value};
  }
  DriverResult<void> lock(Pid pid, milliseconds timeout) override {
    CallRequest lock = request(Action::kLock, pid);
    lock.timeout_ms = timeout.count();
    return done(call(lock));
  }
  DriverResult<void> lock_unless(Pid pid, milliseconds timeout,
                                 const Interrupt& interrupt) override {
    CallRequest lock = request(Action::kLock, pid);
    lock.timeout_ms = timeout.count();
    return done(call(lock, &interrupt));
  }
  DriverResult<void> checkpoint(Pid pid) override {
    return done(call(request(Action::kCheckpoint, pid)));
  }
  void prepare_restore() override {
    CallRequest prepare = request(Action::kRestore, Pid{});
    prepare.kind = CallRequest::Kind::kPrepareRestore;
    (void)call(prepare);
  }
  DriverResult<void> restore(Pid pid, std::span<const GpuPair> pairs) override {
    CallRequest restore = request(Action::kRestore, pid);
    if (pairs.size() > restore.pairs.size()) return inner_->restore(pid, pairs);
    restore.pair_count = static_cast<std::uint32_t>(pairs.size());
    std::copy(pairs.begin(), pairs.end(), restore.pairs.begin());
    return done(call(restore));
  }
  DriverResult<void> unlock(Pid pid) override { return done(call(request(Action::kUnlock, pid))); }

  DriverFailure describe(int cu_result) const override { return inner_->describe(cu_result); }
  Result<std::vector<Gpu>> gpus() override { return inner_->gpus(); }
  Result<std::map<Pid, std::vector<GpuUse>>> memory_by_process() override {
    return inner_->memory_by_process();
  }

 private:
  static CallRequest request(Action action, Pid pid) {
    CallRequest request;
    request.action = action;
    request.pid = pid.value;
    return request;
  }
  static DriverResult<void> done(const DriverResult<int>& value) {
    if (!value) return tl::unexpected<DriverFailure>(value.error());
    return {};
  }

  // An idle caller, or a new one. The choice among the idle ones matters for a restore only.
  std::optional<Caller> take(bool initialised) {
    const std::scoped_lock lock(mutex_);
    auto found = std::find_if(idle_.begin(), idle_.end(), [&](const Caller& caller) {
      return caller.initialised == initialised;
    });
    // The caller was made ready for a restore that never came.
    if (found == idle_.end() && lasting_ && !initialised) {
      for (Caller& caller : idle_)
        caller.let_go();
      idle_.clear();
      found = idle_.end();
    }
    if (found == idle_.end() && !idle_.empty()) found = idle_.begin();
    if (found != idle_.end()) {
      Caller caller = std::move(*found);
      idle_.erase(found);
      return caller;
    }
    auto made = source_.make();
    if (!made) return std::nullopt;
    return std::move(*made);
  }
  void put_back(Caller caller, const CallRequest& request) {
    if (lasting_ && request.action == Action::kRestore &&
        request.kind == CallRequest::Kind::kAction) {
      return caller.let_go();
    }
    const std::scoped_lock lock(mutex_);
    idle_.push_back(std::move(caller));
  }

  // How long to wait for an answer without a sign of work; zero: for ever.
  milliseconds timeout_for(const CallRequest& request) {
    const bool works = request.action == Action::kCheckpoint || request.action == Action::kRestore;
    if (works) return timeouts_.work;
    if (timeouts_.answer.count() == 0) return milliseconds(0);
    if (request.action == Action::kLock) {
      if (request.timeout_ms == 0) return milliseconds(0);  // as it was asked for
      return milliseconds(request.timeout_ms) + std::min(kLockGrace, timeouts_.answer);
    }
    const std::scoped_lock lock(mutex_);
    const bool silent = silent_.contains(Pid{request.pid});
    return silent ? std::min(kLittleTimeout, timeouts_.answer) : timeouts_.answer;
  }

  void note(Pid pid, bool answered) {
    const std::scoped_lock lock(mutex_);
    if (answered) {
      silent_.erase(pid);
    } else {
      silent_.insert(pid);
    }
  }

  // A question that was lost with its caller is asked again.
  DriverResult<int> call(const CallRequest& request, const Interrupt* interrupt = nullptr) {
    auto answer = call_once(request, interrupt);
    const bool asks =
        request.action == Action::kGetState || request.action == Action::kGetRestoreThreadId;
    if (answer || answer.error().number != kDriverCallLost || !asks) return answer;
    return call_once(request, interrupt);
  }

  DriverResult<int> call_once(const CallRequest& request, const Interrupt* interrupt) {
    const bool restores = request.action == Action::kRestore;
    auto caller = take(restores);
    if (!caller || !caller->send(request)) return call_here(request, interrupt);
    const milliseconds timeouts = timeout_for(request);
    const bool works = restores || request.action == Action::kCheckpoint;
    std::optional<Signs> signs;
    if (works && request.pid != 0) signs.emplace(Pid{request.pid});
    auto last = Clock::now();
    for (;;) {
      bool gone = false;
      const auto left =
          timeouts.count() == 0
              ? kForEver
              : std::chrono::duration_cast<milliseconds>(last + timeouts - Clock::now());
      const bool looks = works || interrupt != nullptr;
      const auto turn = std::clamp(left, milliseconds(1), looks ? kPoll : kForEver);
      if (auto answer = caller->wait(turn, gone)) {
        caller->initialised = caller->initialised || restores;
        put_back(std::move(*caller), request);
        note(Pid{request.pid}, true);
        if (answer->cu_result == 0) return answer->value;
        return tl::unexpected<DriverFailure>(describe(answer->cu_result));
      }
      if (gone) return failure(kDriverCallLost, "the process that made the call has ended");
      if (interrupt != nullptr && interrupt->requested()) {
        caller->kill();
        return failure(kDriverInterrupted, "a stop was requested");
      }
      if (signs && signs->any()) last = Clock::now();
      if (timeouts.count() == 0 || Clock::now() - last < timeouts) continue;
      // Nothing of the call is left when this returns, so that it has no effect later.
      caller->kill();
      note(Pid{request.pid}, false);
      return failure(kDriverNoAnswer, fmt::format("no answer within {} ms", timeouts.count()));
    }
  }

  // Where the system gives no process.
  DriverResult<int> call_here(const CallRequest& request, const Interrupt* interrupt) {
    const Pid pid{request.pid};
    if (request.kind == CallRequest::Kind::kPrepareRestore) return 0;
    DriverResult<void> result;
    switch (request.action) {
      case Action::kGetState: {
        auto state = inner_->state(pid);
        if (!state) return tl::unexpected<DriverFailure>(state.error());
        return static_cast<int>(*state);
      }
      case Action::kGetRestoreThreadId: {
        auto thread = inner_->restore_thread_id(pid);
        if (!thread) return tl::unexpected<DriverFailure>(thread.error());
        return thread->value;
      }
      case Action::kLock:
        result = interrupt == nullptr
                     ? inner_->lock(pid, milliseconds(request.timeout_ms))
                     : inner_->lock_unless(pid, milliseconds(request.timeout_ms), *interrupt);
        break;
      case Action::kCheckpoint:
        result = inner_->checkpoint(pid);
        break;
      case Action::kRestore:
        result = inner_->restore(pid, std::span(request.pairs).first(request.pair_count));
        break;
      case Action::kUnlock:
        result = inner_->unlock(pid);
        break;
    }
    if (!result) return tl::unexpected<DriverFailure>(result.error());
    return 0;
  }

  static tl::unexpected<DriverFailure> failure(int number, std::string text) {
    const char* name = number == kDriverNoAnswer      ? "no answer"
                       : number == kDriverInterrupted ? "interrupted"
                                                      : "call lost";
    return tl::unexpected<DriverFailure>(DriverFailure{number, name, std::move(text)});
  }

  std::unique_ptr<Driver> inner_;
  CallerSource source_;
  DriverTimeouts timeouts_;
  bool lasting_;
  std::mutex mutex_;
  std::vector<Caller> idle_;
  std::set<Pid> silent_;
};

}  // namespace

Result<std::unique_ptr<Driver>> bound_driver(std::unique_ptr<Driver>& driver,
                                             const DriverTimeouts& timeouts) {
  STASIS_TRY_ASSIGN(auto source, CallerSource::start(*driver));
  return std::unique_ptr<Driver>(
      new BoundedDriver(std::move(driver), std::move(source), timeouts, false));
}

Result<std::unique_ptr<Driver>> bound_driver_by(const std::string& program,
                                                const std::string& library,
                                                std::unique_ptr<Driver>& driver,
                                                const DriverTimeouts& timeouts) {
  STASIS_TRY_ASSIGN(auto source, CallerSource::start_program(program, library));
  return std::unique_ptr<Driver>(
      new BoundedDriver(std::move(driver), std::move(source), timeouts, true));
}

}  // namespace stasis
