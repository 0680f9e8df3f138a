#include "criu/criu_tcp_queues.h"

#include <fcntl.h>

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "criu/criu_messages.h"

namespace stasis {
namespace {

namespace fs = std::filesystem;

constexpr const char* kQueues = "what is in the queues";

class TcpQueues : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-queues-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  // A connection with that message, as it is afterwards.
  std::string changed(const std::string& message) const {
    std::string text;
    for (const std::uint32_t word :
         {kAnyImageMagic, std::uint32_t{0x51465506}, static_cast<std::uint32_t>(message.size())})
      text.append(reinterpret_cast<const char*>(&word), sizeof word);
    std::ofstream(path()) << text << message << kQueues;
    const auto dir = open_file(AT_FDCWD, root_.string(), O_RDONLY | O_DIRECTORY);
    EXPECT_TRUE(dir && count_as_sent(*dir));
    std::ifstream file(path());
    std::string after((std::istreambuf_iterator<char>(file)), {});
    EXPECT_EQ(after.size(), text.size() + message.size() + std::string(kQueues).size());
    EXPECT_TRUE(after.ends_with(kQueues));
    return after.substr(text.size(), message.size());
  }
  fs::path path() const { return root_ / "tcp-stream-1a.img"; }

  fs::path root_;
};

TEST_F(TcpQueues, AllCountsAsSent) {
  for (const std::uint32_t unsent : {0U, 1U, 788U, 800000U}) {
    std::string message;
    protozero::pbf_writer writer(message);
    writer.add_uint32(3, 900000);
    writer.add_uint32(4, 0xfffffff0);
    writer.add_uint32(12, unsent);
    writer.add_uint32(17, 7);
    const std::string after = changed(message);
    protozero::pbf_reader reader(after);
    std::string seen;
    while (reader.next()) {
      const auto tag = reader.tag();
      seen += std::to_string(tag) + "=" + std::to_string(reader.get_uint32()) + " ";
    }
    EXPECT_EQ(seen, "3=900000 4=4294967280 12=0 17=7 ");
  }
}

TEST_F(TcpQueues, WhatIsDamagedStaysAsItIs) {
  for (const std::string& message :
       {std::string(), std::string("\x60"), std::string("\x60\x80\x80"),
        std::string("\x62\x01\x01", 3), std::string("\xff\xff\xff")})
    EXPECT_EQ(changed(message), message);
}

}  // namespace
}  // namespace stasis
