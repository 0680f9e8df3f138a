// SPDX-License-Identifier: GPL-2.0-or-later
#include "begun_threads.h"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include <gtest/gtest.h>

namespace stasis::plugin {
namespace {

// As criu's first task in a user namespace. The status it ends with.
int changes_its_user_in_a_clone() {
  const auto child = static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
  if (child == 0) {
    constexpr uid_t kAsItWas = static_cast<uid_t>(-1);
    ::alarm(5);
    ::_exit(::setresuid(kAsItWas, kAsItWas, kAsItWas) == 0 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

TEST(BegunThreads, ACloneThatChangesItsUserWaitsForNoneOfThem) {
  // On one processor, a thread begins when the one that made it rests.
  cpu_set_t all;
  ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (std::size_t i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++i)
    if (CPU_ISSET(i, &all)) CPU_SET(i, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  for (int i = 0; i < 50 && !HasFailure(); ++i) {
    std::thread([] {
      for (;;)
        ::poll(nullptr, 0, -1);
    }).detach();
    ASSERT_TRUE(wait_for_begun_threads());
    EXPECT_EQ(changes_its_user_in_a_clone(), 0) << "thread " << i;
  }
  ::sched_setaffinity(0, sizeof all, &all);
}

}  // namespace
}  // namespace stasis::plugin
