#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "group/group_rendezvous.h"
#include "rendezvous/address.h"
#include "rendezvous/messages.h"
#include "rendezvous/record_store.h"
#include "rendezvous/sealed_channel.h"
#include "rendezvous/secret.h"

namespace stasis::rendezvous {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

GroupKey key_of(const std::string& secret) { return std::move(*GroupKey::from_secret(secret)); }
const std::string kSecret = "sixteen bytes and more";

// --- The sealed channel

struct Ends {
  SealedChannel client;
  SealedChannel server;
};
Ends connected(const GroupKey& of_client, const GroupKey& of_server) {
  const Nonce client = new_nonce();
  const Nonce server = new_nonce();
  Ends out{SealedChannel(of_client, Side::kClient, client, server),
           SealedChannel(of_server, Side::kServer, client, server)};
  EXPECT_TRUE(out.client.begin(out.server.header()));
  EXPECT_TRUE(out.server.begin(out.client.header()));
  return out;
}
Ends connected() { return connected(key_of(kSecret), key_of(kSecret)); }

// Without its length.
std::string sealed(SealedChannel& from, const std::string& text) {
  return from.seal(text).substr(kLengthBytes);
}

TEST(SealedChannel, CarriesMessagesBothWaysInOrder) {
  Ends ends = connected();
  for (const std::string& text : {std::string("one"), std::string(), std::string(100'000, 'x')}) {
    EXPECT_EQ(ends.server.open(sealed(ends.client, text)), text);
    EXPECT_EQ(ends.client.open(sealed(ends.server, text)), text);
  }
}

TEST(SealedChannel, AnotherSecretOpensNothing) {
  Ends ends = connected(key_of(kSecret), key_of(kSecret + "."));
  EXPECT_FALSE(ends.client.open(sealed(ends.server, "hello")));
  EXPECT_FALSE(ends.server.open(sealed(ends.client, "hello")));
}

TEST(SealedChannel, AMessageThatIsRepeatedLeftOutOrChangedEndsIt) {
  {
    Ends ends = connected();
    const std::string message = sealed(ends.client, "once");
    EXPECT_EQ(ends.server.open(message), "once");
    EXPECT_FALSE(ends.server.open(message)) << "again";
    EXPECT_FALSE(ends.server.open(sealed(ends.client, "later"))) << "none opens after that";
  }
  {
    Ends ends = connected();
    const std::string first = sealed(ends.client, "first");
    EXPECT_FALSE(ends.server.open(sealed(ends.client, "second"))) << "the first is left out";
    EXPECT_FALSE(ends.server.open(first));
  }
  for (const std::size_t at : {0U, 1U, 10U, 20U}) {
    Ends ends = connected();
    std::string message = sealed(ends.client, "text");
    ASSERT_LT(at, message.size());
    message[at] = static_cast<char>(message[at] ^ 1);
    EXPECT_FALSE(ends.server.open(message)) << at;
  }
  for (const std::size_t left : {0U, 1U, 16U, 20U}) {
    Ends ends = connected();
    EXPECT_FALSE(ends.server.open(sealed(ends.client, "text").substr(0, left))) << left;
  }
}

TEST(SealedChannel, WhatIsReflectedOrOfAnotherConnectionDoesNotOpen) {
  {
    const GroupKey key = key_of(kSecret);
    SealedChannel own(key, Side::kClient, new_nonce(), new_nonce());
    ASSERT_TRUE(own.begin(own.header())) << "the header is sent back, too";
    EXPECT_FALSE(own.open(sealed(own, "my own")));
  }
  // A whole stream of before, header and all, against fresh nonces.
  const GroupKey key = key_of(kSecret);
  const Nonce client = new_nonce();
  SealedChannel before(key, Side::kClient, client, new_nonce());
  const std::string message = sealed(before, "old");
  SealedChannel now(key, Side::kServer, client, new_nonce());
  ASSERT_TRUE(now.begin(before.header()));
  EXPECT_FALSE(now.open(message));
}

TEST(SealedChannel, ALengthIsBounded) {
  const auto length = [](std::uint32_t size) {
    std::string out;
    for (int i = 0; i < 4; ++i)
      out.push_back(static_cast<char>(size >> (8 * i)));
    return out;
  };
  EXPECT_EQ(SealedChannel::sealed_bytes(length(17 + 100), 100), 117U);
  for (const std::uint32_t bad : {0U, 16U, 17U + 101U, 0xffffffffU})
    EXPECT_FALSE(SealedChannel::sealed_bytes(length(bad), 100)) << bad;
  EXPECT_FALSE(SealedChannel::sealed_bytes("abc", 100));
}

TEST(SealedChannel, AGreetingOfAnotherVersionIsNone) {
  const std::string good = greeting(new_nonce());
  EXPECT_TRUE(nonce_of(good));
  EXPECT_FALSE(nonce_of(good.substr(1)));
  EXPECT_FALSE(nonce_of(good + "x"));
  EXPECT_FALSE(nonce_of("stasis-2" + good.substr(8)));
  EXPECT_FALSE(nonce_of(""));
}

// --- The secret

class SecretTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-secret-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
  }
  void TearDown() override { fs::remove_all(dir_); }
  std::string file(const std::string& text, fs::perms mode = fs::perms::owner_read) const {
    const fs::path path = dir_ / "secret";
    fs::remove(path);
    std::ofstream(path) << text;
    fs::permissions(path, mode);
    return path;
  }

  fs::path dir_;
};

TEST_F(SecretTest, IsTheContentOfAFileThatOthersCannotRead) {
  const auto key = GroupKey::from_file(file(kSecret));
  ASSERT_TRUE(key) << key.error().to_string();
  EXPECT_EQ(key->bytes(), key_of(kSecret).bytes());
  EXPECT_NE(key->bytes(), key_of(kSecret + "\n").bytes());
  for (const fs::perms bad :
       {fs::perms::others_read, fs::perms::group_read, fs::perms::others_write}) {
    const auto open = GroupKey::from_file(file(kSecret, fs::perms::owner_read | bad));
    ASSERT_FALSE(open);
    EXPECT_EQ(open.error().code, ErrorCode::kNotPermitted);
  }
}

TEST_F(SecretTest, HasABoundedSize) {
  EXPECT_TRUE(GroupKey::from_file(file(std::string(kLeastSecret, 'x'))));
  EXPECT_TRUE(GroupKey::from_file(file(std::string(kMostSecret, 'x'))));
  const auto small = GroupKey::from_file(file(std::string(kLeastSecret - 1, 'x')));
  ASSERT_FALSE(small);
  EXPECT_EQ(small.error().code, ErrorCode::kUsage);
  EXPECT_THAT(small.error().message, HasSubstr("15 bytes"));
  EXPECT_FALSE(GroupKey::from_file(file(std::string(kMostSecret + 1, 'x'))));
}

TEST_F(SecretTest, IsNoLinkAndNoPipeAndNoDirectory) {
  file(kSecret);
  fs::create_symlink("secret", dir_ / "link");
  EXPECT_FALSE(GroupKey::from_file(dir_ / "link"));
  ASSERT_EQ(::mkfifo((dir_ / "fifo").c_str(), 0600), 0);
  EXPECT_FALSE(GroupKey::from_file(dir_ / "fifo"));
  EXPECT_FALSE(GroupKey::from_file(dir_));
  EXPECT_FALSE(GroupKey::from_file(dir_ / "none"));
}

TEST_F(SecretTest, OfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to give a file away";
  const std::string path = file(kSecret);
  ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
  const auto other = GroupKey::from_file(path);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, ErrorCode::kNotPermitted);
}

