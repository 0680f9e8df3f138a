#include "criu/criu_rpc.h"

#include <string>

#include <gtest/gtest.h>

namespace stasis::criu_rpc {
namespace {

using namespace std::string_literals;  // bytes may be 0

// What criu 4.2.1 answers to the question for its version, and to a notification.
const std::string kVersionAnswer = "\x08\x0a\x10\x01\x52\x06\x08\x04\x10\x02\x20\x01"s;

TEST(CriuRpcTest, ARequestHasTheBytesOfTheProtocol) {
  Request request;
  request.type = Type::kVersion;
  EXPECT_EQ(to_wire(request), "\x08\x0a"s);
  request.type = Type::kNotify;
  request.notify_success = false;
  EXPECT_EQ(to_wire(request), "\x08\x06\x18\x00"s);
}

TEST(CriuRpcTest, OnlyWhatIsSetIsSent) {
  Request request;
  request.type = Type::kDump;
  Options& options = request.opts.emplace();
  options.images_dir_fd = 7;
  EXPECT_EQ(to_wire(request), "\x08\x01\x12\x02\x08\x07"s);
  options.pid = 300;
  options.leave_running = true;
  options.inherit_fd = {{"p", 4}};
  EXPECT_EQ(to_wire(request),
            "\x08\x01\x12\x0f"
            "\x08\x07\x10\xac\x02\x18\x01"
            "\xda\x01\x05\x0a\x01p\x10\x04"s);
}

// The numbers of criu_opts in CRIU's images/rpc.proto, in the order of criu_options.inc.
TEST(CriuRpcTest, OptionsHaveCriusNumbers) {
  Request request;
  request.type = Type::kDump;
  Options& options = request.opts.emplace();
  options.images_dir_fd = 7;
  CriuOptions& criu = options.criu.emplace();
  criu.external = {"a", "bc"};
  criu.network_lock = NetworkLock::kSkip;
  criu.cgroups = CgroupMode::kStrict;
  criu.ghost_limit = 4294967295U;
  const std::string sent =
      "\x08\x07"
      "\x38\x00\x28\x00\xa0\x03\x00\x40\x00\x90\x01\x01\x20\x00"
      "\x98\x02\xff\xff\xff\xff\x0f"
      "\xaa\x02\x01"
      "a\xaa\x02\x02"
      "bc"
      "\x90\x02\x05\x80\x04\x03"s;
  EXPECT_EQ(to_wire(request), "\x08\x01\x12\x26"s + sent);
  // What a user does not choose is sent only where it is not the default.
  criu.unprivileged = true;
  criu.lsm_profile = "p";
  EXPECT_EQ(to_wire(request).size(), sent.size() + 4 + 3 + 4);
  EXPECT_NE(to_wire(request).find("\x98\x04\x01"s), std::string::npos);
  EXPECT_TRUE(to_wire(request).ends_with("\xaa\x03\x01p"s));
}

TEST(CriuRpcTest, AnAnswerIsRead) {
  const auto answer = response_from_wire(kVersionAnswer);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->type, Type::kVersion);
  EXPECT_TRUE(answer->success);
  ASSERT_TRUE(answer->version);
  EXPECT_EQ(answer->version->major_number, 4);
  EXPECT_EQ(answer->version->minor_number, 2);
  EXPECT_EQ(answer->version->sublevel, 1);
  const auto notify =
      response_from_wire("\x08\x06\x10\x01\x2a\x0d\x0a\x09post-dump\x10\x0c\x38\x02\x4a\x02no"s);
  ASSERT_TRUE(notify);
  EXPECT_EQ(notify->notify.script, "post-dump");
  EXPECT_EQ(notify->notify.pid, 12);
  EXPECT_EQ(notify->cr_errno, 2);
  EXPECT_EQ(notify->cr_errmsg, "no");
  const auto restored = response_from_wire("\x08\x02\x10\x01\x22\x02\x08\x2a"s);
  ASSERT_TRUE(restored);
  EXPECT_EQ(restored->restored_pid, 42);
}

TEST(CriuRpcTest, FieldsOfANewerCriuArePassedOver) {
  // Number 99 as each of the four kinds, also where a known number comes as another kind.
  const std::string more =
      "\x98\x06\x05\x9a\x06\x01x\x99\x06\x01\x02\x03\x04\x05\x06\x07\x08\x9d\x06\x01\x02\x03\x04\x20\x01"s;
  const auto answer = response_from_wire(more + kVersionAnswer + more);
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->version);
  EXPECT_FALSE(answer->restored_pid);
}

TEST(CriuRpcTest, WhatIsCutShortOrLacksAFieldIsNoAnswer) {
  for (std::size_t length = 0; length < kVersionAnswer.size(); ++length) {
    const auto answer = response_from_wire(kVersionAnswer.substr(0, length));
    EXPECT_FALSE(answer && answer->version) << length;
  }
  EXPECT_FALSE(response_from_wire("\x08\x0a"s)) << "no success";
  EXPECT_FALSE(response_from_wire("\x10\x01"s)) << "no type";
  EXPECT_FALSE(response_from_wire("\x08\x02\x10\x01\x22\x00"s)) << "a restore without a number";
  EXPECT_FALSE(response_from_wire("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"s));
}

}  // namespace
}  // namespace stasis::criu_rpc
