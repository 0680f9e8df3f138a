#include "base/fd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <gtest/gtest.h>

namespace stasis {
namespace {

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

// A directory that goes away with the test.
class FdTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-fd-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
  }
  void TearDown() override {
    ::unlink(path("file").c_str());
    ::rmdir(dir_.c_str());
  }
  std::string path(const std::string& name) const { return dir_ + "/" + name; }

  std::string dir_;
};

TEST_F(FdTest, OwnerClosesOnceAndMoves) {
  auto opened = open_file(AT_FDCWD, path("file"), O_RDWR | O_CREAT, 0600);
  ASSERT_TRUE(opened);
  const int raw = opened->get();
  EXPECT_NE(::fcntl(raw, F_GETFD) & FD_CLOEXEC, 0) << "must not leak into programs that we start";
  {
    UniqueFd moved = std::move(*opened);
    EXPECT_FALSE(opened->valid());  // NOLINT(bugprone-use-after-move)
    EXPECT_EQ(moved.get(), raw);
    EXPECT_TRUE(is_open(raw));
    UniqueFd assigned;
    assigned = std::move(moved);
    UniqueFd& itself = assigned;
    assigned = std::move(itself);
    EXPECT_TRUE(is_open(raw));
  }
  EXPECT_FALSE(is_open(raw));
}

TEST_F(FdTest, ReleaseGivesTheDescriptorAway) {
  int raw = -1;
  {
    auto opened = open_file(AT_FDCWD, dir_, O_RDONLY | O_DIRECTORY);
    ASSERT_TRUE(opened);
    raw = opened->release();
    EXPECT_FALSE(opened->valid());
  }
  EXPECT_TRUE(is_open(raw));
  ::close(raw);
}

TEST_F(FdTest, CloseReportsWhatTheKernelSays) {
  UniqueFd not_open(99999);
  auto closed = not_open.close("x");
  ASSERT_FALSE(closed);
  EXPECT_EQ(closed.error().code, ErrorCode::kIo);
  EXPECT_EQ(closed.error().message, "cannot close x: Bad file descriptor");
  EXPECT_TRUE(not_open.close("x")) << "a second close has nothing to do";
}

TEST_F(FdTest, WritesAllAndReadsAll) {
  auto opened = open_file(AT_FDCWD, path("file"), O_WRONLY | O_CREAT, 0600);
  ASSERT_TRUE(opened);
  const std::string text(100'000, 'a');
  ASSERT_TRUE(write_all(opened->get(), text.data(), text.size(), "file"));
  ASSERT_TRUE(opened->close("file"));
  auto read = read_file(AT_FDCWD, path("file"));
  ASSERT_TRUE(read);
  EXPECT_EQ(*read, text);

  auto exact = read_file(AT_FDCWD, path("file"), text.size());
  EXPECT_TRUE(exact) << "the limit itself is allowed";
  auto limited = read_file(AT_FDCWD, path("file"), text.size() - 1);
  ASSERT_FALSE(limited);
  EXPECT_EQ(limited.error().code, ErrorCode::kIo);
}

TEST_F(FdTest, ShortWritesGoOn) {
  // A pipe of one page takes a large write in many pieces.
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd in(ends[0]);
  const UniqueFd out(ends[1]);
  ::fcntl(out.get(), F_SETPIPE_SZ, 4096);
  const std::string text(50'000, 'b');
  std::string got;
  std::thread reader([&] {
    char chunk[1000];
    while (got.size() < text.size()) {
      const ssize_t n = ::read(in.get(), chunk, sizeof chunk);
      if (n <= 0) return;
      got.append(chunk, static_cast<std::size_t>(n));
    }
  });
  EXPECT_TRUE(write_all(out.get(), text.data(), text.size(), "pipe"));
  reader.join();
  EXPECT_EQ(got, text);
}

TEST_F(FdTest, MissingFileIsNamed) {
  auto opened = open_file(AT_FDCWD, path("none"), O_RDONLY);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::kIo);
  EXPECT_EQ(opened.error().message, "cannot open " + path("none") + ": No such file or directory");
}

TEST(ErrnoError, MapsWhatCallersTellApart) {
  EXPECT_EQ(errno_error("x", EPERM).code, ErrorCode::kNotPermitted);
  EXPECT_EQ(errno_error("x", EACCES).code, ErrorCode::kNotPermitted);
  EXPECT_EQ(errno_error("x", ENOSPC).code, ErrorCode::kNoSpace);
  EXPECT_EQ(errno_error("x", EDQUOT).code, ErrorCode::kNoSpace);
  EXPECT_EQ(errno_error("x", ENOMEM).code, ErrorCode::kOutOfHostMemory);
  EXPECT_EQ(errno_error("x", ESRCH).code, ErrorCode::kNoSuchProcess);
  EXPECT_EQ(errno_error("x", EIO).code, ErrorCode::kIo);
  for (int number : {EPERM, ENOSPC, EMFILE, EFBIG}) {
    EXPECT_FALSE(errno_error("x", number).remedy.empty()) << number;
  }
  EXPECT_EQ(errno_error("cannot do it", EIO).message, "cannot do it: Input/output error");
}

// A child that sleeps until it is told to go.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ == 0) {
      ::pause();
      ::_exit(0);
    }
  }
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  Pid pid() const { return Pid{pid_}; }
  // Lets it become a zombie.
  void end() const {
    ::kill(pid_, SIGKILL);
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }

 private:
  pid_t pid_;
};

