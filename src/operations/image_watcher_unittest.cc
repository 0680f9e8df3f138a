// What is written of an image is watched in its own folder.
#include "operations/image_watcher.h"

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "image/image_test_support.h"

namespace stasis {
namespace {

// The most that was told, and how often.
struct Told : Progress {
  void update(std::string_view /*phase*/, std::uint64_t done, std::uint64_t /*total*/) override {
    most = std::max(most.load(), done);
    ++times;
  }
  void wait_for(int updates) const {
    const int until = times + updates;
    while (times < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::atomic<std::uint64_t> most{0};
  std::atomic<int> times{0};
};

TEST(ImageWatcher, TellsWhatIsWritten) {
  const TemporaryDirectory dir;
  auto writer = ImageWriter::create(dir / "img", false);
  ASSERT_TRUE(writer);
  Told told;
  const ImageWatcher watcher(told, *writer, SyncPolicy::kDisk);
  write_text(writer->path() + "/criu/pages-1.img", std::string(3 << 20, 'x'));
  told.wait_for(2);
  EXPECT_EQ(told.most, 3U << 20);
}

// A user who owns the folder in which the image lies can rename it. What he puts there instead is
// not so much as looked at: a pipe, exchanged for a file, would hold the dump.
TEST(ImageWatcher, LooksAtNothingThatTookTheName) {
  const TemporaryDirectory dir;
  auto writer = ImageWriter::create(dir / "img", false);
  ASSERT_TRUE(writer);
  std::filesystem::rename(writer->path(), dir / "aside");
  std::filesystem::create_directories(writer->path() + "/criu");
  write_text(writer->path() + "/criu/pages-1.img", std::string(3 << 20, 'x'));
  Told told;
  const ImageWatcher watcher(told, *writer, SyncPolicy::kDisk);
  told.wait_for(2);
  EXPECT_EQ(told.most, 0U);
}

}  // namespace
}  // namespace stasis
