// A tree that a restore has made: whatever happens to the restore, none of it is left behind.
#include "operations/restored_job.h"

#include <filesystem>
#include <stdexcept>

#include <gtest/gtest.h>

#include "driver/fake_driver.h"
#include "tests/fakes/child.h"

namespace stasis {
namespace {

using fakes::Child;

class RestoredJobTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-restored-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
    ::setenv("STASIS_STATE_DIR", dir_.c_str(), 1);
    driver_.add(child_.pid(), CudaState::kCheckpointed);
    manifest_.root = child_.pid();
    manifest_.processes.push_back({child_.pid(), Pid{0}, {}, true, CudaState::kRunning, {}});
  }
  void TearDown() override {
    ::unsetenv("STASIS_STATE_DIR");
    std::filesystem::remove_all(dir_);
  }
  bool nothing_remembered() const { return std::filesystem::is_empty(dir_); }
  bool child_lives() const {
    auto pidfd = Pidfd::open(child_.pid());
    return pidfd && pidfd->alive();
  }

  const Child child_;
  FakeDriver driver_;
  Manifest manifest_;
  std::filesystem::path dir_;
  NoProgress progress_;
};

TEST_F(RestoredJobTest, IsEndedAndForgottenOnEveryWayOut) {
  try {
    RestoredJob job(manifest_);
    ASSERT_TRUE(job.take_hold(driver_, {}, {}, false));
    EXPECT_FALSE(nothing_remembered()) << "for `stasis resume`";
    throw std::runtime_error("the user cannot be told");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(child_lives());
  EXPECT_TRUE(nothing_remembered());
}

TEST_F(RestoredJobTest, RunsOnIfItIsKept) {
  {
    RestoredJob job(manifest_);
    ASSERT_TRUE(job.take_hold(driver_, {}, {}, false));
    job.adopt({child_.pid(), *Pidfd::open(child_.pid())});
    const auto targets = job.targets(false);
    bool told = false;
    auto back = job.bring_back(targets, {}, progress_, [&] {
      told = true;
      EXPECT_EQ(driver_.state_of(child_.pid()), CudaState::kLocked)
          << "it runs already, or not yet";
    });
    EXPECT_TRUE(told);
    ASSERT_TRUE(back) << back.error().to_string();
    (void)job.keep(false);
    EXPECT_TRUE(job.end());
  }
  EXPECT_TRUE(child_lives());
  EXPECT_EQ(driver_.state_of(child_.pid()), CudaState::kRunning);
  EXPECT_TRUE(nothing_remembered());
}

TEST_F(RestoredJobTest, AProcessThatIsNotThereMeansThatTheManifestIsAnothers) {
  manifest_.processes.push_back({Pid{4194000}, child_.pid(), {}, false, std::nullopt, {}});
  RestoredJob job(manifest_);
  auto held = job.take_hold(driver_, {}, {}, false);
  ASSERT_FALSE(held);
  EXPECT_EQ(held.error().code, ErrorCode::kImageCorrupt);
  EXPECT_TRUE(job.end());
  EXPECT_FALSE(child_lives());
  EXPECT_TRUE(nothing_remembered());
}

}  // namespace
}  // namespace stasis
