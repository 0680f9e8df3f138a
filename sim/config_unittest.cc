#include "sim/config.h"

#include <cstdlib>
#include <set>

#include <gtest/gtest.h>

namespace stasis::sim {
namespace {

TEST(Size, IsANumberWithAnOptionalUnit) {
  std::uint64_t size = 0;
  std::string error;
  EXPECT_TRUE(parse_size("512", size, error));
  EXPECT_EQ(size, 512u);
  EXPECT_TRUE(parse_size("64M", size, error));
  EXPECT_EQ(size, 64u << 20);
  EXPECT_TRUE(parse_size("2T", size, error));
  EXPECT_EQ(size, std::uint64_t{2} << 40);
}

TEST(Size, RefusesEverythingElse) {
  for (const char* text : {"", "G", "1.5G", "-1", "8g", "8GB", "0x10", "99999999999T", " 1"}) {
    std::uint64_t size = 0;
    std::string error;
    EXPECT_FALSE(parse_size(text, size, error)) << text;
    EXPECT_NE(error.find(text), std::string::npos);
  }
}

TEST(Gpus, AreCountedSizedAndNamed) {
  std::vector<GpuSpec> gpus;
  std::string error;
  ASSERT_TRUE(parse_gpus("2x8G,Big:16G", "0", gpus, error)) << error;
  ASSERT_EQ(gpus.size(), 3u);
  EXPECT_EQ(gpus[1].capacity, std::uint64_t{8} << 30);
  EXPECT_EQ(gpus[2].name, "Big");
  EXPECT_EQ(gpus[2].capacity, std::uint64_t{16} << 30);
  ASSERT_TRUE(parse_gpus("none", "0", gpus, error));
  EXPECT_TRUE(gpus.empty());
}

TEST(Gpus, RefuseWhatTheyCannotBe) {
  for (const char* text : {"0x8G", "x8G", "2x", ":8G", "8G,", "1M", "65x1G", "ax8G"}) {
    std::vector<GpuSpec> gpus;
    std::string error;
    EXPECT_FALSE(parse_gpus(text, "0", gpus, error)) << text;
    EXPECT_FALSE(error.empty());
  }
}

TEST(Gpus, HaveTheSameUuidOnTheSameMachineAndAnotherOnAnother) {
  std::vector<GpuSpec> first;
  std::vector<GpuSpec> again;
  std::vector<GpuSpec> other;
  std::string error;
  parse_gpus("8x8G", "a", first, error);
  parse_gpus("4G,7x8G", "a", again, error);
  parse_gpus("8x8G", "b", other, error);
  std::set<std::string> all;
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_TRUE(same(first[i].uuid, again[i].uuid));
    all.insert(to_text(first[i].uuid));
    all.insert(to_text(other[i].uuid));
  }
  EXPECT_EQ(all.size(), 16u);
  EXPECT_EQ(to_text(first[0].uuid).size(), 40u);
}

TEST(Versions, FollowTheDriver) {
  Config config;
  EXPECT_EQ(config.cuda_version(), 13000);
  EXPECT_TRUE(config.has_gpu_pairs());
  config.driver_version = 570;
  EXPECT_EQ(config.cuda_version(), 12080);
  EXPECT_TRUE(config.has_checkpoint());
  EXPECT_FALSE(config.has_gpu_pairs());
  config.driver_version = 565;
  EXPECT_FALSE(config.has_checkpoint());
}

class Environment : public testing::Test {
 protected:
  void TearDown() override {
    for (const char* name :
         {"STASIS_SIM_GPUS", "CUDA_VISIBLE_DEVICES", "STASIS_SIM_DIR", "STASIS_SIM_DRIVER_VERSION",
          "STASIS_SIM_PERSISTENCE", "STASIS_SIM_CONTEXT"}) {
      ::unsetenv(name);
    }
  }
  Config config_;
  std::string error_;
};

TEST_F(Environment, HidesGpusAsCudaDoes) {
  ::setenv("STASIS_SIM_GPUS", "4x1G", 1);
  ::setenv("CUDA_VISIBLE_DEVICES", "2,0,7,1", 1);
  ASSERT_TRUE(load(config_, error_)) << error_;
  EXPECT_EQ(config_.gpus.size(), 4u);
  EXPECT_EQ(config_.visible, (std::vector<int>{2, 0}));  // the first unknown one ends the list
}

TEST_F(Environment, NamesTheVariableThatIsWrong) {
  ::setenv("STASIS_SIM_DRIVER_VERSION", "new", 1);
  EXPECT_FALSE(load(config_, error_));
  EXPECT_NE(error_.find("STASIS_SIM_DRIVER_VERSION"), std::string::npos);
  ::setenv("STASIS_SIM_DRIVER_VERSION", "570.86.10", 1);
  EXPECT_TRUE(load(config_, error_));
  EXPECT_EQ(config_.driver_version, 570);
  ::setenv("STASIS_SIM_PERSISTENCE", "yes", 1);
  EXPECT_FALSE(load(config_, error_));
  ::unsetenv("STASIS_SIM_PERSISTENCE");
  ::setenv("STASIS_SIM_CONTEXT", "5000", 1);
  EXPECT_FALSE(load(config_, error_));
  EXPECT_NE(error_.find("STASIS_SIM_CONTEXT"), std::string::npos);
  ::setenv("STASIS_SIM_CONTEXT", "8K", 1);
  EXPECT_TRUE(load(config_, error_));
  EXPECT_EQ(config_.context_bytes, 8192u);
  ::setenv("STASIS_SIM_DIR", "relative", 1);
  EXPECT_FALSE(load(config_, error_));
}

}  // namespace
}  // namespace stasis::sim
