#include "base/fault_point.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <set>

#include <gtest/gtest.h>

namespace stasis {
namespace {

// In a process of its own, because the setting is read once. Returns how it ended.
int with_fault(const char* setting, const std::function<int()>& act) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv("STASIS_FAULT", setting, 1);
    ::_exit(act());
  }
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return status;
}

bool refused(const char* setting) {
  return with_fault(setting, [] {
           auto possible = check_fault_setting();
           return !possible && possible.error().code == ErrorCode::kUsage ? 0 : 1;
         }) == 0;
}

TEST(FaultPoints, HaveNamesOfTheirOwn) {
  std::set<std::string_view> names;
  for (const FaultPointInfo& info : fault_points()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_FALSE(info.what.empty()) << info.name;
  }
}

TEST(FaultPoints, AMisspeltFaultIsRefused) {
  EXPECT_TRUE(refused("lock.before"));
  EXPECT_TRUE(refused("lock.befor:kill"));
  EXPECT_TRUE(refused("lock.before:kil"));
  EXPECT_TRUE(refused("lock.before:kill@0"));
  EXPECT_TRUE(refused("lock.before:kill@1x"));
  EXPECT_TRUE(refused("lock.before:kill@"));
}

#ifdef STASIS_FAULT_POINTS

TEST(FaultPoints, AFaultThatCannotBeIsRefused) {
  EXPECT_TRUE(refused("journal.finish:error")) << "nothing can fail there";
  EXPECT_TRUE(refused("lock.before:disk-full")) << "no disk is named";
  EXPECT_FALSE(refused("lock.before:kill@2"));
}

TEST(FaultPoints, NothingHappensUnlessAskedFor) {
  const int status = with_fault("", [] {
    if (!check_fault_setting() || !fault(FaultPoint::kLockBefore)) return 1;
    return fault_not_reached().empty() ? 0 : 2;
  });
  EXPECT_EQ(status, 0);
}

TEST(FaultPoints, ItHappensAtTheNthTimeAndOnce) {
  const int status = with_fault("lock.before:error@2", [] {
    if (!fault(FaultPoint::kLockAfter) || !fault(FaultPoint::kLockBefore)) return 1;
    if (fault_not_reached() != "lock.before") return 2;
    if (fault(FaultPoint::kLockBefore)) return 3;
    if (!fault(FaultPoint::kLockBefore)) return 4;
    return fault_not_reached().empty() ? 0 : 5;
  });
  EXPECT_EQ(status, 0);
}

TEST(FaultPoints, KillKills) {
  const int status = with_fault("lock.after:kill", [] {
    (void)between(FaultPoint::kLockBefore, FaultPoint::kLockAfter, [] { return Result<void>(); });
    return 0;
  });
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST(FaultPoints, WhoIsNotThereCannotDie) {
  const int status = with_fault("lock.after:criu-dies", [] {
    auto done = fault(FaultPoint::kLockAfter);
    return !done && done.error().code == ErrorCode::kUsage ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
}

#endif

}  // namespace
}  // namespace stasis
