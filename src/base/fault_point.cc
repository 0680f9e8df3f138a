#include "base/fault_point.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis {
namespace {

using enum FaultPoint;

constexpr std::array kPoints = {
#define STASIS_FAULT_POINT(point, name, fails, when) FaultPointInfo{point, name, fails, when},
#include "base/fault_points.inc"
#undef STASIS_FAULT_POINT
};

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

}  // namespace

std::span<const FaultPointInfo> fault_points() { return kPoints; }

#ifndef STASIS_FAULT_POINTS

Result<void> check_fault_setting() {
  for (const char* name : {"STASIS_FAULT", "STASIS_FAULT_LOG", "STASIS_FAULT_FILL"}) {
    if (setting(name) == nullptr) continue;
    return fail(ErrorCode::kUsage,
                fmt::format("{} is set, and this build has no fault points", name),
                "unset it, or build with -DSTASIS_FAULT_POINTS=ON");
  }
  return {};
}

#else

namespace {

enum class FaultAction {
  kKill,
  kError,
  kTargetDies,
  kCriuDies,
  kMoverDies,
  kDiskFull,
  kNoMemory,
  kTargetNoMemory,
  kStop
};

struct Fault {
  const FaultPointInfo* point = nullptr;
  FaultAction action = FaultAction::kKill;
  std::string_view action_name;
  int nth = 1;
};

std::optional<FaultAction> action_from_name(std::string_view name) {
  if (name == "kill") return FaultAction::kKill;
  if (name == "error") return FaultAction::kError;
  if (name == "target-dies") return FaultAction::kTargetDies;
  if (name == "criu-dies") return FaultAction::kCriuDies;
  if (name == "mover-dies") return FaultAction::kMoverDies;
  if (name == "disk-full") return FaultAction::kDiskFull;
  if (name == "no-memory") return FaultAction::kNoMemory;
  if (name == "stop") return FaultAction::kStop;
  if (name == "target-no-memory") return FaultAction::kTargetNoMemory;
  return std::nullopt;
}

tl::unexpected<Error> cannot_be(std::string message) {
  return fail(ErrorCode::kUsage, std::move(message),
              "STASIS_FAULT=POINT:ACTION[@N]; `stasis list-fault-points` lists the points; actions "
              "are kill, error, target-dies, criu-dies, mover-dies, disk-full, no-memory, "
              "target-no-memory and stop");
}

// Nothing if the environment asks for no fault.
Result<std::optional<Fault>> parse(const char* text) {
  if (text == nullptr) return std::optional<Fault>();
  std::string_view rest = text;
  const std::size_t colon = rest.find(':');
  if (colon == std::string_view::npos) return cannot_be(fmt::format("'{}' is no fault", text));
  Fault fault;
  for (const FaultPointInfo& info : kPoints) {
    if (info.name == rest.substr(0, colon)) fault.point = &info;
  }
  if (fault.point == nullptr) {
    return cannot_be(fmt::format("there is no fault point '{}'", rest.substr(0, colon)));
  }
  rest.remove_prefix(colon + 1);
  if (const std::size_t at = rest.find('@'); at != std::string_view::npos) {
    const std::string_view number = rest.substr(at + 1);
    const auto [end, error] =
        std::from_chars(number.data(), number.data() + number.size(), fault.nth);
    if (error != std::errc() || end != number.data() + number.size() || fault.nth < 1) {
      return cannot_be(fmt::format("'{}' does not say at which time", text));
    }
    rest = rest.substr(0, at);
  }
  const auto action = action_from_name(rest);
  if (!action) return cannot_be(fmt::format("there is no action '{}'", rest));
  fault.action = *action;
  fault.action_name = rest;
  if (*action == FaultAction::kError && !fault.point->can_fail) {
    return cannot_be(
        fmt::format("nothing can fail at {}: {}", fault.point->name, fault.point->what));
  }
  if (*action == FaultAction::kDiskFull && setting("STASIS_FAULT_FILL") == nullptr) {
    return cannot_be("disk-full needs STASIS_FAULT_FILL, a directory on the disk to be filled");
  }
  return std::optional<Fault>(fault);
}

struct State {
  std::optional<Fault> fault;
  const char* log = setting("STASIS_FAULT_LOG");
  std::array<std::atomic<int>, kPoints.size()> reached{};
  std::atomic<bool> done = false;
  std::atomic<int> target = 0;
  std::atomic<int> criu = 0;
  std::atomic<int> mover = 0;

