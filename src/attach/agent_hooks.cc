#include "attach/agent_hooks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "attach/libraries.h"
#include "attach/seccomp_filter.h"
#include "base/fault_point.h"
#include "base/printable.h"
#include "base/units.h"
#include "proc/remote_syscall.h"
#include "proc/stopped_threads.h"

namespace stasis::attach {

using proc::AddressSpace;
using proc::StoppedThreads;

namespace {

constexpr std::size_t kWord = sizeof(std::uint64_t);
// What is looked through of a thread's stack: a handler of a signal that needs more is not known.
constexpr std::uint64_t kMostStack = std::uint64_t{256} << 10;
// Between two tries, each of which stops the program for some milliseconds: longer each time.
constexpr std::chrono::milliseconds kTryPause{2};
constexpr std::chrono::milliseconds kLongestTryPause{50};
// A thread that exchanges its stack for another (a coroutine) has one in an instant.
constexpr std::chrono::milliseconds kStackTimeout{1000};
constexpr std::chrono::milliseconds kInsideTimeout{10000};

bool is_attached_library(std::string_view name) {
  return name == fmt::format("memfd:{}", kAttachedLibrary);
}

Result<std::optional<Library>> find_agent_library(const AddressSpace& space,
                                                  const std::vector<proc::Mapping>& mappings) {
  STASIS_TRY_ASSIGN(auto found, find_libraries(space, mappings, is_attached_library));
  if (found.empty()) return std::optional<Library>();
  return std::optional<Library>(std::move(found.front()));
}

std::string words_of(const AttachState& state) {
  return printable(std::string(state.message, ::strnlen(state.message, sizeof state.message)));
}

Error of_answer(Pid pid, AttachAnswer answer, const std::optional<AttachState>& state) {
  std::string why = state ? words_of(*state) : "";
  if (why.empty()) why = "the library that it loads as the agent's does not say why";
  const bool inactive = answer == AttachAnswer::kInactive;
  return refusal({"attach", Severity::kRed, pid,
                  fmt::format("no agent can be brought to process {}: {}", pid.value, why),
                  inactive
                      ? "start it without that tool or variable, or leave its memory to the driver"
                      : "leave its memory to the driver, or start it with `stasis run`"});
}

// Code of the driver's, as the mappings show it.
bool is_driver_code(const std::vector<proc::Mapping>& mappings, std::uint64_t from,
                    std::uint64_t size) {
  return std::any_of(mappings.begin(), mappings.end(), [&](const proc::Mapping& mapping) {
    return mapping.permissions.size() > 2 && mapping.permissions[2] == 'x' &&
           file_name(mapping).starts_with("libcuda.so") && from >= mapping.start &&
           from + size <= mapping.end;
  });
}

class Hooking {
 public:
  Hooking(const AddressSpace& space, std::vector<EntryPatch> patches)
      : space_(space), patches_(std::move(patches)) {
    for (const EntryPatch& patch : patches_)
      entries_.push_back(patch.entry);
    std::sort(entries_.begin(), entries_.end());
  }

  // Why a thread is in the way.
  struct InTheWay {
    Tid thread;
    std::string why;
    bool has_no_stack = false;
  };

  // Nothing: all are in. Otherwise nothing is changed.
  Result<std::optional<InTheWay>> try_once() {
    std::optional<InTheWay> blocked;
    STASIS_TRY(trace_on_own_thread([&]() -> Result<void> {
      STASIS_TRY_ASSIGN(const auto stopped, StoppedThreads::stop(space_, [](Tid) { return true; }));
      STASIS_TRY(fault(FaultPoint::kAttachStopped));
      STASIS_TRY_ASSIGN(const auto mappings, proc::ProcFs().mappings(space_.pid()));
      STASIS_TRY(check(mappings));
      STASIS_TRY_ASSIGN(blocked, find_in_the_way(stopped, mappings));
      if (blocked) return {};
      auto written = write_all(stopped);
      if (written) written = fault(FaultPoint::kAttachHooked);
      if (!written) {
        take_out(stopped);
        return written;
      }
      return {};
    }));
    return blocked;
  }

 private:
  Result<std::array<unsigned char, kEntryBytes>> begin_of(std::uint64_t entry) const {
    std::array<unsigned char, kEntryBytes> bytes{};
    STASIS_TRY(space_.read(entry, bytes.data(), bytes.size()));
    return bytes;
  }

  Result<void> check(const std::vector<proc::Mapping>& mappings) const {
    for (const EntryPatch& patch : patches_) {
      if (!is_driver_code(mappings, patch.entry, kEntryBytes)) {
        return fail(ErrorCode::kNotSupported,
                    fmt::format("process {}: what its agent names is no code of the driver's",
                                space_.pid().value));
      }
      STASIS_TRY_ASSIGN(const auto begin, begin_of(patch.entry));
      STASIS_TRY(check_patch(patch, begin));
    }
    return {};
  }

