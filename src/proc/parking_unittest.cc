// Long because each case parks another kind of thread, with the same child.
#include "proc/parking.h"

#include <dlfcn.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <ctime>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/units.h"
#include "proc/procfs.h"
#include "tests/fakes/address_space.h"
#include "tests/fakes/child.h"
#include "tests/fakes/parked_threads.h"
#include "tests/fakes/thoroughness.h"

namespace stasis {
namespace {

using fakes::Child;
using fakes::count_parked_threads;

// What the target tells, in memory that it shares with the test.
struct Shared {
  std::atomic<std::uint64_t> spins;
  std::atomic<std::uint64_t> signals;
  std::atomic<int> ready;
  std::atomic<int> spared;
  std::atomic<bool> may_see_eintr;
  std::atomic<int> failed;  // line of the target's first complaint
};

template <class T>
T* shared_memory() {
  void* memory =
      ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return new (memory) T();
}

Shared* g_shared = nullptr;
void count_signal(int) { ++g_shared->signals; }

// Ends the target where something was not as it must be.
#define TARGET_CHECK(condition)                                 \
  do {                                                          \
    if (!(condition)) {                                         \
      int none = 0;                                             \
      g_shared->failed.compare_exchange_strong(none, __LINE__); \
      ::_exit(3);                                               \
    }                                                           \
  } while (false)

// Keeps values in the floating-point and vector registers all the time.
void compute() {
  ++g_shared->ready;
  double a = 1.0;
  double b = 0.5;
  for (;;) {
    double x = 1.0;
    double y = 3.0;
    for (int i = 0; i < 1000; ++i) {
      x = x * 1.0000001 + b;
      y = y - x * 0.0000001;
      asm volatile("" : "+x"(x), "+x"(y));
    }
    if (a == 1.0) a = x + y;
    TARGET_CHECK(a == x + y);
    ++g_shared->spins;
  }
}

// A system call that is made all the time.
void call() {
  ++g_shared->ready;
  for (;;)
    TARGET_CHECK(::syscall(SYS_getppid) > 0);
}

void wait_on_pipe(int fd) {
  ++g_shared->ready;
  char byte = 0;
  TARGET_CHECK(::read(fd, &byte, 1) == 1 && byte == 'x');
  ++g_shared->spins;
  for (;;)
    ::pause();
}

void wait_on_epoll(int fd) {
  const int epoll = ::epoll_create1(0);
  epoll_event event{EPOLLIN, {}};
  TARGET_CHECK(::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
  ++g_shared->ready;
  while (::epoll_wait(epoll, &event, 1, -1) != 1)
    TARGET_CHECK(errno == EINTR && g_shared->may_see_eintr);
  ++g_shared->spins;
  for (;;)
    ::pause();
}

void sleep_in_steps() {
  ++g_shared->ready;
  for (;;) {
    // glibc's own wrapper: EINTR would be an error no program without signals expects.
    const timespec wanted{0, 3000000};
    TARGET_CHECK(::nanosleep(&wanted, nullptr) == 0);
  }
}

void wait_on_condition(std::mutex& mutex, std::condition_variable& condition) {
  ++g_shared->ready;
  std::unique_lock lock(mutex);
  for (;;)
    condition.wait_for(lock, std::chrono::milliseconds(2));
}

void spared_thread() {
  g_shared->spared = static_cast<int>(::syscall(SYS_gettid));
  ++g_shared->ready;
  for (;;)
    ::pause();
}

constexpr int kThreads = 7;

[[noreturn]] void live(int pipe_read, int epoll_read) {
  struct sigaction action {};
  action.sa_handler = count_signal;
  ::sigaction(SIGUSR1, &action, nullptr);
  std::mutex mutex;
  std::condition_variable condition;
  std::thread([&] { wait_on_pipe(pipe_read); }).detach();
  std::thread([&] { wait_on_epoll(epoll_read); }).detach();
  std::thread([&] { wait_on_condition(mutex, condition); }).detach();
  std::thread(sleep_in_steps).detach();
  std::thread(spared_thread).detach();
  std::thread(call).detach();
  compute();
  ::_exit(4);
}

class ParkingTest : public testing::Test {
 protected:
  void SetUp() override {
    g_shared = shared_ = shared_memory<Shared>();
    ASSERT_EQ(::pipe(for_read_.data()), 0);
    ASSERT_EQ(::pipe(for_epoll_.data()), 0);
    target_.emplace([this] {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      live(for_read_[0], for_epoll_[0]);
    });
    while (shared_->ready < kThreads)
      pause(1);
  }
  void TearDown() override {
    EXPECT_EQ(shared_->failed, 0) << "the target complains, see this line";
    for (const int fd : {for_read_[0], for_read_[1], for_epoll_[0], for_epoll_[1]})
      ::close(fd);
    target_.reset();
    ::munmap(shared_, sizeof(Shared));
  }

  static void pause(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
  Pid pid() const { return target_->pid(); }
  Tid spared() const { return Tid{shared_->spared}; }
  bool spins_within(int ms) const {
    const std::uint64_t before = shared_->spins;
    for (int i = 0; i < ms && shared_->spins == before; ++i)
      pause(1);
    return shared_->spins != before;
  }
  bool alive() const { return ::waitpid(pid().value, nullptr, WNOHANG) == 0; }
  static std::string text(const Result<void>& result) {
    return result ? std::string() : result.error().to_string();
  }

  Shared* shared_ = nullptr;
  std::array<int, 2> for_read_{};
  std::array<int, 2> for_epoll_{};
  std::optional<Child> target_;
};

TEST_F(ParkingTest, ParkedThreadsStandStillAndGoOnUnharmed) {
  for (int round = 0; round < fakes::times(20, 50); ++round) {
    const auto parked = park_threads(pid(), {spared()});
    ASSERT_TRUE(parked) << text(parked);
    const std::uint64_t before = shared_->spins;
    pause(2);
    EXPECT_EQ(shared_->spins, before);
    const auto on = unpark_threads(pid());
    ASSERT_TRUE(on) << text(on);
    ASSERT_TRUE(spins_within(30000)) << "round " << round;
    ASSERT_TRUE(alive());
  }
  // Those that waited all the time get what they waited for, and nothing else came before.
  ASSERT_EQ(::write(for_read_[1], "x", 1), 1);
  ASSERT_EQ(::write(for_epoll_[1], "x", 1), 1);
  pause(50);
  EXPECT_TRUE(alive());
}

TEST_F(ParkingTest, EveryThreadButTheSparedOneIsParked) {
  ASSERT_TRUE(park_threads(pid(), {spared()}));
  for (int i = 0; i < 30000 && count_parked_threads(pid()) < kThreads - 1; ++i)
    pause(1);
  EXPECT_GE(count_parked_threads(pid()), kThreads - 1);
  ASSERT_TRUE(unpark_threads(pid()));
  EXPECT_EQ(count_parked_threads(pid()), 0);
}

// More than are stopped in one go, of those that wait and of those that come and go, and more than
// one lot has room for after the first time.
TEST(ParkingOfMany, AllStandStillAndGoOnUnharmed) {
  constexpr int kMany = 200;
  g_shared = shared_memory<Shared>();
  Child target([] {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::mutex mutex;
    std::condition_variable condition;
    for (int i = 0; i < kMany / 4; ++i) {
      std::thread(sleep_in_steps).detach();
      std::thread([&] { wait_on_condition(mutex, condition); }).detach();
      for (int two = 0; two < 2; ++two)
        std::thread(spared_thread).detach();  // which only waits
    }
    compute();
  });
  const auto all_are_there = [&] {
    while (g_shared->ready < kMany + 1 && ::waitpid(target.pid().value, nullptr, WNOHANG) == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return g_shared->ready == kMany + 1;
  };
  ASSERT_TRUE(all_are_there());
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(park_threads(target.pid(), {Tid{0}}));
    // A sanitizer has a thread of its own.
    EXPECT_GE(count_parked_threads(target.pid()), kMany + 1);
    const std::uint64_t before = g_shared->spins;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(g_shared->spins, before);
    ASSERT_TRUE(unpark_threads(target.pid()));
    EXPECT_EQ(count_parked_threads(target.pid()), 0);
  }
  EXPECT_EQ(g_shared->failed, 0) << "the target complains, see this line";
  ::munmap(g_shared, sizeof(Shared));
}

TEST_F(ParkingTest, ParkingTwiceIsParkingOnce) {
  ASSERT_TRUE(park_threads(pid(), {spared()}));
  ASSERT_TRUE(park_threads(pid(), {spared()}));
  ASSERT_TRUE(unpark_threads(pid()));
  EXPECT_TRUE(spins_within(30000));
  ASSERT_TRUE(unpark_threads(pid()));
  EXPECT_TRUE(alive());
}

// A killed operation has parked some of them; the next one parks the rest, in slots of their own.
TEST_F(ParkingTest, TheRestIsParkedBesideThoseThatAre) {
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(park_threads(pid(), {Tid{pid().value}}));
    EXPECT_TRUE(spins_within(30000));
    ASSERT_TRUE(park_threads(pid(), {spared()}));
    const std::uint64_t before = shared_->spins;
    pause(2);
    EXPECT_EQ(shared_->spins, before);
    ASSERT_TRUE(unpark_threads(pid()));
    ASSERT_TRUE(spins_within(30000)) << "round " << round;
    ASSERT_TRUE(alive());
  }
  // The driver's thread stayed parked from the first time on, and goes on as well.
  EXPECT_EQ(count_parked_threads(pid()), 0);
}

// Whether the process comes to sleep in one of these system calls.
bool comes_to_sleep_in(Pid pid, const std::set<long>& numbers) {
  for (int i = 0; i < 30000; ++i) {
    // "34 0x0 ...", or "running" also for one that waits for a processor.
    std::ifstream file(fmt::format("/proc/{}/syscall", pid.value));
    long number = -1;
    if (file >> number && numbers.contains(number)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// pause() and its like end when a signal is taken: they are not simply made again.
TEST(ParkingInPause, ASignalThatCameMeanwhileEndsTheCall) {
  g_shared = shared_memory<Shared>();
  Child target([] {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct sigaction action {};
    action.sa_handler = count_signal;
    ::sigaction(SIGUSR1, &action, nullptr);
    ++g_shared->ready;
    if (::pause() != -1 || errno != EINTR) ::_exit(3);
    timespec long_time{60, 0};
    ++g_shared->ready;
    if (::nanosleep(&long_time, nullptr) != -1 || errno != EINTR) ::_exit(4);
    ::_exit(0);
  });
  const std::array<std::set<long>, 2> calls{{{SYS_pause}, {SYS_nanosleep, SYS_clock_nanosleep}}};
  for (int call = 1; call <= 2; ++call) {
    const auto& numbers = calls.at(static_cast<std::size_t>(call) - 1);
    ASSERT_TRUE(comes_to_sleep_in(target.pid(), numbers)) << "call " << call;
    // Once without a signal: the call goes on. Then with one.
    ASSERT_TRUE(park_threads(target.pid(), {Tid{0}}));
    ASSERT_TRUE(unpark_threads(target.pid()));
    ASSERT_TRUE(comes_to_sleep_in(target.pid(), numbers)) << "call " << call;
    EXPECT_EQ(g_shared->ready, call);
    ASSERT_TRUE(park_threads(target.pid(), {Tid{0}}));
    ::kill(target.pid().value, SIGUSR1);
    ASSERT_TRUE(unpark_threads(target.pid()));
  }
  EXPECT_EQ(target.wait(), 0);
  EXPECT_EQ(g_shared->signals, 2U);
  ::munmap(g_shared, sizeof(Shared));
}

TEST_F(ParkingTest, ASignalWaitsUntilTheThreadsGoOn) {
  ASSERT_TRUE(park_threads(pid(), {spared()}));
  // To one thread: the spared one would take what is sent to the process.
  ASSERT_EQ(::syscall(SYS_tgkill, pid().value, pid().value, SIGUSR1), 0);
  pause(20);
  EXPECT_EQ(shared_->signals, 0U);
  ASSERT_TRUE(unpark_threads(pid()));
  EXPECT_TRUE(spins_within(30000));
  EXPECT_EQ(shared_->signals, 1U);
}

TEST_F(ParkingTest, SignalsThatComeWhileItIsParkedAreNotLost) {
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> sent{0};
  std::thread sender([&] {
    while (!stop) {
      const std::uint64_t seen = shared_->signals;
      ::syscall(SYS_tgkill, pid().value, pid().value, SIGUSR1);
      ++sent;
      while (shared_->signals == seen && !stop)
        std::this_thread::yield();
    }
  });
  // Each signal takes the sender a processor, and the target one.
  constexpr std::uint64_t kFewest = 100;
  const auto start = Clock::now();
  Result<void> done;
  for (int round = 0; done && (round < fakes::times(50, 100) ||
                               (sent <= kFewest && since(start) < std::chrono::seconds(30)));
       ++round) {
    done = park_threads(pid(), {spared()});
    if (done) done = unpark_threads(pid());
  }
  pause(20);
  stop = true;
  sender.join();
  EXPECT_TRUE(done) << text(done);
  EXPECT_GT(sent, kFewest);
  for (int i = 0; i < 30000 && shared_->signals < sent; ++i)
    pause(1);
  pause(20);  // and none more
  EXPECT_EQ(shared_->signals, sent);
}

// A target with threads in a library that passes for the driver.
struct InDriver {
  std::atomic<int> ready;
  std::array<std::atomic<int>, 3> held;
  std::atomic<std::uint64_t> rounds;
};

void busy(int steps) {
  for (int i = 0; i < steps; ++i)
    asm volatile("" ::"r"(i));
}

[[noreturn]] void live_in_driver(InDriver& shared, int fd) {
  void* library = ::dlopen(FAKE_BUSY_LIBCUDA, RTLD_NOW);
  if (library == nullptr) ::_exit(5);
  const auto ask = reinterpret_cast<void (*)(std::atomic<int>*)>(::dlsym(library, "fake_ask"));
  const auto wait = reinterpret_cast<int (*)(int)>(::dlsym(library, "fake_wait"));
  if (ask == nullptr || wait == nullptr) ::_exit(6);
  for (auto& held : shared.held) {
    std::thread([&] {
      ++shared.ready;
      for (;;) {
        ask(&held);
        ++shared.rounds;
        // Work of its own: the time in which it may be parked.
        busy(200);
      }
    }).detach();
  }
  std::thread([&] {
    ++shared.ready;
    wait(fd);
    ::_exit(7);
  }).detach();
  // Sleeps for less than it takes to be sure that it sleeps.
  for (++shared.ready;;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST(ParkingInTheDriver, AThreadIsParkedOutsideOfItOrAsleepInIt) {
  auto* shared = shared_memory<InDriver>();
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const Child target([&] {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    live_in_driver(*shared, pipe[0]);
  });
  while (shared->ready < 5)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // On a busy machine fewer rounds have to do: each of them may take a minute there.
  const auto start = Clock::now();
  for (int round = 0; round < 3 && (round < 2 || since(start) < std::chrono::seconds(60));
       ++round) {
    // It may not see all of them outside in its time then, and says so.
    auto parked = park_threads(target.pid(), {Tid{0}});
    for (int tries = 0; !parked && parked.error().code == ErrorCode::kBusy && tries < 30; ++tries)
      parked = park_threads(target.pid(), {Tid{0}});
    ASSERT_TRUE(parked) << parked.error().to_string();
    for (const auto& held : shared->held)
      EXPECT_EQ(held, 0) << "parked in the driver, in round " << round;
    const std::uint64_t before = shared->rounds;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(shared->rounds, before);
    for (int i = 0; i < 30000 && count_parked_threads(target.pid()) < 5; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_GE(count_parked_threads(target.pid()), 5);  // a sanitizer may add one
    ASSERT_TRUE(unpark_threads(target.pid()));
    for (int i = 0; i < 30000 && shared->rounds == before; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_NE(shared->rounds, before);
  }
  ::close(pipe[0]);
  ::close(pipe[1]);
  ::munmap(shared, sizeof(InDriver));
}

TEST_F(ParkingTest, AParkedProcessCanBeKilled) {
  ASSERT_TRUE(park_threads(pid(), {spared()}));
  ::kill(pid().value, SIGKILL);
  int status = 0;
  EXPECT_EQ(::waitpid(pid().value, &status, 0), pid().value);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(unpark_threads(pid()));
}

// A tool that parks may be killed at any instant: another can send on what is left.
// epoll_wait() alone gets an EINTR from the kernel then, as from any tracer that comes and goes.
TEST_F(ParkingTest, SurvivesAParkerThatIsKilled) {
  shared_->may_see_eintr = true;
  const int rounds = fakes::times(30, 60);
  for (int round = 0; round < rounds; ++round) {
    {
      const Child parker([this] {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) {
          (void)park_threads(pid(), {spared()});
          (void)unpark_threads(pid());
        }
      });
      std::this_thread::sleep_for(std::chrono::microseconds(500 + 5520 / rounds * round));
    }
    const auto on = unpark_threads(pid());
    ASSERT_TRUE(on) << text(on);
    ASSERT_TRUE(spins_within(30000)) << "round " << round;
    ASSERT_TRUE(alive());
    ASSERT_EQ(count_parked_threads(pid()), 0);
  }
}

TEST_F(ParkingTest, ATracedProcessIsRefused) {
  Child tracer([this] {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::syscall(SYS_ptrace, 0x4206 /* PTRACE_SEIZE */, pid().value, 0, 0) != 0) ::_exit(1);
    for (;;)
      ::pause();
  });
  std::string tracer_line;
  const std::string seized = fmt::format("TracerPid:\t{}", tracer.pid().value);
  for (int i = 0; i < 30000 && tracer_line != seized; ++i) {
    std::ifstream status(fmt::format("/proc/{}/status", pid().value));
    while (std::getline(status, tracer_line) && tracer_line.compare(0, 9, "TracerPid") != 0) {
    }
    pause(1);
  }
  ASSERT_EQ(tracer_line, seized);
  const auto parked = park_threads(pid(), {spared()});
  ASSERT_FALSE(parked);
  EXPECT_EQ(parked.error().code, ErrorCode::kBusy);
  EXPECT_TRUE(spins_within(30000));
}

// Stops a thread as a debugger does, before the call in which a parked thread waits, and stays.
[[noreturn]] void hold_before_its_wait(Pid pid) {
  const pid_t thread = pid.value;
  user_regs_struct registers{};
  if (::ptrace(PTRACE_SEIZE, thread, nullptr, nullptr) != 0 ||
      ::ptrace(PTRACE_INTERRUPT, thread, nullptr, nullptr) != 0 ||
      ::waitpid(thread, nullptr, __WALL) != thread ||
      ::ptrace(PTRACE_GETREGS, thread, nullptr, &registers) != 0)
    ::_exit(1);
  registers.orig_rax = static_cast<std::uint64_t>(-1);
  registers.rip = registers.rip / 4096 * 4096 + 64;
  if (::ptrace(PTRACE_SETREGS, thread, nullptr, &registers) != 0) ::_exit(2);
  ++g_shared->ready;
  for (;;)
    ::pause();
}

TEST_F(ParkingTest, OneHeldOnItsWayIntoTheWaitIsNotCalledFree) {
  ASSERT_TRUE(park_threads(pid(), {spared()}));
  for (int i = 0; i < 30000 && count_parked_threads(pid()) < kThreads - 1; ++i)
    pause(1);
  {
    const Child tracer([this] {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      hold_before_its_wait(pid());
    });
    for (int i = 0; i < 30000 && shared_->ready == kThreads; ++i)
      pause(1);
    ASSERT_EQ(shared_->ready, kThreads + 1);
    const auto on = unpark_threads(pid());
    ASSERT_FALSE(on);
    EXPECT_EQ(on.error().code, ErrorCode::kBusy);
  }
  // Once the debugger is gone.
  EXPECT_TRUE(unpark_threads(pid()));
  EXPECT_TRUE(spins_within(30000));
}

TEST_F(ParkingTest, AProcessThatIsNotThereIsNoError) {
  target_.emplace([] {});
  target_->become_zombie();
  EXPECT_TRUE(unpark_threads(target_->pid()));
}

// The mark of images of before 0.2.0, whose memory was given back while criu saved the rest.
TEST_F(ParkingTest, AProcessThatAnEarlierToolHasMarkedLacksItsMemory) {
  constexpr std::uint64_t kEarlierMark = 0x5aa5a3a1b1c7d39b;
  constexpr std::uint64_t kPlaceOfMark = 24;
  ASSERT_TRUE(park_threads(pid(), {spared()}));
  const auto space = fakes::space_of(pid());
  int marked = 0;
  const auto mappings = proc::ProcFs().mappings(pid());
  ASSERT_TRUE(mappings);
  for (const proc::Mapping& mapping : *mappings) {
    std::uint64_t magic = 0;
    if (mapping.permissions != "r-xp" || mapping.inode != 0 ||
        !space->read(mapping.start, &magic, sizeof magic) || magic != 0x5354415349530001)
      continue;
    ASSERT_TRUE(space->write(mapping.start + kPlaceOfMark, &kEarlierMark, sizeof kEarlierMark));
    ++marked;
  }
  ASSERT_EQ(marked, 1);
  const auto there = check_host_memory_is_there(pid());
  ASSERT_FALSE(there);
  EXPECT_EQ(there.error().code, ErrorCode::kWrongState) << text(there);
  const auto unparked = unpark_threads(pid());
  ASSERT_FALSE(unparked);
  EXPECT_EQ(unparked.error().code, ErrorCode::kWrongState) << text(unparked);
  ASSERT_TRUE(mark_host_memory_there(*space));
  EXPECT_TRUE(check_host_memory_is_there(pid()));
  EXPECT_TRUE(unpark_threads(pid()));
  EXPECT_TRUE(spins_within(10000));
}

// A target can make as many mappings as it likes that look like ours, each with room for thousands.
TEST_F(ParkingTest, PlacesThatAreForgedDoNotHoldItUp) {
  target_.emplace([this] {
    constexpr std::size_t kForged = 1000;
    constexpr std::size_t kPageSize = 4096;
    const std::array<std::uint64_t, 3> header{0x5354415349530001, 0x9d1f3c5b7e2a4068, 1 << 30};
    for (std::size_t i = 0; i < kForged; ++i) {
      void* at = ::mmap(nullptr, 3 * kPageSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
      std::memcpy(at, header.data(), sizeof header);
      ::mprotect(at, 2 * kPageSize, PROT_READ | PROT_EXEC);
    }
    shared_->ready = 1000;
    for (;;)
      ++shared_->spins;
  });
  for (int i = 0; i < 30000 && shared_->ready != 1000; ++i)
    pause(1);
  const auto start = std::chrono::steady_clock::now();
  const auto parked = park_threads(pid(), {});
  ASSERT_FALSE(parked);
  EXPECT_EQ(parked.error().code, ErrorCode::kNotSupported) << text(parked);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_TRUE(spins_within(30000));
}

}  // namespace
}  // namespace stasis
