#include "report/treemap.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace stasis::report {
namespace {

constexpr double kWidth = 1000;
constexpr double kHeight = 320;
// Of a length or an area: what doubles may lose on the way.
constexpr double kSlack = 1e-6;

double area(const Tile& tile) { return tile.width * tile.height; }

double shared_length(double a, double a_length, double b, double b_length) {
  return std::min(a + a_length, b + b_length) - std::max(a, b);
}

void check_layout(const std::vector<std::uint64_t>& amounts) {
  const std::vector<Tile> tiles = lay_out_treemap(amounts, kWidth, kHeight);
  RC_ASSERT(tiles.size() == amounts.size());
  double total = 0;
  for (const std::uint64_t amount : amounts)
    total += static_cast<double>(amount);
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const Tile& tile = tiles[i];
    RC_ASSERT(tile.width >= 0 && tile.height >= 0);
    const double share = total > 0 ? static_cast<double>(amounts[i]) / total : 0;
    RC_ASSERT(std::abs(area(tile) - share * kWidth * kHeight) <= kSlack * kWidth * kHeight);
    RC_ASSERT(tile.x >= -kSlack && tile.x + tile.width <= kWidth + kSlack);
    RC_ASSERT(tile.y >= -kSlack && tile.y + tile.height <= kHeight + kSlack);
    for (std::size_t j = 0; j < i; ++j) {
      const Tile& other = tiles[j];
      const double shared_x = shared_length(tile.x, tile.width, other.x, other.width);
      const double shared_y = shared_length(tile.y, tile.height, other.y, other.height);
      RC_ASSERT(shared_x <= kSlack || shared_y <= kSlack);
    }
  }
}

RC_GTEST_PROP(Treemap, TilesHaveTheirShareDoNotOverlapAndStayInTheFrame, ()) {
  auto amounts =
      *rc::gen::container<std::vector<std::uint64_t>>(rc::gen::inRange<std::uint64_t>(0, 1000000));
  std::sort(amounts.rbegin(), amounts.rend());
  check_layout(amounts);
}

// Nothing depends on the order but how slim they are.
RC_GTEST_PROP(Treemap, AnyAmountsInAnyOrderAreLaidOut, (const std::vector<std::uint64_t>& any)) {
  check_layout(any);
}

RC_GTEST_PROP(Treemap, AmountsOfAllMagnitudesAreLaidOut, ()) {
  check_layout(*rc::gen::container<std::vector<std::uint64_t>>(
      rc::gen::map(rc::gen::inRange(0, 63), [](int power) { return std::uint64_t{1} << power; })));
}

TEST(Treemap, IsNearToSquares) {
  // Shown as one row, the ratio of the last would be 1000 / 16 to 320.
  const std::vector<std::uint64_t> amounts = {16, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1};
  for (const Tile& tile : lay_out_treemap(amounts, kWidth, kHeight)) {
    const double ratio = tile.width / tile.height;
    EXPECT_LT(std::max(ratio, 1 / ratio), 3) << tile.width << " by " << tile.height;
  }
}

TEST(Treemap, NothingIsNothing) {
  EXPECT_TRUE(lay_out_treemap({}, kWidth, kHeight).empty());
  const std::vector<std::uint64_t> zeros = {0, 0};
  for (const Tile& tile : lay_out_treemap(zeros, kWidth, kHeight))
    EXPECT_EQ(area(tile), 0);
  const std::vector<std::uint64_t> one = {5};
  for (const Tile& tile : lay_out_treemap(one, 0, kHeight))
    EXPECT_EQ(area(tile), 0);
  EXPECT_DOUBLE_EQ(area(lay_out_treemap(one, kWidth, kHeight)[0]), kWidth * kHeight);
}

}  // namespace
}  // namespace stasis::report