// --- Addresses

TEST(GroupAddress, IsAHostAndAPort) {
  const auto host = parse_host_port("tcp://node-0.example.org:7777");
  ASSERT_TRUE(host);
  EXPECT_EQ(host->host, "node-0.example.org");
  EXPECT_EQ(host->port, 7777);
  const auto six = parse_host_port("tcp://[fd00::1]:1");
  ASSERT_TRUE(six);
  EXPECT_EQ(six->host, "fd00::1");
  for (const char* bad :
       {"", "tcp://", "tcp://a", "tcp://a:", "tcp://:1", "tcp://a:0", "tcp://a:65536", "tcp://a:1x",
        "tcp://a:-1", "tcp://fd00::1:1", "tcp://[]:1", "tcp://a/b:1", "tcp://u@a:1", "udp://a:1"})
    EXPECT_FALSE(parse_host_port(bad)) << bad;
}

TEST(GroupAddress, IsOneAtWhichOthersReachIt) {
  EXPECT_TRUE(resolve({"127.0.0.1", 1}));
  EXPECT_TRUE(resolve({"localhost", 1}));
  for (const char* bad : {"0.0.0.0", "::", "224.0.0.1", "255.255.255.255", "ff02::1"})
    EXPECT_FALSE(resolve({bad, 1})) << bad;
}

