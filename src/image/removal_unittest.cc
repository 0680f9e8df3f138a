#include "image/removal.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include <gtest/gtest.h>

#include "base/error.h"

namespace stasis {
namespace {

namespace fs = std::filesystem;

class Removal : public ::testing::Test {
 protected:
  Removal() {
    std::string form = (fs::temp_directory_path() / "stasis-removal-XXXXXX").string();
    top_ = ::mkdtemp(form.data());
    fs::create_directory(top_ / "in");
  }
  ~Removal() override { fs::remove_all(top_); }

  fs::path in() const { return top_ / "in"; }
  fs::path top() const { return top_; }
  // What an image has, and what it has not.
  void make(const std::string& name, const std::string& other = {}) const {
    for (const char* folder : {"criu", "gpu", "log"})
      fs::create_directories(in() / name / folder);
    std::ofstream(in() / name / "criu" / "pages-1.img") << "pages";
    std::ofstream(in() / name / "manifest.json") << "{}";
    if (!other.empty()) std::ofstream(in() / name / other) << "another's";
  }
  bool has(const std::string& name) const { return fs::exists(fs::symlink_status(in() / name)); }
  UniqueFd folder(const std::string& name = ".") const {
    return UniqueFd(::open((in() / name).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  Result<void> remove(const std::string& name, const UniqueFd* known = nullptr) const {
    return remove_image(folder(), name, (in() / name).string(), known);
  }
  void others_may_rename() const { ASSERT_EQ(::chmod(in().c_str(), 0777), 0); }

 private:
  fs::path top_;
};

TEST_F(Removal, AllBelowGoesAndNoLinkIsFollowed) {
  std::ofstream(top() / "outside") << "stays";
  make("image", "notes");
  fs::create_symlink(top(), in() / "image" / "link");
  ASSERT_TRUE(remove("image"));
  EXPECT_FALSE(has("image"));
  EXPECT_TRUE(fs::exists(top() / "outside"));
  EXPECT_TRUE(remove("image")) << "it is gone already";
  fs::create_symlink(top(), in() / "link");
  EXPECT_TRUE(remove("link"));
  EXPECT_FALSE(has("link"));
  EXPECT_TRUE(fs::exists(top() / "outside"));
}

TEST_F(Removal, WhereOthersMayRenameOnlyWhatImagesHave) {
  others_may_rename();
  make("image");
  EXPECT_TRUE(remove("image"));
  EXPECT_FALSE(has("image"));
  make("backup", "letters");
  const auto refused = remove("backup");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kNotPermitted);
  EXPECT_NE(refused.error().message.find("holds \"letters\""), std::string::npos);
  EXPECT_TRUE(has("backup/criu/pages-1.img"));
}

TEST_F(Removal, OnlyTheFolderThatIsMeant) {
  make("image");
  make("other");
  const UniqueFd own = folder("image");
  fs::rename(in() / "image", in() / "moved");
  fs::rename(in() / "other", in() / "image");
  const auto refused = remove("image", &own);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kNotPermitted);
  EXPECT_TRUE(has("image/manifest.json"));
  EXPECT_TRUE(remove("moved", &own));
  EXPECT_FALSE(has("moved"));
}

TEST_F(Removal, WhatBelongsToAnotherUserStays) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  // What that one cannot have put there goes.
  make("image");
  ASSERT_EQ(::chown((in() / "image" / "gpu").c_str(), 65431, 65431), 0);
  EXPECT_TRUE(remove("image"));
  // Where all may make folders.
  ASSERT_EQ(::chmod(in().c_str(), 01777), 0);
  make("planted");
  ASSERT_EQ(::chown((in() / "planted").c_str(), 65431, 65431), 0);
  EXPECT_FALSE(remove("planted"));
  EXPECT_TRUE(has("planted/manifest.json"));
  // In a user's folder root removes what is that user's, and no folder besides.
  ASSERT_EQ(::chmod(in().c_str(), 0755), 0);
  ASSERT_EQ(::chown(in().c_str(), 65431, 65431), 0);
  EXPECT_FALSE(remove("planted"));
  EXPECT_TRUE(has("planted/criu/pages-1.img"));
  for (const char* one : {"planted/criu", "planted/gpu", "planted/log"})
    ASSERT_EQ(::chown((in() / one).c_str(), 65431, 65431), 0);
  EXPECT_TRUE(remove("planted"));
  EXPECT_FALSE(has("planted"));
}

TEST_F(Removal, NothingPastAMountGoes) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  make("image");
  fs::create_directory(top() / "disk");
  std::ofstream(top() / "disk" / "important") << "stays";
  bool may_mount = false;
  // In a mount namespace of this thread's.
  std::thread([&] {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
      return;
    may_mount = ::mount((top() / "disk").c_str(), (in() / "image" / "gpu").c_str(), nullptr,
                        MS_BIND, nullptr) == 0;
    if (!may_mount) return;
    const auto refused = remove("image");
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().message.find("mount point"), std::string::npos)
        << refused.error().message;
  }).join();
  if (!may_mount) GTEST_SKIP() << "nothing can be mounted here";
  EXPECT_TRUE(fs::exists(top() / "disk" / "important"));
}

}  // namespace
}  // namespace stasis
