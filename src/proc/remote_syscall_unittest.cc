#include "proc/remote_syscall.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "proc/parking.h"
#include "tests/fakes/child.h"

namespace stasis {
namespace {

using fakes::Child;

struct Shared {
  std::atomic<std::uint64_t> rounds;
  std::atomic<std::uint64_t> signals;
  std::atomic<bool> broken;
};
Shared* g_shared = nullptr;

// Has a value of its own in every register that a program may use and in the flags, goes round with
// them, and says so if one has changed.
[[noreturn]] void go_round() {
  struct sigaction action {};
  action.sa_handler = [](int) { ++g_shared->signals; };
  ::sigaction(SIGUSR1, &action, nullptr);
  std::uint64_t good = 1;
  while (good != 0) {
    std::array<std::uint64_t, 2> kept{};
    asm volatile(
        "mov $0x11, %%rax; mov $0x22, %%rcx; mov $0x33, %%rdx; mov $0x44, %%rsi; mov $0x55, %%r8\n"
        "mov $0x66, %%r9; mov $0x77, %%r10; mov $0x88, %%r11; mov $0x99, %%r12; mov $0xaa, %%r13\n"
        "mov $0xbb, %%r14; mov %%rsp, %%r15\n"
        // Nothing in this stretch changes the flags: carry stays set.
        "stc\n"
        ".rept 4000\n nop\n .endr\n"
        "jnc 2f\n"
        "cmp $0x11, %%rax; jne 2f; cmp $0x22, %%rcx; jne 2f; cmp $0x33, %%rdx; jne 2f\n"
        "cmp $0x44, %%rsi; jne 2f; cmp $0x55, %%r8; jne 2f; cmp $0x66, %%r9; jne 2f\n"
        "cmp $0x77, %%r10; jne 2f; cmp $0x88, %%r11; jne 2f; cmp $0x99, %%r12; jne 2f\n"
        "cmp $0xaa, %%r13; jne 2f; cmp $0xbb, %%r14; jne 2f; cmp %%rsp, %%r15; jne 2f\n"
        "movq $1, (%%rdi); jmp 3f\n"
        "2: movq $0, (%%rdi)\n"
        "3:\n"
        :
        : "D"(kept.data())
        : "rax", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "cc",
          "memory");
    good = kept[0];
    ++g_shared->rounds;
  }
  g_shared->broken = true;
  for (;;)
    ::pause();
}

class RemoteSyscallTest : public testing::Test {
 protected:
  void SetUp() override {
    void* memory =
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    g_shared = shared_ = new (memory) Shared();
    target_.emplace(go_round);
    ASSERT_TRUE(goes_on());
  }
  void TearDown() override {
    target_.reset();
    ::munmap(shared_, sizeof(Shared));
  }

  Pid pid() const { return target_->pid(); }
  Tid thread() const { return Tid{pid().value}; }
  bool goes_on() const {
    const std::uint64_t before = shared_->rounds;
    for (int i = 0; i < 5000 && shared_->rounds < before + 3; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return shared_->rounds >= before + 3 && !shared_->broken;
  }

  Shared* shared_ = nullptr;
  std::optional<Child> target_;
};

// No tool comes after it.
TEST_F(RemoteSyscallTest, AThreadWhoseToolWasKilledGoesOnByItself) {
  for (int round = 0; round < 40; ++round) {
    Child tool([this, round] {
      (void)call_from_thread(pid(), thread(), {}, [round](const SystemCall& call, std::uint64_t) {
        if (round % 2 == 1) (void)call(SYS_getppid, {});
        std::raise(SIGKILL);
        return Result<void>();
      });
    });
    tool.wait();
    ASSERT_TRUE(goes_on()) << "round " << round;
    ASSERT_EQ(::kill(pid().value, SIGUSR1), 0);
    const std::uint64_t before = shared_->signals;
    for (int i = 0;
         i < 5000 && shared_->signals == before && before <= static_cast<unsigned>(round); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_TRUE(goes_on());
    ASSERT_EQ(shared_->signals, static_cast<std::uint64_t>(round) + 1) << "its signal mask is back";
    // Removes what lies there, or the next call finds no room.
    ASSERT_TRUE(finish_remote_call(pid()));
    ASSERT_TRUE(goes_on());
  }
}

TEST_F(RemoteSyscallTest, ACallIsMadeAndTheThreadGoesOn) {
  std::int64_t answer = 0;
  for (int round = 0; round < 200; ++round) {
    const auto done =
        call_from_thread(pid(), thread(), {}, [&](const SystemCall& call, std::uint64_t) {
          auto got = call(SYS_getpid, {});
          if (got) answer = *got;
          return got ? Result<void>() : Result<void>(fail(std::move(got.error())));
        });
    ASSERT_TRUE(done) << done.error().to_string();
    ASSERT_EQ(answer, pid().value);
  }
  EXPECT_TRUE(goes_on());
}

}  // namespace
}  // namespace stasis
