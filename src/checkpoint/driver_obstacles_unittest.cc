#include "checkpoint/driver_obstacles.h"

#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
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

}  // namespace
}  // namespace stasis
