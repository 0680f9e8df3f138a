#include "proc/bystander.h"

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>

#include <gtest/gtest.h>

#include "tests/fakes/child.h"

namespace stasis::proc {
namespace {

Tid this_thread() { return Tid{static_cast<int>(::syscall(SYS_gettid))}; }

// 0: it may.
int look_into(Pid pid) {
  void* head = nullptr;
  std::size_t size = 0;
  return ::syscall(SYS_get_robust_list, pid.value, &head, &size) == 0 ? 0 : errno;
}

// As a program does it that may make no FIFO any more.
bool enter_domain() {
  const std::array<std::uint64_t, 2> handled{1U << 12, 0};
  const long ruleset = ::syscall(444, handled.data(), 8, 0);
  return ruleset >= 0 && ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::syscall(446, ruleset, 0) == 0;
}

TEST(Bystander, IsLookedIntoByAllButThoseInADomain) {
  const Pid pid{::getpid()};
  const auto bystander = Bystander::for_thread(pid, this_thread());
  if (!bystander) GTEST_SKIP() << "no Landlock, or a profile of a security module";
  EXPECT_TRUE(bystander->suits(pid, this_thread()));
  EXPECT_EQ(look_into(bystander->pid()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool free = look_into(bystander->pid()) == 0;
    ::_exit(!free ? 1 : !enter_domain() ? 2 : look_into(bystander->pid()));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (status == 2 << 8) GTEST_SKIP() << "no domain can be entered here";
  EXPECT_EQ(WEXITSTATUS(status), EPERM);
}

// The user whose process it is may stop it at any moment.
TEST(Bystander, IsGivenUpWhereItsUserStopsIt) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs another user";
  constexpr unsigned kUser = 64999;
  const auto as_user = [] {
    if (::setresgid(kUser, kUser, kUser) != 0 || ::setresuid(kUser, kUser, kUser) != 0) ::_exit(1);
  };
  const fakes::Child target([&] {
    as_user();
    ::pause();
  });
  const fakes::Child stopper([&] {
    as_user();
    for (;;)
      (void)::kill(-1, SIGSTOP);
  });
  const auto begin = std::chrono::steady_clock::now();
  (void)Bystander::for_thread(target.pid(), Tid{target.pid().value});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

}  // namespace
}  // namespace stasis::proc
