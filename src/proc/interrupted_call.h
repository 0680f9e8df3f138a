// abi/interrupted_call.h for processes that the tool looks into.
//
// Pure but for the reading of the process's code. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>

#include "abi/interrupted_call.h"
#include "base/ids.h"
#include "proc/address_space.h"

namespace stasis::proc {

using interrupted::CallRegisters;
using interrupted::kRestartBlock;
using interrupted::kRestartNoHand;
using interrupted::kRestartNoIntr;
using interrupted::kRestartSys;
using interrupted::kSyscallLength;
using interrupted::returns_eintr_after_stop;
using interrupted::waits_for_kept_time;

std::optional<std::uint64_t> call_made(const AddressSpace& space, const CallRegisters& registers);

// Is a signal waiting that the thread would take?
bool has_signal(Pid pid, Tid thread);

}  // namespace stasis::proc
