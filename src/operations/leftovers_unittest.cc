#include "operations/leftovers.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "criu/criu_messages.h"

namespace stasis {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kAlice = 65533;
constexpr std::uint32_t kRemapMagic = 0x59133954;

// A number below 128, and a short text, as protobuf has them.
std::string number(char tag, char value) { return {static_cast<char>(tag << 3), value}; }
std::string text(char tag, const std::string& value) {
  return std::string{static_cast<char>(tag << 3 | 2), static_cast<char>(value.size())} + value;
}

std::string image_of(std::uint32_t magic, const std::string& message) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &kAnyImageMagic, sizeof kAnyImageMagic);
  std::memcpy(out.data() + 4, &magic, sizeof magic);
  append_message(out, message);
  return out;
}

class LeftoversTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "left-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    top_ = fs::canonical(name);
    std::ofstream(top_ / "link") << "content";
  }
  void TearDown() override { fs::remove_all(top_); }

  // The half of an image, whose files of CRIU say that it has made the name `link`.
  fs::path make_half() {
    const fs::path half = top_ / "img.partial-0123456789abcdef";
    fs::create_directories(half / "criu");
    for (const fs::path& folder : {half, half / "criu"})
      fs::permissions(folder, fs::perms::owner_all);
    const std::string file = text(6, (top_ / "link").string());
    std::ofstream(half / "criu/files.img")
        << image_of(kFilesMagic, number(1, 1) + number(2, 2) + text(3, file));
    std::ofstream(half / "criu/remap-fpath.img")
        << image_of(kRemapMagic, number(1, 1) + number(2, 2) + number(3, 0));
    return half;
  }

  fs::path top_;
};

TEST_F(LeftoversTest, NamesThatCriuHasMadeGoWithTheHalfOfAnImage) {
  const fs::path half = make_half();
  ASSERT_TRUE(clear_half_image((top_ / "img").string(), false));
  EXPECT_FALSE(fs::exists(half));
  EXPECT_FALSE(fs::exists(top_ / "link"));
}

TEST_F(LeftoversTest, WhatStaysKeepsNothingElseFromBeingRemoved) {
  const fs::path half = make_half();
  ASSERT_EQ(::chmod(top_.c_str(), 0777), 0);
  const fs::path planted = top_ / "img.partial-00";
  fs::create_directory(planted);
  std::ofstream(planted / "letters") << "another's";
  const auto cleared = clear_half_image((top_ / "img").string(), false);
  ASSERT_FALSE(cleared);
  EXPECT_EQ(cleared.error().code, ErrorCode::kNotPermitted);
  EXPECT_TRUE(fs::exists(planted / "letters"));
  EXPECT_FALSE(fs::exists(half));
}

// Who may write beside the image may make such a half, which names any file.
TEST_F(LeftoversTest, NamesInAnotherUsersHalfStay) {
  if (::geteuid() != 0) GTEST_SKIP() << "files of two users need root";
  fs::path half = make_half();
  ASSERT_EQ(::chown(half.c_str(), kAlice, kAlice), 0);
  ASSERT_EQ(::chown((half / "criu").c_str(), kAlice, kAlice), 0);
  ASSERT_TRUE(clear_half_image((top_ / "img").string(), false));
  EXPECT_TRUE(fs::exists(top_ / "link"));
  half = make_half();
  ASSERT_EQ(::chown((half / "criu").c_str(), kAlice, kAlice), 0);
  ASSERT_TRUE(clear_half_image((top_ / "img").string(), false));
  EXPECT_TRUE(fs::exists(top_ / "link"));
  half = make_half();
  ASSERT_EQ(::chmod(half.c_str(), 0777), 0);
  ASSERT_TRUE(clear_half_image((top_ / "img").string(), false));
  EXPECT_TRUE(fs::exists(top_ / "link"));
}

}  // namespace
}  // namespace stasis
