// What the driver does not give out any more.
//
// Large memory that the driver's own restore has made cannot be exported on some machines, and the
// call that is refused leaves a descriptor of /dev/nvidiactl open (seen on two H200s, 580.159.04;
// docs/adr/0059-renewed-memory.md), with which CRIU dumps no checkpointed process. So large memory
// is tried by a thread with a table of descriptors of its own: what the driver leaves open goes
// with it.
#pragma once

#include <cstddef>

namespace stasis::preload {

// Seen from 512 MiB on, and not at 510. A few smaller ones are tried, too, but not all of a pool's,
// which are 32 MiB each: JAX has thousands.
inline constexpr std::size_t kTriedFrom = std::size_t{32} << 20;
inline constexpr std::size_t kAllTriedFrom = std::size_t{256} << 20;
inline constexpr std::size_t kFew = 32;

// Enters into the Reach of each piece of device memory that can leave what the driver says. With
// the gate closed, and while the program's threads run: a thread is started, with locks of the C
// library.
void try_exports();

}  // namespace stasis::preload
