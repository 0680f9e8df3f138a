// Ways out of a restore with a real CRIU. Like criu_integrationtest.cc, in the same program.
#include <stdexcept>

#include <gtest/gtest.h>

#include "criu/criu_test_fixture.h"

namespace stasis {
namespace {

class CriuRestoreTest : public CriuTest {
 protected:
  // Dumps a tree of two; both are gone afterwards.
  void dump_tree() {
    Target target("tree", target_dir());
    root_ = target.pid();
    pids_ = {target.pid(), target.child()};
    auto dumped = dump(target);
    ASSERT_TRUE(dumped) << dumped.error().to_string();
    ASSERT_TRUE(target.reap());
  }
  void expect_nothing_left() {
    for (const Pid pid : pids_)
      EXPECT_EQ(process_state(pid), '-') << pid.value;
  }
  Pid root_;
};

TEST_F(CriuRestoreTest, AnExceptionEndsWhatWasRestored) {
  dump_tree();
  bool there = false;
  EXPECT_THROW((void)restore(root_, {},
                             [&]() -> Result<void> {
                               there = process_state(pids_[1]) != '-';
                               throw std::runtime_error("the terminal has gone");
                             }),
               std::runtime_error);
  EXPECT_TRUE(there) << "the exception must come when the tree stands";
  expect_nothing_left();
}

TEST_F(CriuRestoreTest, AnInterruptWhileTheTreeStandsEndsIt) {
  dump_tree();
  auto restored = restore(root_, {}, [&]() -> Result<void> {
    interrupt_.request(SIGTERM);
    return {};
  });
  ASSERT_FALSE(restored);
  EXPECT_EQ(restored.error().code, ErrorCode::kInterrupted);
  expect_nothing_left();
}

TEST_F(CriuRestoreTest, AnotherRootThanThatOfTheImageMeansThatItIsCorrupt) {
  dump_tree();
  const Pid other{root_.value == 4194000 ? 4194001 : 4194000};
  auto restored = restore(other, {}, [] { return Result<void>(); });
  ASSERT_FALSE(restored);
  EXPECT_EQ(restored.error().code, ErrorCode::kImageCorrupt) << restored.error().to_string();
  expect_nothing_left();
}

TEST_F(CriuRestoreTest, AThreadNumberThatIsTakenIsFoundBeforehand) {
  dump_tree();
  threads_ = {Tid{4194001}, Tid{::getpid()}};
  auto restored = restore(root_);
  ASSERT_FALSE(restored);
  EXPECT_EQ(restored.error().code, ErrorCode::kPidInUse);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "log/restore.log")) << "nothing was to be begun";
}

}  // namespace
}  // namespace stasis
