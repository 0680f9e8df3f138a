// The help text of cuda-checkpoint, in our own words.
#pragma once

#include <string>

#include "driver/driver.h"

namespace stasis::compat {

// `driver` is null where none could be loaded. Options that the driver has no use for are left out,
// as NVIDIA's utility of that version does. The second line says so if the GPU is simulated.
std::string help_text(const DriverInfo* driver);

}  // namespace stasis::compat
