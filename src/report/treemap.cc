#include "report/treemap.h"

#include <algorithm>
#include <limits>

namespace stasis::report {
namespace {

// How far from a square the worst tile of a row is: 1 for squares. The row lies along a side of
// that length; its tiles have `sum` of the area together, and at least `least` and at most `most`.
double worst_ratio(double least, double most, double sum, double side) {
  if (least <= 0) return std::numeric_limits<double>::infinity();
  const double thickness = sum / side;
  const auto ratio = [&](double area) {
    const double length = area / thickness;
    return std::max(length / thickness, thickness / length);
  };
  return std::max(ratio(least), ratio(most));
}

}  // namespace

std::vector<Tile> lay_out_treemap(std::span<const std::uint64_t> amounts, double width,
                                  double height) {
  std::vector<Tile> out(amounts.size());
  double total = 0;
  for (const std::uint64_t amount : amounts)
    total += static_cast<double>(amount);
  if (total <= 0 || width <= 0 || height <= 0) return out;
  // What was not given away yet; its area is always that of the amounts that are left.
  Tile room{0, 0, width, height};
  const auto area_of = [&](std::size_t i) {
    return static_cast<double>(amounts[i]) / total * width * height;
  };
  for (std::size_t first = 0; first < amounts.size();) {
    if (amounts[first] == 0) {
      ++first;
      continue;
    }
    const bool upright = room.height <= room.width;  // the row stands at the left, or lies on top
    const double side = upright ? room.height : room.width;
    std::size_t end = first;
    double sum = 0;
    double sum_amounts = 0;
    double least = std::numeric_limits<double>::infinity();
    double most = 0;
    double ratio = std::numeric_limits<double>::infinity();
    for (; end < amounts.size(); ++end) {
      if (amounts[end] == 0) continue;
      const double area = area_of(end);
      const double with =
          worst_ratio(std::min(least, area), std::max(most, area), sum + area, side);
      if (sum > 0 && with > ratio) break;
      ratio = with;
      least = std::min(least, area);
      most = std::max(most, area);
      sum += area;
      sum_amounts += static_cast<double>(amounts[end]);
    }
    // The last row takes what is left to the hair, so that rounding leaves no gap.
    const bool last = end == amounts.size();
    // Added up anew: subtracting from the total would leave nothing of small ones behind a large
    // one.
    double left = 0;
    for (std::size_t i = first; i < amounts.size(); ++i)
      left += static_cast<double>(amounts[i]);
    const double depth = upright ? room.width : room.height;
    const double thickness = last ? depth : std::min(depth, depth * (sum_amounts / left));
    double along = 0;
    for (std::size_t i = first; i < end; ++i) {
      const double length = side * (static_cast<double>(amounts[i]) / sum_amounts);
      out[i] = upright ? Tile{room.x, room.y + along, thickness, length}
                       : Tile{room.x + along, room.y, length, thickness};
      along += length;
    }
    (upright ? room.x : room.y) += thickness;
    (upright ? room.width : room.height) -= thickness;
    first = end;
  }
  return out;
}

}  // namespace stasis::report
