#include "job/images.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis::job {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

class JobImages : public ::testing::Test {
 protected:
  JobImages() {
    std::string form = (fs::temp_directory_path() / "stasis-job-XXXXXX").string();
    top_ = ::mkdtemp(form.data());
  }
  ~JobImages() override { fs::remove_all(top_); }

  std::string dir() const { return (top_ / "job").string(); }
  // A directory with a manifest, which is what counts as complete.
  void make(const std::string& name, bool complete = true) const {
    fs::create_directories(top_ / "job" / name);
    if (complete) std::ofstream(top_ / "job" / name / "manifest.json") << "{}";
  }
  bool has(const std::string& name) const { return fs::exists(top_ / "job" / name); }

 private:
  fs::path top_;
};

TEST_F(JobImages, ASecondOneIsRefusedNamingTheFirst) {
  auto first = Images::open(dir());
  ASSERT_TRUE(first) << first.error().to_string();
  auto second = Images::open(dir());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kBusy);
  EXPECT_THAT(second.error().message, ::testing::HasSubstr(std::to_string(::getpid())));
}

TEST_F(JobImages, WhatOthersMayHaveWrittenIntoTheLockNamesNoProcess) {
  auto first = Images::open(dir());
  ASSERT_TRUE(first) << first.error().to_string();
  const std::string lock = dir() + "/lock";
  ASSERT_EQ(::chmod(lock.c_str(), 0666), 0);
  const auto second = Images::open(dir());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kBusy);
  EXPECT_THAT(second.error().message,
              ::testing::Not(::testing::HasSubstr(std::to_string(::getpid()))));
  if (::geteuid() != 0) return;
  ASSERT_EQ(::chmod(lock.c_str(), 0600), 0);
  ASSERT_EQ(::chown(lock.c_str(), 65431, 65431), 0);
  const auto third = Images::open(dir());
  ASSERT_FALSE(third);
  EXPECT_THAT(third.error().message,
              ::testing::Not(::testing::HasSubstr(std::to_string(::getpid()))));
}

TEST_F(JobImages, WhatTheyMadeGoesUnlessAJobHasBegun) {
  { const auto images = Images::open(dir()); }
  EXPECT_FALSE(fs::exists(dir()));
  fs::create_directory(dir());
  { const auto images = Images::open(dir()); }
  EXPECT_TRUE(fs::exists(dir())) << "made by another";
  EXPECT_FALSE(has("lock"));
  {
    auto images = Images::open(dir());
    ASSERT_TRUE(images) << images.error().to_string();
    EXPECT_FALSE(Images::open(dir()));
    EXPECT_TRUE(has("lock")) << "removed by one that was refused";
    images->keep();
  }
  EXPECT_TRUE(has("lock"));
  { const auto images = Images::open(dir()); }
  EXPECT_TRUE(has("lock")) << "made by an earlier run";
}

TEST_F(JobImages, WhoElseMayRenameThemIsKnown) {
  auto images = Images::open(dir());
  ASSERT_TRUE(images) << images.error().to_string();
  EXPECT_THAT(images->who_may_rename(), ElementsAre());
  if (::geteuid() != 0) return;
  ::unsetenv("SUDO_UID");
  ASSERT_EQ(::chown(dir().c_str(), 65431, 65431), 0);
  EXPECT_THAT(images->who_may_rename(), ElementsAre(dir() + " belongs to user 65431"));
  ::setenv("SUDO_UID", "65431", 1);
  EXPECT_THAT(images->who_may_rename(), ElementsAre());
  ::unsetenv("SUDO_UID");
}

// Its owner gives the folder another name, and puts that of another job in its place.
TEST_F(JobImages, WhoElseMayRenameAFolderAboveThemIsKnown) {
  if (::geteuid() != 0) GTEST_SKIP() << "folders of two users need root";
  ::unsetenv("SUDO_UID");
  const std::string above = dir() + "/above";
  const std::string shared = above + "/shared";
  for (const std::string& folder : {above, shared, shared + "/sticky"})
    std::filesystem::create_directories(folder);
  ASSERT_EQ(::chown(above.c_str(), 65431, 65431), 0);
  ASSERT_EQ(::chmod(shared.c_str(), 0777), 0);
  ASSERT_EQ(::chmod((shared + "/sticky").c_str(), 01777), 0);
  auto images = Images::open(shared + "/sticky/job");
  ASSERT_TRUE(images) << images.error().to_string();
  EXPECT_THAT(images->who_may_rename(),
              ElementsAre(above + " belongs to user 65431", "others may write to " + shared));
}

