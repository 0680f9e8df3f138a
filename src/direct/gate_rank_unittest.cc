#include "direct/gate_rank.h"

#include <sys/mman.h>

#include <atomic>
#include <deque>
#include <new>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "abi/cuda_abi.h"
#include "direct/fake_agent.h"
#include "driver/fake_driver.h"

namespace stasis {
namespace {

using direct::AgentClient;
using direct::AgentCommand;
using direct::ControlPage;
using direct::FakeAgent;
using direct::kAgentSeals;
using direct::kKeepBuffer;
using std::chrono::milliseconds;

// What the agents know of each other, in memory that they share.
struct Job {
  std::atomic<int> opened{0};       // how often the first was let go on
  std::atomic<int> lost_buffer{0};  // and without its buffer
  std::atomic<int> first_closed{0};
};

class GateRankTest : public ::testing::Test {
 public:
  GateRankTest() {
    void* at =
        ::mmap(nullptr, sizeof(Job), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(at, MAP_FAILED);
    job_ = new (at) Job;
  }
  ~GateRankTest() override { ::munmap(job_, sizeof(Job)); }

 protected:
  // Quiesced whenever it is asked.
  FakeAgent::Answer behind() const {
    return [job = job_](ControlPage& page) {
      page.cu_result = 0;
      if (page.command == AgentCommand::kClose) job->first_closed++;
      if (page.command != AgentCommand::kOpen) return;
      if (page.arguments[0] != kKeepBuffer) job->lost_buffer++;
      job->opened++;
    };
  }
  // Is quiesced when the other has been let go on so often.
  FakeAgent::Answer ahead(int times) const {
    return [job = job_, times](ControlPage& page) {
      page.cu_result = 0;
      if (page.command != AgentCommand::kClose) return;
      const auto end = Clock::now() + milliseconds(page.arguments[0]);
      while (job->opened < times && Clock::now() < end && page.abandoned != page.request)
        ::usleep(100);
      if (job->opened < times) page.cu_result = cuda::CUDA_ERROR_NOT_READY;
    };
  }

  static std::vector<AgentClient> clients(std::initializer_list<const FakeAgent*> agents) {
    std::vector<AgentClient> found;
    for (const FakeAgent* agent : agents) {
      auto client = agent->find();
      EXPECT_TRUE(client.has_value() && client->has_value());
      found.push_back(std::move(**client));
    }
    return found;
  }

  QuiesceRound close(std::vector<AgentClient>& agents, milliseconds slice) const {
    std::deque<GateRank> gates;
    std::vector<Rank*> ranks;
    for (AgentClient& agent : agents)
      ranks.push_back(&gates.emplace_back(agent));
    return quiesce_ranks(ranks, slice, interrupt_);
  }

  Job* job_;
  Interrupt interrupt_;
};

TEST_F(GateRankTest, ThoseThatAreQuiescedAreClosedAtOnce) {
  const FakeAgent first(kAgentSeals, behind());
  const FakeAgent second(kAgentSeals, behind());
  auto agents = clients({&first, &second});
  // Where one has no processor for some milliseconds it holds up the other.
  for (int tries = 0; tries < 100; ++tries) {
    job_->opened = 0;
    const auto round = close(agents, milliseconds(60000));
    ASSERT_TRUE(round.result.has_value());
    ASSERT_TRUE(round.all_quiesced);
    if (job_->opened == 0) break;
  }
  EXPECT_EQ(job_->opened, 0);
}

TEST_F(GateRankTest, OneThatHoldsUpAnotherIsLetGoOnWithItsBuffer) {
  for (const int times : {1, 3}) {
    job_->opened = job_->first_closed = 0;
    const FakeAgent first(kAgentSeals, behind());
    const FakeAgent second(kAgentSeals, ahead(times));
    auto agents = clients({&first, &second});
    const auto round = close(agents, milliseconds(60000));
    EXPECT_TRUE(round.all_quiesced) << times;
    EXPECT_GE(round.tries, times + 1);
    EXPECT_GE(job_->opened, times);
    EXPECT_EQ(job_->first_closed, job_->opened + 1) << "it was not closed again";
    EXPECT_EQ(job_->lost_buffer, 0);
  }
}

TEST_F(GateRankTest, AllAreOpenWhenOneIsNotQuiesced) {
  const FakeAgent first(kAgentSeals, behind());
  const FakeAgent second(kAgentSeals, ahead(1000000));
  auto agents = clients({&first, &second});
  const auto round = close(agents, milliseconds(200));
  EXPECT_FALSE(round.all_quiesced);
  EXPECT_TRUE(round.result.has_value());
  ASSERT_FALSE(round.late.has_value());
  EXPECT_EQ(round.late.error().code, ErrorCode::kTimeout);
  EXPECT_EQ(job_->first_closed, job_->opened);
  EXPECT_EQ(job_->lost_buffer, 0);
}

TEST_F(GateRankTest, AnErrorIsToldAndNotTheTimeThatIsOver) {
  const FakeAgent first(kAgentSeals, ahead(1000000));
  const FakeAgent second(kAgentSeals,
                         [](ControlPage& page) { page.cu_result = cuda::CUDA_ERROR_UNKNOWN; });
  auto agents = clients({&first, &second});
  const auto round = close(agents, milliseconds(200));
  ASSERT_FALSE(round.result.has_value());
  EXPECT_EQ(round.result.error().code, ErrorCode::kDriverError);
}

TEST_F(GateRankTest, AnInterruptEndsIt) {
  interrupt_.request(SIGINT);
  const FakeAgent first(kAgentSeals, behind());
  const FakeAgent second(kAgentSeals, ahead(1000000));
  auto agents = clients({&first, &second});
  const auto round = close(agents, milliseconds(60000));
  ASSERT_FALSE(round.result.has_value());
  EXPECT_EQ(round.result.error().code, ErrorCode::kInterrupted);
  EXPECT_EQ(job_->first_closed, job_->opened) << "a gate is left closed";
}

// Of an agent that came while its program ran.
class DrainedRankTest : public GateRankTest {
 protected:
  Result<void> hold(milliseconds left) {
    agents_ = clients({&agent_});
    driver_.add(agents_.front().pid(), CudaState::kRunning);
    auto opened = Process::open(driver_, agents_.front().pid());
    EXPECT_TRUE(opened.has_value());
    process_.emplace(std::move(*opened));
    rank_.emplace(agents_.front(), *process_);
    return rank_->hold(left, false, interrupt_);
  }
  bool is_closed() const { return job_->first_closed == job_->opened + 1; }

