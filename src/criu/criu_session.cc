#include "criu/criu_session.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/fd.h"
#include "base/trace.h"
#include "criu/criu.h"
#include "criu/criu_log.h"
#include "proc/capabilities.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

// How often the deadline is looked at while criu says nothing.
constexpr std::chrono::milliseconds kPoll{100};
// criu ends within milliseconds of its last answer; a large process takes longer to let go.
constexpr std::chrono::seconds kEndTimeout{30};
// For criu's way back when it is to give up: letting every task go. A criu that is stuck, in state
// S or T and without any processor time for this long, is not waited for.
constexpr std::chrono::seconds kGiveUpTimeout{30};
constexpr std::chrono::seconds kIdleTimeout{2};

// Until something has to be looked at: the poll's time, or what is left of the deadline.
std::chrono::milliseconds timeout(Clock::time_point start, std::chrono::milliseconds deadline) {
  if (deadline.count() == 0) return kPoll;
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(start + deadline - Clock::now());
  return std::clamp(left + std::chrono::milliseconds(1), std::chrono::milliseconds(1), kPoll);
}

// One that works, and waits so long in state D, waits for what does not come; a disk that is at
// work lets it go on in between.
constexpr std::chrono::minutes kHeldTimeout{5};

// Whether a criu that works waits in the kernel for ever.
class HeldUp {
 public:
  bool too_long(const CriuProcess& process) {
    const auto activity = process.activity();
    const auto now = Clock::now();
    // Not looked at for a while: our own work was asked for, or we stood still.
    const bool is_first = now - last_look_ > std::chrono::seconds(1);
    if (is_first || !activity.blocked || activity.processor_ticks != last_ticks_) since_ = now;
    last_ticks_ = activity.processor_ticks;
    last_look_ = now;
    return now - since_ > kHeldTimeout;
  }

 private:
  Clock::time_point since_ = Clock::now();
  Clock::time_point last_look_;
  std::uint64_t last_ticks_ = 0;
};

// Whether a criu that is to give up still may.
class LastHope {
 public:
  bool lost(const CriuProcess& process) {
    const auto now = Clock::now();
    const auto activity = process.activity();
    if (activity.blocked || activity.processor_ticks != last_ticks_) active_ = now;
    last_ticks_ = activity.processor_ticks;
    return now - begun_ > kGiveUpTimeout || now - active_ > kIdleTimeout;
  }

 private:
  Clock::time_point begun_ = Clock::now();
  Clock::time_point active_ = begun_;
  std::uint64_t last_ticks_ = 0;
};

// CRIU's own names of the moments at which it asks.
Result<void> fault_at(const std::string& script) {
  constexpr std::pair<std::string_view, FaultPoint> kScripts[] = {
      {"pre-dump", FaultPoint::kCriuPreDump},       {"post-dump", FaultPoint::kCriuPostDump},
      {"pre-restore", FaultPoint::kCriuPreRestore}, {"post-restore", FaultPoint::kCriuPostRestore},
      {"pre-resume", FaultPoint::kCriuPreResume},   {"post-resume", FaultPoint::kCriuPostResume}};
  for (const auto& [name, point] : kScripts) {
    if (script == name) return fault(point);
  }
  return {};
}

class Conversation {
 public:
  Conversation(CriuProcess& process, const OnNotification& on_notification,
               const CriuLimits& limits)
      : process_(process), on_notification_(on_notification), limits_(limits) {}

  CriuAnswer run(const criu_rpc::Request& request) {
    if (auto sent = process_.send(request); !sent) answer_.trouble = sent.error().message;
    if (auto allowed = fault(FaultPoint::kCriuRequested); !allowed)
      answer_.refusal = std::move(allowed.error());
    while (answer_.trouble.empty() && !answer_.response) {
      auto message = process_.receive(timeout(start_, limits_.deadline));
      if (!message) {
        answer_.trouble = message.error().message;
      } else if (!*message) {
        if (!waits_on()) break;
      } else {
        hear(std::move(**message));
      }
    }
    answer_.end = process_.finish(answer_.response ? kEndTimeout : end_timeout_);
    fault_only(FaultPoint::kCriuEnded);
    return std::move(answer_);
  }

 private:
  bool is_given_up() const { return answer_.refusal || answer_.timed_out; }