  Result<std::optional<InTheWay>> find_in_the_way(
      const StoppedThreads& stopped, const std::vector<proc::Mapping>& mappings) const {
    for (const Tid thread : stopped.threads()) {
      // It works for the process in the kernel (io_uring), and never comes to the driver's code.
      if (proc::is_kernels_own(space_.pid(), thread)) continue;
      const auto registers = stopped.registers(thread);
      if (!registers) {
        if (registers.error().code == ErrorCode::kProcessGone) continue;
        return fail(registers.error());
      }
      const auto at =
          std::find_if(mappings.begin(), mappings.end(), [&](const proc::Mapping& mapping) {
            return registers->rsp >= mapping.start && registers->rsp < mapping.end;
          });
      const std::uint64_t from = registers->rsp / kWord * kWord;
      std::vector<std::uint64_t> stack;
      if (at != mappings.end()) stack.resize(std::min(at->end - from, kMostStack) / kWord);
      // What is not known may lead there.
      if (at == mappings.end() || !space_.read(from, stack.data(), stack.size() * kWord)) {
        return std::optional<InTheWay>(
            {thread,
             fmt::format("has a stack that cannot be read (its stack pointer is "
                         "{:#x}), and may be about to go on where a hook is to be",
                         registers->rsp),
             true});
      }
      if (is_at_hook(registers->rip, stack, entries_))
        return std::optional<InTheWay>({thread, "stood all the time where a hook is to be"});
    }
    return std::optional<InTheWay>();
  }

  Result<void> write_all(const StoppedThreads& stopped) {
    const Tid thread = stopped.threads().front();
    for (const EntryPatch& patch : patches_) {
      std::uint64_t now = 0;
      STASIS_TRY(space_.read(patch.entry, &now, sizeof now));
      if (now == patch.after) continue;
      STASIS_TRY(stopped.write(thread, patch.entry, std::span(&patch.after, 1)));
      written_.push_back(&patch);
      if (written_.size() == 1) STASIS_TRY(fault(FaultPoint::kAttachHookedOne));
    }
    for (const EntryPatch& patch : patches_) {
      std::uint64_t now = 0;
      STASIS_TRY(space_.read(patch.entry, &now, sizeof now));
      if (now == patch.after) continue;
      return fail(
          ErrorCode::kInternal,
          fmt::format("process {}: a hook was written and is not there", space_.pid().value));
    }
    return {};
  }

  void take_out(const StoppedThreads& stopped) {
    for (const EntryPatch* patch : written_)
      (void)stopped.write(stopped.threads().front(), patch->entry, std::span(&patch->before, 1));
    written_.clear();
  }

