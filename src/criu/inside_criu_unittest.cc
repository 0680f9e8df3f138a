#include "criu/inside_criu.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace stasis {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kPages = 64;
// Of the table's second descriptor, by which the child fills it.
constexpr const char* kChildVariable = "STASIS_TEST_TABLE";
// Of the process that has started the child, and a page of it that is there.
constexpr const char* kToolVariable = "STASIS_TEST_TOOL";
constexpr const char* kPageVariable = "STASIS_TEST_PAGE";

// linux/fs.h of Linux 6.7.
struct Scan {
  std::uint64_t size = 96, flags = 0, start = 0, end = 0, walk_end = 0, vec = 0, vec_len = 0,
                max_pages = 0, inverted = 0, mask = 0, any_of = 2, returned = 2;  // present
};
struct Region {
  std::uint64_t start, end, categories;
};

// This program again, with the library in it, as one test.
int run_child(const InsideCriu& pages) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int first = ::dup(pages.descriptor().get());
    const int second = ::dup(pages.descriptor().get());
    ::setenv("LD_PRELOAD", pages.library().c_str(), 1);
    ::setenv(inside_criu::kDescriptorVariable, std::to_string(first).c_str(), 1);
    ::setenv(kChildVariable, std::to_string(second).c_str(), 1);
    ::setenv(kToolVariable, std::to_string(::getppid()).c_str(), 1);
    ::setenv(kPageVariable, std::to_string(reinterpret_cast<std::uintptr_t>(&pages)).c_str(), 1);
    ::execl("/proc/self/exe", "child", "--gtest_filter=InsideCriuChild.*",
            "--gtest_also_run_disabled_tests", nullptr);
    ::_exit(99);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