// --- Messages and records

TEST(GroupMessages, AreReadAsTheyWereWritten) {
  for (const Request& request :
       {Request{Verb::kHello, {}, std::string(kIdBytes, 'i')}, Request{Verb::kRead, "lead", {}},
        Request{Verb::kWrite, "part.a", "text"}, Request{Verb::kClaim, "rest", ""},
        Request{Verb::kNames, {}, {}}, Request{Verb::kRemove, {}, "a\nb\n"}}) {
    const auto read = request_from_bytes(to_bytes(request));
    ASSERT_TRUE(read);
    EXPECT_EQ(read->verb, request.verb);
    EXPECT_EQ(read->name, request.name);
    EXPECT_EQ(read->text, request.text);
  }
  EXPECT_EQ(names_from_text(names_to_text({"a", "b"})), std::vector<std::string>({"a", "b"}));
}

TEST(GroupMessages, MalformedOnesAreRefused) {
  const std::string large(kMostGroupRecord + 1, 'x');
  for (const std::string& bad :
       {std::string(), std::string("\x02", 1), std::string("\0\0", 2), std::string("\x07\0", 2),
        std::string("\x02\x05lead"), std::string("\x02\0", 2), std::string("\x02\x04l/ad"),
        std::string("\x02\x04leadtext"), std::string("\x05\x01n"), std::string("\x01\0short", 7),
        to_bytes(Request{Verb::kWrite, "lead", large}),
        to_bytes(Request{Verb::kWrite, std::string(kMostRecordName + 1, 'n'), ""})})
    EXPECT_FALSE(request_from_bytes(bad)) << bad.substr(0, 20);
  for (const std::string& bad : {std::string(), std::string("\x09"), "\x02" + large})
    EXPECT_FALSE(answer_from_bytes(bad)) << bad.substr(0, 20);
  std::string many;
  for (std::size_t i = 0; i <= kMostGroupNames; ++i)
    many += "n\n";
  for (const std::string& bad : {std::string("a"), std::string("\n"), std::string("a\n/\n"), many})
    EXPECT_FALSE(names_from_text(bad)) << bad.substr(0, 20);
}

TEST(RecordStore, AClaimIsOfOneAndItsRepetitionIsTheSame) {
  RecordStore store;
  EXPECT_EQ(store.claim("rest", "a", "still"), true);
  EXPECT_EQ(store.claim("rest", "b", "go-on"), false);
  EXPECT_EQ(store.claim("rest", "a", "still"), true) << "the answer was lost";
  EXPECT_EQ(store.claim("rest", "a", "go-on"), false) << "another decision of the same part";
  EXPECT_EQ(store.read("rest"), "still");
  store.remove({"rest", "none"});
  EXPECT_TRUE(store.names().empty());
}

TEST(RecordStore, KeepsNoMoreThanItsBound) {
  RecordStore store;
  const std::string large(kMostGroupRecord, 'x');
  for (int i = 0; i < 32; ++i)
    ASSERT_TRUE(store.write(std::to_string(i), "a", large));
  EXPECT_FALSE(store.write("more", "a", "x"));
  EXPECT_FALSE(store.claim("more", "a", "x"));
  EXPECT_TRUE(store.write("0", "a", "in its place"));
  EXPECT_TRUE(store.write("more", "a", "x"));
  for (std::size_t i = 33; i < kMostGroupNames; ++i)
    ASSERT_TRUE(store.write(std::to_string(i), "a", ""));
  EXPECT_FALSE(store.write("one too many", "a", ""));
}

}  // namespace
}  // namespace stasis::rendezvous
