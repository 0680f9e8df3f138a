#include "proc/served_files.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/fd.h"
#include "proc/lock_holder.h"
#include "proc/procfs.h"
#include "tests/fakes/served_file.h"

namespace stasis::proc {
namespace {

// What is on no mount is asked by a child, which has none of our descriptors.
TEST(ServedFiles, TheSystemOfWhatIsOnNoMountIsKnownByADescriptorOfOurs) {
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_TRUE(socket.valid());
  const Pid self{::getpid()};
  for (const auto& whose : {std::string("self"), fmt::format("{}", self.value)}) {
    const auto system = file_system_of(self, fmt::format("/proc/{}/fd/{}", whose, socket.get()));
    ASSERT_TRUE(system) << whose;
    EXPECT_EQ(system->f_type, SOCKFS_MAGIC);
  }
}

// An overlay asks what is below it with the rights of the user who has mounted it, so that the
// kernel keeps no tool out there.
TEST(ServedFiles, WhatAnOverlayOnTopOfThemIsIsNotAskedFor) {
  const fakes::OverlaidFile file;
  if (!file.is_there()) GTEST_SKIP() << "no such file can be made here";
  const auto begin = std::chrono::steady_clock::now();
  const auto info = known_status(file.link());
  ASSERT_TRUE(info);
  EXPECT_TRUE(S_ISREG(info->st_mode));
  const auto opened = open_checked(AT_FDCWD, file.link(), O_RDONLY, &is_memory_file);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::kNotSupported);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST(ServedFiles, WhoHoldsALockIsNotAskedForByThem) {
  const UniqueFd program(::open("/bin/sleep", O_RDONLY | O_CLOEXEC));
  const fakes::OverlaidFile file(program.get());
  if (!file.is_there()) GTEST_SKIP() << "no such file can be made here";
  const auto process = ProcFs().process(file.pid());
  ASSERT_TRUE(process);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(is_tool(*process));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

}  // namespace
}  // namespace stasis::proc
