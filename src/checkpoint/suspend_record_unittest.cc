#include "checkpoint/suspend_record.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/journal.h"
#include "driver/fake_driver.h"
#include "tests/fakes/child.h"

namespace stasis {
namespace {

using fakes::Child;
using testing::SizeIs;

class SuspendedTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-suspended-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
    ::setenv("STASIS_STATE_DIR", dir_.c_str(), 1);
    gpu_ = *GpuUuid::parse("GPU-00000000-1111-2222-3333-444444444444");
  }
  void TearDown() override {
    ::unsetenv("STASIS_STATE_DIR");
    std::filesystem::remove_all(dir_);
  }
  Process open(const Child& child) {
    auto process = Process::open(driver_, child.pid());
    EXPECT_TRUE(process);
    return std::move(*process);
  }
  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> out;
    for (const auto& entry : std::filesystem::directory_iterator(dir_))
      out.push_back(entry.path());
    return out;
  }

  FakeDriver driver_;
  std::filesystem::path dir_;
  GpuUuid gpu_;
};

TEST_F(SuspendedTest, RemembersUntilToldToForget) {
  const Child child;
  const Process process = open(child);
  EXPECT_FALSE(recall_suspended(process));
  const SuspendedMemory known{{{gpu_, 1234}}, {{gpu_, "\xff odd", "0000:65:00.0", 99, 0}}};
  (void)remember_suspended(process, known);
  auto memory = recall_suspended(process);
  ASSERT_TRUE(memory);
  EXPECT_NEAR(static_cast<double>(memory->since), static_cast<double>(std::time(nullptr)), 60);
  ASSERT_THAT(memory->uses, SizeIs(1));
  EXPECT_EQ(memory->uses[0].gpu, gpu_);
  EXPECT_EQ(memory->uses[0].bytes, 1234U);
  ASSERT_THAT(memory->gpus, SizeIs(1));
  EXPECT_EQ(memory->gpus[0].pci_bus_id, "0000:65:00.0");
  EXPECT_EQ(memory->gpus[0].memory_total, 99U);
  struct stat info {};
  ASSERT_EQ(::stat(files().at(0).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  forget_suspended(process);
  EXPECT_FALSE(recall_suspended(process));
  EXPECT_THAT(files(), SizeIs(0));
}

TEST_F(SuspendedTest, AgroupRemembersWhatItsProcessesHad) {
  const Child child;
  driver_.add(child.pid());
  driver_.use[child.pid()] = {{gpu_, 77}};
  auto tree = ProcessTree::open(driver_, child.pid());
  ASSERT_TRUE(tree);
  const Interrupt interrupt;
  NoProgress progress;
  ASSERT_TRUE(tree->lock(std::chrono::seconds(60), interrupt));
  ASSERT_TRUE(tree->checkpoint(progress, interrupt));
  tree->dismiss();
  remember_suspended(*tree);
  auto memory = recall_suspended(open(child));
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory->uses.at(0).bytes, 77U);
}

TEST_F(SuspendedTest, DamageIsNoMemory) {
  const Child child;
  const Process process = open(child);
  (void)remember_suspended(process, {});
  ASSERT_TRUE(recall_suspended(process));
  for (const char* text : {"", "[]", "{", "{}", R"({"uses":[]})", R"({"uses":[{}],"gpus":[]})",
                           R"({"uses":[{"gpu":"x","bytes":1}],"gpus":[]})",
                           R"({"uses":[],"gpus":[{"uuid":"x"}]})", R"({"uses":1,"gpus":2})"}) {
    std::ofstream(files().at(0)) << text;
    EXPECT_FALSE(recall_suspended(process)) << text;
  }
}

TEST_F(SuspendedTest, TheDeadAreForgotten) {
  const Child living;
  const Process process = open(living);
  (void)remember_suspended(process, {});
  // Of a process that has gone, and of an earlier one with a number that another process has now.
  const std::string end = pid_namespace_mark() + ".suspended";
  std::ofstream(dir_ / ("4194303-5" + end)) << "{}";
  std::ofstream(dir_ / (std::to_string(living.pid().value) + "-1" + end)) << "{}";
  std::ofstream(dir_ / "4194303-5.suspended.keep") << "not ours";
  driver_.add(living.pid());
  auto tree = ProcessTree::open(driver_, living.pid());
  ASSERT_TRUE(tree);
  remember_suspended(*tree);
  EXPECT_TRUE(recall_suspended(process));
  EXPECT_THAT(files(), SizeIs(2));
}

}  // namespace
}  // namespace stasis
