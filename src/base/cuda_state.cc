#include "base/cuda_state.h"

#include <fmt/format.h>

namespace stasis {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"running", "locked", "checkpointed", "failed"};

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

std::string_view cuda_state_name(CudaState state) {
  return kNames.at(static_cast<std::size_t>(state));
}

std::optional<CudaState> cuda_state_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames.at(i) == name) return static_cast<CudaState>(i);
  }
  return std::nullopt;
}

std::string GpuUuid::to_string() const {
  std::string out = "GPU-";
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) out += '-';
    out += fmt::format("{:02x}", bytes.at(i));
  }
  return out;
}

std::optional<GpuUuid> GpuUuid::parse(std::string_view text) {
  constexpr std::string_view kShape = "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
  if (text.size() != kShape.size()) return std::nullopt;
  GpuUuid uuid;
  std::size_t nibbles = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (kShape[i] != 'x') {
      if (text[i] != kShape[i]) return std::nullopt;
      continue;
    }
    const int digit = hex_digit(text[i]);
    if (digit < 0) return std::nullopt;
    auto& byte = uuid.bytes.at(nibbles / 2);
    byte = static_cast<std::uint8_t>(byte * 16 + digit);
    ++nibbles;
  }
  return uuid;
}

}  // namespace stasis
