#include "driver/driver.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "driver/library.h"
#include "tests/fakes/fake_libcuda.h"

namespace stasis {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

class DriverTest : public testing::Test {
 protected:
  void SetUp() override {
    ::unsetenv("STASIS_LIBCUDA");
    auto library = Library::load(FAKE_LIBCUDA);
    ASSERT_TRUE(library) << library.error();
    fake_ = static_cast<fakes::FakeLibcuda*>(library->symbol("fake_libcuda"));
    ASSERT_NE(fake_, nullptr);
    *fake_ = fakes::FakeLibcuda();
  }
  std::unique_ptr<Driver> load() const {
    auto driver = load_driver(FAKE_LIBCUDA);
    EXPECT_TRUE(driver) << (driver ? "" : driver.error().message);
    return driver ? std::move(*driver) : nullptr;
  }

  fakes::FakeLibcuda* fake_ = nullptr;
};

TEST_F(DriverTest, MissingLibraryIsNamed) {
  auto driver = load_driver("/nonexistent/libcuda.so.1");
  ASSERT_FALSE(driver);
  EXPECT_EQ(driver.error().code, ErrorCode::kDriverMissing);
  EXPECT_THAT(driver.error().message, HasSubstr("/nonexistent/libcuda.so.1"));
  EXPECT_FALSE(driver.error().remedy.empty());
}

TEST_F(DriverTest, AfileThatIsNoLibraryIsRefused) {
  char name[] = "/tmp/stasis-driver-XXXXXX";
  const int fd = ::mkstemp(name);
  ASSERT_GE(fd, 0);
  std::ofstream(name) << "not a library";
  auto driver = load_driver(name);
  std::filesystem::remove(name);
  ASSERT_FALSE(driver);
  EXPECT_EQ(driver.error().code, ErrorCode::kDriverMissing);
}

TEST_F(DriverTest, AnotherLibraryIsRefused) {
  auto driver = load_driver("libm.so.6");
  ASSERT_FALSE(driver);
  EXPECT_EQ(driver.error().code, ErrorCode::kDriverUnsupported);
  EXPECT_THAT(driver.error().message, HasSubstr("libm.so.6"));
}

TEST_F(DriverTest, EnvironmentNamesTheLibrary) {
  ::setenv("STASIS_LIBCUDA", FAKE_LIBCUDA, 1);
  auto driver = load_driver();
  ::setenv("STASIS_LIBCUDA", "/nonexistent/libcuda.so.1", 1);
  auto wrong = load_driver();
  auto argument_first = load_driver(FAKE_LIBCUDA);
  ::unsetenv("STASIS_LIBCUDA");
  ASSERT_TRUE(driver);
  EXPECT_EQ((*driver)->info().library, FAKE_LIBCUDA);
  ASSERT_FALSE(wrong);
  EXPECT_THAT(wrong.error().remedy, HasSubstr("STASIS_LIBCUDA"));
  EXPECT_TRUE(argument_first);
}

TEST_F(DriverTest, TooOldSaysWhatItNeeds) {
  fake_->cuda_version = 12070;  // driver 565
  auto driver = load_driver(FAKE_LIBCUDA);
  ASSERT_FALSE(driver);
  EXPECT_EQ(driver.error().code, ErrorCode::kDriverTooOld);
  EXPECT_THAT(driver.error().message, HasSubstr("CUDA 12.7"));
  EXPECT_THAT(driver.error().remedy, HasSubstr("570"));
}

TEST_F(DriverTest, AstubThatTellsNoVersionIsRefused) {
  fake_->version_result = cuda::CUDA_ERROR_STUB_LIBRARY;
  auto driver = load_driver(FAKE_LIBCUDA);
  ASSERT_FALSE(driver);
  EXPECT_EQ(driver.error().code, ErrorCode::kDriverUnsupported);
  EXPECT_THAT(driver.error().message, HasSubstr("34"));
}

TEST_F(DriverTest, WithoutTheCheckpointCallsItIsRefused) {
  auto driver = load_driver(FAKE_LIBCUDA_WITHOUT_CHECKPOINT);
  ASSERT_FALSE(driver);
  EXPECT_EQ(driver.error().code, ErrorCode::kDriverUnsupported);
  EXPECT_THAT(driver.error().message, HasSubstr("checkpoint calls"));
}

TEST_F(DriverTest, VersionTellsWhatItCanDo) {
  struct Case {
    int cuda_version;
    bool device_map;
    bool jobs;
  };
  for (const Case& wanted : {Case{12080, false, false}, Case{12090, false, false},
                             Case{13000, true, false}, Case{13010, true, true}}) {
    fake_->cuda_version = wanted.cuda_version;
    auto driver = load();
    ASSERT_TRUE(driver);
    EXPECT_EQ(driver->info().has_device_map, wanted.device_map) << wanted.cuda_version;
    EXPECT_EQ(driver->info().has_jobs, wanted.jobs) << wanted.cuda_version;
    EXPECT_FALSE(driver->info().simulated);
  }
}

TEST_F(DriverTest, PassesTheCallsOnAndInitialisesNothing) {
  auto driver = load();
  ASSERT_TRUE(driver);
  fake_->state = 2;
  EXPECT_EQ(driver->state(Pid{42}), CudaState::kCheckpointed);
  EXPECT_EQ(fake_->pid, 42);
  EXPECT_EQ(driver->restore_thread_id(Pid{42})->value, 43);
  EXPECT_TRUE(driver->lock(Pid{42}, milliseconds(1500)));
  EXPECT_EQ(fake_->timeout_ms, 1500U);
  EXPECT_TRUE(driver->checkpoint(Pid{42}));
  EXPECT_TRUE(driver->unlock(Pid{42}));
  EXPECT_THAT(fake_->calls, ElementsAre("state", "tid", "lock", "checkpoint", "unlock"));
  EXPECT_EQ(fake_->inits, 0) << "cuInit costs up to seconds";
  EXPECT_TRUE(fake_->reserved_zero);
}

TEST_F(DriverTest, RestoreInitialisesOnceAndPassesThePairs) {
  auto driver = load();
  ASSERT_TRUE(driver);
  EXPECT_TRUE(driver->restore(Pid{42}, {}));
  EXPECT_TRUE(fake_->pairs.empty());
  GpuPair pair;
  for (std::size_t i = 0; i < 16; ++i) {
    pair.from.bytes.at(i) = static_cast<std::uint8_t>(i);
    pair.to.bytes.at(i) = static_cast<std::uint8_t>(255 - i);
  }
  const std::vector<GpuPair> pairs = {pair, {pair.to, pair.from}};
  EXPECT_TRUE(driver->restore(Pid{42}, pairs));
  ASSERT_EQ(fake_->pairs.size(), 2U);
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(static_cast<unsigned char>(fake_->pairs[0].oldUuid.bytes[i]), i);
    EXPECT_EQ(static_cast<unsigned char>(fake_->pairs[0].newUuid.bytes[i]), 255 - i);
    EXPECT_EQ(static_cast<unsigned char>(fake_->pairs[1].oldUuid.bytes[i]), 255 - i);
  }
  EXPECT_EQ(fake_->inits, 1);
  EXPECT_TRUE(fake_->reserved_zero);
}

