// The driver's view of a process, and the names of GPUs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace stasis {

// The CUDA state of a process as the driver reports it (CUprocessState).
enum class CudaState { kRunning, kLocked, kCheckpointed, kFailed };

// "running", "locked", "checkpointed", "failed": the words of cuda-checkpoint and
// cuda.core.checkpoint.
std::string_view cuda_state_name(CudaState state);
std::optional<CudaState> cuda_state_from_name(std::string_view name);

// A GPU's identity, the same on every machine that ever holds the card.
struct GpuUuid {
  std::array<std::uint8_t, 16> bytes{};
  auto operator<=>(const GpuUuid&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm

  // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
  std::string to_string() const;
  // Takes that form, upper or lower case; nothing else.
  static std::optional<GpuUuid> parse(std::string_view text);
};

// A GPU that the driver can see, in the driver's order.
struct Gpu {
  GpuUuid uuid;
  std::string name;                // "NVIDIA H100 80GB HBM3"
  std::string pci_bus_id;          // "00000000:65:00.0"
  std::uint64_t memory_total = 0;  // bytes
  std::uint64_t memory_used = 0;   // bytes, by all processes and the driver itself
  bool mig = false;                // divided into instances (MIG)
};

// "What was on `from` goes to `to`."
struct GpuPair {
  GpuUuid from;
  GpuUuid to;
  auto operator<=>(const GpuPair&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

}  // namespace stasis
