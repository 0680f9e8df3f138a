// Numbers of file systems that <linux/magic.h> lacks where it is older than the file system's
// entry.
#pragma once

#include <cstdint>

namespace stasis {

// FUSE_SUPER_MAGIC, which is there from Linux 5.16 on: not on Ubuntu 22.04.
inline constexpr std::uint32_t kFuseMagic = 0x65735546;

}  // namespace stasis