TEST_F(JobImages, AFolderInThePlaceOfTheOpenedOneIsRefused) {
  auto images = Images::open(dir());
  ASSERT_TRUE(images) << images.error().to_string();
  EXPECT_TRUE(images->check_place());
  std::filesystem::rename(dir(), dir() + ".old");
  EXPECT_FALSE(images->check_place());
  std::filesystem::create_directory_symlink(dir() + ".old", dir());
  EXPECT_TRUE(images->check_place());
  std::filesystem::remove(dir());
  std::filesystem::create_directories(dir());
  const auto there = images->check_place();
  ASSERT_FALSE(there);
  EXPECT_EQ(there.error().code, ErrorCode::kNotPermitted);
  EXPECT_FALSE(images->clear());
  std::filesystem::remove_all(dir() + ".old");
}

TEST_F(JobImages, WhatIsNoFileInPlaceOfTheLockIsNamed) {
  std::filesystem::create_directories(dir());
  ASSERT_EQ(::mkfifo((dir() + "/lock").c_str(), 0600), 0);
  const auto images = Images::open(dir());
  ASSERT_FALSE(images);
  EXPECT_THAT(images.error().message, ::testing::HasSubstr("is not a regular file"));
}

TEST_F(JobImages, TheNewestComeFirstAndHalfOnesDoNotCount) {
  auto images = Images::open(dir());
  ASSERT_TRUE(images);
  EXPECT_EQ(*images->next(), 1);
  make("000002");
  make("000010");
  make("000011", false);
  make("000012.partial-0123456789abcdef", false);
  make("notes");
  make("0000x1");
  EXPECT_THAT(*images->complete(), ElementsAre(10, 2));
  EXPECT_EQ(*images->next(), 13);
  images->damaged(10);
  EXPECT_THAT(*images->complete(), ElementsAre(2));
}

TEST_F(JobImages, AFolderStandsForItsNewestAndAnImageForItself) {
  make("000009");
  make("000010");
  make("000011", false);
  EXPECT_EQ(image_in(dir()), dir() + "/000010");
  EXPECT_EQ(image_in(dir() + "/000009"), dir() + "/000009");
  EXPECT_EQ(image_in(dir() + "/none"), dir() + "/none");
}

TEST_F(JobImages, KeepsTheNewestThatAreSoundAndWhatIsNotItsOwn) {
  auto images = Images::open(dir());
  ASSERT_TRUE(images);
  for (const char* name : {"000001", "000002", "000003", "000004", "notes"})
    make(name);
  std::ofstream(dir() + "/000001.failed-dump.log") << "log";
  images->damaged(3);
  EXPECT_THAT(*images->remove_old(2), ElementsAre(1));
  EXPECT_FALSE(has("000001.failed-dump.log"));
  EXPECT_TRUE(has("000002") && has("000003") && has("000004") && has("notes"));
  EXPECT_THAT(*images->remove_old(1), ElementsAre(2, 3));
  EXPECT_THAT(*images->remove_old(1), IsEmpty());
  EXPECT_TRUE(has("000004") && has("notes") && has("lock"));
}

TEST_F(JobImages, ThatAJobIsDoneIsKnownOfItsWordAndItsCommand) {
  auto images = Images::open(dir());
  ASSERT_TRUE(images);
  EXPECT_FALSE(images->is_done("7.0", {"train", "x"}));
  ASSERT_TRUE(images->note_done("7.0", {"train", "x"}));
  ASSERT_TRUE(images->note_done("7.1", {"test"}));
  EXPECT_TRUE(images->is_done("7.0", {"train", "x"}));
  EXPECT_TRUE(images->is_done("7.1", {"test"}));
  EXPECT_FALSE(images->is_done("7.0", {"train"}));
  EXPECT_FALSE(images->is_done("7", {"train", "x"}));
  EXPECT_EQ(*images->next(), 1);
  std::ofstream(dir() + "/done-7.1") << "[";
  EXPECT_FALSE(images->is_done("7.1", {"test"}));
  std::ofstream(dir() + "/done-7.1")
      << R"({"command":)" << std::string(1'000'000, '[') << std::string(1'000'000, ']') << "}";
  EXPECT_FALSE(images->is_done("7.1", {"test"}));
  for (const char* word : {"", "a/b", "a b"})
    EXPECT_FALSE(Images::check_word(word)) << word;
}

TEST_F(JobImages, WhatAKilledRemovalOrDumpHasLeftIsClearedAway) {
  auto images = Images::open(dir());
  ASSERT_TRUE(images);
  make("000001.removing");
  make("000003");
  make("000004.partial-0123456789abcdef", false);
  auto removed = images->clear();
  ASSERT_TRUE(removed) << removed.error().to_string();
  EXPECT_EQ(removed->removed.size(), 2U);
  EXPECT_THAT(removed->failed, IsEmpty());
  EXPECT_FALSE(has("000001.removing") || has("000004.partial-0123456789abcdef"));
  EXPECT_TRUE(has("000003"));
}

}  // namespace
}  // namespace stasis::job
