#include "criu/criu_core.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <initializer_list>
#include <string>

#include <gtest/gtest.h>
#include <protozero/pbf_writer.hpp>

namespace stasis {
namespace {

constexpr Tid kThread{77};

// As CRIU writes it, with what it has besides.
std::string core_file(std::uint32_t signal, std::uint64_t state = 0) {
  std::string registers;
  protozero::pbf_writer(registers).add_uint64(11, 7);
  std::string info;
  protozero::pbf_writer(info).add_message(2, registers);
  std::string extended;
  protozero::pbf_writer(extended).add_uint64(1, state);
  std::string floating;
  protozero::pbf_writer of_floating(floating);
  of_floating.add_uint32(1, 0x37f);
  of_floating.add_message(13, extended);
  protozero::pbf_writer(info).add_message(3, floating);
  std::string thread_core;
  protozero::pbf_writer of_thread(thread_core);
  of_thread.add_uint64(1, 0x7f0000000000);
  if (signal != 0) of_thread.add_uint32(8, signal);
  of_thread.add_string(15, "python3");
  std::string message;
  protozero::pbf_writer core(message);
  core.add_int32(1, 1);
  core.add_message(2, info);
  core.add_message(5, thread_core);
  const std::uint32_t head[3] = {0x54564319, 0x55053847,
                                 static_cast<std::uint32_t>(message.size())};
  std::string text(sizeof head, '\0');
  std::memcpy(text.data(), head, sizeof head);
  return text + message;
}

class CriuCore : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "core-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    path_ = name;
    directory_ = open_file(AT_FDCWD, path_, O_RDONLY | O_DIRECTORY).value();
  }
  void TearDown() override {
    ::unlinkat(directory_.get(), "core-77.img", 0);
    ::unlinkat(directory_.get(), "pstree.img", 0);
    ::rmdir(path_.c_str());
  }
  void write(const std::string& text, const char* name = "core-77.img") {
    auto file = open_file(directory_.get(), name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    EXPECT_TRUE(file && write_all(file->get(), text.data(), text.size(), "core"));
  }
  std::optional<int> signal_of(const std::string& text) {
    write(text);
    return parent_death_signal(directory_, kThread);
  }

  std::string path_;
  UniqueFd directory_;
};

TEST_F(CriuCore, KnowsTheParentDeathSignal) {
  EXPECT_EQ(parent_death_signal(directory_, kThread), std::nullopt);
  EXPECT_EQ(signal_of(core_file(9)), 9);
  EXPECT_EQ(signal_of(core_file(0)), 0);
}

TEST_F(CriuCore, KnowsWhetherTilesAreInUse) {
  EXPECT_FALSE(has_tiles(directory_, kThread));
  write(core_file(9, 0x2e7));
  EXPECT_FALSE(has_tiles(directory_, kThread));
  const std::string whole = core_file(9, 0x602e7);
  write(whole);
  EXPECT_TRUE(has_tiles(directory_, kThread));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    write(whole.substr(0, size));
    EXPECT_FALSE(has_tiles(directory_, kThread)) << size;
  }
}

TEST_F(CriuCore, KnowsTheHighestNumberOfGroupsAndSessionsToo) {
  EXPECT_EQ(highest_number(directory_), 0);
  const auto entry = [](std::initializer_list<std::uint32_t> numbers) {
    std::string message;
    protozero::pbf_writer writer(message);
    std::uint32_t tag = 1;
    for (const std::uint32_t number : numbers)
      writer.add_uint32(tag < 5 ? tag++ : 5, number);
    const auto size = static_cast<std::uint32_t>(message.size());
    return std::string(reinterpret_cast<const char*>(&size), sizeof size) + message;
  };
  const std::uint32_t head[2] = {0x54564319, 0x50273030};
  const std::string start(reinterpret_cast<const char*>(head), sizeof head);
  // The process, its parent, group, session and threads.
  for (const auto& numbers : {std::initializer_list<std::uint32_t>{2, 0, 90, 2, 6, 7},
                              {2, 0, 2, 90, 6, 7},
                              {2, 0, 2, 2, 6, 90, 7},
                              {90, 2, 2, 2, 0xffffffff}}) {
    write(start + entry({3, 2, 2, 2, 3}) + entry(numbers), "pstree.img");
    EXPECT_EQ(highest_number(directory_), 90);
  }
}

TEST_F(CriuCore, WhatIsDamagedIsNotRead) {
  const std::string whole = core_file(9);
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_EQ(signal_of(whole.substr(0, size)), std::nullopt) << size;
  // Any byte: whatever it then says, nothing is read that is not there.
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0xff);
    (void)signal_of(changed);
  }
  // A link, and what is no file.
  ::unlinkat(directory_.get(), "core-77.img", 0);
  ASSERT_EQ(::symlinkat("/proc/self/exe", directory_.get(), "core-77.img"), 0);
  EXPECT_EQ(parent_death_signal(directory_, kThread), std::nullopt);
  ::unlinkat(directory_.get(), "core-77.img", 0);
  ASSERT_EQ(::mkfifoat(directory_.get(), "core-77.img", 0600), 0);
  EXPECT_EQ(parent_death_signal(directory_, kThread), std::nullopt);
}

}  // namespace
}  // namespace stasis
