// Whether this machine can take an image, check by check: a restore ends with the first that fails,
// and inspect gives the result of each.
//
// Private to src/operations. Any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "image/image_reader.h"
#include "operations/operations.h"

namespace stasis {

struct MachineCheckInput {
  const ImageReader& image;
  Progress& progress;
  const Interrupt& interrupt;
  const ContentReader* host = nullptr;  // its host memory; null: opened here, if there is any
  std::uint64_t elsewhere = 0;          // the three of check_host_memory()
  bool in_our_cgroup = false;
  std::uint64_t ours = 0;
  bool tcp_close = false;
  std::vector<AddressPair> addresses;
  // To wait for ports of connections that were just closed; null: without waiting.
  const Environment* waits = nullptr;
};

struct MachineCheck {
  std::string_view id;  // in the JSON of inspect
  Result<void> (*check)(const MachineCheckInput& input);
};

// In this order: what costs little comes first.
extern const std::array<MachineCheck, 6> kMachineChecks;

}  // namespace stasis
