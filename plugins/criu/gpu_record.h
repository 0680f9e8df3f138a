// SPDX-License-Identifier: GPL-2.0-or-later
// What the plugin leaves in an image for its own restore: the GPUs there were, how much of them
// each process used, and the state each had before the dump. A file of JSON in the image's
// directory, cuda-plugin.json. An image without it (by CRIU's own plugin) can be restored too, with
// fewer checks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "driver/driver.h"

namespace stasis::plugin {

struct ProcessRecord {
  int ns_pid = 0;  // its number in its innermost PID namespace
  CudaState initial = CudaState::kRunning;
  std::vector<GpuUse> uses;
};

struct GpuRecord {
  bool simulated = false;
  std::string driver_version;
  std::vector<Gpu> gpus;  // all that the driver saw; empty if that could not be asked
  std::vector<ProcessRecord> processes;
  // On which the tree listened in criu's own network namespace.
  std::vector<std::uint16_t> tcp_ports;
};

std::string to_text(const GpuRecord& record);
// kImageCorrupt, kImageVersion.
Result<GpuRecord> parse_record(const std::string& text);

// A file beside CRIU's; nothing if there is none. An image may come from an untrusted source, so no
// link is followed, and only a regular file of at most `limit` bytes is read: kImageCorrupt.
Result<std::optional<std::string>> read_image_file(int directory, const std::string& name,
                                                   std::size_t limit);

Result<void> write_record(int directory, const GpuRecord& record);
// Nothing if the image has none.
Result<std::optional<GpuRecord>> read_record(int directory);

}  // namespace stasis::plugin
