// What the parts of the API that create things offer to the part that destroys a whole context.
#pragma once

#include "sim/driver.h"

namespace stasis::sim {

void destroy_streams(Driver& driver, Context& context);
void unload_modules(Driver& driver, Context& context);

}  // namespace stasis::sim
