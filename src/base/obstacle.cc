#include "base/obstacle.h"

#include <algorithm>

namespace stasis {

std::string_view severity_name(Severity severity) {
  switch (severity) {
    case Severity::kGreen:
      return "green";
    case Severity::kYellow:
      return "yellow";
    case Severity::kRed:
      return "red";
  }
  return "?";
}

std::string_view option_of(Override by) {
  switch (by) {
    case Override::kNone:
      break;
    case Override::kIgnoreObstacles:
      return "--ignore-obstacles";
    case Override::kIgnoreUndumpable:
      return "--ignore-obstacles";  // the command line has one for both
  }
  return {};
}

std::optional<ObstacleId> ObstacleId::find(std::string_view name) {
  const std::size_t row = row_of(name);
  if (row == kObstacles.size()) return std::nullopt;
  return ObstacleId(row);
}

Severity worst(std::span<const Obstacle> obstacles) {
  Severity out = Severity::kGreen;
  for (const Obstacle& obstacle : obstacles)
    out = std::max(out, obstacle.severity);
  return out;
}

}  // namespace stasis
