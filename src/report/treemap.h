// A treemap: amounts as tiles that fill a frame, each with its share of the area, as near to
// squares as can be (the "squarified" layout of Bruls, Huizing and van Wijk, 2000).
//
// Plain values; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace stasis::report {

struct Tile {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

// One tile per amount, in their order; they should be sorted, the largest first, or the tiles come
// out slim. An amount of 0 gets an empty tile, and so does each if all are 0.
std::vector<Tile> lay_out_treemap(std::span<const std::uint64_t> amounts, double width,
                                  double height);

}  // namespace stasis::report
