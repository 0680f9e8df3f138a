// How much a process has on a GPU, in records that are kept as JSON.
#pragma once

#include "base/json_record.h"
#include "driver/driver.h"

namespace stasis {

void fields(auto& io, Described<GpuUse> auto& use) {
  io.named("gpu", use.gpu, &GpuUuid::to_string, GpuUuid::parse);
  io("bytes", use.bytes);
}

}  // namespace stasis
