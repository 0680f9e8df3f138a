#include "proc/cgroup.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

namespace fs = std::filesystem;

class CgroupTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "cgroup_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
    write("proc/self/mountinfo", "30 22 0:26 / " + at("v1") + " rw - cgroup none rw,pids\n" +
                                     "31 22 0:27 / " + at("v2") + " rw - cgroup2 none rw\n");
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::string at(const std::string& path) const { return (root_ / path).string(); }
  std::optional<PidsCgroup> tightest() const { return tightest_pids_cgroup(Pid{12}, at("proc")); }

  fs::path root_;
};

TEST_F(CgroupTest, WithTheLeastRoomWhereverItIs) {
  EXPECT_FALSE(tightest()) << "there is no such process";
  write("proc/12/cgroup", "4:cpu,pids:/job/step\n0::/pod\n");
  EXPECT_FALSE(tightest()) << "no cgroup sets a limit";
  write("v1/job/step/pids.max", "max\n");
  write("v1/job/step/pids.current", "5\n");
  EXPECT_FALSE(tightest());
  write("v1/job/pids.max", "100\n");
  write("v1/job/pids.current", "40\n");
  ASSERT_TRUE(tightest());
  EXPECT_EQ(tightest()->directory, at("v1/job"));
  EXPECT_EQ(tightest()->room(), 60U);
  write("v2/pod/pids.max", "10\n");
  write("v2/pod/pids.current", "12\n");
  EXPECT_EQ(tightest()->directory, at("v2/pod"));
  EXPECT_EQ(tightest()->room(), 0U) << "more than there may be, as a lowered limit allows";
}

TEST_F(CgroupTest, TheFrozenOneIsNamedThatHoldsTheProcess) {
  write("proc/self/mountinfo", "30 22 0:26 / " + at("v1") + " rw - cgroup none rw,freezer\n" +
                                   "31 22 0:27 / " + at("v2") + " rw - cgroup2 none rw\n");
  const auto frozen = [&] { return frozen_cgroup(Pid{12}, at("proc")); };
  EXPECT_FALSE(frozen()) << "there is no such process";
  write("proc/12/cgroup", "4:freezer:/job/step\n0::/pod/box\n");
  write("v1/job/step/freezer.state", "THAWED\n");
  write("v2/pod/box/cgroup.events", "populated 1\nfrozen 0\n");
  EXPECT_FALSE(frozen());
  write("v2/pod/box/cgroup.events", "populated 1\nfrozen 1\n");
  ASSERT_TRUE(frozen()) << "by one that cannot be seen from here";
  EXPECT_EQ(frozen()->directory, at("v2/pod/box"));
  write("v2/pod/cgroup.freeze", "1\n");
  EXPECT_EQ(frozen()->directory, at("v2/pod"));
  write("v2/pod/cgroup.freeze", "0\n");
  write("v2/pod/box/cgroup.events", "populated 1\nfrozen 0\n");
  write("v1/job/step/freezer.state", "FREEZING\n");
  ASSERT_TRUE(frozen());
  EXPECT_TRUE(frozen()->version1);
  EXPECT_EQ(frozen()->directory, at("v1/job/step"));
  write("v1/job/freezer.self_freezing", "1\n");
  EXPECT_EQ(frozen()->directory, at("v1/job"));
  write("proc/13/cgroup", "0::/pod\n");
  FrozenCgroups known(at("proc"));
  ASSERT_TRUE(known.of(Pid{12}));
  write("v1/job/freezer.self_freezing", "0\n");
  EXPECT_EQ(known.of(Pid{12})->directory, at("v1/job")) << "it is asked once for all in it";
  EXPECT_FALSE(known.of(Pid{13}));
  EXPECT_FALSE(known.of(Pid{14})) << "a process that is not there";
}

}  // namespace
}  // namespace stasis::proc
