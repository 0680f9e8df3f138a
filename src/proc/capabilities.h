// The names of capabilities, as the kernel's manual has them.
//
// Functions only; any thread.
#pragma once

#include <cstdint>
#include <string>

namespace stasis::proc {

// Of a set as /proc/PID/status has it: "CAP_CHOWN, CAP_SYS_TIME".
std::string capability_names(std::uint64_t bits);

}  // namespace stasis::proc
