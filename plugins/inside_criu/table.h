// Loaded into the criu that the tool starts for a dump: a table that both share.
//
// All of this library uses old functions of the C library only, and no C++ library: criu may bring
// its own.
#pragma once

#include "abi/inside_criu.h"

namespace stasis::inside_criu {

// nullptr if the tool has given none, or it cannot be mapped.
extern Table* table;

}  // namespace stasis::inside_criu