  State() {
    if (auto parsed = parse(setting("STASIS_FAULT"))) fault = *parsed;
  }
};

State& state() {
  static State state;
  return state;
}

// A zombie does not count.
bool lives(int pid) {
  if (pid <= 0) return false;
  auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/stat", pid), 4096);
  const std::size_t end = text ? text->rfind(')') : std::string::npos;
  return end != std::string::npos && end + 2 < text->size() && (*text)[end + 2] != 'Z' &&
         (*text)[end + 2] != 'X';
}

void log_line(const std::string& text) {
  if (state().log == nullptr) return;
  if (auto file = open_file(AT_FDCWD, state().log, O_WRONLY | O_CREAT | O_APPEND, 0600)) {
    (void)write_all(file->get(), text.data(), text.size(), state().log);
  }
}

// Fills the disk to the last byte, in a file of its own, which the test removes.
Result<void> fill_disk() {
  constexpr std::size_t kMost = 256U << 20;
  const std::string path = std::string(setting("STASIS_FAULT_FILL")) + "/fault-fill";
  STASIS_TRY_ASSIGN(auto file, open_file(AT_FDCWD, path, O_WRONLY | O_CREAT, 0600));
  const std::string zeros(64U << 10, '\0');
  std::size_t written = 0;
  for (std::size_t step = zeros.size(); step >= 1;) {
    const ssize_t got = ::write(file.get(), zeros.data(), step);
    if (got > 0) {
      written += static_cast<std::size_t>(got);
      if (written <= kMost) continue;
      (void)::unlink(path.c_str());
      return cannot_be("disk-full needs a small disk: 256 MiB did not fill that of " + path);
    }
    if (errno != ENOSPC) return fail(errno_error("cannot fill " + path, errno));
    step /= 2;
  }
  return {};
}

// The process gets no more than it has: of address space, and of memory that it may write to, which
// keeps the C library from using what it has only reserved. Its hard limits stay, so that the test
// can lift it.
Result<void> take_no_more_memory(int pid) {
  STASIS_TRY_ASSIGN(auto text, read_file(AT_FDCWD, fmt::format("/proc/{}/status", pid), 65536));
  const auto limit = [&](auto resource, std::string_view field) -> Result<void> {
    const std::size_t at = text.find(field);
    rlimit limits{};
    if (at == std::string::npos || ::prlimit(pid, resource, nullptr, &limits) != 0)
      return fail(errno_error(fmt::format("cannot read {} of process {}", field, pid), errno));
    // In KiB.
    limits.rlim_cur = std::min<rlim_t>(
        limits.rlim_max, std::strtoull(text.c_str() + at + field.size(), nullptr, 10) << 10);
    if (::prlimit(pid, resource, &limits, nullptr) == 0) return {};
    return fail(errno_error(fmt::format("cannot limit the memory of process {}", pid), errno));
  };
  auto done = limit(RLIMIT_AS, "\nVmSize:");
  return done ? limit(RLIMIT_DATA, "\nVmData:") : done;
}

// A fault that cannot be made is an error in any case, so that no test passes because nothing
// happened.
Result<void> act(const Fault& fault) {
  const auto signal = [&](int pid, const char* whom) -> Result<void> {
    if (!lives(pid)) return cannot_be(fmt::format("at {} there is no {}", fault.point->name, whom));
    ::kill(pid, SIGKILL);
    return {};
  };
  switch (fault.action) {
    case FaultAction::kKill:
      ::kill(::getpid(), SIGKILL);
      return {};
    case FaultAction::kError:
      return fail(ErrorCode::kInternal, fmt::format("a test made {} fail", fault.point->name),
                  "unset STASIS_FAULT");
    case FaultAction::kTargetDies:
      return signal(state().target.load(), "target");
    case FaultAction::kCriuDies:
      return signal(state().criu.load(), "criu");
    case FaultAction::kMoverDies:
      return signal(state().mover.load(), "mover");
    case FaultAction::kDiskFull:
      return fill_disk();
    case FaultAction::kNoMemory: {
      auto done = take_no_more_memory(::getpid());
      for (const int helper : {state().criu.load(), state().mover.load()})
        if (done && lives(helper)) done = take_no_more_memory(helper);
      return done;
    }
    case FaultAction::kStop:
      ::raise(SIGSTOP);
      return {};
    case FaultAction::kTargetNoMemory:
      if (lives(state().target.load())) return take_no_more_memory(state().target.load());
      return cannot_be(fmt::format("at {} there is no target", fault.point->name));
  }
  return {};
}

}  // namespace

Result<void> check_fault_setting() {
  STASIS_TRY(parse(setting("STASIS_FAULT")));
  return {};
}

std::string_view fault_not_reached() {
  const State& now = state();
  return now.fault && !now.done.load() ? now.fault->point->name : std::string_view();
}

Result<void> fault(FaultPoint point) {
  State& now = state();
  if (!now.fault && now.log == nullptr) return {};
  const auto at = static_cast<std::size_t>(point);
  const int nth = ++now.reached.at(at);
  const bool hit = now.fault && now.fault->point->point == point && now.fault->nth == nth;
  log_line(fmt::format("{}{} {} target={} criu={} mover={}\n", hit ? "fault " : "",
                       kPoints.at(at).name, hit ? now.fault->action_name : "-",
                       lives(now.target.load()) ? 1 : 0, lives(now.criu.load()) ? 1 : 0,
                       lives(now.mover.load()) ? 1 : 0));
  if (!hit) return {};
  now.done = true;
  return act(*now.fault);
}

void fault_only(FaultPoint point) { (void)fault(point); }

void set_fault_target(Pid pid) { state().target = pid.value; }
void set_fault_criu(Pid pid) { state().criu = pid.value; }
void set_fault_mover(Pid pid) { state().mover = pid.value; }

#endif

}  // namespace stasis
