// What the agent's library has decided in the program that it was started with: an object in the
// library, which the tool finds by its name and reads through /proc/PID/mem. The environment does
// not tell: a program may change its own, and CUDA's tools come by others of its variables.
#pragma once

#include <cstdint>

namespace stasis::direct {

inline constexpr char kActivationName[] = "stasis_agent_activation";

enum class Activation : std::uint32_t {
  kUndecided = 0,  // no call of the driver's has come by yet
  kWorks = 1,
  kOff = 2,       // STASIS_AGENT=off
  kOwnTool = 3,   // a program of Stasis's own
  kCudaTool = 4,  // CUPTI, Nsight, compute-sanitizer, cuda-gdb
};

}  // namespace stasis::direct
