// Pages that lie: the target may write into its page what it likes, whenever it likes.
#include "direct/agent_client.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <new>
#include <utility>

#include <gtest/gtest.h>

#include "base/futex.h"
#include "driver/cuda_abi.h"

namespace stasis::direct {
namespace {

using std::chrono::milliseconds;

// A process with a page like an agent's, which answers every request with `answer`.
class Liar {
 public:
  using Answer = std::function<void(ControlPage&)>;

  Liar(int seals, const Answer& answer, off_t bytes = sizeof(ControlPage),
       std::uint32_t version = kAgentVersion) {
    int up[2];
    EXPECT_EQ(::pipe2(up, O_CLOEXEC), 0);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(0);
      const int file = ::memfd_create(kAgentMemfd, MFD_ALLOW_SEALING);
      if (::ftruncate(file, bytes) != 0 || (seals && ::fcntl(file, F_ADD_SEALS, seals) != 0))
        ::_exit(1);
      void* at = ::mmap(nullptr, sizeof(ControlPage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (bytes >= static_cast<off_t>(offsetof(ControlPage, segments))) {
        auto* page = static_cast<ControlPage*>(at);
        page->magic = kAgentMagic;
        page->version = version;
        page->bytes = sizeof(ControlPage);
        page->pid = ::getpid();
      }
      (void)!::write(up[1], "x", 1);
      auto* page = static_cast<ControlPage*>(at);
      if (bytes < static_cast<off_t>(sizeof(ControlPage))) {
        for (;;)
          ::pause();
      }
      for (std::uint32_t seen = 0;;) {  // until it is killed
        const auto now = page->request.load();
        if (now == seen) {
          ::usleep(200);
          continue;
        }
        answer(*page);
        page->reply = seen = now;
        futex::wake_all(page->reply, true);
      }
    }
    ::close(up[1]);
    char ready = 0;
    EXPECT_EQ(::read(up[0], &ready, 1), 1);
    ::close(up[0]);
  }
  ~Liar() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Liar(const Liar&) = delete;
  Liar& operator=(const Liar&) = delete;

  Pid pid() const { return Pid{pid_}; }
  Result<std::optional<AgentClient>> find() const {
    auto pidfd = Pidfd::open(Pid{pid_});
    if (!pidfd) return fail(std::move(pidfd.error()));
    return AgentClient::find(Pid{pid_}, *pidfd);
  }

 private:
  pid_t pid_ = -1;
};

void say_nothing(ControlPage& page) { page.cu_result = 0; }

TEST(AgentClient, FindsASealedPageAndLeavesOthersAlone) {
  const Liar sealed(kAgentSeals, &say_nothing);
  auto found = sealed.find();
  ASSERT_TRUE(found.has_value());
  EXPECT_TRUE(found->has_value());
  // Each of these could be cut short while a tool has it mapped, which would end the tool.
  for (const int seals : {0, F_SEAL_GROW | F_SEAL_SEAL, F_SEAL_SHRINK | F_SEAL_SEAL}) {
    const Liar open(seals, &say_nothing);
    found = open.find();
    ASSERT_TRUE(found.has_value());
    EXPECT_FALSE(found->has_value()) << "seals " << seals;
  }
  const Liar small(kAgentSeals, &say_nothing, 100);
  found = small.find();
  ASSERT_TRUE(found.has_value());
  EXPECT_FALSE(found->has_value());
}

TEST(AgentClient, SeesThatAnAgentIsOfAnotherVersionWhateverTheSizeOfItsPage) {
  // As that of version 1 was smaller.
  for (const off_t more : {-16, 0, 4096}) {
    const Liar other(kAgentSeals, &say_nothing, static_cast<off_t>(sizeof(ControlPage)) + more,
                     kAgentVersion + 1);
    auto found = other.find();
    ASSERT_FALSE(found.has_value()) << more;
    EXPECT_EQ(found.error().code, ErrorCode::kNotSupported) << more;
    auto seen = AgentClient::look(other.pid());
    ASSERT_TRUE(seen.has_value() && seen->has_value()) << more;
    EXPECT_FALSE((*seen)->of_our_version) << more;
  }
  const Liar cut(kAgentSeals, &say_nothing, sizeof(ControlPage) - 16);
  auto found = cut.find();
  ASSERT_TRUE(found.has_value());
  EXPECT_FALSE(found->has_value());
  auto seen = AgentClient::look(cut.pid());
  ASSERT_TRUE(seen.has_value());
  EXPECT_FALSE(seen->has_value());
}

TEST(AgentClient, HasOnePeerAtATime) {
  const Liar agent(kAgentSeals, &say_nothing);
  {
    auto first = agent.find();
    ASSERT_TRUE(first.has_value() && first->has_value());
    const auto second = agent.find();
    ASSERT_FALSE(second.has_value());
    EXPECT_EQ(second.error().code, ErrorCode::kBusy);
  }
  const auto third = agent.find();
  EXPECT_TRUE(third.has_value() && third->has_value());
}

// The agent tries the lock itself, to see whether its peer is dead.
TEST(AgentClient, IsNotTurnedAwayByTheAgentsOwnLook) {
  const Liar agent(kAgentSeals, [](ControlPage& page) {
    page.cu_result = 0;
    if (page.command != AgentCommand::kHold) return;
    // From now on it looks for 20 ms in every 25.
    const pid_t parent = ::getpid();
    if (::fork() != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(0);  // too late: it has been killed already
    for (int fd = 3; fd < 64; ++fd) {
      if (::fcntl(fd, F_GET_SEALS) < 0) continue;
      char path[40];
      std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
      const int own = ::open(path, O_RDWR | O_CLOEXEC);
      for (;;) {
        ::flock(own, LOCK_SH | LOCK_NB);
        ::usleep(20000);
        ::flock(own, LOCK_UN);
        ::usleep(5000);
      }
    }
  });
  {
    auto client = agent.find();
    ASSERT_TRUE(client.has_value() && client->has_value());
    ASSERT_TRUE((*client)->ask(AgentCommand::kHold, 0, milliseconds(60000)).has_value());
  }
  for (int i = 0; i < 10; ++i) {
    const auto again = agent.find();
    EXPECT_TRUE(again.has_value() && again->has_value());
  }
}

TEST(AgentClient, PassesNoCommandsToTheTerminal) {
  const Liar agent(kAgentSeals, [](ControlPage& page) {
    page.cu_result = cuda::CUDA_ERROR_UNKNOWN;
    for (char& letter : page.message)
      letter = '\x1b';  // and no end
  });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  const auto done = (*client)->ask(AgentCommand::kClose, 100, milliseconds(60000));
  ASSERT_FALSE(done.has_value());
  EXPECT_EQ(done.error().message.find('\x1b'), std::string::npos);
}

TEST(AgentClient, DoesNotBelieveCounts) {
  for (const std::uint32_t count : {0U, kExportBatch + 1, 0xffffffffU}) {
    const Liar agent(kAgentSeals, [count](ControlPage& page) {
      page.cu_result = 0;
      page.segment_count = 0xffffffff;
      page.exported_count = count;
    });
    auto client = agent.find();
    ASSERT_TRUE(client.has_value() && client->has_value());
    ASSERT_TRUE((*client)->ask(AgentCommand::kClose, 100, milliseconds(60000)).has_value());
    const auto taken = (*client)->take_segments(milliseconds(2000));
    EXPECT_FALSE(taken.has_value()) << count;
  }
}

TEST(AgentClient, DoesNotTakeDescriptorsThatAreNotThere) {
  const Liar agent(kAgentSeals, [](ControlPage& page) {
    page.cu_result = 0;
    page.segment_count = 1;
    page.exported_count = 1;
    page.segments[0] = {std::uint64_t{1} << 60, 0, 0, {}, 4000, 0};
  });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  ASSERT_TRUE((*client)->ask(AgentCommand::kClose, 100, milliseconds(60000)).has_value());
  EXPECT_FALSE((*client)->take_segments(milliseconds(2000)).has_value());
}

// What was checked is what is used, whatever the page says a moment later.
TEST(AgentClient, FiguresAreThoseOfTheAnswer) {
  const Liar agent(kAgentSeals, [](ControlPage& page) {
    static std::uint64_t bytes = 1000;
    page.cu_result = 0;
    page.segment_bytes = bytes++;
    const pid_t parent = ::getpid();
    if (::fork() != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(0);  // too late: it has been killed already
    for (;;)
      page.segment_bytes = bytes++;
  });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  ASSERT_TRUE((*client)->ask(AgentCommand::kPrepare, 0, milliseconds(60000)).has_value());
  const auto first = (*client)->bytes();
  ::usleep(20000);
  EXPECT_EQ((*client)->bytes(), first);
}

TEST(AgentClient, HostMemoryAndGpuMemoryAreNotMixedUp) {
  const Liar agent(kAgentSeals,
                   [](ControlPage& page) { page.cu_result = cuda::CUDA_ERROR_OUT_OF_MEMORY; });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  const auto code = [&](AgentCommand command) {
    return (*client)->ask(command, 0, milliseconds(60000)).error().code;
  };
  EXPECT_EQ(code(AgentCommand::kPrepare), ErrorCode::kOutOfHostMemory);
  EXPECT_EQ(code(AgentCommand::kRefill), ErrorCode::kOutOfGpuMemory);
}

TEST(AgentClient, GivesUpOnOneThatDoesNotAnswer) {
  const Liar agent(kAgentSeals, [](ControlPage&) { ::pause(); });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  const auto done = (*client)->ask(AgentCommand::kNone, 0, milliseconds(100));
  ASSERT_FALSE(done.has_value());
  EXPECT_EQ(done.error().code, ErrorCode::kNoAnswer);
}

}  // namespace
}  // namespace stasis::direct
