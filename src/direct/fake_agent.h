// A process with a page like an agent's, for tests of those who talk to it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <functional>
#include <optional>

#include <gtest/gtest.h>

#include "abi/agent_protocol.h"
#include "abi/futex.h"
#include "direct/agent_client.h"

namespace stasis::direct {

// It answers every request with `answer`, which runs there.
class FakeAgent {
 public:
  using Answer = std::function<void(ControlPage&)>;

  FakeAgent(int seals, const Answer& answer, off_t bytes = sizeof(ControlPage),
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
  ~FakeAgent() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  FakeAgent(const FakeAgent&) = delete;
  FakeAgent& operator=(const FakeAgent&) = delete;

  Pid pid() const { return Pid{pid_}; }
  Result<std::optional<AgentClient>> find(std::chrono::milliseconds timeout = kPeerEnds) const {
    auto pidfd = Pidfd::open(Pid{pid_});
    if (!pidfd) return fail(std::move(pidfd.error()));
    return AgentClient::find(Pid{pid_}, *pidfd, timeout);
  }

 private:
  pid_t pid_ = -1;
};

}  // namespace stasis::direct
