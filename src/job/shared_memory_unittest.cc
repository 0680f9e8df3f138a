#include "job/shared_memory.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

namespace stasis::job {
namespace {

namespace fs = std::filesystem;

class SharedMemory : public testing::Test {
 public:
  SharedMemory() {
    std::string path = "/dev/shm/stasis-unittest-XXXXXX";
    top_ = ::mkdtemp(path.data());
    for (const char* name : {"from", "image", "to"})
      fs::create_directory(top_ / name);
    image_ = *open_file(AT_FDCWD, (top_ / "image").string(), O_RDONLY | O_DIRECTORY);
  }
  ~SharedMemory() override { fs::remove_all(top_); }

 protected:
  fs::path from(const std::string& name) const { return top_ / "from" / name; }
  fs::path to(const std::string& name) const { return top_ / "to" / name; }
  static void write(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }
  static std::string read(const fs::path& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  Result<std::uint64_t> save() { return save_shared_memory((top_ / "from").string(), image_); }
  Result<void> restore() { return restore_shared_memory((top_ / "to").string(), image_); }
  void index(const std::string& text) { write(top_ / "image" / "stasis-shm-index.json", text); }

  fs::path top_;
  UniqueFd image_;
};

TEST_F(SharedMemory, NameThatAnImageCannotHoldIsRefused) {
  write(from("caf\xe9"), "content");
  auto saved = save();
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().code, ErrorCode::kUndumpable);
  EXPECT_FALSE(fs::exists(top_ / "image" / "stasis-shm-index.json"));
}

TEST_F(SharedMemory, LinkToWhatAnImageCannotHoldIsRefused) {
  fs::create_symlink("caf\xe9", from("link"));
  auto saved = save();
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().code, ErrorCode::kUndumpable);
}

TEST_F(SharedMemory, APipeWithANameComesBack) {
  ASSERT_EQ(::mkfifo(from("pipe").c_str(), 0600), 0);
  ASSERT_EQ(::chmod(from("pipe").c_str(), 0626), 0);
  fs::create_hard_link(from("pipe"), from("twin"));
  auto saved = save();
  ASSERT_TRUE(saved) << saved.error().to_string();
  EXPECT_GT(*saved, 0U);
  auto done = restore();
  ASSERT_TRUE(done) << done.error().to_string();
  struct stat info {};
  ASSERT_EQ(::lstat(to("pipe").c_str(), &info), 0);
  EXPECT_TRUE(S_ISFIFO(info.st_mode));
  EXPECT_EQ(info.st_mode & 07777U, 0626U);
  EXPECT_EQ(info.st_nlink, 2U);
}

TEST_F(SharedMemory, ComesBackWithContentHolesModesNamesAndLinks) {
  write(from("plain"), "content");
  ::chmod(from("plain").c_str(), 0640);
  fs::create_hard_link(from("plain"), from("twin"));
  fs::create_directory(from("dir"));
  write(from("dir/inner"), std::string(3 << 20, 'x'));
  fs::create_symlink("plain", from("link"));
  const int sparse = ::open(from("sparse").c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_EQ(::ftruncate(sparse, 1 << 30), 0);
  ASSERT_EQ(::pwrite(sparse, "end", 3, (1 << 30) - 3), 3);
  ::close(sparse);
  auto saved = save();
  ASSERT_TRUE(saved) << saved.error().to_string();
  EXPECT_LT(*saved, 4U << 20);

  write(to("stale"), "of the image that was damaged");
  auto done = restore();
  ASSERT_TRUE(done) << done.error().to_string();
  EXPECT_FALSE(fs::exists(to("stale")));
  EXPECT_EQ(read(to("plain")), "content");
  struct stat info {};
  ASSERT_EQ(::stat(to("plain").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777U, 0640U);
  EXPECT_EQ(info.st_nlink, 2U);
  EXPECT_TRUE(fs::equivalent(to("plain"), to("twin")));
  EXPECT_EQ(read(to("dir/inner")), std::string(3 << 20, 'x'));
  EXPECT_EQ(fs::read_symlink(to("link")), "plain");
  ASSERT_EQ(::stat(to("sparse").c_str(), &info), 0);
  EXPECT_EQ(info.st_size, 1 << 30);
  EXPECT_LT(info.st_blocks * 512, 1 << 20);
}

// Also for a user whom the modes of directories hold up, as they do not root.
TEST_F(SharedMemory, ADirectoryWithoutPermissionToWriteComesBackWithWhatIsInIt) {
  constexpr uid_t kOtherUser = 65534;
  const bool root = ::geteuid() == 0;
  for (const fs::path& path : {top_, top_ / "from", top_ / "image", top_ / "to"})
    if (root) {
      ASSERT_EQ(::chown(path.c_str(), kOtherUser, static_cast<gid_t>(-1)), 0);
    }
  if (root) {
    ASSERT_EQ(::seteuid(kOtherUser), 0);
  }
  fs::create_directories(from("outer/inner"));
  write(from("outer/inner/file"), "content");
  ::chmod(from("outer/inner").c_str(), 0555);
  ::chmod(from("outer").c_str(), 0555);
  const auto saved = save();
  const auto done = restore();
  const std::string back = read(to("outer/inner/file"));
  struct stat outer {};
  struct stat inner {};
  ::stat(to("outer").c_str(), &outer);
  ::stat(to("outer/inner").c_str(), &inner);
  for (const fs::path& path : {from("outer"), from("outer/inner"), to("outer"), to("outer/inner")})
    ::chmod(path.c_str(), 0755);  // for who removes them
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  ASSERT_TRUE(saved) << saved.error().to_string();
  ASSERT_TRUE(done) << done.error().to_string();
  EXPECT_EQ(back, "content");
  EXPECT_EQ(outer.st_mode & 07777U, 0555U);
  EXPECT_EQ(inner.st_mode & 07777U, 0555U);
}

TEST_F(SharedMemory, NothingIsNoFile) {
  auto saved = save();
  ASSERT_TRUE(saved);
  EXPECT_EQ(*saved, 0U);
  EXPECT_TRUE(fs::is_empty(top_ / "image"));
  write(to("stale"), "");
  ASSERT_TRUE(restore());
  EXPECT_TRUE(fs::is_empty(top_ / "to"));
}

TEST_F(SharedMemory, AnIndexLeadsNowhereElse) {
  const std::string rest = R"(,"mode":384,"uid":0,"gid":0,"size":1,"extents":[]})";
  for (const char* path : {"/etc/x", "../x", "a/../../x", "", ".", "a//b", "missing/x"}) {
    index(R"({"version":1,"entries":[{"type":"file","path":")" + std::string(path) + "\"" + rest +
          "]}");
    auto done = restore();
    ASSERT_FALSE(done) << path;
    EXPECT_EQ(done.error().code, ErrorCode::kImageCorrupt) << path;
    EXPECT_FALSE(fs::exists(top_ / "x"));
  }
  // Whatever the order: a link is made when nothing goes through it any more.
  index(
      R"({"version":1,"entries":[{"type":"link","path":"a","target":"..","mode":511,"uid":0,"gid":0},)"
      R"({"type":"file","path":"a/x")" +
      rest + "]}");
  EXPECT_FALSE(restore());
  EXPECT_FALSE(fs::exists(top_ / "x"));
}

TEST_F(SharedMemory, APipeInTheImageIsDamageAndNotWaitedFor) {
  ASSERT_EQ(::mkfifo((top_ / "image" / "stasis-shm-index.json").c_str(), 0600), 0);
  auto restored = restore();
  ASSERT_FALSE(restored);
  EXPECT_EQ(restored.error().code, ErrorCode::kImageCorrupt);
}

TEST_F(SharedMemory, AnIndexOfTooManyValuesIsRefusedBeforeTheyAreInMemory) {
  std::string text = R"({"version":1,"entries":[],"more":[{})";
  while (text.size() < 60U << 20)
    text += ",{}";
  index(text + "]}");
  rusage before{};
  ::getrusage(RUSAGE_SELF, &before);
  auto done = restore();
  rusage after{};
  ::getrusage(RUSAGE_SELF, &after);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kImageCorrupt);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 256 << 10);  // KiB; 2.2 GB without the bound
}

