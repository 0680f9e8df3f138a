#include "operations/kept_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/fakes/child.h"
#include "tests/fakes/served_file.h"

namespace stasis {
namespace {

namespace fs = std::filesystem;

class KeptFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string text = (fs::temp_directory_path() / "stasis-kept-XXXXXX").string();
    ASSERT_NE(::mkdtemp(text.data()), nullptr);
    top_ = fs::canonical(text);
    dir_ = open_file(AT_FDCWD, top_.string(), O_RDONLY | O_DIRECTORY).value();
  }
  void TearDown() override { fs::remove_all(top_); }

  void write(const std::string& name, const std::string& text) {
    std::ofstream(top_ / name) << text;
  }
  std::string read(const std::string& name) {
    std::ifstream file(top_ / name);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // As a dump has noted that file; its content is in the image.
  KeptFile note(const std::string& name) {
    const std::string path = (top_ / name).string();
    const auto file = open_file(AT_FDCWD, path, O_RDONLY).value();
    struct stat info {};
    ::fstat(file.get(), &info);
    KeptFile out;
    out.path = path;
    out.size = static_cast<std::uint64_t>(info.st_size);
    out.mode = info.st_mode;
    out.uid = info.st_uid;
    out.gid = info.st_gid;
    out.inode = info.st_ino;
    out.mount = mount_above(path);
    out.tail = tail_digest(file, out.size).value();
    out.digest = tail_digest(file, out.size, out.size).value();
    out.modified_ns = modified_ns(info);
    out.content = 0;
    write("stasis-files-content.img", read(name));
    return out;
  }
  static NeededFile needed(const KeptFile& kept) {
    NeededFile out;
    out.path = kept.path;
    out.size = kept.size;
    out.mode = kept.mode;
    return out;
  }
  PutBack how(const KeptFile& kept) { return how_to_put_back(kept, needed(kept)); }

  fs::path top_;
  UniqueFd dir_;
  Interrupt interrupt_;
};

TEST_F(KeptFilesTest, ARecordOfAnotherFormIsDamaged) {
  EXPECT_TRUE(read_kept_files(dir_)->empty());
  const std::string rest = R"("size":1,"mode":33188,"uid":0,"gid":0,"inode":1,"born_ns":0)";
  for (const std::string& text : {
           std::string(""),
           std::string("[]"),
           std::string(R"({"version":2,"files":[]})"),
           std::string(R"({"version":1,"files":{}})"),
           std::string(R"({"version":1,"files":[1]})"),
           fmt::format(R"({{"version":1,"files":[{{"path":"x",{}}}]}})", rest),
           fmt::format(R"({{"version":1,"files":[{{"path":"/x/",{}}}]}})", rest),
           fmt::format(R"({{"version":1,"files":[{{"path":"/x\u0000",{}}}]}})", rest),
           fmt::format(R"({{"version":1,"files":[{{"path":"/x","content":-1,{}}}]}})", rest),
           fmt::format(R"({{"version":1,"files":[{{"path":"/x","names":["y"],{}}}]}})", rest),
           fmt::format(R"({{"version":1,"files":[{{"path":"/x","tail":5,{}}}]}})", rest),
           std::string(R"({"version":1,"files":[{"path":"/x","size":1,"mode":16877,"uid":0,)"
                       R"("gid":0,"inode":1,"born_ns":0}]})"),
       }) {
    write("stasis-files.json", text);
    const auto kept = read_kept_files(dir_);
    ASSERT_FALSE(kept.has_value()) << text;
    EXPECT_EQ(kept.error().code, ErrorCode::kImageCorrupt) << text;
  }
  write("stasis-files.json", fmt::format(R"({{"version":1,"files":[{{"path":"/x",{}}}]}})", rest));
  ASSERT_EQ(read_kept_files(dir_)->size(), 1U);
}

TEST_F(KeptFilesTest, ARecordOfMoreThanAnyOfOursIsDamaged) {
  std::string many = R"({"version":1,"files":[)";
  for (int i = 0; i < 600000; ++i)
    many += "{},";
  write("stasis-files.json", many + "{}]}");
  EXPECT_EQ(read_kept_files(dir_).error().code, ErrorCode::kImageCorrupt);
}

TEST_F(KeptFilesTest, AFileThatHasGrownIsCutAndOneThatIsOtherIsExchanged) {
  write("log", "one\n");
  const KeptFile kept = note("log");
  EXPECT_EQ(how(kept), PutBack::kNothing);
  write("log", "one\ntwo\n");
  EXPECT_EQ(how(kept), PutBack::kShorten);
  write("log", "ten\ntwo\n");
  EXPECT_EQ(how(kept), PutBack::kExchange);
  write("log", "o");
  EXPECT_EQ(how(kept), PutBack::kExchange);
  write("log", "ten\n");  // in place
  EXPECT_EQ(how(kept), PutBack::kExchange);
  fs::remove(top_ / "log");
  EXPECT_EQ(how(kept), PutBack::kMake);
  KeptFile without = kept;
  without.content.reset();
  EXPECT_EQ(how(without), PutBack::kNothing);
  write("log", "o");
  EXPECT_EQ(how(without), PutBack::kNothing);
}

TEST_F(KeptFilesTest, OfALongFileNoByteMayBeAnother) {
  const std::string rest(2 * kKeptTail, 'x');
  write("data", "one" + rest);
  KeptFile kept = note("data");
  EXPECT_EQ(how(kept), PutBack::kNothing);
  write("data", "two" + rest);
  EXPECT_EQ(how(kept), PutBack::kExchange);
  write("data", "two" + rest + "more");
  EXPECT_EQ(how(kept), PutBack::kExchange);
  write("data", "one" + rest + "more");
  EXPECT_EQ(how(kept), PutBack::kShorten);
  // One that is too large for the image.
  kept.content.reset();
  kept.digest.clear();
  write("data", "two" + rest);
  EXPECT_TRUE(has_changed_for_good(kept, needed(kept)));
  kept = note("data");
  kept.content.reset();
  EXPECT_FALSE(has_changed_for_good(kept, needed(kept)));
}

TEST_F(KeptFilesTest, NothingIsDoneToWhatIsNoFileOfThatOwner) {
  write("log", "one\n");
  KeptFile kept = note("log");
  fs::rename(top_ / "log", top_ / "elsewhere");
  fs::create_symlink(top_ / "elsewhere", top_ / "log");
  write("elsewhere", "one\ntwo\n");
  EXPECT_EQ(how(kept), PutBack::kNothing);
  fs::remove(top_ / "log");
  fs::create_directory(top_ / "log");
  EXPECT_EQ(how(kept), PutBack::kNothing);
  fs::remove(top_ / "log");
  write("log", "one\ntwo\n");
  kept.uid += 1;
  EXPECT_EQ(how(kept), PutBack::kNothing);
}

TEST_F(KeptFilesTest, ALogThatAnotherProgramWritesIsLeftToIt) {
  write("log", "one\n");
  const KeptFile kept = note("log");
  write("log", "one\ntwo\n");
  auto writer = open_file(AT_FDCWD, kept.path, O_WRONLY | O_APPEND);
  ASSERT_TRUE(writer);
  const fakes::Child other;
  writer = UniqueFd();
  FilesPutBack files(
      dir_, [](const std::string&) {}, interrupt_);
  const auto done = files.put_back(kept, PutBack::kShorten);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kBusy);
  EXPECT_NE(done.error().message.find(std::to_string(other.pid().value)), std::string::npos);
  EXPECT_EQ(read("log"), "one\ntwo\n");
  EXPECT_FALSE(fs::exists(top_ / "log.after-checkpoint"));
}

