#include "doctor/processes.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "doctor/criu_checks.h"
#include "driver/fake_driver.h"
#include "tests/fakes/child.h"

namespace stasis {
namespace {

namespace fs = std::filesystem;

// A /proc of our own making in which a process, which there is, uses NVML.
class ProcessesTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "processes_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
    const fs::path folder = root_ / fmt::format("{}", pid_.value);
    fs::create_directories(folder / "fd");
    fs::create_symlink("/dev/nvidiactl", folder / "fd/7");
    std::ofstream(folder / "maps")
        << "7f0000000000-7f0000001000 r-xp 00000000 08:01 12 /usr/lib/libnvidia-ml.so.1\n";
    std::ofstream(folder / "environ") << "A=b";
    std::ofstream(root_ / "meminfo") << "MemAvailable: 1000 kB\nSwapFree: 0 kB\n";
    fs::create_directories(folder / "net");
    std::ofstream(folder / "net/unix") << "Num RefCount\n";
    std::ofstream(folder / "status") << "Tgid:\t" << pid_.value << "\nUid:\t0 0 0 0\n";
    std::ofstream(folder / "cmdline") << "x";
    driver_.add(pid_);
  }
  void TearDown() override { fs::remove_all(root_); }

  // How often it is said of a process that its NVML stands in the way.
  long nvml_obstacles(const std::string& version) {
    driver_.driver_info.driver_version = version;
    auto tree = ProcessTree::open(driver_, pid_);
    EXPECT_TRUE(tree);
    if (!tree) return -1;
    tree->dismiss();
    const auto found = examine_processes(driver_, proc::ProcFs(root_), *tree, {}, Interrupt());
    EXPECT_TRUE(found) << found.error().to_string();
    if (!found) return -1;
    return std::count_if(found->begin(), found->end(), [](const Obstacle& one) {
      return one.id == "nvml" && one.severity == Severity::kYellow && !one.remedy.empty();
    });
  }

  fakes::Child child_;
  const Pid pid_ = child_.pid();
  fs::path root_;
  FakeDriver driver_;
};

TEST_F(ProcessesTest, NvmlMattersWithAnOldDriver) {
  EXPECT_EQ(nvml_obstacles("550.54.14"), 1);
  EXPECT_EQ(nvml_obstacles("570.86.15"), 0);
  EXPECT_EQ(nvml_obstacles("580.159.04"), 0);
  EXPECT_EQ(nvml_obstacles(""), 0);
}

TEST_F(ProcessesTest, NvmlThatHasNothingOpenDoesNotMatter) {
  fs::remove(root_ / fmt::format("{}", pid_.value) / "fd/7");
  EXPECT_EQ(nvml_obstacles("550.54.14"), 0);
}

TEST(GuardedMemory, IsSealedOrHasAProtectionKey) {
  std::istringstream smaps(
      "7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \nRss: 4 kB\nProtectionKey:         0\n"
      "VmFlags: rd wr mr mw me sd\n"
      "7f0000002000-7f0000003000 r--p 00000000 00:00 0 \nProtectionKey:        10\n"
      "VmFlags: rd mr mw me sl\n"
      "7f0000004000-7f0000005000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me um ac\n");
  const doctor::GuardedMemory found = doctor::guarded_memory(smaps);
  EXPECT_EQ(found.sealed, "7f0000002000-7f0000003000");
  EXPECT_EQ(found.keyed, "7f0000002000-7f0000003000");
  EXPECT_EQ(found.provided, "7f0000004000-7f0000005000");
  EXPECT_EQ(found.droppable, 0U);
  std::istringstream none("00400000-00401000 r-xp 0 00:01 2 /x\nProtectionKey:         0\n");
  EXPECT_TRUE(doctor::guarded_memory(none).keyed.empty());
}

TEST(GuardedMemory, MayBeDropped) {
  std::istringstream smaps(
      "7f0000000000-7f0000001000 rw-p 0 00:00 0 \nSize:                  4 kB\nVmFlags: rd wr mr "
      "dp\n"
      "7f0000002000-7f0000003000 rw-p 0 00:00 0 \nSize:               1024 kB\nVmFlags: rd wr mr\n"
      "7f0000004000-7f0000204000 rw-p 0 00:00 0 \nSize:               2048 kB\nVmFlags: rd wr dp "
      "dd\n");
  EXPECT_EQ(doctor::guarded_memory(smaps).droppable, 2052U << 10);
}

TEST(PlacedMemory, IsWhatLiesOtherwiseThanTheThreadsWant) {
  std::istringstream of_its_own(
      "400000 interleave:0-1 file=/x mapped=2 N0=2 kernelpagesize_kB=4\n"
      "7f0000000000 prefer:0 anon=1 dirty=1 N0=1 kernelpagesize_kB=4\n"
      "7ffff0000000 interleave:0-1 stack anon=4 dirty=4 N0=4 kernelpagesize_kB=4\n");
  EXPECT_EQ(doctor::placed_memory(of_its_own), "7f0000000000 prefer:0");
  std::istringstream none(
      "400000 bind:1 file=/x mapped=2 N1=2 kernelpagesize_kB=4\n"
      "7ffff0000000 bind:1 stack anon=4 dirty=4 N1=4 kernelpagesize_kB=4\n");
  EXPECT_EQ(doctor::placed_memory(none), "");
}

}  // namespace
}  // namespace stasis
