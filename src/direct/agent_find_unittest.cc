// A process that keeps the descriptor of an agent's page, and has become another program.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "abi/cuda_abi.h"
#include "direct/agent_client.h"
#include "direct/fake_agent.h"
#include "proc/procfs.h"
#include "tests/fakes/child.h"

namespace stasis::direct {
namespace {

using std::chrono::milliseconds;

// A process that keeps its page's descriptor over execve(2), while another one that it has started
// goes on answering in the page.
class Changeling {
 public:
  // In a user namespace of its own with so many users; 0: in ours.
  explicit Changeling(unsigned users = 0)
      : go_(static_cast<std::atomic<int>*>(
            ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))),
        users_(users),
        target_([this] { become(); }) {
    while (go_->load() < kAlone)
      ::usleep(200);
    for (const char* map : {"uid_map", "gid_map"})
      if (users_ != 0)
        std::ofstream(fmt::format("/proc/{}/{}", pid().value, map))
            << fmt::format("0 100000 {}", users_) << std::flush;
    go_->store(kNamed);
    while (go_->load() != kReady)
      ::usleep(200);
  }
  ~Changeling() { ::munmap(go_, 4096); }
  Changeling(const Changeling&) = delete;
  Changeling& operator=(const Changeling&) = delete;

  Pid pid() const { return target_.pid(); }
  Result<std::optional<AgentClient>> find() const {
    auto pidfd = Pidfd::open(pid());
    return pidfd ? AgentClient::find(pid(), *pidfd, milliseconds(1000))
                 : fail(std::move(pidfd.error()));
  }
  void become_another_program() const {
    go_->store(kGo);
    for (int i = 0; i < 10000; ++i, ::usleep(1000)) {
      const auto info = proc::ProcFs().process(pid());
      if (info && info->comm == "sleep") return;
    }
    ADD_FAILURE() << "it did not";
  }

 private:
  static constexpr int kAlone = 1;
  static constexpr int kNamed = 2;
  static constexpr int kReady = 3;
  static constexpr int kGo = 4;

  static void answer(ControlPage& page) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // kept by the parent over execve
    for (std::uint32_t seen = 0;;) {
      const auto now = page.request.load();
      if (now == seen) {
        ::usleep(200);
        continue;
      }
      page.cu_result = 0;
      page.segment_count = 1;
      page.exported_count = 1;
      page.segments[0] = {4096, 0, 0, {}, 0, 0};
      page.reply = seen = now;
      futex::wake_all(page.reply, true);
    }
  }

  void become() const {
    if (users_ != 0 && ::unshare(CLONE_NEWUSER) != 0) return;
    go_->store(kAlone);
    while (go_->load() != kNamed)
      ::usleep(200);
    const int file = ::memfd_create(kAgentMemfd, MFD_ALLOW_SEALING);
    if (::ftruncate(file, sizeof(ControlPage)) != 0 || ::fcntl(file, F_ADD_SEALS, kAgentSeals) != 0)
      return;
    void* at = ::mmap(nullptr, sizeof(ControlPage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    auto* page = static_cast<ControlPage*>(at);
    page->magic = kAgentMagic;
    page->version = kAgentVersion;
    page->bytes = sizeof(ControlPage);
    page->pid = ::getpid();
    if (::fork() == 0) answer(*page);
    go_->store(kReady);
    while (go_->load() != kGo)
      ::usleep(200);
    ::execlp("sleep", "sleep", "1000", nullptr);
  }

  std::atomic<int>* go_;
  unsigned users_;
  fakes::Child target_;
};

TEST(AgentFind, TakesNothingOfTheProgramThatAProcessHasBecome) {
  const Changeling changeling;
  auto client = changeling.find();
  ASSERT_TRUE(client.has_value() && client->has_value());
  ASSERT_TRUE((*client)->ask(AgentCommand::kClose, 100, milliseconds(60000)).has_value());
  ASSERT_TRUE((*client)->take_segments(milliseconds(60000)).has_value());
  changeling.become_another_program();
  // The page still answers, and descriptor 0 is there.
  const auto taken = (*client)->take_segments(milliseconds(60000));
  ASSERT_FALSE(taken.has_value());
  EXPECT_EQ(taken.error().code, ErrorCode::kProcessGone);
  EXPECT_FALSE((*client)->address_space()->check_current());
}

TEST(AgentFind, DoesNotBelieveAPageThatTheProcessDoesNotMap) {
  const Changeling changeling;
  changeling.become_another_program();
  auto client = changeling.find();
  // It may still be on its way there; and for a while it may have been restored.
  const auto may_come = [&] {
    return !client && (client.error().code == ErrorCode::kProcessGone ||
                       client.error().code == ErrorCode::kBusy);
  };
  for (int i = 0; i < 1000 && may_come(); ++i) {
    ::usleep(1000);
    client = changeling.find();
  }
  ASSERT_FALSE(client.has_value());
  EXPECT_EQ(client.error().code, ErrorCode::kNotSupported);
}

// As in a container with users of its own, where a setuid program is another user's.
TEST(AgentFind, DoesNotBelieveItInANamespaceOfManyUsersEither) {
  if (::getuid() != 0) GTEST_SKIP() << "not root";
  const Changeling changeling(65536);
  ASSERT_TRUE(changeling.find());
  changeling.become_another_program();
  auto client = changeling.find();
  // Looked at in the middle of its way there, it is told as what it has become.
  for (int i = 0; i < 1000 && !client && client.error().code != ErrorCode::kBusy; ++i) {
    ::usleep(1000);
    client = changeling.find();
  }
  ASSERT_FALSE(client.has_value());
  EXPECT_EQ(client.error().code, ErrorCode::kBusy) << client.error().to_string();
}

}  // namespace
}  // namespace stasis::direct
