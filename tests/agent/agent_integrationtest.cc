// The agent's own thread among a program's, on the simulated driver: its sources as they are, and
// only what brings the program's calls to them left out. One process is all of it here, the
// program, the agent and its peer, so that a checker of threads sees them together.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "direct/agent_client.h"
#include "preload/deepbind_scan.h"
#include "preload/driver_mmap.h"
#include "preload/eviction.h"
#include "preload/gate.h"
#include "preload/intercept.h"
#include "preload/thread.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

void* simulated_driver() {
  static void* const library = [] {
    static std::string dir =
        (std::filesystem::temp_directory_path() / "stasis-agent-XXXXXX").string();
    EXPECT_NE(::mkdtemp(dir.data()), nullptr);
    std::atexit([] { std::filesystem::remove_all(dir); });
    ::setenv("STASIS_SIM_DIR", dir.c_str(), 1);
    ::setenv("STASIS_SIM_GPUS", "1x2G", 1);
    ::unsetenv("STASIS_SIM_FAULTS");
    ::unsetenv("CUDA_VISIBLE_DEVICES");
    const char* build = std::getenv("STASIS_BUILD");
    const std::string path =
        std::string(build ? build : "build/dev") + "/lib/stasis/sim/libcuda.so.1";
    void* made = ::dlopen(path.c_str(), RTLD_NOW);
    if (!made) ADD_FAILURE() << ::dlerror();
    return made;
  }();
  return library;
}

template <class Call>
Call* found(const char* name) {
  return reinterpret_cast<Call*>(::dlsym(simulated_driver(), name));
}

}  // namespace

// In place of intercept.cc and deepbind_scan.cc.
const DriverCalls& driver() {
  static const DriverCalls calls = [] {
    DriverCalls all;
#define STASIS_FIND(name) all.name = found<fn::name>(#name);
    STASIS_AGENT_NEEDS(STASIS_FIND)
    STASIS_HOOKED_CALLS(STASIS_FIND)
#undef STASIS_FIND
    return all;
  }();
  return calls;
}
void* in_place_of(void* real) { return real; }
void tell_watch_of_graph() {}
// mmap() is the C library's here.
SteeredMapping::SteeredMapping(std::uintptr_t address, std::size_t bytes)
    : address_(address), bytes_(bytes) {}
SteeredMapping::~SteeredMapping() = default;
std::string library_deep_bound() { return {}; }
std::uint64_t deep_loads() { return 0; }
// In place of adopt.cc: this agent was there from the beginning.
Outcome look_for_memory() { return {CUDA_ERROR_NOT_SUPPORTED, "look_for_memory"}; }
Outcome adopt_memory() { return {CUDA_ERROR_NOT_SUPPORTED, "adopt_memory"}; }
void lock_looking_for_fork() {}
void unlock_looking_after_fork() {}

namespace {

using direct::AgentClient;
using direct::AgentCommand;
using direct::AgentState;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kMiB = std::size_t{1} << 20;
// More than the stack of a thread of the agent's has room for, which the C library takes it from.
thread_local std::array<char, 3 * kMiB> g_large_local;
constexpr milliseconds kTimeout{60000};

CUcontext context() {
  static const CUcontext made = [] {
    CUcontext primary = nullptr;
    EXPECT_EQ(found<fn::cuInit>("cuInit")(0), CUDA_SUCCESS);
    EXPECT_EQ(hooks::cuDevicePrimaryCtxRetain(&primary, 0), CUDA_SUCCESS);
    // The first thread inside finds out what the kernel does; then it is ours to say. A checker of
    // threads knows nothing of membarrier.
    { const Gate::Pass pass; }
    Gate::fence_in_every_call();
    return primary;
  }();
  return made;
}

// A piece of device memory with content that is known.
struct Piece {
  CUdeviceptr address = 0;
  CUmemGenericAllocationHandle handle = 0;  // of memory that the program maps itself
  std::vector<std::uint32_t> content;
  std::size_t bytes() const { return content.size() * sizeof content[0]; }
};

// One thread of the program, which allocates, verifies and frees all the time.
class Tenant {
 public:
  Tenant(std::uint32_t number, const std::atomic<bool>& stop)
      : random_(number * 7919 + 1), thread_([this, &stop] { work(stop); }) {}
  ~Tenant() { thread_.join(); }
  Tenant(const Tenant&) = delete;
  Tenant& operator=(const Tenant&) = delete;

