// The filters of a thread's system calls (seccomp): which there are, and what they answer to a
// call.
//
// Plain functions; a thread whose filters are read is stopped by the calling one.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.h"

namespace stasis::proc {

using SystemCallFilter = std::vector<sock_filter>;

// From the last one that was set to the first; none of a thread without. Nothing where they may not
// be read (that takes CAP_SYS_ADMIN and no filter of our own), or are more than 64.
std::optional<std::vector<SystemCallFilter>> filters_of(Tid stopped);

// A call of the 64-bit interface, as filters see it.
seccomp_data call_of(int number, std::span<const std::uint64_t> arguments = {});

// What a filter answers to a call, as the kernel would run it (SECCOMP_RET_...). Nothing if it is
// no program of that kind, or asks where in the code the call is made, which is not known
// beforehand.
std::optional<std::uint32_t> run_filter(std::span<const sock_filter> program,
                                        const seccomp_data& call);

// Do all of them let it pass? Not if that cannot be told.
bool let_pass(std::span<const SystemCallFilter> filters, const seccomp_data& call);

}  // namespace stasis::proc
