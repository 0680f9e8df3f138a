#include "checkpoint/gpu_room.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

GpuUuid gpu(std::uint8_t number) {
  GpuUuid out;
  out.bytes.back() = number;
  return out;
}

class GpuRoomTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-room-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
    ::setenv("STASIS_STATE_DIR", (dir_ / "state").c_str(), 1);
  }
  void TearDown() override {
    ::unsetenv("STASIS_STATE_DIR");
    std::filesystem::remove_all(dir_);
  }

  GpuRoom::Wait briefly() { return {interrupt_, {}, milliseconds(30)}; }

  std::filesystem::path dir_;
  Interrupt interrupt_;
};

TEST_F(GpuRoomTest, OfOneGpuIsOneOperations) {
  auto first = GpuRoom::hold({gpu(1), gpu(2)}, briefly());
  ASSERT_TRUE(first) << first.error().to_string();
  const auto second = GpuRoom::hold({gpu(2), gpu(3)}, briefly());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(second.error().message, HasSubstr(gpu(2).to_string()));
  EXPECT_TRUE(GpuRoom::hold({gpu(3)}, briefly())) << "what was not had is not held";
  first->leave();
  EXPECT_TRUE(GpuRoom::hold({gpu(1), gpu(2)}, briefly()));
}

TEST_F(GpuRoomTest, IsWaitedForAndThatIsToldOnce) {
  std::optional<GpuRoom> first;
  first.emplace(*GpuRoom::hold({gpu(1)}, briefly()));
  std::vector<std::string> told;
  std::atomic<bool> any = false;
  std::thread other([&] {
    while (!any)
      std::this_thread::sleep_for(milliseconds(1));
    std::this_thread::sleep_for(milliseconds(30));
    first.reset();
  });
  const auto second = GpuRoom::hold({gpu(1)}, {interrupt_, [&](std::string text) {
                                                 told.push_back(std::move(text));
                                                 any = true;
                                               }});
  other.join();
  EXPECT_TRUE(second);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_THAT(told.front(), HasSubstr("waiting for it"));
}

TEST_F(GpuRoomTest, AnInterruptEndsTheWait) {
  const auto first = GpuRoom::hold({gpu(1)}, briefly());
  interrupt_.request(SIGINT);
  const auto second = GpuRoom::hold({gpu(1)}, {interrupt_});
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kInterrupted);
}

TEST_F(GpuRoomTest, WithoutAPlaceForLocksNothingIsHeld) {
  ::setenv("STASIS_STATE_DIR", "/proc/nowhere", 1);
  const auto first = GpuRoom::hold({gpu(1)}, briefly());
  ASSERT_TRUE(first);
  EXPECT_TRUE(GpuRoom::hold({gpu(1)}, briefly()));
}

}  // namespace
}  // namespace stasis
