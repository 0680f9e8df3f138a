#include "proc/served_files.h"

#include <linux/magic.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/fd.h"

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

}  // namespace
}  // namespace stasis::proc
