#include "base/units.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace stasis {

std::string format_bytes(std::uint64_t bytes) {
  static constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  // Thresholds are where rounding to three digits would carry: 1023.5 KiB is 1.00 MiB.
  while (value >= (unit == 0 ? 1024.0 : 1023.5) && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  const int digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f} {}", value, digits, kUnits[unit]);
}

std::string format_seconds(Seconds seconds) {
  const double value = seconds.count();
  if (value < 0.0995) return fmt::format("{:.1f} ms", value * 1e3);
  if (value < 0.9995) return fmt::format("{:.0f} ms", value * 1e3);
  return fmt::format("{:.2f} s", value);
}

std::string format_age(std::chrono::seconds age) {
  const auto seconds = std::max<std::chrono::seconds::rep>(age.count(), 0);
  constexpr std::chrono::seconds::rep kMinute = 60;
  constexpr auto kHour = 60 * kMinute;
  constexpr auto kDay = 24 * kHour;
  if (seconds < kMinute) return fmt::format("{} s", seconds);
  if (seconds < kHour) return fmt::format("{} min", seconds / kMinute);
  if (seconds < kDay) return fmt::format("{} h {} min", seconds / kHour, seconds % kHour / kMinute);
  return fmt::format("{} d {} h", seconds / kDay, seconds % kDay / kHour);
}

std::string format_rate(std::uint64_t bytes, Seconds seconds) {
  if (seconds.count() <= 0) return "-";
  const double rate = static_cast<double>(bytes) / seconds.count();
  if (rate >= 0.9995e9) return fmt::format("{:.2f} GB/s", rate / 1e9);
  return fmt::format("{:.0f} MB/s", rate / 1e6);
}

}  // namespace stasis
