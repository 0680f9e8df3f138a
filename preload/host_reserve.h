// What the agent itself needs while it has the program's memory in its hands: bytes for each piece.
// A program that gets no more memory then would be ended by it. Made before the gate closes, never
// written to, and given up where an allocation of the agent's fails: this library has the C++
// library to itself.
#pragma once

#include <cstddef>

namespace stasis::preload {

inline constexpr std::size_t kReserve = std::size_t{4} << 20;

bool make_reserve();
bool has_reserve();
void give_reserve_back();

}  // namespace stasis::preload
