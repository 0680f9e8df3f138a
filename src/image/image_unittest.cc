// Writer and reader together, on a real file system.
// Long because each case writes and reads an image with the same fixture.
#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <stop_token>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "image/checksum.h"
#include "image/directory.h"
#include "image/image_reader.h"
#include "image/image_test_support.h"
#include "image/image_writer.h"

namespace stasis {
namespace {

namespace fs = std::filesystem;

class ImageTest : public testing::Test {
 protected:
  TemporaryDirectory dir_;
  std::string image_ = dir_ / "image";
  NoProgress progress_;
  Interrupt interrupt_;

  static void fill(const ImageWriter& writer, const std::string& pages = "pages") {
    write_text(writer.path() + "/criu/pages-1.img", pages);
    write_text(writer.path() + "/criu/core-100.img", "core");
    write_text(writer.path() + "/criu/empty.img", "");
    write_text(writer.path() + "/log/dump.log", "all went well\n");
  }
  ImageWriter created(bool overwrite = false) {
    auto writer = ImageWriter::create(image_, overwrite);
    EXPECT_TRUE(writer) << writer.error().to_string();
    return std::move(*writer);
  }
  void make_image(const std::string& pages = "pages", bool overwrite = false) {
    ImageWriter writer = created(overwrite);
    fill(writer, pages);
    auto sealed = writer.seal(sample_manifest(), SyncPolicy::kDisk, progress_, interrupt_);
    ASSERT_TRUE(sealed) << sealed.error().to_string();
    auto done = writer.commit();
    ASSERT_TRUE(done) << done.error().to_string();
  }
  Error open_error(const std::string& path) {
    auto reader = ImageReader::open(path);
    EXPECT_FALSE(reader);
    return reader ? Error{} : reader.error();
  }
  Error verify_error() {
    auto reader = ImageReader::open(image_);
    if (!reader) return reader.error();
    auto verified = reader->verify(progress_, interrupt_);
    EXPECT_FALSE(verified);
    return verified ? Error{} : verified.error();
  }
  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir_.path())) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  using Names = std::vector<std::string>;
};

// The digests taken while CRIU writes are those of the file as it is in the end.
TEST_F(ImageTest, DigestsTakenAheadAreThoseOfTheWholeFile) {
  ImageWriter writer = created();
  fill(writer);
  const std::stop_source never;
  std::string pages;
  for (const std::size_t blocks : {1U, 2U, 2U, 5U, 6U}) {
    while (pages.size() < blocks * kChecksumBlock + blocks)
      pages += std::string(1000, '.') + std::to_string(pages.size());
    write_text(writer.path() + "/criu/pages-1.img", pages);
    writer.prefetch_digests(never.get_token());
  }
  std::stop_source now;
  now.request_stop();
  pages += std::string(3 * kChecksumBlock, 'x');
  write_text(writer.path() + "/criu/pages-1.img", pages);
  writer.prefetch_digests(now.get_token());
  auto sealed = writer.seal(sample_manifest(), SyncPolicy::kNone, progress_, interrupt_);
  ASSERT_TRUE(sealed) << sealed.error().to_string();
  ASSERT_TRUE(writer.commit());
  auto reader = ImageReader::open(image_);
  ASSERT_TRUE(reader);
  auto verified = reader->verify(progress_, interrupt_);
  EXPECT_TRUE(verified) << verified.error().to_string();
}

TEST_F(ImageTest, IsWrittenAndReadBack) {
  ImageWriter writer = created();
  EXPECT_NE(writer.path(), image_);
  EXPECT_EQ(writer.final_path(), image_);
  fill(writer);
  auto sealed = writer.seal(sample_manifest(), SyncPolicy::kDisk, progress_, interrupt_);
  ASSERT_TRUE(sealed) << sealed.error().to_string();
  EXPECT_EQ(writer.path(), image_);
  ASSERT_TRUE(writer.commit());
  EXPECT_EQ(entries(), Names{"image"});

  auto reader = ImageReader::open(image_);
  ASSERT_TRUE(reader) << reader.error().to_string();
  EXPECT_EQ(reader->manifest(), *sealed);
  EXPECT_EQ(reader->manifest().total_bytes, 9U);
  ASSERT_EQ(reader->manifest().files.size(), 3U);
  EXPECT_EQ(reader->manifest().files[2].path, "criu/pages-1.img");
  ASSERT_EQ(reader->manifest().phases.size(), 4U);
  EXPECT_EQ(reader->manifest().phases[2].name, "checksums");
  auto verified = reader->verify(progress_, interrupt_);
  EXPECT_TRUE(verified) << verified.error().to_string();
}

