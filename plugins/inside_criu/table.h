// Loaded into the criu that the tool starts: a table that both share, for a dump, and what is to be
// done at a restore.
//
// All of this library uses old functions of the C library only, and no C++ library: criu may bring
// its own.
#pragma once

#include <sys/types.h>

#include "abi/inside_criu.h"

namespace stasis::inside_criu {

// nullptr if the tool has given none, or it cannot be mapped.
extern Table* table;
// Of the file system that has the table's file, and all objects of shared memory.
extern dev_t memory_device;
// The tool, which has started this criu.
extern pid_t tool;
// Whether the tool has asked for it (kBindVariable).
extern bool binds_anywhere;

}  // namespace stasis::inside_criu
