#include "proc/trusted_path.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

constexpr uid_t kAlice = 65533;

class TrustedPathTest : public testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "files of two users need root";
    std::string name = "/tmp/trusted-path-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    make_folder("root", 0);
    make_folder("alice", kAlice);
    make_program("root/criu", 0);
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  std::string at(const std::string& name) const { return folder_ + "/" + name; }
  void make_folder(const std::string& name, uid_t owner, mode_t mode = 0755) const {
    ASSERT_EQ(::mkdir(at(name).c_str(), 0700), 0);
    ASSERT_EQ(::chmod(at(name).c_str(), mode), 0);
    ASSERT_EQ(::lchown(at(name).c_str(), owner, owner), 0);
  }
  void make_program(const std::string& name, uid_t owner, mode_t mode = 0755) const {
    std::ofstream(at(name)) << "#!/bin/sh\n";
    ASSERT_EQ(::lchown(at(name).c_str(), owner, owner), 0);
    ASSERT_EQ(::chmod(at(name).c_str(), mode), 0);
  }
  void make_link(const std::string& name, const std::string& target, uid_t owner) const {
    ASSERT_EQ(::symlink(target.c_str(), at(name).c_str()), 0);
    ASSERT_EQ(::lchown(at(name).c_str(), owner, owner), 0);
  }
  std::string why_not(const std::string& name) const { return judge_path(at(name)).why_not; }

  std::string folder_;
};

TEST_F(TrustedPathTest, RootsOwnIsRunWhereItIsWithoutLinks) {
  EXPECT_EQ(judge_path(at("root/criu")).path, at("root/criu"));
  make_link("root/link", "../root//./criu", 0);
  make_link("folder", at("root"), 0);
  EXPECT_EQ(judge_path(at("folder/link")).path, at("root/criu"));
  EXPECT_EQ(judge_path("/../.." + at("root/criu")).path, at("root/criu"));
}

// The user who owns the link, or its folder, exchanges it between the look and the start.
TEST_F(TrustedPathTest, LinksAndTheirFoldersAreJudgedAsTheFileIs) {
  make_link("alice/criu", at("root/criu"), 0);
  EXPECT_EQ(why_not("alice/criu"), at("alice") + " belongs to user 65533");
  make_link("root/hers", "criu", kAlice);
  EXPECT_EQ(why_not("root/hers"), at("root/hers") + " belongs to user 65533");
  make_link("root/over-hers", "../alice/criu", 0);
  EXPECT_EQ(why_not("root/over-hers"), at("alice") + " belongs to user 65533");
  make_link("root/back", "../alice/../root/criu", 0);
  EXPECT_EQ(why_not("root/back"), at("alice") + " belongs to user 65533");
}

TEST_F(TrustedPathTest, WhatOthersMayWriteIsNotRun) {
  make_program("root/open", 0, 0777);
  EXPECT_EQ(why_not("root/open"), "others may write to " + at("root/open"));
  make_folder("shared", 0, 0777);
  make_program("shared/criu", 0);
  EXPECT_EQ(why_not("shared/criu"), "others may write to " + at("shared"));
  make_folder("group", 0, 0775);
  ASSERT_EQ(::chown(at("group").c_str(), 0, kAlice), 0);
  make_program("group/criu", 0);
  EXPECT_EQ(why_not("group/criu"), "others may write to " + at("group"));
}

TEST_F(TrustedPathTest, InAStickyFolderOnlyRootsOwnEntriesCount) {
  make_folder("sticky", 0, 01777);
  make_program("sticky/criu", 0);
  EXPECT_EQ(judge_path(at("sticky/criu")).path, at("sticky/criu"));
  make_program("sticky/hers", kAlice);
  EXPECT_EQ(why_not("sticky/hers"), at("sticky/hers") + " belongs to user 65533");
}

TEST_F(TrustedPathTest, LinksThatLeadNowhereEnd) {
  make_link("root/round", "round", 0);
  EXPECT_NE(why_not("root/round").find("too many links"), std::string::npos);
  make_link("root/nowhere", "missing/criu", 0);
  EXPECT_NE(why_not("root/nowhere").find("cannot be checked"), std::string::npos);
}

}  // namespace
}  // namespace stasis::proc
