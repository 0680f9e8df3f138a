#include "proc/lesser_rights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/fd.h"
#include "base/scope_guard.h"
#include "proc/address_space.h"
#include "tests/fakes/child.h"
#include "tests/fakes/served_file.h"

namespace stasis::proc {
namespace {

using fakes::Child;

class LesserRightsTest : public ::testing::Test {
 protected:
  LesserRightsTest()
      : go_(static_cast<std::atomic<int>*>(
            ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~LesserRightsTest() override { ::munmap(go_, 4096); }

  bool has_come(int word) const {
    for (int i = 0; i < 10000 && go_->load() != word; ++i)
      ::usleep(1000);
    return go_->load() == word;
  }

  static void become(unsigned user) {
    if (::setresgid(user, user, user) != 0 || ::setresuid(user, user, user) != 0) ::_exit(1);
  }
  void be_target_of(unsigned user) const {
    become(user);
    ::prctl(PR_SET_DUMPABLE, 1);
    go_->store(2);
    for (;;)
      ::pause();
  }

  std::atomic<int>* go_;  // shared with the children
};
// The target's user kills and stops whatever he may, all the time.
TEST_F(LesserRightsTest, WhoMovesWithLesserRightsIsNotOursToLose) {
  if (::getuid() != 0) GTEST_SKIP() << "not root";
  constexpr unsigned kUser = 65432;  // who has no other process
  constexpr std::size_t kSize = std::size_t{8} << 20;
  constexpr int kRounds = 60;
  std::vector<char> memory(kSize, 's');
  const Child target([&] { be_target_of(kUser); });
  ASSERT_TRUE(has_come(2));
  // Numbers that come next, and those of our threads.
  const Child sniper([&, spared = target.pid().value, us = ::getpid()] {
    become(kUser);
    go_->store(3);
    for (int i = 0;; ++i) {
      for (int pid = us; pid < us + 400; ++pid) {
        if (pid == spared || pid == ::getpid()) continue;
        ::kill(pid, i % 2 == 0 ? SIGKILL : SIGSTOP);
        ::syscall(SYS_tgkill, us, pid, SIGKILL);
      }
    }
  });
  ASSERT_TRUE(has_come(3));
  const auto space = AddressSpace::open(target.pid());
  ASSERT_TRUE(space);
  std::vector<char> read(kSize);
  for (int i = 0; i < kRounds; ++i) {
    std::fill(read.begin(), read.end(), '-');
    ASSERT_TRUE(space->read(reinterpret_cast<std::uint64_t>(memory.data()), read.data(), kSize));
    ASSERT_EQ(read, memory);
  }
}

// A user who may freeze processes freezes what moves his memory: SIGKILL does not end it before he
// lets it go on.
TEST_F(LesserRightsTest, WhoMovesWithLesserRightsMayBeFrozenForEver) {
  constexpr unsigned kUser = 65433;  // who has no other process
  constexpr std::size_t kSize = std::size_t{8} << 20;
  const std::string cgroup = "/sys/fs/cgroup/freezer/stasis-frozen-" + std::to_string(::getpid());
  if (::getuid() != 0 || ::mkdir(cgroup.c_str(), 0755) != 0)
    GTEST_SKIP() << "not root, or no freezer of cgroups of version 1";
  const std::string tasks = cgroup + "/tasks";
  ASSERT_EQ(::chown(tasks.c_str(), kUser, kUser), 0);
  const ScopeGuard thaw([&] {
    (void)fakes::served::write_file((cgroup + "/freezer.state").c_str(), "THAWED");
    for (int i = 0; i < 100 && ::rmdir(cgroup.c_str()) != 0; ++i)
      ::usleep(10000);
  });
  ASSERT_TRUE(fakes::served::write_file((cgroup + "/freezer.state").c_str(), "FROZEN"));
  std::vector<char> memory(kSize, 's');
  {
    const Child target([&] { be_target_of(kUser); });
    ASSERT_TRUE(has_come(2));
    // All that come next; of other users' processes the kernel refuses it.
    const Child freezer([&, spared = target.pid().value] {
      become(kUser);
      const int list = ::open(tasks.c_str(), O_WRONLY | O_CLOEXEC);
      const int last = ::open("/proc/sys/kernel/ns_last_pid", O_RDONLY | O_CLOEXEC);
      go_->store(3);
      for (;;) {
        std::array<char, 16> text{};
        (void)!::pread(last, text.data(), text.size() - 1, 0);
        const int next = std::atoi(text.data());
        for (int pid = next - 4; pid < next + 16; ++pid) {
          const std::string number = std::to_string(pid);
          if (pid != spared && pid != ::getpid())
            (void)!::write(list, number.data(), number.size());
        }
      }
    });
    ASSERT_TRUE(has_come(3));
    const auto space = AddressSpace::open(target.pid());
    ASSERT_TRUE(space);
    std::vector<char> read(kSize);
    const auto has_frozen = [&] {
      const auto frozen = read_file(AT_FDCWD, tasks);
      return frozen && !frozen->empty();
    };
    bool seen = false;
    for (int i = 0; i < 5000 && !seen; ++i) {
      const auto begun = std::chrono::steady_clock::now();
      ASSERT_TRUE(space->read(reinterpret_cast<std::uint64_t>(memory.data()), read.data(), kSize));
      EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
      seen = has_frozen();
    }
    EXPECT_TRUE(seen) << "none was frozen";
    EXPECT_EQ(read, memory);
  }
}

}  // namespace
}  // namespace stasis::proc