TEST_F(ImageTest, IsForItsOwnerOnly) {
  const mode_t old = ::umask(0);
  make_image();
  ::umask(old);
  const auto mode = [&](const std::string& name) {
    struct stat info = {};
    EXPECT_EQ(::stat((image_ + name).c_str(), &info), 0);
    return info.st_mode & 07777;
  };
  EXPECT_EQ(mode(""), 0700U);
  EXPECT_EQ(mode("/criu"), 0700U);
  EXPECT_EQ(mode("/log"), 0700U);
  EXPECT_EQ(mode("/manifest.json"), 0600U);
  EXPECT_EQ(mode("/criu/pages-1.img"), 0600U);
}

TEST_F(ImageTest, TheTimeOfWritingIsSetWhereItIsMissing) {
  ImageWriter writer = created();
  fill(writer);
  Manifest manifest = sample_manifest();
  manifest.created.clear();
  auto sealed = writer.seal(manifest, SyncPolicy::kNone, progress_, interrupt_);
  ASSERT_TRUE(sealed) << sealed.error().to_string();
  EXPECT_EQ(sealed->created.size(), 20U);
  EXPECT_EQ(sealed->sync, SyncPolicy::kNone);
}

TEST_F(ImageTest, NothingIsLeftOfAWriterThatDidNotSeal) {
  {
    ImageWriter writer = created();
    write_text(writer.path() + "/criu/pages-1.img", "x");
    EXPECT_EQ(entries().size(), 1U);
  }
  EXPECT_EQ(entries(), Names{});
}

TEST_F(ImageTest, TheLogOfAFailedDumpIsKeptUntilADumpSucceeds) {
  {
    ImageWriter writer = created();
    fill(writer);
    EXPECT_EQ(writer.failed_log_path(), image_ + ".failed-dump.log");
  }
  EXPECT_EQ(entries(), Names{"image.failed-dump.log"});
  EXPECT_EQ(read_text(image_ + ".failed-dump.log"), "all went well\n");
  make_image();
  EXPECT_EQ(entries(), Names{"image"});
}

TEST_F(ImageTest, SealedButNotCommittedIsUndone) {
  {
    ImageWriter writer = created();
    fill(writer);
    fs::remove(writer.path() + "/log/dump.log");
    ASSERT_TRUE(writer.seal(sample_manifest(), SyncPolicy::kNone, progress_, interrupt_));
    EXPECT_TRUE(fs::exists(image_ + "/manifest.json"));
  }
  EXPECT_EQ(entries(), Names{});
}

TEST_F(ImageTest, AnExistingImageIsKeptUnlessToldOtherwise) {
  make_image("old");
  auto writer = ImageWriter::create(image_, false);
  ASSERT_FALSE(writer);
  EXPECT_EQ(writer.error().code, ErrorCode::kImageExists);
  EXPECT_NE(writer.error().remedy.find("--force"), std::string::npos);
}

TEST_F(ImageTest, AReplacedImageIsThereAtEveryInstantAndComesBackIfDiscarded) {
  make_image("old");
  {
    ImageWriter writer = created(true);
    fill(writer, "new");
    EXPECT_EQ(read_text(image_ + "/criu/pages-1.img"), "old");
    ASSERT_TRUE(writer.seal(sample_manifest(), SyncPolicy::kNone, progress_, interrupt_));
    EXPECT_EQ(read_text(image_ + "/criu/pages-1.img"), "new");
    EXPECT_EQ(entries().size(), 2U);
    ASSERT_TRUE(writer.discard());
    EXPECT_EQ(read_text(image_ + "/criu/pages-1.img"), "old");
  }
  fs::remove(image_ + ".failed-dump.log");
  EXPECT_EQ(entries(), Names{"image"});
  make_image("new", true);
  EXPECT_EQ(read_text(image_ + "/criu/pages-1.img"), "new");
  EXPECT_EQ(entries(), Names{"image"});
}

