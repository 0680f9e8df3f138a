#include "base/units.h"

#include <limits>

#include <gtest/gtest.h>

namespace stasis {
namespace {

TEST(FormatBytes, UsesBinaryUnitsAndThreeDigits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(17'300'000), "16.5 MiB");
  EXPECT_EQ(format_bytes(17'179'869'184), "16.0 GiB");
  EXPECT_EQ(format_bytes(std::uint64_t{500} << 30), "500 GiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<std::uint64_t>::max()), "16384 PiB");
}

// 9.999 is not written as "10.00", with four digits, nor 1023.9 as "1024".
TEST(FormatBytes, RoundsIntoTheNextStep) {
  EXPECT_EQ(format_bytes(10'239), "10.0 KiB");
  EXPECT_EQ(format_bytes(102'399), "100 KiB");
  EXPECT_EQ(format_bytes(1'048'575), "1.00 MiB");
}

TEST(FormatSeconds, ChoosesTheUnit) {
  EXPECT_EQ(format_seconds(Seconds(0)), "0.0 ms");
  EXPECT_EQ(format_seconds(Seconds(0.0012)), "1.2 ms");
  EXPECT_EQ(format_seconds(Seconds(0.012)), "12.0 ms");
  EXPECT_EQ(format_seconds(Seconds(0.35)), "350 ms");
  EXPECT_EQ(format_seconds(Seconds(0.9996)), "1.00 s");
  EXPECT_EQ(format_seconds(Seconds(1.35)), "1.35 s");
}

TEST(FormatRate, UsesDecimalUnits) {
  EXPECT_EQ(format_rate(2'610'000'000, Seconds(1)), "2.61 GB/s");
  EXPECT_EQ(format_rate(500'000'000, Seconds(1)), "500 MB/s");
  EXPECT_EQ(format_rate(999'700'000, Seconds(1)), "1.00 GB/s");
  EXPECT_EQ(format_rate(1, Seconds(0)), "-");
}

TEST(FormatAge, IsRough) {
  using std::chrono::seconds;
  EXPECT_EQ(format_age(seconds(-5)), "0 s");
  EXPECT_EQ(format_age(seconds(59)), "59 s");
  EXPECT_EQ(format_age(seconds(60)), "1 min");
  EXPECT_EQ(format_age(seconds(3599)), "59 min");
  EXPECT_EQ(format_age(seconds(3600)), "1 h 0 min");
  EXPECT_EQ(format_age(seconds(86399)), "23 h 59 min");
  EXPECT_EQ(format_age(seconds(90000)), "1 d 1 h");
}

}  // namespace
}  // namespace stasis
