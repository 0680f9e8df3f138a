#include "base/cuda_state.h"

#include <cctype>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace stasis {
namespace {

TEST(CudaState, NamesAreTheFieldsOwn) {
  EXPECT_EQ(cuda_state_name(CudaState::kRunning), "running");
  EXPECT_EQ(cuda_state_name(CudaState::kLocked), "locked");
  EXPECT_EQ(cuda_state_name(CudaState::kCheckpointed), "checkpointed");
  EXPECT_EQ(cuda_state_name(CudaState::kFailed), "failed");
  for (int i = 0; i < 4; ++i) {
    const auto state = static_cast<CudaState>(i);
    EXPECT_EQ(cuda_state_from_name(cuda_state_name(state)), state);
  }
  EXPECT_FALSE(cuda_state_from_name("Running"));
  EXPECT_FALSE(cuda_state_from_name(""));
}

TEST(GpuUuid, HasTheFormOfNvidiaSmi) {
  const auto uuid = GpuUuid::parse("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
  ASSERT_TRUE(uuid);
  for (std::size_t i = 0; i < 16; ++i)
    EXPECT_EQ(uuid->bytes.at(i), i);
  EXPECT_EQ(uuid->to_string(), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
}

TEST(GpuUuid, TakesNothingElse) {
  for (const char* text :
       {"", "0", "GPU-", "00010203-0405-0607-0809-0a0b0c0d0e0f",
        "gpu-00010203-0405-0607-0809-0a0b0c0d0e0f", "MIG-00010203-0405-0607-0809-0a0b0c0d0e0f",
        "GPU-00010203-0405-0607-0809-0a0b0c0d0e0", "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f ",
        "GPU-00010203-0405-0607-0809-0a0b0c0d0e0g", "GPU-0001020300405-0607-0809-0a0b0c0d0e0f",
        "GPU-00010203-0405-0607-0809-0a0b0c0d0e-f", "GPU-+0010203-0405-0607-0809-0a0b0c0d0e0f"}) {
    EXPECT_FALSE(GpuUuid::parse(text)) << text;
  }
}

RC_GTEST_PROP(GpuUuid, SurvivesPrintingAndParsing, (const std::array<std::uint8_t, 16>& bytes)) {
  GpuUuid uuid;
  uuid.bytes = bytes;
  std::string text = uuid.to_string();
  RC_ASSERT(GpuUuid::parse(text) == uuid);
  for (std::size_t i = 4; i < text.size(); ++i)
    text[i] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[i])));
  RC_ASSERT(GpuUuid::parse(text) == uuid);
}

RC_GTEST_PROP(GpuUuid, NoTextIsTakenForTwo, (const std::string& text)) {
  const auto uuid = GpuUuid::parse(text);
  if (uuid) RC_ASSERT(uuid->to_string().size() == text.size());
}

}  // namespace
}  // namespace stasis
