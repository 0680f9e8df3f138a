#include "criu/criu_terminals.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include "criu/criu_fifos.h"
#include "criu/criu_messages.h"

namespace stasis {
namespace {

using Numbers = std::vector<std::pair<std::uint32_t, std::uint64_t>>;

std::string message_of(const Numbers& fields) {
  std::string out;
  protozero::pbf_writer writer(out);
  for (const auto& [tag, value] : fields)
    writer.add_uint64(tag, value);
  return out;
}

std::string entry_of(std::uint64_t type, std::uint64_t id, std::uint32_t tag,
                     const std::string& inner) {
  std::string out = message_of({{1, type}, {2, id}});
  protozero::pbf_writer(out).add_message(tag, inner);
  return out;
}

class CriuTerminals : public ::testing::Test {
 protected:
  CriuTerminals() {
    std::filesystem::create_directories(path_);
    folder_ = UniqueFd(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    write("ids-7.img", 0x54432030, {message_of({{1, 1}, {2, 3}})});
  }
  ~CriuTerminals() override { std::filesystem::remove_all(path_); }
  CriuTerminals(const CriuTerminals&) = delete;
  CriuTerminals& operator=(const CriuTerminals&) = delete;

  void write(const std::string& name, std::uint32_t magic,
             const std::vector<std::string>& messages) const {
    std::string image;
    for (const std::uint32_t word : {kAnyImageMagic, magic})
      image.append(reinterpret_cast<const char*>(&word), sizeof word);
    for (const std::string& message : messages)
      append_message(image, message);
    const auto file = open_file(folder_.get(), name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ASSERT_TRUE(file && write_all(file->get(), image.data(), image.size(), name));
  }

  std::string path_ = ::testing::TempDir() + "criu_terminals_" + std::to_string(::getpid());
  UniqueFd folder_;
};

TEST_F(CriuTerminals, HaveTheirFlagsAndWhatIsUnreadWithTheFirstOfAnEnd) {
  std::string data = message_of({{1, 40}});
  protozero::pbf_writer(data).add_bytes(2, "unread");
  write("files.img", kFilesMagic,
        {entry_of(11, 5, 19, message_of({{1, 5}, {2, 40}, {3, O_RDWR}})),
         entry_of(11, 6, 19, message_of({{1, 6}, {2, 40}, {3, O_RDWR | O_ASYNC}}))});
  write(
      "fdinfo-3.img", kDescriptorsMagic,
      {message_of({{1, 6}, {2, 0}, {3, 11}, {4, 9}}), message_of({{1, 5}, {2, 0}, {3, 11}, {4, 8}}),
       message_of({{1, 5}, {2, 0}, {3, 11}, {4, 10}}),
       message_of({{1, 5}, {2, 0}, {3, 1}, {4, 11}})});
  write("tty-data.img", 0x59413026, {data, message_of({{1, 41}})});
  const auto terminals = saved_terminals(folder_, {6, 7});
  ASSERT_EQ(terminals.size(), 2U);
  EXPECT_EQ(terminals[0].descriptor, 9);
  EXPECT_EQ(terminals[0].flags, unsigned{O_RDWR | O_ASYNC});
  EXPECT_FALSE(terminals[0].is_first);
  EXPECT_EQ(terminals[1].number, 7);
  EXPECT_EQ(terminals[1].descriptor, 8);
  EXPECT_EQ(terminals[1].unread, "unread");
  EXPECT_TRUE(terminals[1].is_first);
  EXPECT_FALSE(terminals[1].has_more);
}

TEST_F(CriuTerminals, FifosBecomeFilesByNameAndNothingElseDoes) {
  std::string file = message_of({{1, 21}, {2, O_NONBLOCK}, {3, 0}});
  protozero::pbf_writer(file).add_string(6, "/fifo");
  write("files.img", kFilesMagic,
        {entry_of(1, 21, 3, file), entry_of(3, 20, 17, message_of({{1, 20}, {2, 1}, {3, 21}})),
         entry_of(3, 30, 17, message_of({{1, 30}, {2, 2}, {3, 99}}))});
  const std::string other = message_of({{1, 30}, {2, 0}, {3, 3}, {4, 5}});
  write("fdinfo-3.img", kDescriptorsMagic, {message_of({{1, 20}, {2, 0}, {3, 3}, {4, 4}}), other});
  ASSERT_TRUE(open_fifos_as_files(folder_, {{7, 4}, {7, 5}, {8, 4}}));
  std::vector<std::string> entries;
  const auto take = [&](const protozero::pbf_reader& message) {
    entries.emplace_back(message.data().data(), message.data().size());
  };
  ASSERT_TRUE(each_message(read_criu_image(folder_, "files.img"), kFilesMagic, take));
  std::string wanted = message_of({{1, 20}, {2, O_NONBLOCK}, {3, ~std::uint64_t{0}}});
  protozero::pbf_writer(wanted).add_string(6, "/fifo");
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_EQ(entries[1], entry_of(1, 20, 3, wanted));
  entries.clear();
  ASSERT_TRUE(each_message(read_criu_image(folder_, "fdinfo-3.img"), kDescriptorsMagic, take));
  EXPECT_EQ(entries,
            (std::vector<std::string>{message_of({{1, 20}, {2, 0}, {3, 1}, {4, 4}}), other}));
}

}  // namespace
}  // namespace stasis
