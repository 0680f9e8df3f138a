// Brings the agent to a process that runs: its library by a call inside (inside_call.h), and its
// hooks into the entry points of the driver, while every thread of the process stands still.
//
// The agent prepares the hooks and says what is to be written where; each word is compared before
// it is written with what driver 580's entry points begin with, and all are written or none. The
// tool may be killed at any instant: each word is written at once, a hook that is in passes calls
// on, and the next tool goes on from there. docs/adr/0053-attach.md.
//
// Thread-safe, as long as one at a time acts on a process.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "abi/attach_state.h"
#include "attach/inside_call.h"
#include "base/fd.h"
#include "base/interrupt.h"
#include "base/result.h"

namespace stasis::attach {

// kNotSupported, with what is in the way and what to do: the reasons of Inside::open(), filters of
// system calls. Changes nothing.
Result<void> check_for_agent(Pid pid);
// Has the agent's library loaded, which makes the hooks ready. kNotSupported: a driver whose entry
// points begin otherwise, a CUDA tool at work; the library stays, and does nothing.
Result<void> load_agent(Pid pid, const UniqueFd& library);
// Puts the hooks of a loaded agent in. kTimeout: a thread stood all the time where a hook is to be.
// When this returns, the agent's thread is there, or about to be. `standing` is told when the
// program's threads begin to stand still, and when they run again.
Result<void> hook_agent(Pid pid, std::chrono::milliseconds timeout, const Interrupt& interrupt,
                        const std::function<void(bool)>& standing);

// What the agent says of itself. Nothing if the process has none that came later.
Result<std::optional<AttachState>> read_attach_state(Pid pid);

// What of a thread that stands still is about its next instructions: whether it stands, or a
// handler of a signal is to go back to, between the first two of a hooked entry point.
bool is_at_hook(std::uint64_t instruction, std::span<const std::uint64_t> stack,
                std::span<const std::uint64_t> entries);
// Whether a word may be written: it belongs to code of the driver's that begins as it should.
Result<void> check_patch(const EntryPatch& patch, std::span<const unsigned char> begin);

}  // namespace stasis::attach
