// SPDX-License-Identifier: GPL-2.0-or-later
#include "gpu_record.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fd.h"
#include "criu_api.h"

namespace stasis::plugin {
namespace {

GpuRecord example() {
  const GpuUuid uuid = *GpuUuid::parse("GPU-00112233-4455-6677-8899-aabbccddeeff");
  GpuRecord record;
  record.simulated = true;
  record.driver_version = "580.159.04";
  record.gpus = {{uuid, "A GPU", "00000000:1A:00.0", 8ULL << 30, 0}};
  record.processes = {{12, CudaState::kRunning, {{uuid, 1ULL << 33}}},
                      {13, CudaState::kCheckpointed, {}}};
  return record;
}

class GpuRecordTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-record-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    path_ = name;
    directory_ = UniqueFd(::open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  void TearDown() override { std::filesystem::remove_all(path_); }

  std::filesystem::path path_;
  UniqueFd directory_;
};

TEST_F(GpuRecordTest, IsReadAsItWasWritten) {
  ASSERT_TRUE(write_record(directory_.get(), example()));
  auto read = read_record(directory_.get());
  ASSERT_TRUE(read);
  ASSERT_TRUE(*read);
  EXPECT_EQ(to_text(**read), to_text(example()));
  EXPECT_EQ((*read)->processes[0].uses[0].bytes, 1ULL << 33);
  EXPECT_EQ((*read)->processes[1].initial, CudaState::kCheckpointed);
}

TEST_F(GpuRecordTest, AnImageMayHaveNone) {
  auto read = read_record(directory_.get());
  ASSERT_TRUE(read);
  EXPECT_FALSE(*read);
}

TEST_F(GpuRecordTest, NoLinkIsFollowed) {
  std::filesystem::create_symlink("elsewhere", path_ / "cuda-plugin.json");
  EXPECT_FALSE(write_record(directory_.get(), example()));
  EXPECT_FALSE(std::filesystem::exists(path_ / "elsewhere"));
}

TEST(GpuRecord, DamageIsAnErrorWhereverItIs) {
  const std::string text = to_text(example());
  ASSERT_TRUE(parse_record(text));
  for (std::size_t length = 0; length + 2 < text.size(); ++length) {
    auto read = parse_record(text.substr(0, length));
    ASSERT_FALSE(read) << length;
    EXPECT_EQ(read.error().code, ErrorCode::kImageCorrupt);
  }
  for (const char* wrong : {"null", "[]", "{}", R"({"version":"1"})", R"({"version":1,"gpus":3})"})
    EXPECT_EQ(parse_record(wrong).error().code, ErrorCode::kImageCorrupt) << wrong;
}

TEST(GpuRecord, ANewerOneIsNotMisread) {
  std::string text = to_text(example());
  const std::string version = "\"version\": 1";
  text.replace(text.find(version), version.size(), "\"version\": 2");
  EXPECT_EQ(parse_record(text).error().code, ErrorCode::kImageVersion);
}

// In a program that is not criu.
TEST(CriuApi, CopesWithACriuThatHasNothing) {
  log_info("nobody hears this");
  EXPECT_FALSE(image_directory());
  EXPECT_FALSE(ends_tasks());
  EXPECT_TRUE(enter_inventory());
  EXPECT_EQ(look_into_inventory(), Inventory::kUnknown);
  avoid_freezer();
}

}  // namespace
}  // namespace stasis::plugin