TEST_F(SharedMemory, DamageIsAnErrorAndNoCrash) {
  for (
      const char* text :
      {"",
       "[]",
       "{}",
       R"({"version":2,"entries":[]})",
       R"({"version":1,"entries":[1]})",
       R"({"version":1,"entries":[{"type":"file","path":"a","mode":0,"uid":0,"gid":0,"size":4,"extents":[[2,4,0]]}]})",
       R"({"version":1,"entries":[{"type":"file","path":"a","mode":0,"uid":0,"gid":0,"size":4,"extents":[[-1,4]]}]})",
       R"({"version":1,"entries":[{"type":"file","path":"a","mode":0,"uid":0,"gid":0,"size":4,"extents":[[0,1,0],[0,1,1]]}]})",
       R"({"version":1,"entries":[{"type":"file","path":"a","mode":0,"uid":0,"gid":0,"size":4,"extents":[[0,1,0],[1,1,0]]}]})",
       R"({"version":1,"entries":[{"type":"same","path":"a","mode":0,"uid":0,"gid":0,"target":"../b"}]})",
       R"({"version":1})",
       R"({"version":true,"entries":[]})",
       R"({"version":1.5,"entries":[]})",
       R"({"version":4294967297,"entries":[]})",
       R"({"version":1,"entries":[{"type":"door","path":"a","mode":0,"uid":0,"gid":0}]})",
       R"({"version":1,"entries":[{"type":"directory","path":"a","mode":65536,"uid":0,"gid":0}]})",
       R"({"version":1,"entries":[{"type":"pipe","path":"a","mode":0,"uid":4294967296,"gid":0}]})",
       R"({"version":1,"entries":[{"type":"pipe","path":"a","mode":0,"uid":0,"gid":4294967295}]})",
       R"({"version":1,"entries":[{"type":"file","path":"a","mode":0,"uid":0,"gid":0,"size":1e300,"extents":[]}]})",
       R"({"version":1,"entries":[{"type":"file","path":"a","mode":0,"uid":0,"gid":0,"size":4,"extents":[[0,4,9223372036854775808]]}]})"}) {
    index(text);
    auto done = restore();
    ASSERT_FALSE(done) << text;
    EXPECT_EQ(done.error().code, ErrorCode::kImageCorrupt) << text;
  }
}

}  // namespace
}  // namespace stasis::job
