#include "criu/criu_sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "criu/criu_messages.h"

namespace stasis {
namespace {

constexpr std::uint32_t kTcp = 6;
constexpr std::uint32_t kUdp = 17;
constexpr std::uint32_t kConnected = 1;
constexpr std::uint32_t kClosed = 7;
constexpr std::uint32_t kListens = 10;

void put(std::string& image, std::uint32_t word) {
  image.append(reinterpret_cast<const char*>(&word), sizeof word);
}

void add_socket(std::string& image, const char* address, std::uint32_t port, std::uint32_t protocol,
                std::uint32_t state, const std::string& device = {}) {
  std::uint32_t words[4] = {};
  const bool is_four = std::strchr(address, ':') == nullptr;
  ASSERT_EQ(::inet_pton(is_four ? AF_INET : AF_INET6, address, words), 1);
  std::string options;
  protozero::pbf_writer(options).add_string(15, device);
  std::string socket;
  protozero::pbf_writer fields(socket);
  fields.add_uint32(3, is_four ? AF_INET : AF_INET6);
  fields.add_uint32(5, protocol);
  fields.add_uint32(6, state);
  fields.add_uint32(7, port);
  for (int i = 0; i < (is_four ? 1 : 4); ++i)
    fields.add_uint32(11, words[i]);
  fields.add_message(14, options);
  fields.add_bool(15, !is_four);
  fields.add_string(17, device);
  std::string entry;
  protozero::pbf_writer file(entry);
  file.add_uint32(1, 2);
  file.add_message(4, socket);
  append_message(image, entry);
}

std::vector<proc::BoundSocket> read(const std::string& image) {
  const std::string path = ::testing::TempDir() + "criu_sockets_" + std::to_string(::getpid());
  std::filesystem::create_directories(path);
  const UniqueFd folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto file = open_file(folder.get(), kFilesImage, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  EXPECT_TRUE(file && write_all(file->get(), image.data(), image.size(), kFilesImage));
  auto sockets = bound_sockets(folder);
  std::filesystem::remove_all(path);
  return sockets;
}

TEST(CriuSockets, AreThoseThatAreBound) {
  std::string image;
  put(image, kAnyImageMagic);
  put(image, kFilesMagic);
  add_socket(image, "127.0.0.1", 80, kTcp, kListens);
  add_socket(image, "127.0.0.1", 80, kTcp, kListens);
  add_socket(image, "127.0.0.1", 80, kTcp, kConnected);
  add_socket(image, "::1", 81, kTcp, kClosed, "lo");
  add_socket(image, "0.0.0.0", 82, kUdp, kConnected);
  add_socket(image, "0.0.0.0", 0, kUdp, kClosed);
  add_socket(image, "0.0.0.0", 65536, kUdp, kClosed);
  add_socket(image, "0.0.0.0", 83, 1, kClosed);
  add_socket(image, "0.0.0.0", 84, kUdp, kClosed, "a name that no device may have");
  const auto sockets = read(image);
  ASSERT_EQ(sockets.size(), 4U);
  EXPECT_EQ(sockets[0].text(), "127.0.0.1:80");
  EXPECT_TRUE(sockets[0].is_tcp && sockets[0].is_four && !sockets[0].only_six);
  EXPECT_EQ(sockets[1].text(), "[::1]:81");
  EXPECT_TRUE(sockets[1].is_tcp && !sockets[1].is_four && sockets[1].only_six);
  EXPECT_EQ(sockets[1].device + sockets[1].interface, "lolo");
  EXPECT_EQ(sockets[2].text(), "0.0.0.0:82");
  EXPECT_FALSE(sockets[2].is_tcp);
  EXPECT_EQ(sockets[3].device, "");
  EXPECT_TRUE(read("").empty());
  EXPECT_TRUE(read(image.substr(0, 20)).empty());
}

// Of a socket with the number 70, which has `queues` as sk-queues.img.
std::uint64_t saved(const std::string& queues) {
  std::string files;
  put(files, kAnyImageMagic);
  put(files, kFilesMagic);
  std::string socket;
  protozero::pbf_writer fields(socket);
  fields.add_uint32(1, 7);   // its number in the image
  fields.add_uint32(2, 70);  // in the kernel
  std::string entry;
  protozero::pbf_writer file(entry);
  file.add_uint32(1, 8);
  file.add_message(16, socket);
  append_message(files, entry);
  const std::string path = ::testing::TempDir() + "criu_queues_" + std::to_string(::getpid());
  std::filesystem::create_directories(path);
  const UniqueFd folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto write = [&](const char* name, const std::string& content) {
    const auto out = open_file(folder.get(), name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    EXPECT_TRUE(out && write_all(out->get(), content.data(), content.size(), name));
  };
  write(kFilesImage, files);
  write("sk-queues.img", queues);
  const auto sockets = saved_in_unix_sockets(folder);
  std::filesystem::remove_all(path);
  constexpr std::uint64_t kNothingKnown = 999;
  return sockets.contains(70) ? sockets.at(70) : kNothingKnown;
}

TEST(CriuSockets, CountsWhatTheImageHasOfQueues) {
  constexpr std::uint32_t kQueues = 0x56264026;
  const auto packet = [](std::uint32_t socket, const std::string& data) {
    std::string message;
    protozero::pbf_writer fields(message);
    fields.add_uint32(1, socket);
    fields.add_uint32(2, static_cast<std::uint32_t>(data.size()));
    std::string out;
    append_message(out, message);
    return out + data;
  };
  std::string head;
  put(head, kAnyImageMagic);
  put(head, kQueues);
  EXPECT_EQ(saved(""), 999U);
  EXPECT_EQ(saved(head), 0U);
  EXPECT_EQ(saved(head + packet(7, "abc") + packet(9, "others") + packet(7, "de")), 5U);
  // What is not to be read says nothing.
  std::string other;
  put(other, kAnyImageMagic);
  put(other, kFilesMagic);
  EXPECT_EQ(saved(other + packet(7, "abc")), 999U);
  const std::string whole = head + packet(7, "abc");
  for (std::size_t size = head.size() + 4; size < whole.size(); ++size)
    EXPECT_EQ(saved(whole.substr(0, size)), 999U) << size;
}

}  // namespace
}  // namespace stasis
