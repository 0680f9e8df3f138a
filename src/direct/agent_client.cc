// The commands of the agent and its answers. agent_find.cc finds its page, agent_transfer.cc takes
// descriptors from it and gives it some.
#include "direct/agent_client.h"

#include <sys/mman.h>

#include <algorithm>

#include <fmt/format.h>

#include "abi/cuda_abi.h"
#include "abi/futex.h"
#include "base/trace.h"
#include "base/units.h"
#include "direct/read_once.h"

namespace stasis::direct {
namespace {

constexpr std::chrono::milliseconds kAgentPoll{50};
constexpr int kPollsUntilExec = 10;
// How long an agent may take for the command under way when the user asks to stop.
constexpr std::chrono::milliseconds kLeaveAfter{3000};
// The same for an agent that brings its memory back when the user asks a second time.
constexpr std::chrono::seconds kLeaveBack{10};
// The same for all commands together: each may be answered just in time.
constexpr std::chrono::seconds kLeaveAll{30};
// The same for an agent that has not answered in time once: it may be about to answer, and it may
// hold up the tool for as long as it gets.
constexpr std::chrono::milliseconds kAfterSilence{15000};

// Whether the answer to a command is worth nothing to a tool that is asked to stop: the agent makes
// the program run again when its peer goes.
bool can_be_left(AgentCommand command) {
  return command == AgentCommand::kNone || command == AgentCommand::kPrepare ||
         command == AgentCommand::kClose || command == AgentCommand::kExport ||
         command == AgentCommand::kPin || command == AgentCommand::kShares ||
         command == AgentCommand::kAdopt;
}

}  // namespace

const char* agent_command_name(AgentCommand command) {
  switch (command) {
    case AgentCommand::kNone:
      return "do nothing";
    case AgentCommand::kPrepare:
      return "prepare a buffer";
    case AgentCommand::kClose:
      return "hold the program back";
    case AgentCommand::kExport:
      return "export its device memory";
    case AgentCommand::kEvict:
      return "give its device memory back";
    case AgentCommand::kHold:
      return "stay as it is";
    case AgentCommand::kRepopulate:
      return "take its device memory again";
    case AgentCommand::kCopyIn:
      return "copy its device memory in";
    case AgentCommand::kOpen:
      return "let the program go on";
    case AgentCommand::kBuffer:
      return "have a buffer";
    case AgentCommand::kPin:
      return "pin its device memory";
    case AgentCommand::kUnpin:
      return "unpin its device memory";
    case AgentCommand::kShares:
      return "say what it shares with other processes";
    case AgentCommand::kDetach:
      return "give up memory that the driver cannot restore";
    case AgentCommand::kInherit:
      return "save memory whose owner has ended or has freed it";
    case AgentCommand::kStay:
      return "wait for the tool";
    case AgentCommand::kRetake:
      return "take such memory again";
    case AgentCommand::kLend:
      return "lend its memory to another process";
    case AgentCommand::kAttach:
      return "take other processes' memory again";
    case AgentCommand::kAdopt:
      return "adopt its device memory";
  }
  return "do an unknown thing";
}

void AgentClient::Unmap::operator()(ControlPage* page) const {
  ::munmap(page, sizeof(ControlPage));
}

bool AgentClient::begin_precopy() {
  auto none = PrecopyState::kNo;
  return page_->precopy_state.compare_exchange_strong(none, PrecopyState::kCopies);
}

void AgentClient::end_precopy() {
  auto copies = PrecopyState::kCopies;
  if (page_->precopy_state.compare_exchange_strong(copies, PrecopyState::kNo)) return;
  auto ends = PrecopyState::kEnds;
  if (!page_->precopy_state.compare_exchange_strong(ends, PrecopyState::kNo)) return;
  futex::wake_all(page_->precopy_state, true);
}

bool AgentClient::wants_its_memory() const {
  return page_->precopy_state.load(std::memory_order_relaxed) == PrecopyState::kEnds;
}

bool AgentClient::has_few_zeros() const {
  return bytes() >> 20 < 2 * std::uint64_t{page_->few_zeros.load(std::memory_order_relaxed)};
}

void AgentClient::note_few_zeros(bool few) {
  const std::uint64_t mib = std::min<std::uint64_t>(bytes() >> 20, UINT32_MAX);
  page_->few_zeros.store(few ? static_cast<std::uint32_t>(mib) : 0, std::memory_order_relaxed);
}

void AgentClient::take_figures() {
  // Its size has been checked, and is not another one at each answer.
  const bool anew = asked_ == AgentCommand::kNone || asked_ == AgentCommand::kPrepare ||
                    asked_ == AgentCommand::kClose;
  if (anew) {
    figures_.bytes = once(page_->segment_bytes);
    figures_.segments = once(page_->segment_count);
    figures_.staying_bytes = once(page_->staying_bytes);
  }
  figures_.buffer_address = once(page_->buffer_address);
  figures_.buffer_bytes = once(page_->buffer_bytes);
  figures_.content_id = {once(page_->content_id[0]), once(page_->content_id[1])};
  figures_.driver_shares = once(page_->driver_share_count);
  figures_.multicasts = once(page_->multicast_count);
  figures_.shares = once(page_->share_count);
  figures_.detached = once(page_->detached_count);
  figures_.managed_areas = once(page_->managed_areas);
}

AgentState AgentClient::state() const { return page_->state.load(std::memory_order_acquire); }

void AgentClient::begin(AgentCommand command, std::uint64_t argument) {
  begin(command, ContentId{argument, 0});
}

void AgentClient::begin(AgentCommand command, const ContentId& arguments) {
  asked_ = command;
  asked_at_ = Clock::now();
  page_->command = command;
  page_->arguments[0] = arguments[0];
  page_->arguments[1] = arguments[1];
  page_->request.store(++number_, std::memory_order_release);
  futex::wake_all(page_->request, true);
}

Result<void> AgentClient::finish(std::chrono::milliseconds timeout) {
  const Interrupt never;
  return finish_unless(never, timeout);
}

Clock::time_point AgentClient::waiting_since() const {
  return silent_ ? silent_since_ : first_at_.value_or(asked_at_);
}

void AgentClient::note_silence() {
  silent_since_ = waiting_since();
  silent_ = true;
}

Result<void> AgentClient::wants_to_leave() const {
  if (interrupt_ == nullptr) return {};
  if (heeds_ == Heeds::kFirst && can_be_left(asked_)) return interrupt_->check();
  if (!interrupt_->insists()) return {};
  const bool long_enough =
      Clock::now() - waiting_since() >= kLeaveBack || interrupt_->insisted_for() >= kLeaveAll;
  if (!silent_ && !long_enough) return {};
  const auto waited = std::chrono::floor<std::chrono::seconds>(Clock::now() - waiting_since());
  return fail(ErrorCode::kInterrupted,
              fmt::format("interrupted twice while the agent in process {} was to {} ({} s)",
                          pid_.value, agent_command_name(asked_), waited.count()));
}

Result<void> AgentClient::check_size(const GpuMemory& of_all_gpus) const {
  constexpr std::uint64_t kEveryGpuHas = std::uint64_t{8} << 30;
  if (bytes() <= kEveryGpuHas) return {};
  const std::uint64_t most = of_all_gpus();
  if (bytes() <= most) return {};
  return fail(refusal({"agent-page", Severity::kRed, pid_,
                       fmt::format("the agent in process {} claims {} of GPU memory, and all GPUs "
                                   "together have {}",
                                   pid_.value, format_bytes(bytes()), format_bytes(most)),
                       "do not trust that process: its page is forged or damaged"}));
}

Result<void> AgentClient::wait_for_reply(const Interrupt& interrupt, Clock::time_point deadline) {
  std::optional<Clock::time_point> stop_at;
  for (int polls = 1;; ++polls) {
    const auto seen = page_->reply.load(std::memory_order_acquire);
    if (seen == number_) return {};
    if (!pidfd_.alive()) {
      return fail(ErrorCode::kProcessGone, fmt::format("process {} has ended", pid_.value));
    }
    if (polls % kPollsUntilExec == 0 && has_left()) {
      return fail(
          ErrorCode::kProcessGone,
          fmt::format("process {} has become another program (exec), and what it had on the "
                      "GPU has gone",
                      pid_.value));
    }
    if (Clock::now() >= deadline) {
      note_silence();
      return fail(
          ErrorCode::kNoAnswer,
          fmt::format(
              "the agent in process {} was to {} and has not answered within {} ms", pid_.value,
              agent_command_name(asked_),
              std::chrono::ceil<std::chrono::milliseconds>(Clock::now() - waiting_since()).count()),
          fmt::format("see whether the driver hangs there: `cat /proc/{0}/task/*/wchan`; `stasis "
                      "recover {0}` makes the process run when it answers again",
                      pid_.value));
    }
    if (auto leave = wants_to_leave(); !leave && !can_be_left(asked_)) {
      note_silence();
      return leave;
    }
    auto stop = interrupt.check();
    if (stop) stop = wants_to_leave();
    if (!stop) {
      page_->abandoned.store(number_, std::memory_order_relaxed);
      if (!stop_at) stop_at = Clock::now() + kLeaveAfter;
      if (Clock::now() >= *stop_at && can_be_left(asked_)) {
        note_silence();
        return stop;
      }
    }
    futex::wait(page_->reply, seen, true, kAgentPoll);
  }
}

Result<void> AgentClient::finish_unless(const Interrupt& interrupt,
                                        std::chrono::milliseconds timeout) {
  if (silent_) timeout = std::min(timeout, kAfterSilence);
  STASIS_TRY(wait_for_reply(interrupt, Clock::now() + timeout));
  trace_record(
      {TraceKind::kAgent, agent_command_name(asked_), asked_at_, Clock::now(), 0, pid_, 0});
  take_figures();
  const auto result = static_cast<cuda::CUresult>(once(page_->cu_result));
  if (result == cuda::CUDA_SUCCESS) return {};
  std::string words;
  for (const char& letter : page_->message) {
    const char one = once(letter);
    if (one == '\0') break;
    // They go to a terminal.
    words += one >= ' ' && one <= '~' ? one : '?';
  }
  auto message = fmt::format("the agent in process {} could not {}: {}", pid_.value,
                             agent_command_name(asked_), words);
  switch (result) {
    case cuda::CUDA_ERROR_NOT_READY:
      return fail(ErrorCode::kTimeout, std::move(message),
                  "its GPU work takes longer than that: give it more time (--timeout)");
    case cuda::CUDA_ERROR_DEINITIALIZED:
      return fail(ErrorCode::kProcessGone, fmt::format("process {} is about to exit", pid_.value));
    case cuda::CUDA_ERROR_OUT_OF_MEMORY:
      if (asked_ == AgentCommand::kPrepare || asked_ == AgentCommand::kClose ||
          asked_ == AgentCommand::kBuffer || asked_ == AgentCommand::kDetach) {
        return fail(ErrorCode::kOutOfHostMemory, std::move(message),
                    "the content of its GPU memory needs that much host memory: free some, or "
                    "allow more (`ulimit -v`, vm.overcommit_memory)");
      }
      // Addresses, of which there are enough if no limit is set.
      if (words.starts_with("cuMemAddressReserve")) {
        return fail(ErrorCode::kOutOfGpuMemory, std::move(message),
                    fmt::format("allow the program more memory (`ulimit -v`; `prlimit --pid {} "
                                "--as=unlimited`), then try again",
                                pid_.value));
      }
      return fail(ErrorCode::kOutOfGpuMemory, std::move(message),
                  "free memory on the GPU (`stasis ps` shows who uses it), then try again");
    case cuda::CUDA_ERROR_NOT_SUPPORTED:
      return fail(refusal({"staying-memory", Severity::kRed, pid_, std::move(message),
                           "leave --path direct out: the driver can take it"}));
    default:
      return fail(ErrorCode::kDriverError, std::move(message));
  }
}

Result<void> AgentClient::ask(AgentCommand command, std::uint64_t argument,
                              std::chrono::milliseconds timeout) {
  begin(command, argument);
  return finish(timeout);
}

std::chrono::milliseconds copy_time(std::uint64_t bytes) {
  constexpr double kSlowestRate = 200e6;  // per second
  // A target may name any number of bytes.
  constexpr std::uint64_t kMost = std::uint64_t{1} << 50;
  return std::chrono::milliseconds(
      30000 +
      static_cast<std::int64_t>(static_cast<double>(std::min(bytes, kMost)) / kSlowestRate * 1000));
}

Result<void> AgentClient::repopulate(const Fill& fill) {
  const auto copying = copy_time(bytes());
  const bool away = state() == AgentState::kHeld || state() == AgentState::kEvicted ||
                    state() == AgentState::kFilling;
  if (away && content_is_elsewhere() && !fill) {
    return fail(ErrorCode::kWrongState,
                fmt::format("the content of process {}'s GPU memory is in an image", pid_.value));
  }
  if (state() == AgentState::kHeld || state() == AgentState::kEvicted) {
    // It may have to copy first, if it has pinned its memory (kPin).
    STASIS_TRY(ask(AgentCommand::kRepopulate, 0, kMappingTimeout + copying));
  }
  if (state() == AgentState::kFilling) {
    if (content_is_elsewhere()) {
      STASIS_TRY(ask(AgentCommand::kBuffer, 0, kMappingTimeout));
      STASIS_TRY(fill(*this));
    }
    STASIS_TRY(ask(AgentCommand::kCopyIn, 0, copying));
  }
  return {};
}

Result<void> AgentClient::bring_back(const Fill& fill,
                                     const std::function<Result<void>(AgentClient&)>& before_open) {
  STASIS_TRY(repopulate(fill));
  if (state() == AgentState::kRunning) return {};
  if (before_open) STASIS_TRY(before_open(*this));
  return ask(AgentCommand::kOpen, 0, kMappingTimeout);
}

}  // namespace stasis::direct
