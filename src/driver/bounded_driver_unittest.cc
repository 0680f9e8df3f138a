#include "driver/bounded_driver.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <new>
#include <thread>

#include <gtest/gtest.h>

#include "base/units.h"
#include "driver/fake_driver.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

using std::chrono::milliseconds;

// How long a call that hangs takes, if it is not ended.
constexpr std::chrono::seconds kHang{120};
// What a call gets that is to be answered, and one that is to be given up.
constexpr std::chrono::seconds kTimeout{60};
constexpr milliseconds kLittleTimeout{1000};

// Seen by all processes.
struct Shared {
  std::atomic<int> caller = 0;     // the process that made the last call
  std::atomic<int> completed = 0;  // calls that hung and came back all the same
  std::atomic<bool> hang = false;
};

class BoundedDriverTest : public testing::Test {
 protected:
  void SetUp() override {
    void* memory =
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    shared_ = new (memory) Shared;
    bind_driver({kTimeout, kTimeout});
  }
  void bind_driver(const DriverTimeouts& timeout) {
    auto fake = std::make_unique<FakeDriver>();
    fake->add(self_);
    fake->on_call = [shared = shared_](const FakeDriver::Call&) {
      shared->caller = ::getpid();
      if (!shared->hang) return;
      std::this_thread::sleep_for(kHang);
      ++shared->completed;
    };
    std::unique_ptr<Driver> driver = std::move(fake);
    auto bounded = bound_driver(driver, timeout);
    ASSERT_TRUE(bounded) << bounded.error().to_string();
    driver_ = std::move(*bounded);
  }
  void TearDown() override {
    driver_.reset();
    ::munmap(shared_, sizeof(Shared));
  }
  // And is not just waiting to be collected.
  static bool lives(int pid) {
    const auto info = proc::ProcFs().process(Pid{pid});
    return info && !info->has_ended();
  }
  template <class F>
  static bool soon(const F& condition) {
    const auto start = Clock::now();
    while (!condition()) {
      if (Clock::now() - start > kHang / 2) return false;
      std::this_thread::sleep_for(milliseconds(5));
    }
    return true;
  }
  static bool ends(int pid) {
    return soon([pid] { return !lives(pid); });
  }

  const Pid self_{static_cast<int>(::getpid())};
  Shared* shared_ = nullptr;
  std::unique_ptr<Driver> driver_;
};

TEST_F(BoundedDriverTest, CallsAreMadeElsewhereAndAnswered) {
  EXPECT_EQ(driver_->state(self_), CudaState::kRunning);
  const int first = shared_->caller;
  EXPECT_NE(first, self_.value);
  ASSERT_TRUE(driver_->lock(self_, milliseconds(100)));
  ASSERT_TRUE(driver_->checkpoint(self_));
  EXPECT_EQ(driver_->state(self_), CudaState::kCheckpointed);
  ASSERT_TRUE(driver_->restore(self_, {}));
  ASSERT_TRUE(driver_->unlock(self_));
  EXPECT_EQ(driver_->restore_thread_id(self_)->value, self_.value);
  EXPECT_EQ(shared_->caller, first) << "it is used again";
}

TEST_F(BoundedDriverTest, WhatTheDriverAnswersComesBackWhole) {
  auto unlocked = driver_->unlock(self_);
  ASSERT_FALSE(unlocked);
  EXPECT_EQ(unlocked.error().number, 401);
  EXPECT_EQ(unlocked.error().name, "CUDA_ERROR_ILLEGAL_STATE");
  EXPECT_EQ(driver_->state(Pid{1}).error().number, 3);
}