class InsideCriuChild : public testing::Test {
 protected:
  void SetUp() override {
    const char* const number = std::getenv(kChildVariable);
    ASSERT_NE(number, nullptr) << "only InsideCriu runs this";
    EXPECT_EQ(std::getenv("LD_PRELOAD"), nullptr) << "criu's own children would get it";
    void* const mapped = ::mmap(nullptr, inside_criu::kTableBytes, PROT_READ | PROT_WRITE,
                                MAP_SHARED, std::atoi(number), 0);
    ASSERT_NE(mapped, MAP_FAILED);
    table_ = static_cast<inside_criu::Table*>(mapped);
    table_->count = 0;
    void* const memory = ::mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    start_ = reinterpret_cast<std::uint64_t>(memory);
    pagemap_ = UniqueFd(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    ASSERT_TRUE(pagemap_.valid());
  }

  std::uint64_t page(std::uint64_t number) const { return start_ + number * kPage; }
  // Pages [first, end) of the memory.
  void hide(std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges) const {
    const auto pid = static_cast<std::uint64_t>(::getpid());
    std::size_t count = 0;
    table_->ranges[count++] = {pid - 1, page(0), page(kPages)};
    for (const auto& [first, end] : ranges)
      table_->ranges[count++] = {pid, page(first), page(end)};
    table_->ranges[count++] = {pid + 1, page(0), page(kPages)};
    table_->count = count;
  }
  std::string seen_by_read() const {
    std::vector<std::uint64_t> entries(kPages);
    const auto bytes = static_cast<ssize_t>(kPages * sizeof entries[0]);
    EXPECT_EQ(::pread(pagemap_.get(), entries.data(), static_cast<std::size_t>(bytes),
                      static_cast<off_t>(start_ / kPage * sizeof entries[0])),
              bytes);
    std::string text;
    for (const std::uint64_t entry : entries)
      text += (entry >> 63) != 0 ? 'x' : '.';
    return text;
  }
  // As CRIU scans: again from where the walk has ended. Empty on a kernel that cannot.
  std::string seen_by_scan(std::uint64_t room) const {
    std::string text(kPages, '.');
    std::vector<Region> regions(room);
    for (std::uint64_t at = page(0); at < page(kPages);) {
      Scan scan;
      scan.start = at;
      scan.end = page(kPages);
      scan.vec = reinterpret_cast<std::uint64_t>(regions.data());
      scan.vec_len = room;
      const int found = ::ioctl(pagemap_.get(), 0xc0606610UL, &scan);
      if (found < 0) return {};
      for (int i = 0; i < found; ++i) {
        const Region& region = regions[static_cast<std::size_t>(i)];
        for (std::uint64_t one = region.start; one < region.end; one += kPage) {
          EXPECT_EQ(text[(one - start_) / kPage], '.') << "told twice";
          text[(one - start_) / kPage] = 'x';
        }
      }
      EXPECT_GT(scan.walk_end, at);
      if (scan.walk_end <= at) break;
      at = scan.walk_end;
    }
    return text;
  }

  inside_criu::Table* table_ = nullptr;
  std::uint64_t start_ = 0;
  UniqueFd pagemap_;
};

TEST_F(InsideCriuChild, DISABLED_SeesThePagesThatAreNotHidden) {
  const std::string all(kPages, 'x');
  const bool scans = !seen_by_scan(kPages).empty();
  const std::vector<std::vector<std::pair<std::uint64_t, std::uint64_t>>> cases = {
      {},
      {{0, kPages}},
      {{0, 1}, {kPages - 1, kPages}},
      {{3, 5}, {5, 9}, {20, 21}, {22, 23}, {24, 25}, {40, 63}},
  };
  for (const auto& ranges : cases) {
    hide(ranges);
    std::string expected = all;
    for (const auto& [first, end] : ranges)
      for (std::uint64_t i = first; i < end; ++i)
        expected[i] = '.';
    const std::uint64_t before = table_->hidden;
    EXPECT_EQ(seen_by_read(), expected);
    EXPECT_EQ(table_->hidden - before,
              static_cast<std::uint64_t>(std::count(expected.begin(), expected.end(), '.')));
    for (const unsigned room : {1U, 2U, 3U, 5U, 64U}) {
      if (!scans) break;
      EXPECT_EQ(seen_by_scan(room), expected) << room;
    }
  }
  // Another file that is read and asked.
  const UniqueFd other(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  std::array<unsigned char, 4> head{};
  EXPECT_EQ(::pread(other.get(), head.data(), head.size(), 0), 4);
  EXPECT_EQ(head[1], 'E');
  EXPECT_EQ(::ioctl(other.get(), TCGETS, head.data()), -1);
  EXPECT_EQ(errno, ENOTTY);
  // Its own are none of those that it stops.
  EXPECT_EQ(table_->is_asked, 0U);
  const std::string parent = "/proc/" + std::to_string(::getppid()) + "/pagemap";
  const UniqueFd others(::open(parent.c_str(), O_RDONLY | O_CLOEXEC));
  std::uint64_t entry = 0;
  EXPECT_EQ(::pread(others.get(), &entry, sizeof entry, static_cast<off_t>(start_ / kPage * 8)), 8);
  EXPECT_EQ(table_->is_asked, 1U);
}

// Looks at a page of the parent, which is the tool, as criu does at those of a process.
ssize_t look_at_page_of_tool(std::uint64_t address, std::uint64_t& entry) {
  const std::string path = "/proc/" + std::string(std::getenv(kToolVariable)) + "/pagemap";
  const UniqueFd pagemap(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  return ::pread(pagemap.get(), &entry, sizeof entry, static_cast<off_t>(address / kPage * 8));
}

bool sees_page_of_tool(std::uint64_t address) {
  std::uint64_t entry = 0;
  EXPECT_EQ(look_at_page_of_tool(address, entry), 8);
  return entry >> 63 != 0;
}

TEST_F(InsideCriuChild, DISABLED_WaitsForRangesThatAreToCome) {
  const std::uint64_t tool = std::strtoull(std::getenv(kToolVariable), nullptr, 10);
  const std::uint64_t address = std::strtoull(std::getenv(kPageVariable), nullptr, 10);
  ASSERT_TRUE(sees_page_of_tool(address));
  table_->is_awaited = 1;
  // A process whose parent is not the tool, as criu is when that has ended: it is to give up.
  const pid_t orphan = ::fork();
  if (orphan == 0) {
    std::uint64_t entry = 0;
    const bool fails = look_at_page_of_tool(address, entry) == -1 && errno == EIO;
    ::_exit(fails ? 0 : 1);
  }
  int status = 0;
  ::waitpid(orphan, &status, 0);
  EXPECT_EQ(status, 0);
  std::atomic<bool> done = false;
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    table_->ranges[0] = {tool, address / kPage * kPage, address / kPage * kPage + kPage};
    table_->count = 1;
    done = true;
    table_->is_awaited = 0;
  });
  EXPECT_FALSE(sees_page_of_tool(address));
  EXPECT_TRUE(done);
  later.join();
}

// As CRIU asks for the pages of shared memory.
std::string seen_by_seek(int file) {
  std::string text(kPages, '.');
  for (off_t at = 0;;) {
    const off_t data = ::lseek(file, at, SEEK_DATA);
    if (data < 0) {
      EXPECT_EQ(errno, ENXIO);
      return text;
    }
    const off_t hole = ::lseek(file, data, SEEK_HOLE);
    EXPECT_GT(hole, data);
    EXPECT_EQ(::lseek(file, 0, SEEK_CUR), hole);
    if (hole <= data) return text;
    for (auto page = static_cast<std::uint64_t>(data) / kPage;
         page < static_cast<std::uint64_t>(hole) / kPage; ++page)
      text[page] = 'x';
    at = hole;
  }
}

TEST_F(InsideCriuChild, DISABLED_SeesThePagesOfSharedMemoryThatAreNotHidden) {
  const UniqueFd file(::memfd_create("", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), kPages * kPage), 0);
  struct stat info {};
  ASSERT_EQ(::fstat(file.get(), &info), 0);
  std::string all(kPages, '.');
  for (std::uint64_t i = 2; i < kPages - 3; ++i) {
    if (i == 30 || i == 31) continue;
    ASSERT_EQ(::pwrite(file.get(), "x", 1, static_cast<off_t>(i * kPage)), 1);
    all[i] = 'x';
  }
  const std::uint64_t owner = inside_criu::kObject | info.st_ino;
  const std::vector<std::vector<std::pair<std::uint64_t, std::uint64_t>>> cases = {
      {},
      {{0, kPages}},
      {{0, 1}, {kPages - 1, kPages}},
      {{2, 3}, {3, 9}, {20, 21}, {22, 23}, {28, 33}, {40, kPages}},
      {{0, 30}},
      {{32, 60}},
  };
  for (const auto& ranges : cases) {
    std::string expected = all;
    std::size_t count = 0;
    table_->ranges[count++] = {owner - 1, 0, kPages * kPage};
    for (const auto& [first, end] : ranges) {
      table_->ranges[count++] = {owner, first * kPage, end * kPage};
      for (std::uint64_t i = first; i < end; ++i)
        expected[i] = '.';
    }
    table_->ranges[count++] = {owner + 1, 0, kPages * kPage};
    table_->count = count;
    EXPECT_EQ(seen_by_seek(file.get()), expected);
  }
  // In the middle of a page.
  table_->ranges[1] = {owner, 4 * kPage, 6 * kPage};
  EXPECT_EQ(::lseek(file.get(), 3 * kPage + 5, SEEK_DATA), 3 * kPage + 5);
  EXPECT_EQ(::lseek(file.get(), 4 * kPage + 5, SEEK_DATA), 6 * kPage);
  EXPECT_EQ(::lseek(file.get(), 4 * kPage + 5, SEEK_HOLE), 4 * kPage + 5);
  // Of another file, and another question.
  EXPECT_EQ(::lseek(file.get(), 5, SEEK_SET), 5);
  const UniqueFd other(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(::lseek(other.get(), 0, SEEK_DATA), 0);
  EXPECT_EQ(::lseek(-1, 0, SEEK_DATA), -1);
}

TEST(InsideCriu, AreHeardOfByWhatLoadsTheLibrary) {
  auto pages = InsideCriu::create();
  ASSERT_TRUE(pages) << pages.error().to_string();
  EXPECT_FALSE(pages->is_heard());
  EXPECT_FALSE(pages->is_asked());
  EXPECT_EQ(run_child(*pages), 0);
  EXPECT_TRUE(pages->is_heard());
  EXPECT_TRUE(pages->is_asked());
  EXPECT_GT(pages->hidden_bytes(), 0U);
}

TEST(InsideCriu, AreSortedAndNotMoreThanThereIsRoomFor) {
  auto pages = InsideCriu::create();
  ASSERT_TRUE(pages) << pages.error().to_string();
  EXPECT_FALSE(pages->hide(std::vector<inside_criu::Range>(inside_criu::kMostRanges + 1)));
  EXPECT_TRUE(pages->hide({{2, 0, 1}, {1, 4, 5}, {1, 2, 3}}));
  std::array<inside_criu::Range, 3> ranges{};
  ASSERT_GT(::pread(pages->descriptor().get(), ranges.data(), sizeof ranges,
                    offsetof(inside_criu::Table, ranges)),
            0);
  EXPECT_EQ(ranges[0].start, 2U);
  EXPECT_EQ(ranges[1].start, 4U);
  EXPECT_EQ(ranges[2].owner, 2U);
}

}  // namespace
}  // namespace stasis