// Root may look at it, and would wait for the program that serves it, which has nothing to do with
// the log.
TEST_F(KeptFilesTest, AFileThatAnotherUsersProgramServesHoldsUpNoLog) {
  const fakes::OverlaidFile served;
  if (!served.is_there()) GTEST_SKIP() << "no such file can be made here";
  write("log", "one\n");
  const KeptFile kept = note("log");
  write("log", "one\ntwo\n");
  write("b", "one\n");
  KeptFile linked = note("b");
  linked.link = true;
  linked.names = {linked.path};
  linked.path = (top_ / "link_remap.stasis-1").string();
  FilesPutBack files(
      dir_, [](const std::string&) {}, interrupt_);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(files.put_back(kept, PutBack::kShorten));
  EXPECT_TRUE(files.put_back(linked, PutBack::kLink));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST_F(KeptFilesTest, WhatALinkedFileHoldsIsSetAsideAndComesBackIfTheRestoreFails) {
  write("b", "one\n");
  KeptFile kept = note("b");
  kept.link = true;
  kept.names = {kept.path};
  kept.path = (top_ / "link_remap.stasis-1").string();
  {
    FilesPutBack files(
        dir_, [](const std::string&) {}, interrupt_);
    ASSERT_TRUE(files.put_back(kept, PutBack::kLink));
    EXPECT_FALSE(fs::exists(top_ / "b.after-checkpoint")) << "it was as it had been";
    EXPECT_TRUE(fs::exists(kept.path));
  }
  write("b", "two\n");  // in place
  {
    FilesPutBack files(
        dir_, [](const std::string&) {}, interrupt_);
    ASSERT_TRUE(files.put_back(kept, PutBack::kLink));
    EXPECT_EQ(read("b"), "one\n");
  }
  EXPECT_EQ(read("b"), "two\n");
  EXPECT_FALSE(fs::exists(top_ / "b.after-checkpoint"));
  EXPECT_FALSE(fs::exists(kept.path));
  {
    FilesPutBack files(
        dir_, [](const std::string&) {}, interrupt_);
    ASSERT_TRUE(files.put_back(kept, PutBack::kLink));
    files.keep();
  }
  EXPECT_EQ(read("b"), "one\n");
  EXPECT_EQ(read("b.after-checkpoint"), "two\n");
}

TEST_F(KeptFilesTest, AnEmptyFileComesBackIfTheRestoreFailsAndIsGoneOtherwise) {
  write("log", "one\n");
  const KeptFile kept = note("log");
  write("log", "");
  {
    FilesPutBack files(
        dir_, [](const std::string&) {}, interrupt_);
    ASSERT_TRUE(files.put_back(kept, PutBack::kExchange));
    EXPECT_EQ(read("log"), "one\n");
  }
  EXPECT_TRUE(fs::exists(top_ / "log") && read("log").empty());
  {
    FilesPutBack files(
        dir_, [](const std::string&) {}, interrupt_);
    ASSERT_TRUE(files.put_back(kept, PutBack::kExchange));
    files.keep();
  }
  EXPECT_EQ(read("log"), "one\n");
  EXPECT_FALSE(fs::exists(top_ / "log.after-checkpoint"));
}

TEST_F(KeptFilesTest, NothingIsOverwrittenWhereNoNameIsLeft) {
  write("log", "one\n");
  const KeptFile kept = note("log");
  write("log", "other");
  write("log.after-checkpoint", "precious");
  for (int i = 2; i < 1000; ++i)
    write(fmt::format("log.after-checkpoint.{}", i), "");
  FilesPutBack files(
      dir_, [](const std::string&) {}, interrupt_);
  const auto done = files.put_back(kept, PutBack::kExchange);
  ASSERT_FALSE(done);
  EXPECT_NE(done.error().remedy.find("remove"), std::string::npos);
  EXPECT_EQ(read("log.after-checkpoint"), "precious");
  EXPECT_EQ(read("log"), "other");
}

TEST_F(KeptFilesTest, WhatWasPutBackIsUndone) {
  write("log", "one\n");
  const KeptFile kept = note("log");
  write("log", "one\ntwo\n");
  {
    FilesPutBack files(
        dir_, [](const std::string&) {}, interrupt_);
    ASSERT_TRUE(files.put_back(kept, PutBack::kShorten));
    EXPECT_EQ(read("log"), "one\n");
    EXPECT_EQ(read("log.after-checkpoint"), "two\n");
  }
  EXPECT_EQ(read("log"), "one\ntwo\n");
  EXPECT_FALSE(fs::exists(top_ / "log.after-checkpoint"));
  write("log", "other");
  {
    FilesPutBack files(
        dir_, [](const std::string&) {}, interrupt_);
    ASSERT_TRUE(files.put_back(kept, PutBack::kExchange));
    EXPECT_EQ(read("log"), "one\n");
  }
  EXPECT_EQ(read("log"), "other");
  EXPECT_FALSE(fs::exists(top_ / "log.after-checkpoint"));
  fs::remove(top_ / "log");
  {
    FilesPutBack files(
        dir_, [](const std::string&) {}, interrupt_);
    ASSERT_TRUE(files.put_back(kept, PutBack::kMake));
    EXPECT_EQ(read("log"), "one\n");
  }
  EXPECT_FALSE(fs::exists(top_ / "log"));
}

// The image's content is shorter than its record says.
TEST_F(KeptFilesTest, NothingIsMadeOfAContentThatIsNotThere) {
  write("log", "one\n");
  KeptFile kept = note("log");
  fs::remove(top_ / "log");
  kept.content = UINT64_C(1) << 62;
  {
    FilesPutBack files(
        dir_, [](const std::string&) {}, interrupt_);
    const auto done = files.put_back(kept, PutBack::kMake);
    ASSERT_FALSE(done.has_value());
    EXPECT_EQ(done.error().code, ErrorCode::kImageCorrupt);
  }
  EXPECT_FALSE(fs::exists(top_ / "log"));
}

}  // namespace
}  // namespace stasis
