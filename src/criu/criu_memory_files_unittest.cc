#include "criu/criu_memory_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <tuple>

#include <gtest/gtest.h>
#include <protozero/pbf_writer.hpp>

#include "criu/criu_messages.h"

namespace stasis {
namespace {

constexpr std::uint32_t kMemoryFilesMagic = 0x48453499;

std::string memory_image(std::uint32_t magic = kMemoryFilesMagic) {
  std::string image(8, '\0');
  std::memcpy(image.data(), &kAnyImageMagic, 4);
  std::memcpy(image.data() + 4, &magic, 4);
  return image;
}

// As CRIU 4.2.1 writes it; of others of its fields two.
std::string memory_file(const std::string& name, std::uint64_t mode) {
  std::string message;
  protozero::pbf_writer writer(message);
  writer.add_string(1, name);
  writer.add_uint64(4, std::uint64_t{24} << 20);
  writer.add_uint64(6, 1);
  if (mode != 0) writer.add_uint64(9, mode);
  return message;
}

class CriuMemoryFiles : public testing::Test {
 protected:
  CriuMemoryFiles() {
    std::filesystem::create_directories(path_);
    dir_ = UniqueFd(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  ~CriuMemoryFiles() override { std::filesystem::remove_all(path_); }
  CriuMemoryFiles(const CriuMemoryFiles&) = delete;
  CriuMemoryFiles& operator=(const CriuMemoryFiles&) = delete;

  void write(const std::string& image) const {
    const auto file = open_file(dir_.get(), "memfd.img", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ASSERT_TRUE(file);
    ASSERT_TRUE(write_all(file->get(), image.data(), image.size(), "image"));
  }
  std::string changed() const {
    EXPECT_TRUE(drop_execute_rights(dir_));
    return read_criu_image(dir_, "memfd.img");
  }

  std::string path_ = ::testing::TempDir() + "criu_memory_files_" + std::to_string(::getpid());
  UniqueFd dir_;
};

TEST_F(CriuMemoryFiles, HaveNoRightToExecuteIfTheyAreOfNoFile) {
  std::string image = memory_image();
  std::string wanted = memory_image();
  for (const auto& [name, mode, then] :
       {std::tuple("/dev/zero", 0100777U, 0100666U), std::tuple("code", 0100777U, 0100777U),
        std::tuple("/dev/zero", 0100640U, 0100640U), std::tuple("/dev/zero", 0U, 0U)}) {
    append_message(image, memory_file(name, mode));
    append_message(wanted, memory_file(name, then));
  }
  write(image);
  EXPECT_EQ(changed(), wanted);
  EXPECT_EQ(changed(), wanted);
}

TEST_F(CriuMemoryFiles, AreLeftAsTheyAreWhereTheImageIsWrong) {
  EXPECT_TRUE(drop_execute_rights(dir_));
  std::string image = memory_image();
  append_message(image, memory_file("/dev/zero", 0100777));
  for (const std::string& wrong :
       {std::string(), std::string("short"), image + "x", image.substr(0, image.size() - 1),
        memory_image(1) + image.substr(8)}) {
    write(wrong);
    EXPECT_EQ(changed(), wrong);
  }
}

}  // namespace
}  // namespace stasis
