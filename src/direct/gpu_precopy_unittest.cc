#include "direct/gpu_precopy.h"

#include <fcntl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "driver/fake_driver.h"
#include "image/image_test_support.h"

namespace stasis {
namespace {

using testing::HasSubstr;

class FailingMover final : public direct::MemoryMover {
 public:
  FailingMover(std::optional<ErrorCode> code, bool silent) : code_(code), silent_(silent) {}

  Result<direct::CopyReport> copy_out(std::vector<direct::Segment>, direct::Content&,
                                      const Interrupt&, Clock::time_point) override {
    if (code_) return fail(*code_, "as the test wants");
    return direct::CopyReport{};
  }
  Result<direct::CopyReport> copy_in(std::vector<direct::Segment>, direct::Content&,
                                     const Interrupt&, Clock::time_point) override {
    return direct::CopyReport{};
  }
  Result<void> prepare_digests(const Interrupt&, Clock::time_point) override { return {}; }
  void keep(std::vector<direct::SpareRoom>) override {}
  void hold(std::vector<UniqueFd>) override {}
  Result<direct::CopyReport> prefetch(const std::vector<direct::PrefetchRequest>&, direct::Content&,
                                      const Interrupt&, Clock::time_point) override {
    return direct::CopyReport{};
  }
  bool was_silent() const override { return silent_; }

 private:
  std::optional<ErrorCode> code_;
  bool silent_;
};

class GpuPrecopyTest : public testing::Test {
 protected:
  // Of a pre-copy by a mover that fails with that.
  Result<void> run(std::optional<ErrorCode> code, bool silent = false) {
    made_ = 0;
    said_.clear();
    Environment env{driver_, interrupt_, progress_,
                    [this](const std::string& text) { said_ += text + "\n"; }};
    env.mover = [&](const MoverRequest&) -> Result<std::shared_ptr<direct::MemoryMover>> {
      return std::make_shared<FailingMover>(made_++ == 0 ? code : std::nullopt, silent);
    };
    MoverLease lease;
    STASIS_TRY(lease.take(env, {}));
    const TemporaryDirectory dir;
    STASIS_TRY_ASSIGN(const auto opened, open_file(AT_FDCWD, dir.path(), O_RDONLY | O_DIRECTORY));
    STASIS_TRY_ASSIGN(const auto image, ImageContent::create(opened, {}));
    AgentSet agents;
    STASIS_TRY_ASSIGN(auto precopy, GpuPrecopy::begin(agents));
    return precopy->run(env, lease, *image);
  }

  FakeDriver driver_;
  Interrupt interrupt_;
  NoProgress progress_;
  std::string said_;
  int made_ = 0;
};

TEST_F(GpuPrecopyTest, OneThatIsDoneSaysNothing) {
  EXPECT_TRUE(run(std::nullopt));
  EXPECT_EQ(said_, "");
}

TEST_F(GpuPrecopyTest, PastItsTimeTheRestIsCopiedAtTheStop) {
  EXPECT_TRUE(run(ErrorCode::kTimeout));
  EXPECT_THAT(said_, HasSubstr("not pre-copied after 300 s"));
  EXPECT_THAT(said_, HasSubstr("the rest is copied while the job stands still"));
  EXPECT_EQ(made_, 1);
}

TEST_F(GpuPrecopyTest, AMoverThatBreaksDownIsReplaced) {
  for (const ErrorCode code : {ErrorCode::kNoAnswer, ErrorCode::kDriverError}) {
    EXPECT_TRUE(run(code));
    EXPECT_THAT(said_, HasSubstr("could not be pre-copied (as the test wants)"));
    EXPECT_EQ(made_, 2);
  }
}

TEST_F(GpuPrecopyTest, OneThatHungIsNotAndTheImageHasItsOwnErrors) {
  EXPECT_FALSE(run(ErrorCode::kNoAnswer, true));
  EXPECT_EQ(run(ErrorCode::kNoSpace).error().code, ErrorCode::kNoSpace);
  EXPECT_EQ(run(ErrorCode::kNotSupported).error().code, ErrorCode::kNotSupported);
  EXPECT_EQ(made_, 1);
  EXPECT_EQ(said_, "");
}

}  // namespace
}  // namespace stasis
