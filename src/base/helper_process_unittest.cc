#include "base/helper_process.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>

#include <gtest/gtest.h>

#include "tests/fakes/child.h"

namespace stasis {
namespace {

HelperProcess started(const std::function<void(const Channel&)>& serve) {
  auto helper = HelperProcess::start("stasis-test", serve);
  EXPECT_TRUE(helper);
  return std::move(*helper);
}

int asked(const HelperProcess& helper) {
  auto message = helper.channel().receive(60000);
  if (!message || !*message) return -1;
  return (*message)->as<int>().value_or(-1);
}

TEST(HelperProcess, WorksAndEnds) {
  auto helper = started([](const Channel& owner) {
    auto message = owner.receive(-1);
    (void)owner.send_value((*message)->as<int>().value_or(0) + 1);
    (void)owner.receive(-1);
  });
  ASSERT_TRUE(helper.channel().send_value(41));
  EXPECT_EQ(asked(helper), 42);
  const Pid pid = helper.pid();
  EXPECT_TRUE(helper.running());
  EXPECT_TRUE(helper.end());
  EXPECT_EQ(::kill(pid.value, 0), -1) << "something of it is left";
  EXPECT_EQ(helper.how_it_ended(), "");
}

TEST(HelperProcess, IsKilledWhereItHangs) {
  auto helper = started([](const Channel&) {
    for (;;)
      ::pause();
  });
  EXPECT_TRUE(helper.end());
  EXPECT_FALSE(helper.running());
}

TEST(HelperProcess, TellsHowItCrashed) {
  auto helper = started([](const Channel&) { ::raise(SIGSEGV); });
  auto message = helper.channel().receive(60000);
  ASSERT_FALSE(message);
  EXPECT_TRUE(helper.end_after(60000));
  EXPECT_NE(helper.how_it_ended().find("signal 11"), std::string::npos) << helper.how_it_ended();
}

TEST(HelperProcess, HoldsNothingOfItsOwner) {
  const UniqueFd ours(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int number = ours.get();
  auto helper = started([number](const Channel& owner) {
    (void)owner.send_value(static_cast<int>(::fcntl(number, F_GETFD)));
    (void)owner.receive(-1);
  });
  EXPECT_EQ(asked(helper), -1);
}

TEST(HelperProcess, EndsWithAnOwnerThatIsKilled) {
  auto ends = Channel::pair();
  ASSERT_TRUE(ends);
  fakes::Child owner([&] {
    auto helper = started([](const Channel&) {
      for (;;)
        ::pause();
    });
    (void)ends->second.send_value(helper.pid().value);
    for (;;)
      ::pause();
  });
  auto message = ends->first.receive(60000);
  ASSERT_TRUE(message && *message);
  auto helper = Pidfd::open(Pid{(*message)->as<int>().value_or(0)});
  ASSERT_TRUE(helper);
  EXPECT_TRUE(helper->alive());
  owner.become_zombie();
  EXPECT_TRUE(helper->wait_exit(60000));
}

}  // namespace
}  // namespace stasis
