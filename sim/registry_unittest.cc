#include "sim/registry.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include <gtest/gtest.h>

namespace stasis::sim {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

class Registry : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-sim-test-XXXXXX";
    dir_ = ::mkdtemp(name);
    std::string error;
    std::vector<GpuSpec> gpus;
    ASSERT_TRUE(parse_gpus("64M", dir_, gpus, error));
    gpu_ = gpus[0];
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::size_t files() const {
    std::size_t n = 0;
    for (const auto& entry : std::filesystem::directory_iterator(dir_ + "/" + to_text(gpu_.uuid))) {
      n += entry.path().filename() != "lock";
    }
    return n;
  }

  // Another process with memory on the GPU; it lives until the returned pipe end is closed.
  pid_t other_process(std::uint64_t size, int& stop, ObjectId* id = nullptr) {
    int ready[2];
    int end[2];
    EXPECT_EQ(::pipe(ready), 0);
    EXPECT_EQ(::pipe(end), 0);
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::close(end[1]);
      renew_nonce();
      Holding holding(dir_, gpu_);
      Fd file;
      ObjectId created;
      const bool ok =
          holding.open() && holding.create(size, {}, created, file) == Holding::Outcome::kOk;
      (void)!::write(ready[1], ok ? &created : nullptr, ok ? sizeof created : 0);
      ::close(ready[1]);
      char c;
      (void)!::read(end[0], &c, 1);
      ::_exit(0);  // without letting go: as if killed
    }
    ::close(ready[1]);
    ::close(end[0]);
    ObjectId created;
    EXPECT_EQ(::read(ready[0], &created, sizeof created), ssize_t{sizeof created});
    ::close(ready[0]);
    if (id) *id = created;
    stop = end[1];
    return pid;
  }

  std::string dir_;
  GpuSpec gpu_;
};

TEST_F(Registry, CountsWhatIsHeld) {
  Holding holding(dir_, gpu_);
  ASSERT_TRUE(holding.open());
  ObjectId id;
  Fd file;
  ASSERT_EQ(holding.create(16 * kMiB, {}, id, file), Holding::Outcome::kOk);
  auto seen = usage(dir_, gpu_.uuid);
  EXPECT_EQ(seen.used, 16 * kMiB);
  ASSERT_EQ(seen.processes.size(), 1u);
  EXPECT_EQ(seen.processes[0].pid, ::getpid());
  holding.drop(id);
  EXPECT_EQ(usage(dir_, gpu_.uuid).used, 0u);
  holding.close();
  EXPECT_TRUE(usage(dir_, gpu_.uuid).processes.empty());
  EXPECT_EQ(files(), 0u);
}

TEST_F(Registry, RefusesMoreThanTheGpuHasAcrossProcesses) {
  int stop = -1;
  const pid_t pid = other_process(40 * kMiB, stop);
  Holding holding(dir_, gpu_);
  ASSERT_TRUE(holding.open());
  ObjectId id;
  Fd file;
  EXPECT_EQ(holding.create(32 * kMiB, {}, id, file), Holding::Outcome::kFull);
  EXPECT_EQ(holding.create(24 * kMiB, {}, id, file), Holding::Outcome::kOk);
  const auto seen = usage(dir_, gpu_.uuid);
  EXPECT_EQ(seen.used, 64 * kMiB);
  EXPECT_EQ(seen.processes.size(), 2u);
  ::close(stop);
  ::waitpid(pid, nullptr, 0);
}

TEST_F(Registry, ForgetsAProcessThatDied) {
  int stop = -1;
  const pid_t pid = other_process(40 * kMiB, stop);
  EXPECT_EQ(usage(dir_, gpu_.uuid).used, 40 * kMiB);
  EXPECT_EQ(usage(dir_, gpu_.uuid).processes[0].pid, pid);
  ::close(stop);
  ::waitpid(pid, nullptr, 0);
  EXPECT_EQ(usage(dir_, gpu_.uuid).used, 0u);
  EXPECT_EQ(files(), 2u);  // its owner file and its memory
  ASSERT_TRUE(sweep(dir_, gpu_.uuid));
  EXPECT_EQ(files(), 0u);
}

TEST_F(Registry, AForkedChildKeepsNothingAlive) {
  auto holding = std::make_unique<Holding>(dir_, gpu_);
  ASSERT_TRUE(holding->open());
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::pause();
    ::_exit(0);
  }
  holding.reset();
  EXPECT_TRUE(usage(dir_, gpu_.uuid).processes.empty());
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
}

TEST_F(Registry, CountsSharedMemoryOnceAndKeepsItUntilTheLastHolder) {
  int stop = -1;
  ObjectId id;
  const pid_t pid = other_process(16 * kMiB, stop, &id);
  auto file = open_object(dir_, gpu_.uuid, id);
  ObjectTrailer trailer;
  ASSERT_TRUE(read_trailer(file.get(), trailer));
  EXPECT_EQ(trailer.size, 16 * kMiB);
  Holding holding(dir_, gpu_);
  ASSERT_TRUE(holding.open());
  ASSERT_EQ(holding.adopt(trailer, file.get()), Holding::Outcome::kOk);
  EXPECT_EQ(usage(dir_, gpu_.uuid).used, 16 * kMiB);
  EXPECT_TRUE(holding.shared(id));
  ::close(stop);
  ::waitpid(pid, nullptr, 0);
  ASSERT_TRUE(sweep(dir_, gpu_.uuid));
  EXPECT_FALSE(holding.shared(id));
  EXPECT_EQ(usage(dir_, gpu_.uuid).used, 16 * kMiB);
  EXPECT_TRUE(holding.reopen(id));
}

TEST_F(Registry, TellsMemoryFromOtherFiles) {
  ObjectTrailer trailer;
  Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(read_trailer(null.get(), trailer));
  Fd other(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(read_trailer(other.get(), trailer));
}

}  // namespace
}  // namespace stasis::sim
