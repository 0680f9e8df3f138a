#include "direct/held_neighbours.h"

#include <sys/mman.h>

#include <atomic>
#include <csignal>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "abi/cuda_abi.h"
#include "direct/fake_agent.h"
#include "driver/fake_driver.h"

namespace stasis {
namespace {

using direct::AgentCommand;
using direct::ControlPage;
using direct::FakeAgent;
using direct::kAgentSeals;
using std::chrono::milliseconds;

// How often each gate was closed and opened, in memory that the agents share.
struct Gates {
  std::atomic<int> closed{0};
  std::atomic<int> opened{0};
};

class HeldNeighboursTest : public ::testing::Test {
 public:
  HeldNeighboursTest() {
    void* at =
        ::mmap(nullptr, sizeof(Gates), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(at, MAP_FAILED);
    gates_ = new (at) Gates;
  }
  ~HeldNeighboursTest() override { ::munmap(gates_, sizeof(Gates)); }

 protected:
  std::unique_ptr<FakeAgent> agent(cuda::CUresult answer = cuda::CUDA_SUCCESS) const {
    return std::make_unique<FakeAgent>(kAgentSeals, [gates = gates_, answer](ControlPage& page) {
      page.cu_result = 0;
      if (page.command == AgentCommand::kOpen) gates->opened++;
      if (page.command != AgentCommand::kClose) return;
      page.cu_result = answer;
      if (answer == cuda::CUDA_SUCCESS) gates->closed++;
    });
  }
  static RestoredNeighbours infos(std::initializer_list<const FakeAgent*> agents) {
    RestoredNeighbours out;
    for (const FakeAgent* one : agents)
      out.known.push_back(*proc::ProcFs().process(one->pid()));
    return out;
  }

  FakeDriver driver_;
  Interrupt interrupt_;
  NoProgress progress_;
  std::string said_;
  Environment env_{driver_, interrupt_, progress_, [this](auto text) { said_ += text + "\n"; }};
  Gates* gates_ = nullptr;
};

TEST_F(HeldNeighboursTest, TheirGatesAreClosedUntilItEnds) {
  const auto first = agent();
  const auto second = agent();
  {
    const auto held =
        HeldNeighbours::hold(env_, infos({first.get(), second.get()}), milliseconds(5000));
    ASSERT_TRUE(held.has_value());
    EXPECT_FALSE(held->empty());
    EXPECT_EQ(gates_->closed - gates_->opened, 2);
  }
  EXPECT_EQ(gates_->closed, gates_->opened);
  EXPECT_EQ(said_, "");
}

TEST_F(HeldNeighboursTest, AllRunWhereTheWorkOfOneDoesNotEnd) {
  const auto first = agent();
  const auto second = agent(cuda::CUDA_ERROR_NOT_READY);
  const auto held =
      HeldNeighbours::hold(env_, infos({first.get(), second.get()}), milliseconds(50));
  ASSERT_FALSE(held.has_value());
  EXPECT_EQ(held.error().code, ErrorCode::kBusy);
  EXPECT_NE(held.error().message.find("its work there has not ended"), std::string::npos);
  EXPECT_EQ(gates_->closed, gates_->opened);
}

TEST_F(HeldNeighboursTest, WhereTheContextIsMadeInAnyCaseItIsTold) {
  const auto held = HeldNeighbours::hold_if_possible(env_, {}, {}, milliseconds(50));
  EXPECT_TRUE(held.empty());
  EXPECT_EQ(said_, "");
}

TEST_F(HeldNeighboursTest, OneThatAnotherToolHasIsTold) {
  const auto first = agent();
  const auto second = agent();
  const auto peer = second->find();
  ASSERT_TRUE(peer.has_value());
  const auto held =
      HeldNeighbours::hold(env_, infos({first.get(), second.get()}), milliseconds(5000));
  ASSERT_TRUE(held.has_value());
  EXPECT_EQ(gates_->closed - gates_->opened, 1);
  EXPECT_NE(said_.find("cannot hold meanwhile: process " + std::to_string(second->pid().value)),
            std::string::npos)
      << said_;
}

TEST_F(HeldNeighboursTest, OneWhoseAgentFailsIsToldAndTheOthersAreHeld) {
  const auto first = agent();
  const auto second = agent(cuda::CUDA_ERROR_INVALID_VALUE);
  const auto held =
      HeldNeighbours::hold(env_, infos({first.get(), second.get()}), milliseconds(5000));
  ASSERT_TRUE(held.has_value()) << held.error().message;
  EXPECT_EQ(gates_->closed - gates_->opened, 1);
  EXPECT_NE(said_.find("cannot hold meanwhile: process " + std::to_string(second->pid().value)),
            std::string::npos)
      << said_;
}

// Its agent would not answer, and it begins no kernel.
TEST_F(HeldNeighboursTest, OneThatASignalHasStoppedIsTold) {
  const auto first = agent();
  ASSERT_EQ(::kill(first->pid().value, SIGSTOP), 0);
  const auto begin = Clock::now();
  while (proc::ProcFs().state(first->pid()).value_or('T') != 'T')
    ASSERT_LT(Clock::now() - begin, std::chrono::seconds(10));
  const auto held = HeldNeighbours::hold(env_, infos({first.get()}), milliseconds(5000));
  ASSERT_EQ(::kill(first->pid().value, SIGCONT), 0);
  ASSERT_TRUE(held.has_value()) << held.error().message;
  EXPECT_TRUE(held->empty());
  EXPECT_NE(said_.find("cannot hold meanwhile"), std::string::npos) << said_;
}

TEST_F(HeldNeighboursTest, OneThatIsStoppedWhileItIsHeldKeepsNoOperation) {
  const auto first = agent();
  const auto second = agent();
  auto held = HeldNeighbours::hold(env_, infos({first.get(), second.get()}), milliseconds(5000));
  ASSERT_TRUE(held.has_value()) << held.error().message;
  ASSERT_EQ(::kill(first->pid().value, SIGSTOP), 0);
  const auto begin = Clock::now();
  held->release();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(3));
  EXPECT_EQ(gates_->opened, 1);
}

TEST_F(HeldNeighboursTest, OneThatIsSuspendedSinceNeedsNoHolding) {
  const auto first = std::make_unique<FakeAgent>(kAgentSeals, [](ControlPage& page) {
    page.cu_result = 0;
    if (page.command == AgentCommand::kEvict) page.state = direct::AgentState::kEvicted;
  });
  {
    auto peer = first->find();
    ASSERT_TRUE(peer.has_value());
    ASSERT_TRUE((*peer)->ask(AgentCommand::kEvict, 0, milliseconds(5000)));
  }
  const auto held = HeldNeighbours::hold(env_, infos({first.get()}), milliseconds(5000));
  ASSERT_TRUE(held.has_value()) << held.error().message;
  EXPECT_TRUE(held->empty());
  EXPECT_EQ(said_, "");
}

TEST_F(HeldNeighboursTest, AnotherProcessThatHasTheNumberIsNotHeld) {
  const auto first = agent();
  auto before = infos({first.get()});
  before.known.front().start_ticks += 1;
  const auto held = HeldNeighbours::hold(env_, before, milliseconds(5000));
  ASSERT_TRUE(held.has_value());
  EXPECT_TRUE(held->empty());
  EXPECT_EQ(gates_->closed, 0);
}

TEST_F(HeldNeighboursTest, AStopIsObeyed) {
  const auto first = agent(cuda::CUDA_ERROR_NOT_READY);
  interrupt_.request(SIGINT);
  const auto held = HeldNeighbours::hold(env_, infos({first.get()}), milliseconds(50));
  ASSERT_FALSE(held.has_value());
  EXPECT_EQ(held.error().code, ErrorCode::kInterrupted);
}

// However many there are: none of them is waited for longer than all may take, and one of theirs
// that answers is held.
TEST_F(HeldNeighboursTest, ForeignOnesThatDoNotAnswerCostASecondTogether) {
  std::vector<std::unique_ptr<FakeAgent>> silent;
  RestoredNeighbours all;
  for (int i = 0; i < 6; ++i) {
    silent.push_back(std::make_unique<FakeAgent>(kAgentSeals, [i](ControlPage& page) {
      // One says nothing, the next one that its work has not ended.
      page.cu_result = cuda::CUDA_ERROR_NOT_READY;
      ::usleep(i % 2 == 0 ? 60'000'000 : static_cast<unsigned>(page.arguments[0]) * 1000);
    }));
    all.foreign.push_back(*proc::ProcFs().process(silent.back()->pid()));
  }
  const auto first = agent();
  all.foreign.push_back(*proc::ProcFs().process(first->pid()));
  Clock::duration all_together{0};
  for (int times = 0; times < 3; ++times) {
    const auto begin = Clock::now();
    const auto held = HeldNeighbours::hold(env_, all, milliseconds(20000));
    ASSERT_TRUE(held.has_value()) << held.error().message;
    EXPECT_EQ(held->empty(), false);
    all_together += Clock::now() - begin;
  }
  EXPECT_LT(all_together, std::chrono::milliseconds(2500));
  EXPECT_NE(said_.find("cannot hold meanwhile: process " + std::to_string(silent[0]->pid().value)),
            std::string::npos)
      << said_;
}

}  // namespace
}  // namespace stasis
