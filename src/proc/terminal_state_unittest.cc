#include "proc/terminal_state.h"

#include <fcntl.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

const Pid kSelf{::getpid()};

// Both ends of which wait, and let through what is written as it is.
class TerminalPairsTest : public ::testing::Test {
 protected:
  TerminalPairsTest() : master_(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)) {
    std::array<char, 64> name{};
    if (::grantpt(master_.get()) != 0 || ::unlockpt(master_.get()) != 0 ||
        ::ptsname_r(master_.get(), name.data(), name.size()) != 0)
      return;
    slave_ = UniqueFd(::open(name.data(), O_RDWR | O_NOCTTY | O_CLOEXEC));
    termios settings{};
    if (::tcgetattr(slave_.get(), &settings) != 0) return;
    ::cfmakeraw(&settings);
    (void)::tcsetattr(slave_.get(), TCSANOW, &settings);
  }
  Result<void> put_back(const std::string& unread) const {
    return TerminalPairs(std::array{kSelf}).put_unread_back(kSelf, slave_.get(), unread, false);
  }
  std::string read(std::size_t size) const {
    std::string out;
    std::array<char, 4096> some{};
    while (out.size() < size) {
      const ssize_t got = ::read(slave_.get(), some.data(), some.size());
      if (got <= 0) break;
      out.append(some.data(), static_cast<std::size_t>(got));
    }
    return out;
  }

  UniqueFd master_;
  UniqueFd slave_;
};

TEST_F(TerminalPairsTest, MoreThanOneBufferIsReadAgain) {
  ASSERT_TRUE(slave_.valid());
  const std::string unread = std::string(4500, 'a') + std::string(4500, 'b');
  const auto done = put_back(unread);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(read(unread.size()), unread);
}

// As an image may have it that another user has written: the write is not to wait for a reader that
// stands still.
TEST_F(TerminalPairsTest, MoreThanThereIsRoomForIsAnError) {
  ASSERT_TRUE(slave_.valid());
  ::alarm(30);
  const auto done = put_back(std::string(1 << 16, 'x'));
  ::alarm(0);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kIo);
  // Each end waits as before.
  EXPECT_EQ(::fcntl(master_.get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_EQ(::fcntl(slave_.get(), F_GETFL) & O_NONBLOCK, 0);
}

}  // namespace
}  // namespace stasis::proc