TEST_F(ImageTest, AnEmptyDirectoryIsReplacedAndComesBackIfDiscarded) {
  fs::create_directory(image_);
  fs::permissions(image_, fs::perms(0711));
  {
    ImageWriter writer = created();
    fill(writer);
    ASSERT_TRUE(writer.seal(sample_manifest(), SyncPolicy::kNone, progress_, interrupt_));
  }
  EXPECT_TRUE(fs::is_empty(image_));
  EXPECT_EQ(fs::status(image_).permissions(), fs::perms(0711));
  make_image();
  EXPECT_EQ(entries(), (Names{"image"}));
}

TEST_F(ImageTest, ADirectoryThatIsNoImageIsNeverReplaced) {
  fs::create_directories(image_ + "/criu");
  write_text(image_ + "/manifest.json", "{}");
  write_text(image_ + "/thesis.tex", "years of work");
  auto writer = ImageWriter::create(image_, true);
  ASSERT_FALSE(writer);
  EXPECT_EQ(writer.error().code, ErrorCode::kImageExists);
  EXPECT_NE(writer.error().message.find("thesis.tex"), std::string::npos);
  fs::remove(image_ + "/thesis.tex");
  // Another program's manifest.json, none, and one of ours that was edited.
  const auto refused = [&] {
    for (const bool overwrite : {false, true}) {
      auto again = ImageWriter::create(image_, overwrite);
      ASSERT_FALSE(again);
      EXPECT_EQ(again.error().code, ErrorCode::kImageExists);
      EXPECT_EQ(again.error().remedy.find("--force"), std::string::npos);
    }
  };
  refused();
  fs::remove(image_ + "/manifest.json");
  refused();
  fs::remove_all(image_);
  make_image();
  std::string text = read_text(image_ + "/manifest.json");
  write_text(image_ + "/manifest.json", "\n" + text);
  refused();
  write_text(image_ + "/manifest.json", text);
  EXPECT_TRUE(ImageWriter::create(image_, true));

  write_text(dir_ / "file", "");
  EXPECT_EQ(ImageWriter::create(dir_ / "file", true).error().code, ErrorCode::kImageExists);
  fs::create_symlink(image_, dir_ / "link");
  EXPECT_EQ(ImageWriter::create(dir_ / "link", true).error().code, ErrorCode::kImageExists);
}

TEST_F(ImageTest, ADirectoryFilledDuringTheDumpIsNotReplaced) {
  fs::create_directory(image_);
  ImageWriter writer = created();
  fill(writer);
  write_text(image_ + "/mine", "precious");
  auto sealed = writer.seal(sample_manifest(), SyncPolicy::kNone, progress_, interrupt_);
  ASSERT_FALSE(sealed);
  EXPECT_EQ(sealed.error().code, ErrorCode::kImageExists);
  EXPECT_EQ(read_text(image_ + "/mine"), "precious");
}

TEST_F(ImageTest, OneThatAnotherUserMovesAwayIsNotSaidToBeThere) {
  ImageWriter writer = created();
  fill(writer);
  const auto partial =
      *std::find_if(fs::directory_iterator(dir_ / ""), fs::directory_iterator(),
                    [](const fs::directory_entry& entry) {
                      return entry.path().string().find(".partial-") != std::string::npos;
                    });
  fs::rename(partial, dir_ / "stolen");
  fs::create_directory(partial);
  auto sealed = writer.seal(sample_manifest(), SyncPolicy::kNone, progress_, interrupt_);
  ASSERT_FALSE(sealed);
  EXPECT_EQ(sealed.error().code, ErrorCode::kNotPermitted);
  EXPECT_FALSE(fs::exists(image_));
}

