// SPDX-License-Identifier: GPL-2.0-or-later
#include "gpu_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fd.h"
#include "criu_api.h"

// In the place of CRIU's: what was given as --plugin-option.
static std::vector<std::string> g_plugin_options;
extern "C" int criu_plugin_get_options(int* argc, char*** argv) {
  static std::vector<char*> words;
  static char name[] = "criu-plugin";
  words = {name};
  for (std::string& option : g_plugin_options)
    words.push_back(option.data());
  words.push_back(nullptr);
  *argc = static_cast<int>(words.size()) - 1;
  *argv = words.data();
  return 0;
}

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
  record.tcp_ports = {80, 65535};
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
  EXPECT_EQ((*read)->tcp_ports, example().tcp_ports);
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

TEST_F(GpuRecordTest, OnlyARegularFileOfTheImageIsRead) {
  const auto read = [this](std::size_t limit) {
    return read_image_file(directory_.get(), "file", limit);
  };
  ASSERT_TRUE(read(4));
  EXPECT_FALSE(*read(4));
  ASSERT_EQ(::mkfifoat(directory_.get(), "file", 0600), 0);
  EXPECT_EQ(read(4).error().code, ErrorCode::kImageCorrupt);  // and does not wait for a writer
  std::filesystem::remove(path_ / "file");
  std::filesystem::create_symlink("/etc/hostname", path_ / "file");
  EXPECT_FALSE(read(1 << 10));
  std::filesystem::remove(path_ / "file");
  std::ofstream(path_ / "file") << "0=1\n";
  EXPECT_EQ(**read(4), "0=1\n");
  EXPECT_FALSE(read(3));
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

TEST(GpuRecord, AProcessThatCouldNotHaveBeenDumpedIsDamage) {
  std::string text = to_text(example());
  const std::string state = "\"state\": \"running\"";
  ASSERT_NE(text.find(state), std::string::npos) << text;
  text.replace(text.find(state), state.size(), "\"state\": \"failed\"");
  EXPECT_EQ(parse_record(text).error().code, ErrorCode::kImageCorrupt);
}

TEST(GpuRecord, ANewerOneIsNotMisread) {
  std::string text = to_text(example());
  const std::string version = "\"version\": 1";
  text.replace(text.find(version), version.size(), "\"version\": 2");
  EXPECT_EQ(parse_record(text).error().code, ErrorCode::kImageVersion);
}

// In a program that is not criu.
TEST(CriuApi, CopesWithACriuThatHasNothing) {
  log_info("this goes to no log");
  EXPECT_FALSE(image_directory());
  EXPECT_FALSE(ends_tasks());
  EXPECT_TRUE(enter_inventory());
  EXPECT_EQ(probe_inventory(), Inventory::kUnknown);
  avoid_freezer();
}

TEST(CriuApi, TheLastOfItsOwnOptionsCounts) {
  g_plugin_options = {"--other.device-map=1=0", "--cuda_plugin.device-map=0=1",
                      "--cuda_plugin.device-mapper=2=2", "--cuda_plugin.device-map=1=1"};
  auto value = plugin_option("device-map");
  ASSERT_TRUE(value);
  EXPECT_EQ(*value, "1=1");
  EXPECT_EQ(*plugin_option("device"), std::nullopt);
  g_plugin_options.emplace_back("--cuda_plugin.device-map");
  EXPECT_EQ(plugin_option("device-map").error().code, ErrorCode::kUsage);
  g_plugin_options.clear();
  EXPECT_EQ(*plugin_option("device-map"), std::nullopt);
}

}  // namespace
}  // namespace stasis::plugin
