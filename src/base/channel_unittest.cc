#include "base/channel.h"

#include <sys/resource.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace stasis {
namespace {

std::pair<Channel, Channel> connected() {
  auto ends = Channel::pair();
  EXPECT_TRUE(ends);
  return std::move(*ends);
}

TEST(Channel, KeepsMessagesApart) {
  auto [here, there] = connected();
  ASSERT_TRUE(here.send_value(std::uint64_t{7}));
  ASSERT_TRUE(here.send_value(std::uint16_t{9}));
  auto first = there.receive(60000);
  ASSERT_TRUE(first && *first);
  EXPECT_EQ((*first)->as<std::uint64_t>(), 7U);
  auto second = there.receive(60000);
  ASSERT_TRUE(second && *second);
  EXPECT_EQ((*second)->as<std::uint64_t>(), std::nullopt) << "two bytes are no number of eight";
  EXPECT_EQ((*second)->as<std::uint16_t>(), 9U);
}

TEST(Channel, SaysNothingWhenNothingComes) {
  auto [here, there] = connected();
  auto message = there.receive(10);
  ASSERT_TRUE(message);
  EXPECT_FALSE(*message);
}

TEST(Channel, NoticesTheOthersEnd) {
  auto [here, there] = connected();
  here.close();
  auto message = there.receive(-1);
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code, ErrorCode::kProcessGone);
  auto sent = there.send_value(1);
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code, ErrorCode::kProcessGone);
}

TEST(Channel, CarriesAsManyDescriptorsAsItPromises) {
  auto [here, there] = connected();
  std::vector<UniqueFd> sent;
  for (std::size_t i = 0; i < Channel::kMostDescriptors; ++i)
    sent.emplace_back(::dup(STDIN_FILENO));
  ASSERT_TRUE(here.send_value('d', sent));
  auto message = there.receive(60000);
  ASSERT_TRUE(message && *message);
  ASSERT_EQ((*message)->descriptors.size(), sent.size());
  EXPECT_NE((*message)->descriptors.front().get(), sent.front().get());
  sent.emplace_back(::dup(STDIN_FILENO));
  auto refused = here.send_value('d', sent);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInternal);
}

TEST(Channel, SaysThatDescriptorsWereLostToTheLimitOfOpenFiles) {
  auto [here, there] = connected();
  std::vector<UniqueFd> sent;
  for (int i = 0; i < 8; ++i)
    sent.emplace_back(::dup(STDIN_FILENO));
  ASSERT_TRUE(here.send_value('d', sent));
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  rlimit low = old;
  low.rlim_cur = static_cast<rlim_t>(sent.back().get()) + 3;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  auto message = there.receive(60000);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
  ASSERT_FALSE(message);
  EXPECT_NE(message.error().remedy.find("ulimit -n"), std::string::npos);
}

TEST(Channel, WhatMayBeLostIsNeverWaitedFor) {
  auto pair = Channel::pair();
  ASSERT_TRUE(pair.has_value());
  const std::vector<std::byte> bytes(1000);
  for (int i = 0; i < 10000; ++i)
    pair->first.send_if_it_reads(bytes);
  const auto message = pair->second.receive(0);
  ASSERT_TRUE(message.has_value() && message->has_value());
  EXPECT_EQ((*message)->bytes.size(), bytes.size());
}

}  // namespace
}  // namespace stasis