// By a user to whom a folder above belongs.
TEST_F(ImageTest, AFolderInThePlaceOfTheRightOneGetsNoImage) {
  const std::string folder = dir_ / "job";
  const std::string other = dir_ / "other";
  fs::create_directory(folder);
  fs::create_directory(other);
  const auto opened = open_file(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY);
  ASSERT_TRUE(opened);
  const auto id = folder_id(*opened);
  ASSERT_TRUE(id);
  EXPECT_TRUE(ImageWriter::probe(folder + "/image", false, *id));
  auto writer = ImageWriter::create(folder + "/image", false, *id);
  ASSERT_TRUE(writer) << writer.error().to_string();
  fill(*writer);
  fs::rename(folder, folder + ".old");
  fs::create_directory_symlink(other, folder);
  const auto sealed = writer->seal(sample_manifest(), SyncPolicy::kDisk, progress_, interrupt_);
  ASSERT_FALSE(sealed);
  EXPECT_EQ(sealed.error().code, ErrorCode::kNotPermitted);
  EXPECT_FALSE(ImageWriter::probe(folder + "/image", false, *id));
  EXPECT_FALSE(ImageWriter::create(folder + "/image", false, *id));
  EXPECT_TRUE(fs::is_empty(other));
  EXPECT_FALSE(fs::exists(folder + ".old/image"));
  make_image();
  const auto image = ImageReader::open(image_);
  ASSERT_TRUE(image);
  EXPECT_EQ(image->check_place(*id).error().code, ErrorCode::kNotPermitted);
}

TEST_F(ImageTest, NamesThatAreNoNamesAreRefused) {
  for (const char* path : {"", "/", ".", "..", "a/..", "a/."}) {
    EXPECT_EQ(ImageWriter::create(path, false).error().code, ErrorCode::kUsage) << path;
  }
  EXPECT_EQ(ImageWriter::create(dir_ / "not/there", false).error().code, ErrorCode::kIo);
  EXPECT_TRUE(ImageWriter::create(image_ + "//", false));
}

TEST_F(ImageTest, ANameWithoutRoomForALongerOneIsRefused) {
  EXPECT_TRUE(ImageWriter::create(dir_ / std::string(229, 'x'), false));
  const auto refused = ImageWriter::probe(dir_ / std::string(230, 'x'), false);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUsage);
  EXPECT_NE(refused.error().remedy.find("at most 229"), std::string::npos)
      << refused.error().remedy;
}

TEST_F(ImageTest, AnInterruptAndAnUnwritableManifestUndoTheSeal) {
  {
    ImageWriter writer = created();
    fill(writer);
    Interrupt interrupt;
    interrupt.request(SIGINT);
    auto sealed = writer.seal(sample_manifest(), SyncPolicy::kDisk, progress_, interrupt);
    ASSERT_FALSE(sealed);
    EXPECT_EQ(sealed.error().code, ErrorCode::kInterrupted);
  }
  ImageWriter writer = created();
  fill(writer);
  Manifest manifest = sample_manifest();
  manifest.processes.clear();
  auto sealed = writer.seal(manifest, SyncPolicy::kNone, progress_, interrupt_);
  ASSERT_FALSE(sealed);
  EXPECT_EQ(sealed.error().code, ErrorCode::kInternal);
  EXPECT_EQ(entries(), Names{"image.failed-dump.log"});
}

TEST_F(ImageTest, ALinkAmongCriusFilesIsRefused) {
  ImageWriter writer = created();
  fill(writer);
  fs::create_symlink("/etc/passwd", writer.path() + "/criu/zlink.img");
  auto sealed = writer.seal(sample_manifest(), SyncPolicy::kNone, progress_, interrupt_);
  ASSERT_FALSE(sealed);
  EXPECT_TRUE(fs::exists("/etc/passwd"));
}