  const AddressSpace& space_;
  std::vector<EntryPatch> patches_;
  std::vector<std::uint64_t> entries_;
  std::vector<const EntryPatch*> written_;
};

Result<std::vector<EntryPatch>> read_patches(const AddressSpace& space, const AttachState& state) {
  if (state.patch_count == 0 || state.patch_count > kMostEntries)
    return fail(ErrorCode::kInternal, fmt::format("process {}: its agent names {} entry points",
                                                  space.pid().value, state.patch_count));
  std::vector<EntryPatch> patches(state.patch_count);
  STASIS_TRY(space.read(state.patches, patches.data(), patches.size() * sizeof patches[0]));
  return patches;
}

Result<void> put_hooks_in(const AddressSpace& space, const AttachState& state,
                          std::chrono::milliseconds timeout, const Interrupt& interrupt,
                          const std::function<void(bool)>& standing) {
  STASIS_TRY_ASSIGN(auto patches, read_patches(space, state));
  Hooking hooking(space, std::move(patches));
  const auto begun = Clock::now();
  for (auto pause = kTryPause;; pause = std::min(pause * 2, kLongestTryPause)) {
    standing(true);
    auto in_the_way = hooking.try_once();
    standing(false);
    if (in_the_way && !*in_the_way) return {};
    // A thread in a call that nothing interrupts cannot be stopped now.
    if (!in_the_way && in_the_way.error().code != ErrorCode::kBusy)
      return fail(std::move(in_the_way.error()));
    const bool has_no_stack = in_the_way && (*in_the_way)->has_no_stack;
    if (Clock::now() - begun >= (has_no_stack ? std::min(timeout, kStackTimeout) : timeout)) {
      if (!in_the_way) return fail(std::move(in_the_way.error()));
      const auto thread = proc::ProcFs().thread(space.pid(), (*in_the_way)->thread);
      return fail(ErrorCode::kTimeout,
                  fmt::format("thread {} ({}) of process {} {}", (*in_the_way)->thread.value,
                              thread ? printable(thread->comm) : "it has ended", space.pid().value,
                              (*in_the_way)->why),
                  has_no_stack ? "" : "try again");
    }
    STASIS_TRY(interrupt.check());
    std::this_thread::sleep_for(pause);
  }
}

bool is_of_our_version(const std::optional<AttachState>& state) {
  return state && state->magic == kAttachMagic && state->version == kAttachVersion &&
         state->bytes == sizeof(AttachState);
}

Result<std::uint64_t> function_of(const Library& library, const char* name) {
  return library.need_function(name);
}

}  // namespace

bool is_at_hook(std::uint64_t instruction, std::span<const std::uint64_t> stack,
                std::span<const std::uint64_t> entries) {
  if (entries.empty()) return false;
  const auto is_between = [&](std::uint64_t at) {
    if (at <= entries.front() || at > entries.back() + kEntryBytes) return false;
    const std::uint64_t entry = *std::prev(std::lower_bound(entries.begin(), entries.end(), at));
    return std::any_of(std::begin(kEntryBetween), std::end(kEntryBetween),
                       [&](std::uint64_t offset) { return at == entry + offset; });
  };
  return is_between(instruction) || std::any_of(stack.begin(), stack.end(), is_between);
}

Result<void> check_patch(const EntryPatch& patch, std::span<const unsigned char> begin) {
  constexpr std::size_t kJump = 5;  // e9 and a distance
  std::array<unsigned char, kWord> before{};
  std::array<unsigned char, kWord> after{};
  std::memcpy(before.data(), &patch.before, kWord);
  std::memcpy(after.data(), &patch.after, kWord);
  const bool is_jump =
      after[0] == 0xe9 && std::equal(after.begin() + kJump, after.end(), before.begin() + kJump);
  const bool was_known = std::equal(before.begin(), before.end(), kEntryBegin);
  // As it was, or hooked by a tool that was killed.
  const bool is_one = begin.size() == kEntryBytes &&
                      (std::equal(before.begin(), before.end(), begin.begin()) ||
                       std::equal(after.begin(), after.end(), begin.begin())) &&
                      std::equal(begin.begin() + kWord, begin.end(), kEntryBegin + kWord);
  if (patch.entry % kWord == 0 && is_jump && was_known && is_one) return {};
  return fail(ErrorCode::kNotSupported,
              "an entry point of the driver does not begin as those of driver 580 do",
              "leave its memory to the driver, or start it with `stasis run`");
}

Result<std::optional<AttachState>> read_attach_state(Pid pid) {
  STASIS_TRY_ASSIGN(const auto space, AddressSpace::open(pid));
  STASIS_TRY_ASSIGN(const auto mappings, proc::ProcFs().mappings(pid));
  STASIS_TRY_ASSIGN(const auto library, find_agent_library(space, mappings));
  if (!library) return std::optional<AttachState>();
  return library->image().value<AttachState>(kAttachStateName);
}

Result<void> check_for_agent(Pid pid) {
  STASIS_TRY_ASSIGN(const auto inside, Inside::open(pid));
  return check_filters_of_all(inside.space(), CallsInside::kOfLibrary);
}

Result<void> load_agent(Pid pid, const UniqueFd& library) {
  STASIS_TRY_ASSIGN(const auto inside, Inside::open(pid));
  // One that a killed tool has left is gone on with: its hooks may be in.
  STASIS_TRY_ASSIGN(const auto there, find_agent_library(inside.space(), inside.mappings()));
  int answer = 0;
  if (there) {
    STASIS_TRY_ASSIGN(const auto prepare, function_of(*there, kAttachPrepareName));
    STASIS_TRY_ASSIGN(answer, call_function_inside(inside, prepare, 0, kInsideTimeout));
  } else {
    STASIS_TRY_ASSIGN(answer, load_inside(inside, library, kAttachedLibrary, kAttachPrepareName, 0,
                                          kInsideTimeout));
  }
  STASIS_TRY_ASSIGN(const auto state, read_attach_state(pid));
  if (answer != static_cast<int>(AttachAnswer::kDone))
    return fail(of_answer(pid, static_cast<AttachAnswer>(answer), state));
  if (!is_of_our_version(state)) {
    return fail(refusal({"agent-version", Severity::kRed, pid,
                         fmt::format("process {} has an agent of another version", pid.value),
                         "use the stasis that came with that agent"}));
  }
  return fault(FaultPoint::kAttachLoaded);
}

Result<void> hook_agent(Pid pid, std::chrono::milliseconds timeout, const Interrupt& interrupt,
                        const std::function<void(bool)>& standing) {
  STASIS_TRY_ASSIGN(const auto state, read_attach_state(pid));
  STASIS_TRY_ASSIGN(const auto inside, Inside::open(pid));
  STASIS_TRY_ASSIGN(const auto there, find_agent_library(inside.space(), inside.mappings()));
  if (!there || !is_of_our_version(state))
    return fail(ErrorCode::kProcessGone, fmt::format("process {} has gone", pid.value));
  STASIS_TRY(put_hooks_in(inside.space(), *state, timeout, interrupt, standing));
  STASIS_TRY_ASSIGN(const auto begin, function_of(*there, kAttachBeginName));
  STASIS_TRY(call_function_inside(inside, begin, 0, kInsideTimeout));
  return {};
}

}  // namespace stasis::attach
