// The processors that this process may run on, which a container or taskset makes fewer than there
// are. At least 1. Thread-safe.
#pragma once

namespace stasis {

unsigned usable_processors();

}  // namespace stasis