TEST(Pidfd, HoldsAprocess) {
  const Child child;
  auto held = Pidfd::open(child.pid());
  ASSERT_TRUE(held);
  EXPECT_TRUE(held->alive());
  EXPECT_FALSE(held->wait_exit(10));
  EXPECT_NE(::fcntl(held->fd(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_TRUE(held->signal(0));
  ASSERT_TRUE(held->signal(SIGTERM));
  EXPECT_TRUE(held->wait_exit(60000));
  EXPECT_FALSE(held->alive()) << "a zombie is not alive";
}

TEST(Pidfd, SignalsNoProcessOnceItsOwnIsGone) {
  auto child = std::make_unique<Child>();
  auto held = Pidfd::open(child->pid());
  ASSERT_TRUE(held);
  child.reset();  // ended and collected: its number may be given to another one
  EXPECT_FALSE(held->alive());
  auto sent = held->signal(SIGTERM);
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code, ErrorCode::kProcessGone);
}

TEST(Pidfd, OpensAzombieAsOneThatIsNotAlive) {
  const Child child;
  child.end();
  auto held = Pidfd::open(child.pid());
  ASSERT_TRUE(held);
  EXPECT_FALSE(held->alive());
}

TEST(Pidfd, RefusesAthreadsNumber) {
  std::atomic<int> tid{0};
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    tid = static_cast<int>(::syscall(SYS_gettid));
    while (!stop)
      std::this_thread::yield();
  });
  while (tid == 0)
    std::this_thread::yield();
  auto held = Pidfd::open(Pid{tid});
  stop = true;
  thread.join();
  ASSERT_FALSE(held);
  EXPECT_EQ(held.error().code, ErrorCode::kThreadId);
  EXPECT_NE(held.error().message.find(std::to_string(tid)), std::string::npos);
}

TEST(Pidfd, RefusesNumbersOfNoProcess) {
  auto gone = Pidfd::open(Pid{0x7ffffffe});
  ASSERT_FALSE(gone);
  EXPECT_EQ(gone.error().code, ErrorCode::kNoSuchProcess);
  for (int number : {0, -1}) {
    auto none = Pidfd::open(Pid{number});
    ASSERT_FALSE(none);
    EXPECT_EQ(none.error().code, ErrorCode::kUsage);
  }
}

TEST(OpenChecked, OpensNothingOfAnotherKind) {
  const std::string directory = ::testing::TempDir() + "open_checked_" + std::to_string(::getpid());
  std::filesystem::create_directories(directory);
  const std::string fifo = directory + "/fifo";
  const std::string file = directory + "/file";
  const std::string link = directory + "/link";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::ofstream(file) << "text";
  ASSERT_EQ(::symlink("file", link.c_str()), 0);
  // To open a FIFO for reading waits for who writes.
  for (const std::string& other : {fifo, std::string("/dev/null"), directory}) {
    const auto opened = open_checked(AT_FDCWD, other, O_RDONLY, &is_regular_file);
    ASSERT_FALSE(opened) << other;
    EXPECT_EQ(opened.error().code, ErrorCode::kNotSupported) << other;
    EXPECT_FALSE(read_file(AT_FDCWD, other)) << other;
  }
  EXPECT_FALSE(open_checked(AT_FDCWD, link, O_RDONLY | O_NOFOLLOW, &is_regular_file));
  EXPECT_FALSE(open_checked(AT_FDCWD, file, O_RDONLY, &is_memory_file));
  EXPECT_EQ(read_file(AT_FDCWD, link).value_or(""), "text");
  EXPECT_EQ(read_file(AT_FDCWD, file).value_or(""), "text");
  const UniqueFd memory(::memfd_create("any", MFD_CLOEXEC));
  EXPECT_TRUE(open_checked(AT_FDCWD, "/proc/self/fd/" + std::to_string(memory.get()), O_RDWR,
                           &is_memory_file));
  std::filesystem::remove_all(directory);
}

TEST(OpenChecked, AFileThatAnotherHasALeaseOnIsTold) {
  const std::string file = ::testing::TempDir() + "open_leased_" + std::to_string(::getpid());
  std::ofstream(file) << "text";
  const auto before = ::signal(SIGIO, SIG_IGN);  // by which its holder is told
  {
    const UniqueFd holder(::open(file.c_str(), O_RDWR | O_CLOEXEC));
    if (::fcntl(holder.get(), F_SETLEASE, F_WRLCK) != 0) GTEST_SKIP() << "no leases there";
    const auto leased = open_checked(AT_FDCWD, file, O_RDONLY, &is_regular_file);
    ASSERT_FALSE(leased);
    EXPECT_NE(leased.error().remedy.find("lease"), std::string::npos);
  }
  EXPECT_TRUE(open_checked(AT_FDCWD, file, O_RDONLY, &is_regular_file));
  ::signal(SIGIO, before);
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace stasis
