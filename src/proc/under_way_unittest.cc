#include "proc/under_way.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <utility>

#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

struct Pair {
  explicit Pair(int kind) : type(kind) {
    int ends[2];
    if (::socketpair(AF_UNIX, kind | SOCK_CLOEXEC, 0, ends) != 0) return;
    here = UniqueFd(ends[0]);
    there = UniqueFd(ends[1]);
  }
  void send(const std::string& bytes, const UniqueFd& file) const {
    iovec place{const_cast<char*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &place;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    const int number = file.get();
    std::memcpy(CMSG_DATA(head), &number, sizeof number);
    ASSERT_EQ(::sendmsg(here.get(), &message, 0), static_cast<ssize_t>(bytes.size()));
  }
  UnderWay look() const { return look_at_under_way(there, type == SOCK_STREAM); }
  std::uint32_t count() const { return descriptors_under_way(Pid{::getpid()}, there.get()); }

  int type;
  UniqueFd here;
  UniqueFd there;
};

UniqueFd some_file() {
  std::string name = ::testing::TempDir() + "under_way_XXXXXX";
  UniqueFd out(::mkostemp(name.data(), O_CLOEXEC));
  (void)::unlink(name.c_str());
  return out;
}

class UnderWayOf : public ::testing::TestWithParam<int> {};

TEST_P(UnderWayOf, TellsWhatIsLost) {
  const UniqueFd locked = some_file();
  ASSERT_EQ(::flock(locked.get(), LOCK_EX), 0);
  const UniqueFd part_locked = some_file();
  struct flock part {};
  part.l_type = F_WRLCK;
  ASSERT_EQ(::fcntl(part_locked.get(), F_OFD_SETLK, &part), 0);
  const UniqueFd owned = some_file();
  ASSERT_EQ(::fcntl(owned.get(), F_SETOWN, ::getpid()), 0);
  const UniqueFd semaphore(::eventfd(1, EFD_SEMAPHORE | EFD_CLOEXEC));
  const UniqueFd high(::eventfd(0, EFD_CLOEXEC));
  const std::uint64_t value = std::uint64_t{1} << 32;
  ASSERT_EQ(::write(high.get(), &value, sizeof value), 8);
  const UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  ASSERT_EQ(::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, high.get(), &event), 0);
  const UniqueFd watches_none(::epoll_create1(EPOLL_CLOEXEC));
  const UniqueFd of_thread(::open("/proc/thread-self/stat", O_RDONLY | O_CLOEXEC));
  const UniqueFd of_process(::open("/proc/self/stat", O_RDONLY | O_CLOEXEC));
  const UniqueFd terminal(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  const UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::string kUnusual =
      "a file of the kernel (/proc, /sys, a cgroup), a device, one of O_TMPFILE, or extended "
      "attributes without a name";
  const UniqueFd plain = some_file();
  const UniqueFd low(::eventfd(0xffffffff, EFD_CLOEXEC));
  const std::pair<const UniqueFd*, std::string> cases[] = {
      {&locked, "a lock (flock, F_OFD_SETLK) or a lease"},
      {&part_locked, "a lock (flock, F_OFD_SETLK) or a lease"},
      {&owned, "a process that it signals (F_SETOWN, F_SETSIG)"},
      {&semaphore, "EFD_SEMAPHORE"},
      {&high, "an eventfd's value above 32 bits"},
      {&epoll, "files that it watches (epoll)"},
      {&of_thread, kUnusual},
      {&of_process, kUnusual},
      {&terminal, kUnusual},
      {&null, ""},
      {&watches_none, ""},
      {&plain, ""},
      {&low, ""}};
  for (const auto& [file, lost] : cases) {
    const Pair pair(GetParam());
    // Behind a long message, and one that is as the others.
    const std::string before(70000, 'x');
    ASSERT_EQ(::send(pair.here.get(), before.data(), before.size(), 0), 70000);
    pair.send("a", plain);
    pair.send("b", *file);
    ASSERT_EQ(pair.count(), 2U);
    const UnderWay found = pair.look();
    EXPECT_TRUE(found.is_known);
    EXPECT_EQ(found.lost, lost);
    EXPECT_GE(found.with_bytes, 2U);
    EXPECT_TRUE(found.with_bytes == 2U || GetParam() == SOCK_STREAM);
    // Nothing is taken, and the socket peeks where it did.
    EXPECT_EQ(pair.count(), 2U);
    int offset = 0;
    socklen_t size = sizeof offset;
    ASSERT_EQ(::getsockopt(pair.there.get(), SOL_SOCKET, SO_PEEK_OFF, &offset, &size), 0);
    EXPECT_EQ(offset, -1);
    char byte = 0;
    EXPECT_EQ(::recv(pair.there.get(), &byte, 1, MSG_PEEK), 1);
    EXPECT_EQ(byte, 'x');
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, UnderWayOf,
                         ::testing::Values(SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET));

TEST(UnderWay, CountsThoseOfEmptyMessagesApart) {
  const UniqueFd plain = some_file();
  for (const int type : {SOCK_DGRAM, SOCK_SEQPACKET}) {
    const Pair pair(type);
    EXPECT_EQ(pair.count(), 0U);
    pair.send("a", plain);
    pair.send("", plain);
    EXPECT_EQ(pair.count(), 2U);
    EXPECT_EQ(pair.look().with_bytes, 1U);
    // The kernel passes over an empty one that was looked at before.
    EXPECT_EQ(pair.look().with_bytes, 1U);
  }
}

// Has a process that the thread has made the first of these descriptors, and not the second?
bool child_has_only(int thread, const UniqueFd& first, const UniqueFd& second) {
  std::ifstream children("/proc/self/task/" + std::to_string(thread) + "/children");
  for (std::string child; children >> child;) {
    const std::string folder = "/proc/" + child + "/fd/";
    const auto has = [&](const UniqueFd& file) {
      char target[64];
      return ::readlink((folder + std::to_string(file.get())).c_str(), target, sizeof target) > 0;
    };
    if (!has(second) && has(first)) return true;
  }
  return false;
}

// A lock of the tool's would be held for as long as the process that looks is held up.
TEST(UnderWay, TheOneThatLooksKeepsNoOtherDescriptor) {
  const Pair pair(SOCK_DGRAM);
  const UniqueFd plain = some_file();
  for (int i = 0; i < 10; ++i)
    pair.send("a", plain);
  std::atomic<bool> was_alone = false;
  std::atomic<bool> is_over = false;
  std::thread watch([&, thread = static_cast<int>(::gettid())] {
    while (!is_over && !was_alone)
      was_alone = child_has_only(thread, pair.there, plain);
  });
  constexpr int kTries = 500;
  for (int i = 0; i < kTries && !was_alone; ++i)
    EXPECT_TRUE(pair.look().is_known);
  is_over = true;
  watch.join();
  EXPECT_TRUE(was_alone);
}

TEST(UnderWay, EndsWhereTheOtherEndIsClosed) {
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    Pair pair(type);
    pair.send("a", some_file());
    pair.here.reset();
    const UnderWay found = pair.look();
    EXPECT_TRUE(found.is_known);
    EXPECT_EQ(found.with_bytes, 1U);
  }
}

}  // namespace
}  // namespace stasis::proc