  FakeDriver driver_;
  FakeAgent agent_{kAgentSeals, behind()};
  std::vector<AgentClient> agents_;
  std::optional<Process> process_;
  std::optional<DrainedRank> rank_;
};

TEST_F(DrainedRankTest, TheLockIsHadTwiceBehindAClosedGateAndGivenBack) {
  driver_.on_call = [this](const FakeDriver::Call& call) {
    if (call.action == Action::kLock) {
      EXPECT_TRUE(is_closed());
    }
  };
  ASSERT_TRUE(hold(milliseconds(60000)).has_value());
  const std::vector<Action> twice{Action::kLock, Action::kUnlock, Action::kLock, Action::kUnlock};
  EXPECT_EQ(driver_.actions(), twice);
  EXPECT_TRUE(is_closed());
  EXPECT_TRUE(rank_->release().has_value());
  EXPECT_FALSE(is_closed());
}

TEST_F(DrainedRankTest, OneThatDoesNotComeToRestInTimeRuns) {
  driver_.fail_always(Action::kLock, 600);
  const auto held = hold(milliseconds(100));
  ASSERT_FALSE(held.has_value());
  EXPECT_EQ(held.error().code, ErrorCode::kTimeout);
  EXPECT_FALSE(is_closed());
  EXPECT_EQ(driver_.state_of(process_->pid()), CudaState::kRunning);
}

TEST_F(DrainedRankTest, ReleasedAfterAnErrorItIsUnlockedAndOpen) {
  driver_.fail_always(Action::kUnlock, 999);
  const auto held = hold(milliseconds(60000));
  ASSERT_FALSE(held.has_value());
  EXPECT_EQ(held.error().code, ErrorCode::kDriverError);
  EXPECT_EQ(driver_.state_of(process_->pid()), CudaState::kLocked);
  driver_.forgive();
  EXPECT_TRUE(rank_->release().has_value());
  EXPECT_EQ(driver_.state_of(process_->pid()), CudaState::kRunning);
  EXPECT_FALSE(is_closed());
}

// One that is quiesced only when it runs on alone: it has ended, or says that it is about to.
TEST_F(GateRankTest, OneThatEndsIsNotWaitedFor) {
  const FakeAgent first(kAgentSeals, behind());
  const FakeAgent second(kAgentSeals, [](ControlPage& page) {
    if (page.command == AgentCommand::kClose) ::_exit(0);
  });
  const FakeAgent third(kAgentSeals, [](ControlPage& page) {
    page.cu_result = cuda::CUDA_ERROR_DEINITIALIZED;
    page.reply = page.request.load();
    ::usleep(200'000);
    ::_exit(0);
  });
  auto agents = clients({&first, &second, &third});
  const auto round = close(agents, milliseconds(60000));
  EXPECT_TRUE(round.result.has_value());
  EXPECT_TRUE(round.all_quiesced);
}

}  // namespace
}  // namespace stasis