  // While criu says nothing. False: it was to give up, and does not.
  bool waits_on() {
    const bool late = limits_.deadline.count() != 0 && Clock::now() - start_ > limits_.deadline;
    Result<void> allowed = limits_.stop ? limits_.stop() : Result<void>();
    if (!allowed && !answer_.refusal) answer_.refusal = std::move(allowed).error();
    if (late && !answer_.refusal) answer_.timed_out = true;
    if (held_up_.too_long(process_) && !answer_.refusal)
      answer_.refusal =
          Error{ErrorCode::kCriuFailed,
                fmt::format("criu has waited in the kernel for {} minutes", kHeldTimeout.count()),
                "see what its disk, or the network of its files, does (`dmesg`)"};
    if (!is_given_up()) {
      if (limits_.on_wait) limits_.on_wait();
      return true;
    }
    if (limits_.give_up) limits_.give_up();
    if (!hope_) hope_.emplace();
    if (!hope_->lost(process_)) return true;
    end_timeout_ = std::chrono::seconds(0);
    return false;
  }

  void hear(criu_rpc::Response message) {
    const bool asks = message.type == criu_rpc::Type::kNotify;
    trace_record({TraceKind::kCriu,
                  asks ? "criu until " + message.notify.script : "criu until its end",
                  mark_,
                  Clock::now(),
                  0,
                  {},
                  0});
    if (asks)
      reply_to(message.notify);
    else
      answer_.response = std::move(message);
  }

  void reply_to(const criu_rpc::Notification& notification) {
    const auto asked = Clock::now();
    Span span(TraceKind::kCriu, "our answer to " + notification.script);
    if (!is_given_up()) {
      auto allowed = fault_at(notification.script);
      if (allowed) allowed = on_notification_(notification);
      if (!allowed) answer_.refusal = std::move(allowed).error();
    }
    span.end();
    mark_ = Clock::now();
    // The deadline is criu's: the caller may wait for others meanwhile.
    start_ += mark_ - asked;
    criu_rpc::Request reply;
    reply.type = criu_rpc::Type::kNotify;
    reply.notify_success = !is_given_up();
    if (auto sent = process_.send(reply); !sent) answer_.trouble = sent.error().message;
  }

  CriuProcess& process_;
  const OnNotification& on_notification_;
  const CriuLimits& limits_;
  CriuAnswer answer_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point mark_ = start_;
  std::optional<LastHope> hope_;
  HeldUp held_up_;
  std::chrono::seconds end_timeout_{5};
};

}  // namespace

Result<CriuProcess> start_told(const std::string& path, const CriuProcess::StartOptions& options,
                               const std::function<Result<void>(Pid)>& on_started) {
  STASIS_TRY(fault(FaultPoint::kCriuStart));
  STASIS_TRY_ASSIGN(auto process, CriuProcess::start(path, options));
  Result<void> told = on_started ? on_started(process.pid()) : Result<void>();
  if (told) told = fault(FaultPoint::kCriuStarted);
  STASIS_TRY(std::move(told));
  return process;
}

CriuAnswer converse(CriuProcess& process, const criu_rpc::Request& request,
                    const OnNotification& on_notification, const CriuLimits& limits) {
  return Conversation(process, on_notification, limits).run(request);
}

void set_options(criu_rpc::Options& rpc, const CriuOptions& options) {
  CriuOptions& sent = rpc.criu.emplace(options);
  // CRIU is not to try there what only the first namespace's root may (seen: a restore ends at
  // SO_SNDBUFFORCE).
  if (proc::ProcFs().in_own_user_namespace()) sent.unprivileged = true;
  // Without TCP connections in the image there is nothing to lock, and CRIU would still make a
  // table: 10 ms, and an error on a kernel without nf_tables.
  if (!options.tcp_established && !options.tcp_close) sent.network_lock = NetworkLock::kSkip;
}

// Seen, one after the other: each restore that lacks one fails, with one of these error lines
// "SO_SNDBUFFORCE/SO_RCVBUFFORCE", "Can't change root", "Unable to set a monotonic clock offset",
// or waits until its deadline ("Unable to drop capability").
std::uint64_t Criu::capabilities_to_restore() {
  const auto bit = [](unsigned which) { return std::uint64_t{1} << which; };
  if (proc::ProcFs().in_own_user_namespace()) return bit(CAP_SYS_ADMIN) | bit(CAP_SETPCAP);
  // Without time namespaces there are no clocks to be set.
  const bool clocks = ::access("/proc/self/ns/time", F_OK) == 0;
  return bit(CAP_SYS_ADMIN) | bit(CAP_SETPCAP) | bit(CAP_NET_ADMIN) | bit(CAP_SYS_CHROOT) |
         (clocks ? bit(CAP_SYS_TIME) : 0);
}

