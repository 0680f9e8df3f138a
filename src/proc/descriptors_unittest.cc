#include "proc/descriptors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include <gtest/gtest.h>

#include "tests/fakes/child.h"

namespace stasis::proc {
namespace {

// Opened anew by its name in /proc, as root or as its owner, it could be written.
TEST(Descriptors, OneThatIsOnlyReadStaysSo) {
  const UniqueFd whole(::memfd_create("of another program", 0));
  const std::string same = "/proc/self/fd/" + std::to_string(whole.get());
  const UniqueFd to_read(::open(same.c_str(), O_RDONLY));
  ASSERT_TRUE(to_read.valid());
  const fakes::Child child;
  const auto process = Pidfd::open(child.pid());
  ASSERT_TRUE(process);
  const auto read_only = take_descriptor(child.pid(), *process, to_read.get());
  ASSERT_TRUE(read_only) << read_only.error().to_string();
  EXPECT_EQ(::write(read_only->get(), "x", 1), -1);
  EXPECT_EQ(errno, EBADF);
  const auto writable = take_descriptor(child.pid(), *process, whole.get());
  ASSERT_TRUE(writable);
  EXPECT_EQ(::write(writable->get(), "x", 1), 1);
  EXPECT_FALSE(take_descriptor(child.pid(), *process, -1));
}

}  // namespace
}  // namespace stasis::proc