TEST_F(ImageTest, WhatIsNoImageIsIncompleteAndLeftoversAreNamed) {
  EXPECT_EQ(open_error(image_).code, ErrorCode::kImageIncomplete);
  fs::create_directory(image_);
  EXPECT_EQ(open_error(image_).code, ErrorCode::kImageIncomplete);
  fs::create_directory(image_ + ".partial-0123456789abcdef");
  const Error error = open_error(image_);
  EXPECT_EQ(error.code, ErrorCode::kImageIncomplete);
  EXPECT_NE(error.remedy.find(image_ + ".partial-0123456789abcdef"), std::string::npos);
}

TEST_F(ImageTest, AWholeImageWithoutItsNameIsNotCalledRubbish) {
  make_image();
  fs::rename(image_, image_ + ".swap-0123456789abcdef");
  const Error error = open_error(image_);
  EXPECT_EQ(error.code, ErrorCode::kImageIncomplete);
  EXPECT_NE(error.remedy.find(".swap-0123456789abcdef is a whole image"), std::string::npos)
      << error.remedy;
}

TEST_F(ImageTest, EntriesAreSwappedWithAndWithoutTheKernelsHelp) {
  for (const bool exchange : {true, false}) {
    write_text(dir_ / "final", "old");
    write_text(dir_ / "new", "new");
    auto entry = split_path(dir_ / "final");
    ASSERT_TRUE(entry);
    auto old_name = swap_entries(*entry, "new", "aside", "hold", exchange);
    ASSERT_TRUE(old_name) << old_name.error().to_string();
    EXPECT_EQ(*old_name, "aside");
    EXPECT_EQ(read_text(dir_ / "final"), "new");
    EXPECT_EQ(read_text(dir_ / "aside"), "old");
    EXPECT_EQ(entries(), (Names{"aside", "final"}));
    EXPECT_FALSE(swap_entries(*entry, "missing", "aside", "hold", exchange));
    EXPECT_EQ(read_text(dir_ / "final"), "new");
    EXPECT_EQ(entries(), (Names{"aside", "final"}));
  }
}

TEST_F(ImageTest, EveryDamageIsFoundAndNamed) {
  const auto expect_corrupt = [&](const std::string& what) {
    const Error error = verify_error();
    EXPECT_EQ(error.code, ErrorCode::kImageCorrupt);
    EXPECT_NE(error.message.find(what), std::string::npos) << error.to_string();
    fs::remove_all(image_);
    make_image();
  };
  make_image();
  write_text(image_ + "/criu/pages-1.img", "pagez");
  expect_corrupt("criu/pages-1.img has the checksum ");
  write_text(image_ + "/criu/pages-1.img", "page");
  expect_corrupt("criu/pages-1.img has 4 bytes, expected 5");
  fs::remove(image_ + "/criu/core-100.img");
  expect_corrupt("core-100.img");
  write_text(image_ + "/criu/extra.img", "");
  expect_corrupt("criu/extra.img is there but not in the manifest");
  fs::remove(image_ + "/criu/core-100.img");
  write_text(dir_ / "elsewhere", "core");
  fs::create_symlink(dir_ / "elsewhere", image_ + "/criu/core-100.img");
  expect_corrupt("core-100.img");
  fs::remove(image_ + "/criu/core-100.img");
  ASSERT_EQ(::mkfifo((image_ + "/criu/core-100.img").c_str(), 0600), 0);
  expect_corrupt("core-100.img is no regular file");
  fs::rename(image_ + "/criu", dir_ / "moved");
  fs::create_symlink(dir_ / "moved", image_ + "/criu");
  expect_corrupt("criu");
  fs::remove_all(dir_ / "moved");
  fs::rename(image_ + "/manifest.json", dir_ / "moved");
  fs::create_symlink(dir_ / "moved", image_ + "/manifest.json");
  expect_corrupt("manifest.json");
}