  long passes() const { return passes_.load(); }

 private:
  std::uint32_t next() { return random_ = random_ * 1664525 + 1013904223; }

  void work(const std::atomic<bool>& stop) {
    EXPECT_EQ(driver().cuCtxSetCurrent(context()), CUDA_SUCCESS);
    std::vector<Piece> pieces(4);
    for (std::uint32_t i = 0; i < pieces.size(); ++i)
      fill(pieces[i], i % 2 == 1);
    while (!stop) {
      Piece& piece = pieces[(next() >> 16) % pieces.size()];
      verify(piece);
      const bool mapped = piece.handle != 0;
      release(piece);
      fill(piece, mapped);
      ++passes_;
    }
    for (Piece& piece : pieces) {
      verify(piece);
      release(piece);
    }
  }

  void fill(Piece& piece, bool mapped) {
    piece.content.resize((2 + (next() >> 16) % 2) * kMiB / sizeof(std::uint32_t));
    const std::uint32_t seed = next();
    for (std::size_t i = 0; i < piece.content.size(); ++i)
      piece.content[i] = seed + static_cast<std::uint32_t>(i);
    if (mapped)
      map(piece);
    else
      ASSERT_EQ(hooks::cuMemAlloc_v2(&piece.address, piece.bytes()), CUDA_SUCCESS);
    const Gate::Pass pass;
    ASSERT_EQ(driver().cuMemcpyHtoD_v2(piece.address, piece.content.data(), piece.bytes()),
              CUDA_SUCCESS);
  }
  void map(Piece& piece) {
    constexpr std::size_t kGranule = 2 * kMiB / sizeof(std::uint32_t);
    piece.content.resize((piece.content.size() + kGranule - 1) / kGranule * kGranule);
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    const CUmemAccessDesc right{prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    ASSERT_EQ(driver().cuMemAddressReserve(&piece.address, piece.bytes(), 0, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(hooks::cuMemCreate(&piece.handle, piece.bytes(), &prop, 0), CUDA_SUCCESS);
    ASSERT_EQ(hooks::cuMemMap(piece.address, piece.bytes(), 0, piece.handle, 0), CUDA_SUCCESS);
    ASSERT_EQ(hooks::cuMemSetAccess(piece.address, piece.bytes(), &right, 1), CUDA_SUCCESS);
  }
  static void verify(const Piece& piece) {
    std::vector<std::uint32_t> read(piece.content.size());
    const Gate::Pass pass;
    ASSERT_EQ(driver().cuMemcpyDtoH_v2(read.data(), piece.address, piece.bytes()), CUDA_SUCCESS);
    ASSERT_TRUE(read == piece.content) << "device memory has changed";
  }
  static void release(Piece& piece) {
    if (piece.handle == 0) {
      ASSERT_EQ(hooks::cuMemFree_v2(piece.address), CUDA_SUCCESS);
      return;
    }
    ASSERT_EQ(hooks::cuMemUnmap(piece.address, piece.bytes()), CUDA_SUCCESS);
    ASSERT_EQ(hooks::cuMemRelease(std::exchange(piece.handle, 0)), CUDA_SUCCESS);
    ASSERT_EQ(driver().cuMemAddressFree(piece.address, piece.bytes()), CUDA_SUCCESS);
  }

  std::uint32_t random_;
  std::atomic<long> passes_{0};
  std::thread thread_;  // last: it uses the others
};

class AgentThread : public ::testing::Test {
 public:
  AgentThread() {
    EXPECT_NE(context(), nullptr);
    for (std::uint32_t i = 0; i < 3; ++i)
      tenants_.push_back(std::make_unique<Tenant>(i, stop_));
    go_on();
  }
  ~AgentThread() override { stop_ = true; }

 protected:
  static bool soon(const std::function<bool()>& condition) {
    const auto deadline = Clock::now() + kTimeout;
    while (!condition() && Clock::now() < deadline)
      std::this_thread::sleep_for(milliseconds(1));
    return condition();
  }
  // Every thread of the program.
  void go_on() const {
    std::vector<long> before;
    for (const auto& tenant : tenants_)
      before.push_back(tenant->passes());
    for (std::size_t i = 0; i < tenants_.size(); ++i)
      ASSERT_TRUE(soon([&] { return tenants_[i]->passes() > before[i] + 1; })) << "it stands still";
  }
  static AgentClient peer() {
    const Pid self{::getpid()};
    auto pidfd = Pidfd::open(self);
    auto agent = AgentClient::find(self, *pidfd);
    EXPECT_TRUE(agent && *agent) << (agent ? "no agent" : agent.error().to_string());
    return std::move(**agent);
  }
  static void ask(AgentClient& agent, AgentCommand command, std::uint64_t argument = 0) {
    const auto done = agent.ask(command, argument, kTimeout);
    ASSERT_TRUE(done) << done.error().to_string();
  }
  static AgentState state() {
    const auto seen = direct::probe_agent(Pid{::getpid()});
    return seen && *seen ? (*seen)->state : AgentState::kHeld;
  }
  // In place of a mover.
  static void copy_out(const AgentClient& agent) {
    auto* buffer = reinterpret_cast<std::byte*>(agent.buffer_address());
    ASSERT_TRUE(preload::copy_all(buffer, true).ok());
  }
  // As a tool does it, up to and including `last`.
  static void take_away(AgentClient& agent, AgentCommand last) {
    for (const auto command : {AgentCommand::kPrepare, AgentCommand::kClose, AgentCommand::kEvict,
                               AgentCommand::kHold, AgentCommand::kRepopulate}) {
      if (command == AgentCommand::kEvict) copy_out(agent);
      ask(agent, command, command == AgentCommand::kClose ? 60000 : 0);
      if (command == last) return;
    }
  }

  std::atomic<bool> stop_{false};
  std::vector<std::unique_ptr<Tenant>> tenants_;
};

TEST_F(AgentThread, TakesMemoryAwayAndBringsItBackWhileThreadsAllocateAndFree) {
  for (int round = 0; round < 10; ++round) {
    AgentClient agent = peer();
    take_away(agent, AgentCommand::kClose);
    const auto exported = agent.take_segments(kTimeout);
    ASSERT_TRUE(exported) << exported.error().to_string();
    EXPECT_EQ(exported->size(), agent.segment_count());
    EXPECT_GT(agent.segment_count(), 0U);
    copy_out(agent);
    ask(agent, AgentCommand::kEvict);
    ask(agent, AgentCommand::kHold);
    const auto back = agent.bring_back();
    ASSERT_TRUE(back) << back.error().to_string();
    go_on();
  }
}

TEST(AgentOwnThread, HasItsStackBesideLargeThreadLocalVariables) {
  static std::atomic<const char*> seen{nullptr};
  const auto look = [](void*) -> void* {
    volatile char used[kMiB];
    used[0] = 1;
    used[kMiB - 1] = 1;
    seen = &g_large_local[kMiB];
    return nullptr;
  };
  ASSERT_TRUE(start_thread(look, nullptr));
  const auto deadline = std::chrono::steady_clock::now() + kTimeout;
  while (seen == nullptr && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  EXPECT_NE(seen, nullptr);
}

TEST_F(AgentThread, MakesTheProgramGoOnWhenItsPeerHasGone) {
  for (const auto last : {AgentCommand::kPrepare, AgentCommand::kClose, AgentCommand::kEvict,
                          AgentCommand::kRepopulate}) {
    {
      AgentClient agent = peer();
      take_away(agent, last);
    }
    ASSERT_TRUE(soon([] { return state() == AgentState::kRunning; }))
        << direct::agent_command_name(last);
    go_on();
  }
}

// The tool has copied nothing: the agent keeps the memory itself while all that used it is gone.
TEST_F(AgentThread, TakesWhatItPinnedAsTheContent) {
  const auto open_now = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  for (int round = 0; round < 12; ++round) {
    std::ptrdiff_t before = 0;
    {
      AgentClient agent = peer();
      take_away(agent, AgentCommand::kClose);
      before = open_now();
      ask(agent, AgentCommand::kPin);
      EXPECT_EQ(open_now(), before + static_cast<std::ptrdiff_t>(agent.segment_count()));
      // Before it is given up, after, and when the driver was about to hold the process.
      if (round % 3 > 0) ask(agent, AgentCommand::kEvict);
      if (round % 3 > 1) ask(agent, AgentCommand::kHold);
      if (round % 2 == 0) {
        const auto back = agent.bring_back();
        ASSERT_TRUE(back) << back.error().to_string();
      } else if (round % 3 > 1) {
        ask(agent, AgentCommand::kRepopulate);
      }
      // Otherwise its peer goes.
    }
    ASSERT_TRUE(soon([] { return state() == AgentState::kRunning; })) << round;
    go_on();
    EXPECT_LE(open_now(), before) << round;
  }
}

// The program's own handler of forks takes its time, and the thread in it has the agent's locks. A
// tool keeps that thread still then.
std::atomic<int> g_in_fork{0};  // 1: the next one waits; 2: it does; 0: it goes on
void wait_in_fork() {
  int wanted = 1;
  if (!g_in_fork.compare_exchange_strong(wanted, 2)) return;
  while (g_in_fork.load() == 2)
    std::this_thread::sleep_for(milliseconds(1));
}
// Before the agent's own: the last that was registered is called first.
const int kRegistered = ::pthread_atfork(&wait_in_fork, nullptr, nullptr);

TEST_F(AgentThread, LetsGoOfWhatItPinnedWhileAThreadIsInTheMiddleOfAFork) {
  ASSERT_EQ(kRegistered, 0);
  AgentClient agent = peer();
  take_away(agent, AgentCommand::kClose);
  ask(agent, AgentCommand::kPin);
  copy_out(agent);
  ask(agent, AgentCommand::kEvict);
  ask(agent, AgentCommand::kHold);
  const auto half_way = [] {
    const auto seen = direct::probe_agent(Pid{::getpid()});
    return seen && *seen && (*seen)->half_way;
  };
  EXPECT_TRUE(half_way());
  g_in_fork = 1;
  std::thread forks([] {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    ::waitpid(child, nullptr, 0);
  });
  const bool in_the_middle = soon([] { return g_in_fork.load() == 2; });
  const auto unpinned = agent.ask(AgentCommand::kUnpin, 0, kTimeout);
  g_in_fork = 0;
  forks.join();
  EXPECT_TRUE(in_the_middle);
  EXPECT_TRUE(unpinned) << unpinned.error().to_string();
  EXPECT_FALSE(half_way());
  const auto back = agent.bring_back();
  ASSERT_TRUE(back) << back.error().to_string();
  go_on();
}

TEST_F(AgentThread, KeepsNothingWhereTheProgramMayOpenLittle) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  AgentClient agent = peer();
  take_away(agent, AgentCommand::kClose);
  const rlimit few{20, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const auto refused = agent.ask(AgentCommand::kPin, 0, kTimeout);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_FALSE(refused);
  EXPECT_EQ(agent.state(), AgentState::kClosed);
  ask(agent, AgentCommand::kOpen);
  go_on();
}

TEST_F(AgentThread, GivesUpItsPeersHaste) {
  AgentClient agent = peer();
  ask(agent, AgentCommand::kPrepare);
  // A call that does not return: the gate opens again.
  std::atomic<bool> inside{false};
  std::atomic<bool> leave{false};
  std::thread stuck([&] {
    const Gate::Pass pass;
    inside = true;
    while (!leave)
      std::this_thread::sleep_for(milliseconds(1));
  });
  EXPECT_TRUE(soon([&] { return inside.load(); }));
  const auto refused = agent.ask(AgentCommand::kClose, 100, kTimeout);
  EXPECT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kTimeout);
  EXPECT_EQ(agent.state(), AgentState::kRunning);
  go_on();
  leave = true;
  stuck.join();
}

}  // namespace
}  // namespace stasis::preload
