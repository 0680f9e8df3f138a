// Completes a GPU map that a user gave in part to the bijection over all GPUs that the driver
// demands. Pure functions; no driver is asked.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/cuda_state.h"
#include "base/result.h"

namespace stasis {

// One "old=new" as the user wrote it; each side a UUID, an index or a PCI address.
struct GpuMapEntry {
  std::string from;
  std::string to;
};

// Splits "A=B,C=D". kDeviceMapInvalid if it is not of that form or empty.
Result<std::vector<GpuMapEntry>> parse_gpu_map(const std::string& text);
// The text that it was split from.
std::string gpu_map_text(std::span<const GpuMapEntry> entries);

// Finds the GPU that `name` means: its UUID (or a prefix of it that is unique, at least 8 digits),
// its index in the list, or its PCI address ("65:00.0", "0000:65:00.0", "00000000:65:00.0").
// kDeviceMapInvalid lists what there is.
Result<GpuUuid> find_gpu(std::span<const Gpu> gpus, const std::string& name);

// Completes `entries`: `from` are the GPUs the process was checkpointed on (all that its driver
// saw), `to` those that the driver sees here. A GPU that no entry mentions stays where it is if
// that is free; the rest is matched in order, GPUs of the same model and size first. So "0=1" on a
// machine with two GPUs becomes {0=1, 1=0}, since {0=1} alone is refused by the driver
// (580.159.04). kDeviceMapInvalid: something is named twice or unknown; kGpuMismatch: the numbers
// of GPUs differ.
Result<std::vector<GpuPair>> complete_gpu_map(std::span<const GpuMapEntry> entries,
                                              std::span<const Gpu> from, std::span<const Gpu> to);

}  // namespace stasis
