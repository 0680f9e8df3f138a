// Waits until the devices have done what the program gave them.
#pragma once

#include "deadline.h"
#include "eviction.h"

namespace stasis::preload {

// kFailed: the outcome says why.
enum class Waited { kDone, kTimeout, kFailed };

Waited wait_for_devices(const Timeout& timeout, Outcome& outcome);

}  // namespace stasis::preload
