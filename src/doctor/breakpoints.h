// Breakpoints among the changes that were made to a page of code.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

namespace stasis::doctor {

// Where the first one is in `memory`, of a page whose file says `file`, of the same size. The hooks
// of an agent that was brought to a program (abi/attach_state.h) are none, whatever their bytes.
std::optional<std::size_t> find_breakpoint(std::span<const unsigned char> memory,
                                           std::span<const unsigned char> file);

}  // namespace stasis::doctor
