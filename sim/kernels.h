// The kernels of our own programs that have no function for the simulated driver in them.
#pragma once

#include <string_view>

#include "sim/stasis_sim_kernel.h"

namespace stasis::sim {

// What the PTX of that name does, or null.
KernelFunction* built_in_kernel(std::string_view name);

}  // namespace stasis::sim
