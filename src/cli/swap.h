// How a verb has swaps done, or brings to an end what a killed one has left.
#pragma once

#include "cli/verbs.h"
#include "job/swap.h"

namespace stasis::cli {

// Forks the processes of the sides: while this process has one thread. Refers to the context.
job::SwapCaller swap_caller(Context& context);

}  // namespace stasis::cli