// Cut down to 32 bits, 2^32 ms would be 0, which waits for ever.
TEST_F(DriverTest, NoTimeoutTurnsIntoAnother) {
  auto driver = load();
  ASSERT_TRUE(driver);
  EXPECT_TRUE(driver->lock(Pid{42}, milliseconds(0)));
  EXPECT_EQ(fake_->timeout_ms, 0U);
  EXPECT_TRUE(driver->lock(Pid{42}, milliseconds(std::int64_t{1} << 32)));
  EXPECT_EQ(fake_->timeout_ms, 4294967295U);
  EXPECT_TRUE(driver->lock(Pid{42}, milliseconds(-5)));
  EXPECT_EQ(fake_->timeout_ms, 1U) << "a deadline that has passed is not 'no deadline'";
}

TEST_F(DriverTest, RefusalsCarryTheDriversWords) {
  auto driver = load();
  ASSERT_TRUE(driver);
  fake_->result = cuda::CUDA_ERROR_ILLEGAL_STATE;
  auto locked = driver->lock(Pid{42}, milliseconds(1));
  ASSERT_FALSE(locked);
  EXPECT_EQ(locked.error().number, 401);
  EXPECT_EQ(locked.error().name, "CUDA_ERROR_ILLEGAL_STATE");
  EXPECT_EQ(locked.error().text, "the operation cannot be performed in the present state");
  // A code that the driver itself has no words for.
  fake_->result = static_cast<cuda::CUresult>(12345);
  auto state = driver->state(Pid{42});
  ASSERT_FALSE(state);
  EXPECT_EQ(state.error().name, "CUresult 12345");
  EXPECT_FALSE(state.error().text.empty());
}

TEST_F(DriverTest, AnUnknownStateIsAnError) {
  auto driver = load();
  ASSERT_TRUE(driver);
  fake_->state = 4;
  auto state = driver->state(Pid{42});
  ASSERT_FALSE(state);
  EXPECT_EQ(state.error().number, 999);
}

}  // namespace
}  // namespace stasis
