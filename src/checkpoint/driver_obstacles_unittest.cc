#include "checkpoint/driver_obstacles.h"

#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "driver/fake_driver.h"
#include "tests/fakes/child.h"

namespace stasis {
namespace {

std::vector<std::string> obstacles_of(Pid pid) {
  FakeDriver driver;
  const proc::ProcFs procfs;
  const auto info = procfs.process(pid);
  if (!info) return {"no process"};
  const auto found = find_obstacles(driver, procfs, {&*info, 1});
  std::vector<std::string> ids;
  for (const Obstacle& one : found ? *found : std::vector<Obstacle>())
    ids.emplace_back(one.id.name());
  return ids;
}

// Keeping it still would end it.
TEST(DriverObstacles, AThreadInStrictModeIsOne) {
  const fakes::Child free;
  const fakes::Child strict([] {
    std::thread([] {
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
      for (std::atomic<int> i{0};; ++i) {
      }
    }).join();
  });
  EXPECT_TRUE(obstacles_of(free.pid()).empty());
  std::vector<std::string> found;
  for (int i = 0; i < 2000 && found.empty(); ++i) {
    found = obstacles_of(strict.pid());
    ::usleep(1000);
  }
  EXPECT_EQ(found, std::vector<std::string>{"seccomp-strict"});
}

// A device of a /proc of our own making: there may be none here.
TEST(DriverObstacles, AnRdmaDeviceIsOneOfAGroup) {
  namespace fs = std::filesystem;
  std::string name = testing::TempDir() + "rdma_XXXXXX";
  ASSERT_NE(::mkdtemp(name.data()), nullptr);
  const proc::ProcFs procfs(name);
  std::vector<proc::ProcessInfo> infos;
  for (const int pid : {11, 12, 13}) {
    const fs::path folder = fs::path(name) / std::to_string(pid);
    fs::create_directories(folder / "fd");
    fs::create_symlink(pid == 11 ? "/dev/infiniband/uverbs0" : "/dev/infiniband/rdma_cm",
                       folder / "fd/7");
    std::ofstream(folder / "maps") << "7f0000000000-7f0000001000 -w-s 00000000 00:05 12 "
                                   << (pid == 12 ? "/dev/infiniband/uverbs1" : "/dev/zero") << "\n";
    infos.emplace_back().pid = Pid{pid};
  }
  const auto found = find_rdma(procfs, infos);
  ASSERT_TRUE(found) << found.error().to_string();
  ASSERT_EQ(found->size(), 2U);
  EXPECT_EQ(found->front().pid, Pid{11});
  EXPECT_EQ(found->back().pid, Pid{12});
  EXPECT_EQ(found->back().id.name(), "rdma");
  EXPECT_NE(found->back().what.find("/dev/infiniband/uverbs1"), std::string::npos);
  EXPECT_NE(found->back().remedy.find("NCCL_IB_DISABLE=1"), std::string::npos);
  fs::remove_all(name);
}

}  // namespace
}  // namespace stasis
