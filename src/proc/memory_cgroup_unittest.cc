#include "proc/memory_cgroup.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

namespace fs = std::filesystem;

// A /proc and a cgroup file system of our own making.
class MemoryCgroupTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "memory_cgroup_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::string at(const std::string& path) const { return (root_ / path).string(); }
  std::vector<MemoryCgroup> groups() const { return memory_cgroups(Pid{12}, at("proc")); }
  void mount(const std::string& root, const std::string& type, const std::string& options) const {
    write("proc/self/mountinfo",
          "22 1 8:1 / / rw - ext4 /dev/vda rw\n"
          "30 22 0:26 " +
              root + " " + at("cg") + " rw,nosuid shared:9 - " + type + " none " + options + "\n");
  }

  fs::path root_;
};

TEST_F(MemoryCgroupTest, OfVersion2WithTheLimitsAroundIt) {
  mount("/", "cgroup2", "rw");
  write("proc/12/cgroup", "0::/pod/container/inner\n");
  write("cg/pod/memory.max", "8000\n");
  write("cg/pod/memory.current", "5000\n");
  write("cg/pod/memory.stat",
        "anon 3000\nfile 2000\ninactive_file 400\nactive_file 500\nslab_reclaimable 100\n");
  write("cg/pod/memory.swap.max", "max\n");
  write("cg/pod/memory.swap.current", "7\n");
  write("cg/pod/container/memory.max", "max\n");
  write("cg/pod/container/memory.current", "5000\n");
  write("cg/pod/container/inner/memory.max", "300\n");
  write("cg/pod/container/inner/memory.current", "500\n");
  const auto found = groups();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].directory, at("cg/pod/container/inner"));
  EXPECT_EQ(found[0].room(1000), 0U) << "more is used than may be";
  EXPECT_EQ(found[1].directory, at("cg/pod"));
  EXPECT_EQ(found[1].limit, 8000U);
  EXPECT_EQ(found[1].used, 4000U) << "without the page cache";
  EXPECT_EQ(found[1].room(0), 4000U);
  EXPECT_EQ(found[1].room(1000), 5000U);
}

TEST_F(MemoryCgroupTest, OfVersion1BesideVersion2) {
  mount("/", "cgroup", "rw,memory");
  write("proc/12/cgroup", "5:cpu,cpuacct:/other\n4:memory:/a:b\n0::/\n");
  write("cg/a:b/memory.limit_in_bytes", "9000\n");
  write("cg/a:b/memory.usage_in_bytes", "1000\n");
  write("cg/a:b/memory.stat", "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100\n");
  write("cg/a:b/memory.memsw.limit_in_bytes", "9500\n");
  write("cg/a:b/memory.memsw.usage_in_bytes", "1200\n");
  write("cg/memory.limit_in_bytes", "9223372036854771712\n");
  write("cg/memory.usage_in_bytes", "1000\n");
  const auto found = groups();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].used, 700U);
  EXPECT_EQ(found[0].limit, 9000U);
  EXPECT_EQ(found[0].swap, 300U) << "9500 - 1200 for both, of which 8000 are memory";
}

TEST_F(MemoryCgroupTest, InAContainerWithoutACgroupNamespace) {
  mount("/docker/1234", "cgroup2", "rw");
  write("proc/12/cgroup", "0::/docker/1234/job\n");
  write("cg/memory.max", "100\n");
  write("cg/memory.current", "40\n");
  const auto found = groups();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].room(1000), 60U);
  write("proc/12/cgroup", "0::/docker/999\n");
  EXPECT_TRUE(groups().empty()) << "not to be seen from here";
  write("proc/12/cgroup", "0::/docker/12345\n");
  EXPECT_TRUE(groups().empty()) << "another whose name begins alike";
  mount("/", "cgroup2", "rw");
  write("proc/12/cgroup", "0::/../999\n");
  EXPECT_TRUE(groups().empty()) << "nor this";
}

TEST_F(MemoryCgroupTest, NothingWhereNothingCanBeRead) {
  EXPECT_TRUE(groups().empty());
  write("proc/12/cgroup", "0::/a\nnonsense\n");
  EXPECT_TRUE(groups().empty());
  mount("/", "cgroup2", "rw");
  EXPECT_TRUE(groups().empty());
  write("cg/a/memory.max", "nonsense");
  EXPECT_TRUE(groups().empty());
  EXPECT_TRUE(memory_cgroups(Pid{4194304}).empty());
}

}  // namespace
}  // namespace stasis::proc
