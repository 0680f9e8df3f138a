#include "operations/restore_log.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

namespace stasis {
namespace {

namespace fs = std::filesystem;

// What is left in the state directory of a restore whose criu ended with its cgroups mounted there;
// in a mount namespace of its own.
std::size_t left_of_restore(const fs::path& state) {
  for (int i = 0; i < 2; ++i) {
    auto log = RestoreLog::create();
    if (!log) return 100;
    const fs::path work =
        fs::read_symlink("/proc/self/fd/" + std::to_string(log->directory().get()));
    const fs::path yard = work / ".criu.cgyard.aBcDeF";
    if (::mkdir(yard.c_str(), 0700) != 0 || ::mount("none", yard.c_str(), "tmpfs", 0, nullptr) != 0)
      return 101;
  }
  std::size_t left = 0;
  for (const auto& entry : fs::directory_iterator(state))
    left += entry.path().filename().string().starts_with("restore-work-") ? 1 : 0;
  return left;
}

TEST(RestoreLog, LeavesNoMountOfCriu) {
  if (::geteuid() != 0) GTEST_SKIP() << "mounting needs root";
  char state[] = "/tmp/stasis-log-XXXXXX";
  ASSERT_NE(::mkdtemp(state), nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("STASIS_STATE_DIR", state, 1);
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
      ::_exit(77);
    ::_exit(static_cast<int>(left_of_restore(state)));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  fs::remove_all(state);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no mount namespace can be made here";
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace stasis
