#include "criu/criu_addresses.h"

#include <cstring>

#include <gtest/gtest.h>
#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include "criu/criu_messages.h"

namespace stasis {
namespace {

using Words = std::vector<std::uint32_t>;

std::uint32_t four(unsigned a, unsigned b, unsigned c, unsigned d) {
  const unsigned char bytes[] = {static_cast<unsigned char>(a), static_cast<unsigned char>(b),
                                 static_cast<unsigned char>(c), static_cast<unsigned char>(d)};
  std::uint32_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

void append_word(std::string& image, std::uint32_t word) {
  image.append(reinterpret_cast<const char*>(&word), sizeof word);
}

std::string empty_image() {
  std::string image;
  append_word(image, kAnyImageMagic);
  append_word(image, kFilesMagic);
  return image;
}

// inet_sk_entry, with a field that is not known behind the addresses.
void add_socket(std::string& image, const Words& source, const Words& destination,
                std::uint32_t port = 8080, std::uint32_t protocol = 6) {
  std::string socket;
  protozero::pbf_writer fields(socket);
  fields.add_uint32(5, protocol);
  fields.add_uint32(7, port);
  for (const auto word : source)
    fields.add_uint32(11, word);
  for (const auto word : destination)
    fields.add_uint32(12, word);
  fields.add_string(77, "later");
  std::string entry;
  protozero::pbf_writer file(entry);
  file.add_uint32(1, 2);
  file.add_uint32(2, 5);
  file.add_message(4, socket);
  append_message(image, entry);
}

struct Socket {
  Words source, destination;
  std::string later;
};

std::vector<Socket> sockets_of(const std::string& image) {
  std::vector<Socket> out;
  EXPECT_TRUE(each_message(image, kFilesMagic, [&](protozero::pbf_reader entry) {
    while (entry.next()) {
      if (entry.tag() != 4) {
        entry.skip();
        continue;
      }
      Socket& socket = out.emplace_back();
      auto fields = entry.get_message();
      while (fields.next()) {
        if (fields.tag() == 11)
          socket.source.push_back(fields.get_uint32());
        else if (fields.tag() == 12)
          socket.destination.push_back(fields.get_uint32());
        else if (fields.tag() == 77)
          socket.later = fields.get_string();
        else
          fields.skip();
      }
    }
  }));
  return out;
}

std::vector<AddressPair> pairs(std::initializer_list<const char*> texts) {
  std::vector<AddressPair> out;
  for (const char* text : texts)
    out.push_back(parse_address_pair(text).value());
  return out;
}

TEST(CriuAddresses, BothEndsGetTheOtherAddress) {
  const Words here{four(10, 0, 0, 5)};
  const Words there{four(10, 0, 0, 9)};
  const Words other{four(192, 168, 1, 1)};
  std::string image = empty_image();
  add_socket(image, here, {0});
  add_socket(image, other, here);
  add_socket(image, {0}, {0});
  const auto mapped = files_with_addresses(image, pairs({"10.0.0.5=10.0.0.9"}));
  ASSERT_TRUE(mapped) << mapped.error().to_string();
  const auto sockets = sockets_of(*mapped);
  ASSERT_EQ(sockets.size(), 3U);
  EXPECT_EQ(sockets[0].source, there);
  EXPECT_EQ(sockets[0].destination, Words{0});
  EXPECT_EQ(sockets[0].later, "later") << "what is not known stays";
  EXPECT_EQ(sockets[1].source, other);
  EXPECT_EQ(sockets[1].destination, there);
  EXPECT_EQ(sockets[2].source, Words{0});
}

TEST(CriuAddresses, SixAndFourWithinSix) {
  const Words within{0, 0, four(0, 0, 0xff, 0xff), four(10, 0, 0, 5)};
  const Words six{four(0xfd, 0, 0, 0), 0, 0, four(0, 0, 0, 1)};
  std::string image = empty_image();
  add_socket(image, within, six);
  const auto mapped = files_with_addresses(image, pairs({"10.0.0.5=10.0.0.9", "fd00::1=fd00::2"}));
  ASSERT_TRUE(mapped);
  const auto sockets = sockets_of(*mapped);
  EXPECT_EQ(sockets[0].source, (Words{0, 0, four(0, 0, 0xff, 0xff), four(10, 0, 0, 9)}));
  EXPECT_EQ(sockets[0].destination, (Words{four(0xfd, 0, 0, 0), 0, 0, four(0, 0, 0, 2)}));
}

TEST(CriuAddresses, TwoThatChangePlacesDoSo) {
  std::string image = empty_image();
  add_socket(image, {four(10, 0, 0, 1)}, {four(10, 0, 0, 2)});
  const auto mapped =
      files_with_addresses(image, pairs({"10.0.0.1=10.0.0.2", "10.0.0.2=10.0.0.1"}));
  ASSERT_TRUE(mapped);
  EXPECT_EQ(sockets_of(*mapped)[0].source, Words{four(10, 0, 0, 2)});
  EXPECT_EQ(sockets_of(*mapped)[0].destination, Words{four(10, 0, 0, 1)});
}

TEST(CriuAddresses, AnAddressThatNoSocketHasIsAMistake) {
  std::string image = empty_image();
  add_socket(image, {four(10, 0, 0, 5)}, {0});
  const auto mapped =
      files_with_addresses(image, pairs({"10.0.0.5=10.0.0.9", "10.0.0.6=10.0.0.9"}));
  ASSERT_FALSE(mapped);
  EXPECT_EQ(mapped.error().code, ErrorCode::kUsage);
  EXPECT_NE(mapped.error().message.find("10.0.0.6"), std::string::npos);
}

TEST(CriuAddresses, AnAddressThatIsToBeTwoOthersIsAMistake) {
  std::string image = empty_image();
  add_socket(image, {four(10, 0, 0, 5)}, {0});
  const auto mapped =
      files_with_addresses(image, pairs({"10.0.0.5=10.0.0.9", "::ffff:10.0.0.5=10.0.0.8"}));
  ASSERT_FALSE(mapped);
  EXPECT_EQ(mapped.error().code, ErrorCode::kUsage);
  EXPECT_NE(mapped.error().message.find("10.0.0.9 and 10.0.0.8"), std::string::npos);
}

// The kernel lets criu bind both, and no connection reaches one of them.
TEST(CriuAddresses, TwoSocketsInOnePlaceAreAMistake) {
  const Words five{four(10, 0, 0, 5)};
  const Words six{four(10, 0, 0, 6)};
  std::string image = empty_image();
  add_socket(image, five, {0});
  add_socket(image, six, {0});
  const auto mapped = files_with_addresses(image, pairs({"10.0.0.5=10.0.0.6"}));
  ASSERT_FALSE(mapped);
  EXPECT_EQ(mapped.error().code, ErrorCode::kUsage);
  EXPECT_NE(mapped.error().message.find("10.0.0.5 port 8080"), std::string::npos);
  EXPECT_FALSE(files_with_addresses(image, pairs({"10.0.0.5=10.0.0.9", "10.0.0.6=10.0.0.9"})));
  // Another port, another protocol, another peer; no port; and those that were in one place before.
  image = empty_image();
  add_socket(image, five, {0});
  add_socket(image, six, {0}, 8081);
  add_socket(image, six, {0}, 8080, 17);
  add_socket(image, six, five);
  add_socket(image, five, {0}, 0);
  add_socket(image, six, {0}, 0);
  add_socket(image, five, {0});
  EXPECT_TRUE(files_with_addresses(image, pairs({"10.0.0.5=10.0.0.6"})));
}

TEST(CriuAddresses, WhatIsNoFilesImageIsSaid) {
  std::string image = empty_image();
  add_socket(image, {four(10, 0, 0, 5)}, {0});
  image.pop_back();
  for (const std::string& bad : {image, std::string(), std::string("files")}) {
    const auto mapped = files_with_addresses(bad, pairs({"10.0.0.5=10.0.0.9"}));
    ASSERT_FALSE(mapped);
    EXPECT_EQ(mapped.error().code, ErrorCode::kImageCorrupt);
  }
}

TEST(CriuAddresses, PairsAreRead) {
  for (const char* bad : {"", "10.0.0.5", "10.0.0.5=", "=10.0.0.5", "10.0.0.5=fd00::1",
                          "10.0.0.5=10.0.0.300", "a=b", "10.0.0.5=10.0.0.9=10.0.0.1",
                          "10.0.0.5=0.0.0.0", "10.0.0.5=224.0.0.1", "10.0.0.5=255.255.255.255",
                          "fd00::1=::", "fd00::1=ff02::1", "fd00::1=fe80::1", "fe80::1%lo=::1"})
    EXPECT_FALSE(parse_address_pair(bad)) << bad;
  const auto some = pairs({"10.0.0.5=10.0.0.9", "fd00::1=fd00::2"});
  EXPECT_EQ(mapped_address("10.0.0.5", some), "10.0.0.9");
  EXPECT_EQ(mapped_address("fd00:0::1", some), "fd00::2");
  EXPECT_EQ(mapped_address("10.0.0.6", some), "10.0.0.6");
}

}  // namespace
}  // namespace stasis
