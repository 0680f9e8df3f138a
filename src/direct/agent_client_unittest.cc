// Pages that lie: the target may write into its page what it likes, whenever it likes.
#include "direct/agent_client.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "abi/cuda_abi.h"
#include "direct/agent_page.h"
#include "direct/fake_agent.h"
#include "proc/procfs.h"
#include "tests/fakes/child.h"
#include "tests/fakes/served_file.h"

namespace stasis::direct {
namespace {

using std::chrono::milliseconds;

void say_nothing(ControlPage& page) { page.cu_result = 0; }

TEST(AgentClient, FindsASealedPageAndLeavesOthersAlone) {
  const FakeAgent sealed(kAgentSeals, &say_nothing);
  auto found = sealed.find();
  ASSERT_TRUE(found.has_value());
  EXPECT_TRUE(found->has_value());
  // Each of these could be cut short while a tool has it mapped, which would end the tool.
  for (const int seals : {0, F_SEAL_GROW | F_SEAL_SEAL, F_SEAL_SHRINK | F_SEAL_SEAL}) {
    const FakeAgent open(seals, &say_nothing);
    found = open.find();
    ASSERT_TRUE(found.has_value());
    EXPECT_FALSE(found->has_value()) << "seals " << seals;
  }
  const FakeAgent small(kAgentSeals, &say_nothing, 100);
  found = small.find();
  ASSERT_TRUE(found.has_value());
  EXPECT_FALSE(found->has_value());
}

TEST(AgentClient, SeesThatAnAgentIsOfAnotherVersionWhateverTheSizeOfItsPage) {
  // As that of version 1 was smaller.
  for (const off_t more : {-16, 0, 4096}) {
    const FakeAgent other(kAgentSeals, &say_nothing, static_cast<off_t>(sizeof(ControlPage)) + more,
                          kAgentVersion + 1);
    auto found = other.find();
    ASSERT_FALSE(found.has_value()) << more;
    EXPECT_EQ(found.error().code, ErrorCode::kNotSupported) << more;
    auto seen = probe_agent(other.pid());
    ASSERT_TRUE(seen.has_value() && seen->has_value()) << more;
    EXPECT_FALSE((*seen)->of_our_version) << more;
  }
  const FakeAgent cut(kAgentSeals, &say_nothing, sizeof(ControlPage) - 16);
  auto found = cut.find();
  ASSERT_TRUE(found.has_value());
  EXPECT_FALSE(found->has_value());
  auto seen = probe_agent(cut.pid());
  ASSERT_TRUE(seen.has_value());
  EXPECT_FALSE(seen->has_value());
}

TEST(AgentClient, HasOnePeerAtATime) {
  const FakeAgent agent(kAgentSeals, &say_nothing);
  {
    auto first = agent.find();
    ASSERT_TRUE(first.has_value() && first->has_value());
    const auto second = agent.find(std::chrono::milliseconds(100));
    ASSERT_FALSE(second.has_value());
    EXPECT_EQ(second.error().code, ErrorCode::kBusy);
  }
  const auto third = agent.find();
  EXPECT_TRUE(third.has_value() && third->has_value());
}

// The agent tries the lock itself, to see whether its peer is dead.
TEST(AgentClient, IsNotTurnedAwayByTheAgentsOwnPoll) {
  const FakeAgent agent(kAgentSeals, [](ControlPage& page) {
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
  const FakeAgent agent(kAgentSeals, [](ControlPage& page) {
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
    const FakeAgent agent(kAgentSeals, [count](ControlPage& page) {
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
  const FakeAgent agent(kAgentSeals, [](ControlPage& page) {
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

// To close a copy of a socket may take as long as the program has said (SO_LINGER), of a pipe as
// long as it keeps that locked.
TEST(AgentClient, TakesNoSocketOrPipeForMemory) {
  for (const bool is_socket : {true, false}) {
    const FakeAgent agent(kAgentSeals, [is_socket](ControlPage& page) {
      int ends[2]{-1, -1};
      if (is_socket)
        ends[0] = ::socket(AF_INET, SOCK_STREAM, 0);
      else
        (void)!::pipe(ends);
      page.cu_result = 0;
      page.segment_count = 1;
      page.exported_count = 1;
      page.segments[0] = {4096, 0, 0, {}, ends[0], 0};
      page.shares[0].fd = ends[0];
    });
    auto client = agent.find();
    ASSERT_TRUE(client.has_value() && client->has_value());
    ASSERT_TRUE((*client)->ask(AgentCommand::kClose, 100, milliseconds(60000)).has_value());
    const auto taken = (*client)->take_segments(milliseconds(2000));
    ASSERT_FALSE(taken.has_value());
    EXPECT_EQ(taken.error().code, ErrorCode::kNotSupported) << taken.error().to_string();
    const auto lent = (*client)->borrow({1, 2}, milliseconds(2000));
    ASSERT_FALSE(lent.has_value());
    EXPECT_EQ(lent.error().code, ErrorCode::kNotSupported) << lent.error().to_string();
  }
}

TEST(AgentPage, OneThatTheProcessHasClosedIsNoPageOfIt) {
  EXPECT_FALSE(is_closed("/proc/self/fd/0"));
  EXPECT_TRUE(is_closed("/proc/self/fd/1000000"));
  const fakes::Child child;
  const std::string path = "/proc/" + std::to_string(child.pid().value) + "/fd/0";
  EXPECT_FALSE(is_closed(path));
  child.become_zombie();
  EXPECT_TRUE(is_closed(path));
}

// What was checked is what is used, whatever the page says a moment later.
TEST(AgentClient, FiguresAreThoseOfTheAnswer) {
  const FakeAgent agent(kAgentSeals, [](ControlPage& page) {
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
  const FakeAgent agent(kAgentSeals,
                        [](ControlPage& page) { page.cu_result = cuda::CUDA_ERROR_OUT_OF_MEMORY; });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  const auto code = [&](AgentCommand command) {
    return (*client)->ask(command, 0, milliseconds(60000)).error().code;
  };
  EXPECT_EQ(code(AgentCommand::kPrepare), ErrorCode::kOutOfHostMemory);
  EXPECT_EQ(code(AgentCommand::kRepopulate), ErrorCode::kOutOfGpuMemory);
}

TEST(AgentClient, MemoryThatAnAgentCannotMoveIsAnObstacle) {
  const FakeAgent agent(kAgentSeals,
                        [](ControlPage& page) { page.cu_result = cuda::CUDA_ERROR_NOT_SUPPORTED; });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  const auto done = (*client)->ask(AgentCommand::kPrepare, 0, milliseconds(60000));
  ASSERT_FALSE(done.has_value());
  EXPECT_EQ(done.error().code, ErrorCode::kNotSupported);
  ASSERT_EQ(done.error().obstacles.size(), 1U);
  EXPECT_EQ(done.error().obstacles.front().id, ObstacleId("staying-memory"));
  EXPECT_EQ(done.error().obstacles.front().pid, (*client)->pid());
}

TEST(AgentClient, AddressesThatAreRefusedAreNamedAsTheProgramsLimit) {
  const FakeAgent agent(kAgentSeals, [](ControlPage& page) {
    page.cu_result = cuda::CUDA_ERROR_OUT_OF_MEMORY;
    std::snprintf(page.message, sizeof page.message, "cuMemAddressReserve: refused");
  });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  const auto done = (*client)->ask(AgentCommand::kRepopulate, 0, milliseconds(60000));
  ASSERT_FALSE(done.has_value());
  EXPECT_NE(done.error().remedy.find("ulimit -v"), std::string::npos) << done.error().remedy;
}

TEST(AgentClient, GivesUpOnOneThatDoesNotAnswer) {
  const FakeAgent agent(kAgentSeals, [](ControlPage&) { ::pause(); });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  const auto done = (*client)->ask(AgentCommand::kNone, 0, milliseconds(100));
  ASSERT_FALSE(done.has_value());
  EXPECT_EQ(done.error().code, ErrorCode::kNoAnswer);
}

// Each answer names more pieces than the one before, and takes its time.
TEST(AgentClient, CountsPiecesOnceAndWaitsOnceForAll) {
  const FakeAgent agent(kAgentSeals, [](ControlPage& page) {
    page.cu_result = 0;
    page.segment_count = page.segment_count + 2;
    page.exported_count = 1;
    page.segments[0] = {4096, 0, 0, {}, 0, 0};
    if (page.command == AgentCommand::kExport) ::usleep(60000);
  });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  ASSERT_TRUE((*client)->ask(AgentCommand::kClose, 100, milliseconds(60000)).has_value());
  const auto wanted = (*client)->segment_count();
  const auto taken = (*client)->take_segments(milliseconds(60000));
  ASSERT_TRUE(taken.has_value()) << taken.error().to_string();
  EXPECT_EQ(taken->size(), wanted);
  ASSERT_TRUE((*client)->ask(AgentCommand::kClose, 100, milliseconds(60000)).has_value());
  ASSERT_GT((*client)->segment_count(), 5U);
  const auto late = (*client)->take_segments(milliseconds(150));
  ASSERT_FALSE(late.has_value());
  EXPECT_EQ(late.error().code, ErrorCode::kNoAnswer);
  // The time of all of them, and not what the last one was left with.
  const std::string& message = late.error().message;
  const std::size_t figure = message.find("within ");
  ASSERT_NE(figure, std::string::npos) << message;
  EXPECT_GE(std::stoi(message.substr(figure + 7)), 150) << message;
}

// To close it would wait for its server, and no signal ends that.
class AgentClientServed : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(AgentClient, AgentClientServed, testing::Bool());
TEST_P(AgentClientServed, TakesNoFileThatAnotherUsersProgramServes) {
  const FakeAgent agent(kAgentSeals, [is_detached = GetParam()](ControlPage& page) {
    static pid_t server = 0;
    static const int file = fakes::open_served_file(server);
    if (is_detached) ::umount2("/mnt", MNT_DETACH);
    page.cu_result = 0;
    page.content_id[0] = static_cast<std::uint64_t>(file);
    page.content_id[1] = static_cast<std::uint64_t>(server);
    page.segment_count = 1;
    page.segment_bytes = 2 << 20;
    page.exported_count = 1;
    page.segments[0] = {2 << 20, 0, 0, {}, file, 0};
  });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  ASSERT_TRUE((*client)->ask(AgentCommand::kClose, 100, milliseconds(60000)).has_value());
  const auto [file, server] = (*client)->content_id();
  if (static_cast<int>(file) < 0) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  const fakes::ServerEnd end(static_cast<pid_t>(server));
  const auto start = Clock::now();
  EXPECT_FALSE((*client)->take_segments(milliseconds(2000)).has_value());
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(2));
}

// To send by: a connection to this program, which asks who sends.
TEST(AgentClient, SendsNothingToWhomTheAgentNames) {
  for (const int type : {SOCK_SEQPACKET, SOCK_DGRAM}) {
    const UniqueFd reader(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    socklen_t size = sizeof name.sun_family;  // the kernel finds a name
    ASSERT_EQ(::bind(reader.get(), reinterpret_cast<const sockaddr*>(&name), size), 0);
    size = sizeof name;
    ASSERT_EQ(::getsockname(reader.get(), reinterpret_cast<sockaddr*>(&name), &size), 0);
    if (type == SOCK_SEQPACKET) {
      ASSERT_EQ(::listen(reader.get(), 1), 0);
    }
    const FakeAgent agent(kAgentSeals, [&](ControlPage& page) {
      static int socket = -1;
      int pair[2] = {-1, -1};
      if (socket < 0) {
        // One of a pair says whose the other end was, whatever it is connected to since.
        if (type == SOCK_DGRAM && ::socketpair(AF_UNIX, type, 0, pair) == 0) {
          socket = pair[0];
          ::close(pair[1]);
        } else {
          socket = ::socket(AF_UNIX, type, 0);
        }
        if (::connect(socket, reinterpret_cast<const sockaddr*>(&name), size) != 0) ::_exit(1);
      }
      page.exported_count = 1;
      page.shares[0].fd = socket;
    });
    auto client = agent.find();
    ASSERT_TRUE(client.has_value() && client->has_value());
    const UniqueFd piece(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const auto sent = (*client)->attach({{ShareId{1, 2}, &piece}}, milliseconds(60000));
    ASSERT_FALSE(sent.has_value());
    EXPECT_EQ(sent.error().code, ErrorCode::kNotSupported);
    UniqueFd connection;
    if (type == SOCK_SEQPACKET)
      connection = UniqueFd(::accept4(reader.get(), nullptr, nullptr, SOCK_CLOEXEC));
    char byte = 0;
    EXPECT_LE(::recv((connection.valid() ? connection : reader).get(), &byte, 1, MSG_DONTWAIT), 0);
  }
}

// There is always one more, and each answer takes its time.
TEST(AgentClient, WaitsOnceForAllThatIsShared) {
  const FakeAgent agent(kAgentSeals, [](ControlPage& page) {
    page.cu_result = 0;
    page.exported_count = kShareBatch;
    if (page.command == AgentCommand::kShares) ::usleep(60000);
  });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  const auto start = Clock::now();
  auto shares = (*client)->shares(milliseconds(300));
  ASSERT_FALSE(shares.has_value());
  EXPECT_EQ(shares.error().code, ErrorCode::kNoAnswer);
  Interrupt interrupt;
  interrupt.request(SIGINT);
  (*client)->heed(&interrupt, AgentClient::Heeds::kFirst);
  shares = (*client)->shares(milliseconds(60000));
  ASSERT_FALSE(shares.has_value());
  EXPECT_EQ(shares.error().code, ErrorCode::kInterrupted);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
}

TEST(AgentClient, HearsTheUserInTheMiddleOfACommand) {
  const FakeAgent agent(kAgentSeals, [](ControlPage& page) {
    if (page.command == AgentCommand::kExport) ::pause();
    page.cu_result = 0;
    page.segment_count = 1;
  });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  ASSERT_TRUE((*client)->ask(AgentCommand::kClose, 100, milliseconds(60000)).has_value());
  Interrupt interrupt;
  interrupt.request(SIGINT);
  (*client)->heed(&interrupt, AgentClient::Heeds::kFirst);
  const auto start = Clock::now();
  const auto taken = (*client)->take_segments(milliseconds(60000));
  ASSERT_FALSE(taken.has_value());
  EXPECT_EQ(taken.error().code, ErrorCode::kInterrupted);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
}

// One that brings memory back goes on by itself: its user may leave, and does so on purpose.
TEST(AgentClient, LeavesASilentOneThatBringsMemoryBackAtTheSecondRequest) {
  const FakeAgent agent(kAgentSeals, [](ControlPage&) { ::pause(); });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  Interrupt interrupt;
  (*client)->heed(&interrupt, AgentClient::Heeds::kSecond);
  interrupt.request(SIGINT);
  interrupt.request(SIGINT);  // the same one, passed on
  auto done = (*client)->ask(AgentCommand::kRepopulate, 0, milliseconds(100));
  ASSERT_FALSE(done.has_value());
  EXPECT_EQ(done.error().code, ErrorCode::kNoAnswer);
  ::usleep(1000000);
  interrupt.request(SIGTERM);
  const auto start = Clock::now();
  done = (*client)->ask(AgentCommand::kRepopulate, 0, milliseconds(60000));
  ASSERT_FALSE(done.has_value());
  EXPECT_EQ(done.error().code, ErrorCode::kInterrupted);
  // Since the first command that it has not answered.
  EXPECT_EQ(done.error().message.find("(0 s)"), std::string::npos) << done.error().message;
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
}

TEST(AgentClient, ItsSizeIsCheckedAndThenStays) {
  const FakeAgent agent(kAgentSeals, [](ControlPage& page) {
    page.cu_result = 0;
    page.segment_bytes =
        page.command == AgentCommand::kPrepare ? std::uint64_t{9} << 30 : std::uint64_t{1} << 46;
  });
  auto client = agent.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  ASSERT_TRUE((*client)->ask(AgentCommand::kPrepare, 0, milliseconds(60000)).has_value());
  EXPECT_TRUE((*client)->check_size([] { return std::uint64_t{9} << 30; }).has_value());
  EXPECT_FALSE((*client)->check_size([] { return std::uint64_t{8} << 30; }).has_value());
  ASSERT_TRUE((*client)->ask(AgentCommand::kEvict, 0, milliseconds(60000)).has_value());
  EXPECT_EQ((*client)->bytes(), std::uint64_t{9} << 30);
}

// As a user namespace's root directory may have one.
TEST(AgentClient, OpensNothingButMemoryForAPage) {
  const std::string directory = ::testing::TempDir() + "agent_client_" + std::to_string(::getpid());
  std::filesystem::create_directories(directory);
  const std::string fifo = directory + "/memfd:stasis-agent (deleted)";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const auto opened = open_checked(AT_FDCWD, fifo, O_RDWR, &is_memory_file);
  EXPECT_FALSE(opened);
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace stasis::direct
