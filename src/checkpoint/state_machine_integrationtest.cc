// The state machine of one process on the simulated driver, with a real target that verifies its
// own GPU memory in rounds: any sequence of actions follows the model, and in the end nothing was
// lost.
//
// Needs STASIS_BUILD, the build folder. RC_PARAMS=max_success=N sets how many sequences are tried.
#include <cstdlib>
#include <filesystem>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "abi/cuda_abi.h"
#include "checkpoint/process.h"
#include "tests/fakes/sim_workload.h"

namespace stasis {
namespace {

using fakes::Workload;
using std::chrono::milliseconds;

// For a lock that is to succeed, on a machine with much to do.
constexpr milliseconds kTimeout{60'000};

constexpr std::array kActions = {Action::kLock, Action::kCheckpoint, Action::kRestore,
                                 Action::kUnlock};

std::optional<CudaState> next(CudaState state, Action action) {
  if (state == CudaState::kRunning && action == Action::kLock) return CudaState::kLocked;
  if (state == CudaState::kLocked && action == Action::kCheckpoint) return CudaState::kCheckpointed;
  if (state == CudaState::kLocked && action == Action::kUnlock) return CudaState::kRunning;
  if (state == CudaState::kCheckpointed && action == Action::kRestore) return CudaState::kLocked;
  return std::nullopt;
}

class StateMachine : public testing::Test {
 protected:
  void SetUp() override {
    const char* build = std::getenv("STASIS_BUILD");
    if (build == nullptr) GTEST_SKIP() << "STASIS_BUILD names no build folder";
    char name[] = "/tmp/stasis-machine-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
    ::setenv("STASIS_SIM_DIR", (dir_ / "gpus").c_str(), 1);
    ::setenv("STASIS_SIM_GPUS", "2x256M", 1);
    std::filesystem::create_directory(dir_ / "gpus");
    auto driver = load_driver(std::filesystem::path(build) / "lib/stasis/sim/libcuda.so.1");
    ASSERT_TRUE(driver) << driver.error().message;
    driver_ = std::move(*driver);
    ASSERT_TRUE(driver_->info().simulated);
    workload_ = std::make_unique<Workload>(
        build, dir_, std::vector<std::string>{"memory", "--size", "8M", "--pause-ms", "1"});
    ASSERT_TRUE(workload_->gets_past(0));
  }
  void TearDown() override {
    workload_.reset();
    if (!dir_.empty()) std::filesystem::remove_all(dir_);
  }

  // The driver itself, without our check of the state in front of it.
  DriverResult<void> ask_driver(Action action, std::span<const GpuPair> pairs = {}) {
    switch (action) {
      case Action::kLock:
        return driver_->lock(workload_->pid(), kTimeout);
      case Action::kCheckpoint:
        return driver_->checkpoint(workload_->pid());
      case Action::kRestore:
        return driver_->restore(workload_->pid(), pairs);
      default:
        return driver_->unlock(workload_->pid());
    }
  }
  static Result<void> perform(Process& process, Action action, std::span<const GpuPair> pairs) {
    switch (action) {
      case Action::kLock:
        return process.lock(kTimeout);
      case Action::kCheckpoint:
        return process.checkpoint();
      case Action::kRestore:
        return process.restore(pairs);
      default:
        return process.unlock();
    }
  }

  std::filesystem::path dir_;
  std::unique_ptr<Driver> driver_;
  std::unique_ptr<Workload> workload_;
};

TEST_F(StateMachine, AnySequenceOfActionsFollowsTheModelAndLosesNothing) {
  auto process = Process::open(*driver_, workload_->pid());
  ASSERT_TRUE(process);
  auto gpus = driver_->gpus();
  ASSERT_TRUE(gpus);
  ASSERT_EQ(gpus->size(), 2U);
  const std::vector<GpuPair> swap = {{(*gpus)[0].uuid, (*gpus)[1].uuid},
                                     {(*gpus)[1].uuid, (*gpus)[0].uuid}};
  CudaState model = CudaState::kRunning;
  EXPECT_TRUE(rc::check([&] {
    const auto sequence = *rc::gen::container<std::vector<Action>>(
        rc::gen::elementOf(std::vector(kActions.begin(), kActions.end())));
    for (Action action : sequence) {
      const auto expected = next(model, action);
      const bool moves = *rc::gen::arbitrary<bool>();
      const std::span<const GpuPair> pairs = moves ? swap : std::span<const GpuPair>();
      if (!expected) {
        // Ours refuses it, and so does the driver.
        auto refused = ask_driver(action);
        RC_ASSERT(!refused.has_value());
        RC_ASSERT(refused.error().number == 401);
      }
      auto done = perform(*process, action, pairs);
      RC_ASSERT(done.has_value() == expected.has_value());
      if (expected) model = *expected;
      RC_ASSERT(*process->state() == model);
    }
    RC_ASSERT(process->bring_to(CudaState::kRunning).has_value());
    model = CudaState::kRunning;
    RC_ASSERT(workload_->gets_past(workload_->round()));
  }));
  EXPECT_EQ(workload_->end(), 0) << "the target found a wrong byte";
}

TEST_F(StateMachine, GuardsBringItBackFromEverywhere) {
  auto process = Process::open(*driver_, workload_->pid());
  ASSERT_TRUE(process);
  for (CudaState initial : {CudaState::kRunning, CudaState::kLocked, CudaState::kCheckpointed}) {
    for (CudaState changed_to :
         {CudaState::kRunning, CudaState::kLocked, CudaState::kCheckpointed}) {
      ASSERT_TRUE(process->bring_to(initial));
      {
        const StateGuard guard(*process, initial);
        ASSERT_TRUE(process->bring_to(changed_to));
      }
      EXPECT_EQ(*process->state(), initial);
    }
  }
  ASSERT_TRUE(process->bring_to(CudaState::kRunning));
  EXPECT_TRUE(workload_->gets_past(workload_->round()));
  EXPECT_EQ(workload_->end(), 0);
}

// What is not held stands still, what is held does not.
TEST_F(StateMachine, AlockedTargetMakesNoRounds) {
  auto process = Process::open(*driver_, workload_->pid());
  ASSERT_TRUE(process);
  ASSERT_TRUE(process->lock(kTimeout));
  const long before = workload_->round();
  std::this_thread::sleep_for(milliseconds(700));
  const long after = workload_->round();
  EXPECT_LE(after, before + 1) << "more than the record of a round that it had just finished";
  ASSERT_TRUE(process->unlock());
  EXPECT_TRUE(workload_->gets_past(after + 1));
  EXPECT_EQ(workload_->end(), 0);
}

}  // namespace
}  // namespace stasis