// A device does something when it is opened, and a pipe tells its other end.
TEST_F(ImageTest, WhatIsNoRegularFileIsNotOpened) {
  make_image();
  fs::remove(image_ + "/manifest.json");
  ASSERT_EQ(::mkfifo((image_ + "/manifest.json").c_str(), 0600), 0);
  const UniqueFd watch(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  ASSERT_GE(::inotify_add_watch(watch.get(), (image_ + "/manifest.json").c_str(), IN_OPEN), 0);
  EXPECT_THAT(ImageReader::open(image_).error().message, testing::HasSubstr("is no regular file"));
  EXPECT_FALSE(ImageWriter::create(image_, true));
  std::array<char, 256> events{};
  EXPECT_LT(::read(watch.get(), events.data(), events.size()), 0) << "it was opened";
}

TEST_F(ImageTest, AKilledWriterLeavesNoImageAndNoHarm) {
  make_image("old");
  const pid_t child = ::fork();
  if (child == 0) {
    auto writer = ImageWriter::create(image_, true);
    if (writer) fill(*writer, "new");
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(read_text(image_ + "/criu/pages-1.img"), "old");
  ASSERT_EQ(find_leftovers(image_).size(), 1U);
  EXPECT_EQ(open_error(find_leftovers(image_)[0].path).code, ErrorCode::kImageIncomplete);
}

TEST_F(ImageTest, AWriterAtWorkIsToldFromOneThatWasKilled) {
  make_image("old");
  {
    ImageWriter writer = created(true);
    fill(writer, "new");
    ASSERT_EQ(find_leftovers(image_).size(), 1U);
    EXPECT_EQ(find_leftovers(image_)[0].in_use, InUse::kYes);
    ASSERT_TRUE(writer.seal(sample_manifest(), SyncPolicy::kNone, progress_, interrupt_));
    ASSERT_EQ(find_leftovers(image_).size(), 1U);
    EXPECT_EQ(find_leftovers(image_)[0].in_use, InUse::kYes) << "what it replaces";
    fs::rename(image_, image_ + ".away");
    const Error error = open_error(image_);
    fs::rename(image_ + ".away", image_);
    EXPECT_NE(error.remedy.find("under way"), std::string::npos) << error.remedy;
    EXPECT_EQ(error.remedy.find("deleted"), std::string::npos) << error.remedy;
    ASSERT_TRUE(writer.commit());
  }
  fs::create_directory(image_ + ".partial-0123456789abcdef");
  ASSERT_EQ(find_leftovers(image_).size(), 1U);
  EXPECT_EQ(find_leftovers(image_)[0].in_use, InUse::kNo);
}

TEST_F(ImageTest, WhatAKilledDumpHasLeftIsCleared) {
  const std::string partial = image_ + ".partial-0123456789abcdef";
  fs::create_directory(partial);
  write_text(partial + "/manifest.json", "half of");
  auto removed = clear_leftovers(image_, true);
  ASSERT_TRUE(removed) << removed.error().to_string();
  ASSERT_EQ(removed->removed.size(), 1U);
  EXPECT_FALSE(fs::exists(partial));
  // A whole one may be all there is of a job.
  make_image("whole");
  fs::rename(image_, partial);
  ASSERT_TRUE(clear_leftovers(image_, true));
  EXPECT_TRUE(fs::exists(partial));
  ASSERT_TRUE(clear_leftovers(image_, false));
  EXPECT_FALSE(fs::exists(partial));
}

TEST_F(ImageTest, AnOldImageThatWasPutAsideGetsItsNameBackOrGoes) {
  const std::string aside = image_ + ".replaced-0123456789abcdef";
  make_image("old");
  fs::rename(image_, aside);
  ASSERT_TRUE(clear_leftovers(image_, true));
  EXPECT_FALSE(fs::exists(aside));
  ASSERT_TRUE(ImageReader::open(image_));
  fs::copy(image_, aside, fs::copy_options::recursive);
  ASSERT_TRUE(clear_leftovers(image_, true));
  EXPECT_FALSE(fs::exists(aside));
  ASSERT_TRUE(ImageReader::open(image_)) << "the new one stays";
}

TEST_F(ImageTest, ADumpThatIsUnderWayIsNotCleared) {
  ImageWriter writer = created(false);
  fill(writer, "new");
  auto removed = clear_leftovers(image_, false);
  ASSERT_TRUE(removed);
  EXPECT_TRUE(removed->removed.empty());
  EXPECT_TRUE(writer.seal(sample_manifest(), SyncPolicy::kNone, progress_, interrupt_));
}

TEST_F(ImageTest, ALogIsSavedWithoutFollowingOrReplacingAnything) {
  make_image();
  auto reader = ImageReader::open(image_);
  ASSERT_TRUE(reader);
  write_text(dir_ / "source", "what CRIU said");
  auto source = open_file(AT_FDCWD, dir_ / "source", O_RDONLY);
  ASSERT_TRUE(source);
  write_text(dir_ / "victim", "precious");
  fs::create_symlink(dir_ / "victim", image_ + "/log/restore.log");
  auto saved = reader->save_log(*source, "restore.log");
  ASSERT_TRUE(saved) << saved.error().to_string();
  EXPECT_EQ(*saved, image_ + "/log/restore.log.2");
  EXPECT_EQ(read_text(*saved), "what CRIU said");
  EXPECT_EQ(read_text(dir_ / "victim"), "precious");
  fs::remove_all(image_ + "/log");
  EXPECT_TRUE(reader->save_log(*source, "restore.log")) << "made anew";
  fs::remove_all(image_ + "/log");
  fs::create_directory(dir_ / "elsewhere");
  fs::create_symlink(dir_ / "elsewhere", image_ + "/log");
  EXPECT_FALSE(reader->save_log(*source, "restore.log"));
  EXPECT_TRUE(fs::is_empty(dir_ / "elsewhere"));
}

TEST_F(ImageTest, ALargerImageIsCheckedInBlocks) {
  make_image(std::string(40U << 20, 'x'));
  auto reader = ImageReader::open(image_);
  ASSERT_TRUE(reader) << reader.error().to_string();
  EXPECT_TRUE(reader->verify(progress_, interrupt_));
  const int fd = ::open((image_ + "/criu/pages-1.img").c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_EQ(::pwrite(fd, "y", 1, 39 << 20), 1);
  ::close(fd);
  EXPECT_NE(verify_error().message.find("criu/pages-1.img has the checksum"), std::string::npos);
  Interrupt interrupt;
  interrupt.request(SIGINT);
  EXPECT_EQ(reader->verify(progress_, interrupt).error().code, ErrorCode::kInterrupted);
}

TEST_F(ImageTest, AFullDiskIsSaidWithFigures) {
  const std::string small = dir_ / "small";
  fs::create_directory(small);
  if (::mount("none", small.c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "cannot mount";
  image_ = small + "/image";
  {
    ImageWriter writer = created();
    write_text(writer.path() + "/criu/pages-1.img", std::string(2U << 20, 'x'));
    auto sealed = writer.seal(sample_manifest(), SyncPolicy::kDisk, progress_, interrupt_);
    ASSERT_FALSE(sealed);
    EXPECT_EQ(sealed.error().code, ErrorCode::kNoSpace) << sealed.error().to_string();
    EXPECT_NE(sealed.error().message.find("0 B free"), std::string::npos);
  }
  EXPECT_TRUE(fs::is_empty(small));
  EXPECT_EQ(::umount2(small.c_str(), MNT_DETACH), 0);
}

TEST_F(ImageTest, ManyFilesNeedFewDescriptors) {
  struct rlimit old = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  ImageWriter writer = created();
  for (int i = 0; i < 500; ++i) {
    write_text(writer.path() + "/criu/core-" + std::to_string(i) + ".img", std::to_string(i));
  }
  const struct rlimit few = {64, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  auto sealed = writer.seal(sample_manifest(), SyncPolicy::kDeferred, progress_, interrupt_);
  EXPECT_TRUE(sealed) << sealed.error().to_string();
  auto synced = writer.sync(progress_, interrupt_);
  EXPECT_TRUE(synced) << synced.error().to_string();
  auto reader = ImageReader::open(image_);
  EXPECT_TRUE(reader && reader->verify(progress_, interrupt_));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
}

}  // namespace
}  // namespace stasis
