// Ranks that wait for each other on their (simulated) GPUs, as in a collective: locking one after
// the other waits for ever, the tree's lock does not.
//
// Needs STASIS_BUILD, the build folder.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/progress.h"
#include "checkpoint/process_tree.h"
#include "tests/fakes/sim_workload.h"
#include "tests/fakes/thoroughness.h"

namespace stasis {
namespace {

using fakes::Workload;
using std::chrono::milliseconds;

constexpr int kRanks = 8;
const int kRounds = fakes::times(60, 200);
constexpr int kCheckpointEvery = 10;

class RanksTest : public testing::Test {
 protected:
  void SetUp() override {
    const char* build = std::getenv("STASIS_BUILD");
    if (build == nullptr) GTEST_SKIP() << "STASIS_BUILD names no build folder";
    char name[] = "/tmp/stasis-ranks-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
    ::setenv("STASIS_SIM_DIR", (dir_ / "gpus").c_str(), 1);
    std::filesystem::create_directory(dir_ / "gpus");
    auto driver = load_driver(std::filesystem::path(build) / "lib/stasis/sim/libcuda.so.1");
    ASSERT_TRUE(driver) << driver.error().message;
    driver_ = std::move(*driver);
    ASSERT_TRUE(driver_->info().simulated);
    job_ = std::make_unique<Workload>(
        build, dir_,
        std::vector<std::string>{"collective", "--children", std::to_string(kRanks), "--size",
                                 "256K", "--pause-ms", "1"});
    ASSERT_TRUE(job_->gets_past(2));
  }
  void TearDown() override {
    job_.reset();
    if (!dir_.empty()) std::filesystem::remove_all(dir_);
  }

  ProcessTree open() {
    auto tree = ProcessTree::open(*driver_, job_->pid());
    EXPECT_TRUE(tree) << (tree ? "" : tree.error().message);
    EXPECT_EQ(tree->cuda_count(), static_cast<std::size_t>(kRanks));
    return std::move(*tree);
  }
  static std::string text(const Result<void>& result) {
    return result ? std::string() : result.error().to_string();
  }

  std::filesystem::path dir_;
  std::unique_ptr<Driver> driver_;
  std::unique_ptr<Workload> job_;
  NoProgress quiet_;
  Interrupt interrupt_;
};

// This is what the others prove nothing without: the first rank's lock keeps the second's from ever
// being quiesced.
TEST_F(RanksTest, OneAfterTheOtherWaitsForEver) {
  ProcessTree tree = open();
  tree.dismiss();
  std::vector<Process*> ranks;
  for (TreeMember& member : tree.members()) {
    if (member.initial) ranks.push_back(&member.process);
  }
  // Where no collective happens to be under way all of them can be locked: seen once, on a busy
  // machine. So it is tried a few times.
  std::optional<ErrorCode> code;
  for (int tries = 0; tries < 10 && !code; ++tries) {
    std::size_t locked = 0;
    while (locked < ranks.size() && !code) {
      // The first waits only for ranks that run, which may take a while on a busy machine.
      auto done = ranks[locked]->lock(milliseconds(locked == 0 ? 30'000 : 1500));
      if (done)
        ++locked;
      else
        code = done.error().code;
    }
    EXPECT_GT(locked, 0U);
    for (std::size_t i = 0; i < locked; ++i)
      EXPECT_TRUE(ranks[i]->unlock());
    EXPECT_TRUE(job_->gets_past(job_->round() + 1));
  }
  EXPECT_EQ(code, ErrorCode::kTimeout);
  EXPECT_EQ(job_->end(), 0);
}

TEST_F(RanksTest, AllTogetherNeverWaitForEachOther) {
  std::vector<double> seconds;
  std::vector<int> tries;
  for (int round = 0; round < kRounds; ++round) {
    ProcessTree tree = open();
    const auto start = Clock::now();
    auto done = tree.lock(milliseconds(60'000), interrupt_);
    ASSERT_TRUE(done) << "round " << round << ": " << text(done);
    seconds.push_back(since(start).count());
    tries.push_back(tree.lock_tries());
    if (round % kCheckpointEvery == 0) {
      done = tree.checkpoint(quiet_, interrupt_);
      ASSERT_TRUE(done) << "round " << round << ": " << text(done);
    }
    done = tree.roll_back();
    ASSERT_TRUE(done) << "round " << round << ": " << text(done);
    ASSERT_TRUE(job_->gets_past(job_->round())) << "round " << round;
  }
  std::sort(seconds.begin(), seconds.end());
  std::sort(tries.begin(), tries.end());
  std::printf(
      "%d ranks, %d rounds: lock median %.1f ms, 95 %% %.1f ms, longest %.1f ms; tries median "
      "%d, most %d\n",
      kRanks, kRounds, seconds[seconds.size() / 2] * 1e3, seconds[seconds.size() * 95 / 100] * 1e3,
      seconds.back() * 1e3, tries[tries.size() / 2], tries.back());
  EXPECT_EQ(job_->end(), 0);
}

}  // namespace
}  // namespace stasis
