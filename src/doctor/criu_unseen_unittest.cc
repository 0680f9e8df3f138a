#include "doctor/criu_unseen.h"

#include <gtest/gtest.h>

namespace stasis::doctor {
namespace {

constexpr const char* kAddresses =
    "00000000000000000000000000000001 01 80 10 80       lo\n"
    "fd000000000000000000000000000001 02 40 00 80     eth0\n"
    "fd000000000000000000000000000002 02 40 00 80     eth0\n";

TEST(UnseenOptions, AnycastIsASocketsWhereItIsNotARouters) {
  EXPECT_EQ(joined_anycast("", kAddresses), "");
  EXPECT_EQ(
      joined_anycast("2    eth0            fd000000000000000000000000000000     2\n", kAddresses),
      "");
  EXPECT_EQ(
      joined_anycast("2    eth0            fd000000000000000000000000000000     3\n", kAddresses),
      "fd00:: on eth0");
  EXPECT_EQ(
      joined_anycast("3    eth1            fd000000000000000000000000000000     1\n", kAddresses),
      "fd00:: on eth1");
  EXPECT_EQ(
      joined_anycast("2    eth0            fd000000000000000000000000000005     1\n", kAddresses),
      "fd00::5 on eth0");
  EXPECT_EQ(joined_anycast("2    eth0            nonsense     1\n", "more nonsense"), "");
}

TEST(UnseenOptions, LabelsOfOtherProcessesAreTheirs) {
  const std::string head =
      "Label S Owner  Users  Linger Expires  Dst                              Opt\n";
  proc::ProcessInfo own;
  own.pid = Pid{77};
  const Processes processes{own};
  const std::string rest = " 60     60       00000000000000000000000000000001 0   \n";
  EXPECT_EQ(leased_label(head, processes), "");
  EXPECT_EQ(leased_label(head + "12345 255 0      0     " + rest, processes), "");
  EXPECT_EQ(leased_label(head + "12345 255 0      1     " + rest, processes), "12345");
  EXPECT_EQ(leased_label(head + "12345 2 77     1     " + rest, processes), "12345");
  EXPECT_EQ(leased_label(head + "12345 2 78     1     " + rest, processes), "");
}

}  // namespace
}  // namespace stasis::doctor
