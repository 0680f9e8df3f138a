#include "proc/file_locks.h"

#include <sys/sysmacros.h>

#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

TEST(FileLocks, AreReadAsTheKernelListsThem) {
  const auto lock = parse_lock("12: FLOCK  ADVISORY  WRITE 4711 fe:0a:10969875 0 EOF");
  ASSERT_TRUE(lock);
  EXPECT_EQ(lock->kind, "FLOCK");
  EXPECT_EQ(lock->access, "WRITE");
  EXPECT_EQ(lock->device, makedev(0xfe, 0x0a));
  EXPECT_EQ(lock->inode, 10969875U);
  EXPECT_EQ(lock->text, "FLOCK  ADVISORY  WRITE 4711 fe:0a:10969875 0 EOF");
  const auto lease = parse_lock("1: LEASE  ACTIVE    WRITE 4711 00:1f:7 0 EOF");
  ASSERT_TRUE(lease);
  const LocksByFile locks{{{lease->device, lease->inode}, {*lease}}};
  EXPECT_TRUE(breaks_lease(locks, makedev(0, 0x1f), 7));
  EXPECT_FALSE(breaks_lease(locks, makedev(0, 0x1f), 8));
}

TEST(FileLocks, OtherLinesAreNone) {
  for (const char* line : {"", "1:", "1: FLOCK ADVISORY WRITE 1", "1: FLOCK ADVISORY WRITE 1 fe:00",
                           "1: A B C D x:y:z", "1: FLOCK ADVISORY WRITE 1 fe:00:12x 0 EOF"}) {
    EXPECT_FALSE(parse_lock(line)) << line;
  }
  // One that waits.
  const auto waiting = parse_lock("1: -> FLOCK  ADVISORY  WRITE 4711 fe:00:7 0 EOF");
  EXPECT_FALSE(waiting && waiting->kind == "FLOCK");
}

}  // namespace
}  // namespace stasis::proc