Result<void> Criu::may_dump() const {
  STASIS_TRY_ASSIGN(const auto ours, proc::ProcFs().effective_capabilities());
  constexpr std::uint64_t kEither =
      std::uint64_t{1} << CAP_SYS_ADMIN | std::uint64_t{1} << CAP_CHECKPOINT_RESTORE;
  struct stat info {};
  const bool is_set_id = ::stat(path_.c_str(), &info) == 0 && (info.st_mode & S_ISUID) != 0;
  if ((ours & kEither) != 0 || is_set_id ||
      ::getxattr(path_.c_str(), "security.capability", nullptr, 0) > 0)
    return {};
  return fail(refusal(
      {"permissions",
       Severity::kRed,
       {},
       fmt::format("user {} may not dump programs: neither CAP_SYS_ADMIN nor "
                   "CAP_CHECKPOINT_RESTORE",
                   ::geteuid()),
       "run stasis as root (sudo); in a container, start it with --privileged; without root, a job "
       "can be saved in a user namespace: `STASIS_STATE_DIR=/tmp/stasis-$(id -u) unshare "
       "--user --map-root-user stasis run --images-dir DIR -- COMMAND`"},
      ErrorCode::kNotPermitted));
}

Result<void> Criu::may_restore() {
  STASIS_TRY_ASSIGN(const auto ours, proc::ProcFs().effective_capabilities());
  const std::uint64_t missing = capabilities_to_restore() & ~ours;
  if (missing == 0) return {};
  return fail(refusal({"permissions",
                       Severity::kRed,
                       {},
                       fmt::format("this user may not restore programs here, without {}",
                                   proc::capability_names(missing)),
                       "run stasis as root, in a container with these capabilities (--cap-add)"},
                      ErrorCode::kNotPermitted));
}

void tell_of_left_behind(const CriuProcess& process, Error& error) {
  const Pid pid = process.left_behind();
  if (pid.value == 0) return;
  const auto call = read_file(AT_FDCWD, fmt::format("/proc/{}/wchan", pid.value), 64);
  error.message += fmt::format(
      "; criu (process {}) waits in the kernel{} for what another process holds, where "
      "no signal ends it, and keeps the job's processes stopped until it has that",
      pid.value, call && *call != "0" ? " (" + *call + ")" : "");
  error.remedy =
      "end the program that shares a pipe, a socket or a file with the job and writes there from "
      "memory that does not come, as of a FUSE file system that does not answer" +
      (error.remedy.empty() ? "" : "; " + error.remedy);
}

Error criu_error(const std::string& what, const CriuAnswer& answer, const CriuProcess& process,
                 const LogPlace& log) {
  CriuLog found = CriuLog::read(log.directory, log.name);
  // Before it has a log, criu tells its standard error.
  if (!found.diagnosis && found.errors.empty()) {
    found.diagnosis = CriuLog::parse(process.early_errors()).diagnosis;
  }
  Error error;
  error.code = answer.timed_out ? ErrorCode::kTimeout : ErrorCode::kCriuFailed;
  if (found.diagnosis && !answer.timed_out) {
    error.code = found.diagnosis->code;
    error.message = fmt::format("CRIU could not {}: {} (criu: {})", what, found.diagnosis->meaning,
                                found.diagnosis->line);
    error.remedy = found.diagnosis->remedy;
    if (found.diagnosis->obstacle) {
      error.obstacles = {{.id = *found.diagnosis->obstacle,
                          .what = found.diagnosis->meaning,
                          .remedy = found.diagnosis->remedy}};
    }
  } else {
    std::string said;
    // The first errors are the cause, the rest its consequences.
    for (std::size_t i = 0; i < found.errors.size() && i < 3; ++i) {
      said += (said.empty() ? "" : "; ") + found.errors[i];
    }
    if (said.empty() && answer.response) said = answer.response->cr_errmsg.substr(0, 400);
    if (said.empty()) said = process.early_errors().substr(0, 400);
    while (!said.empty() && said.back() == '\n')
      said.pop_back();
    if (answer.timed_out) {
      said = "the deadline passed" + (said.empty() ? "" : "; criu: " + said);
    } else if (!answer.response) {
      said =
          fmt::format("{}; criu {}{}", answer.trouble, answer.end, said.empty() ? "" : ": " + said);
    }
    error.message =
        fmt::format("CRIU could not {}: {}", what, said.empty() ? "it gave no reason" : said);
  }
  if (const std::string path = log.path ? log.path() : std::string(); !path.empty()) {
    error.remedy += fmt::format("{}the whole log is {}", error.remedy.empty() ? "" : "; ", path);
  }
  if (error.remedy.empty()) error.remedy = "`criu check` tells whether CRIU works on this machine";
  return error;
}

}  // namespace stasis
