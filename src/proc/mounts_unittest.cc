#include "proc/mounts.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

namespace fs = std::filesystem;

TEST(Mounts, AreReadWithTheirTagsAndBlanks) {
  std::string name = testing::TempDir() + "mounts_XXXXXX";
  ASSERT_NE(::mkdtemp(name.data()), nullptr);
  fs::create_directories(name + "/12");
  std::ofstream(name + "/12/mountinfo")
      << "22 1 8:1 / / rw - ext4 /dev/vda rw\n"
         "34 22 0:26 /a /mnt/with\\040blank rw,nosuid shared:9 master:2 - tmpfs none rw\n"
         "a line of another kind\n";
  const auto found = mounts("12", name);
  fs::remove_all(name);
  ASSERT_TRUE(found);
  ASSERT_EQ(found->size(), 2U);
  EXPECT_EQ((*found)[0].point, "/");
  EXPECT_EQ((*found)[1].id, 34);
  EXPECT_EQ((*found)[1].major, 0U);
  EXPECT_EQ((*found)[1].minor, 26U);
  EXPECT_EQ((*found)[1].point, "/mnt/with blank");
  EXPECT_EQ((*found)[1].type, "tmpfs");
}

TEST(Mounts, OfTheProcessItself) {
  const auto found = mounts("self");
  ASSERT_TRUE(found);
  EXPECT_FALSE(found->empty());
  EXPECT_FALSE(mounts("2147483647"));
}

}  // namespace
}  // namespace stasis::proc