TEST_F(BoundedDriverTest, ACallWithoutAnAnswerIsGivenUpAndComesToNothing) {
  bind_driver({kLittleTimeout, kLittleTimeout});
  shared_->hang = true;
  const auto start = Clock::now();
  auto state = driver_->state(self_);
  EXPECT_LT(Clock::now() - start, kHang / 2);
  ASSERT_FALSE(state);
  EXPECT_EQ(state.error().number, kDriverNoAnswer);
  EXPECT_TRUE(ends(shared_->caller));
  for (const auto& done : {driver_->lock(self_, milliseconds(50)), driver_->checkpoint(self_),
                           driver_->restore(self_, {}), driver_->unlock(self_)}) {
    ASSERT_FALSE(done);
    EXPECT_EQ(done.error().number, kDriverNoAnswer);
  }
  EXPECT_TRUE(ends(shared_->caller));
  shared_->hang = false;
  EXPECT_TRUE(soon([&] { return driver_->state(self_) == CudaState::kRunning; }));
  EXPECT_EQ(shared_->completed, 0);
}

TEST_F(BoundedDriverTest, ALockEndsWhenTheUserAsksToStopAndComesToNothing) {
  bind_driver({kLittleTimeout, kLittleTimeout});
  shared_->hang = true;
  Interrupt interrupt;
  std::jthread later([&] {
    std::this_thread::sleep_for(milliseconds(200));
    interrupt.request(2);
  });
  const auto start = Clock::now();
  auto locked = driver_->lock_unless(self_, milliseconds(0), interrupt);
  EXPECT_LT(Clock::now() - start, kHang / 2);
  ASSERT_FALSE(locked);
  EXPECT_EQ(locked.error().number, kDriverInterrupted);
  EXPECT_TRUE(ends(shared_->caller));
  shared_->hang = false;
  EXPECT_EQ(shared_->completed, 0);
  EXPECT_TRUE(
      soon([&] { return driver_->lock_unless(self_, milliseconds(0), Interrupt()).has_value(); }));
}

TEST_F(BoundedDriverTest, AProgramForTheCallsThatIsNotThereIsAnError) {
  std::unique_ptr<Driver> fake = std::make_unique<FakeDriver>();
  auto bounded = bound_driver_by("/nowhere/stasis-driver-calls", "", fake, {});
  ASSERT_FALSE(bounded);
  EXPECT_EQ(bounded.error().code, ErrorCode::kIo);
  EXPECT_NE(bounded.error().message.find("/nowhere/stasis-driver-calls"), std::string::npos);
  EXPECT_FALSE(bounded.error().remedy.empty());
  EXPECT_TRUE(fake) << "it was taken all the same";
}

TEST_F(BoundedDriverTest, OneThatHangsHoldsUpNoOther) {
  bind_driver({kTimeout, kLittleTimeout});
  shared_->hang = true;
  std::jthread stuck([&] { EXPECT_FALSE(driver_->checkpoint(self_)); });
  while (shared_->caller == 0)
    std::this_thread::yield();
  shared_->hang = false;
  EXPECT_EQ(driver_->state(self_), CudaState::kRunning);
}

TEST_F(BoundedDriverTest, TheEndOfACallerIsNotOurs) {
  ASSERT_TRUE(driver_->state(self_));
  ::kill(shared_->caller, SIGKILL);
  EXPECT_EQ(driver_->state(self_), CudaState::kRunning);
}

TEST_F(BoundedDriverTest, NoCallerOutlivesUs) {
  shared_->hang = true;
  const pid_t tool = ::fork();
  if (tool == 0) {
    auto fake = std::make_unique<FakeDriver>();
    fake->add(self_);
    fake->on_call = [shared = shared_](const FakeDriver::Call&) {
      shared->caller = ::getpid();
      std::this_thread::sleep_for(kHang);
      ++shared->completed;
    };
    std::unique_ptr<Driver> driver = std::move(fake);
    auto bounded = bound_driver(driver, {});
    if (bounded) (void)(*bounded)->state(self_);
    ::_exit(0);
  }
  while (shared_->caller == 0)
    std::this_thread::yield();
  ::kill(tool, SIGKILL);
  ASSERT_EQ(::waitpid(tool, nullptr, 0), tool);
  EXPECT_TRUE(ends(shared_->caller));
  EXPECT_EQ(shared_->completed, 0);
}

}  // namespace
}  // namespace stasis
