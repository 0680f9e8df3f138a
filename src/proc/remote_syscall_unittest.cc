#include "proc/remote_syscall.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "proc/parking.h"
#include "proc/procfs.h"
#include "proc/ptrace_status.h"
#include "tests/fakes/child.h"

namespace stasis {
namespace {

using fakes::Child;

struct Calls {
  std::atomic<std::uint64_t> rounds;
  std::atomic<std::uint64_t> signals;
  std::atomic<bool> broken;
};
Calls* g_calls = nullptr;

// Has a value of its own in every register that a program may use and in the flags, goes round with
// them, and says so if one has changed.
[[noreturn]] void go_round() {
  struct sigaction action {};
  action.sa_handler = [](int) { ++g_calls->signals; };
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
    ++g_calls->rounds;
  }
  g_calls->broken = true;
  for (;;)
    ::pause();
}

class RemoteSyscallTest : public testing::Test {
 protected:
  void SetUp() override {
    void* memory =
        ::mmap(nullptr, sizeof(Calls), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    g_calls = shared_ = new (memory) Calls();
    target_.emplace(go_round);
    ASSERT_TRUE(goes_on());
  }
  void TearDown() override {
    target_.reset();
    ::munmap(shared_, sizeof(Calls));
  }

  Pid pid() const { return target_->pid(); }
  Tid thread() const { return Tid{pid().value}; }
  bool goes_on() const {
    const std::uint64_t before = shared_->rounds;
    for (int i = 0; i < 5000 && shared_->rounds < before + 3; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return shared_->rounds >= before + 3 && !shared_->broken;
  }

  Calls* shared_ = nullptr;
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

// A program whose other thread exchanges the code with which its first thread makes the call, in
// the very instant. The call is made without the target's filter, and a tool that went on would
// give the registers of this program to another one that it has executed, a setuid one, say.
class ExchangedCodeTest : public testing::Test {
 protected:
  using Code = std::vector<std::uint8_t>;
  struct Exchange {
    std::atomic<std::uint64_t> at;
    std::atomic<bool> is_ready;
    std::atomic<bool> is_done;
  };

  // Before any other code, so that the tool takes room there.
  static constexpr std::uint64_t kCode = 0x100000;
  static constexpr std::uint64_t kWords = 0x110000;
  static constexpr std::uint64_t kCodeAfterData = 208;
  static constexpr std::size_t kPage = 4096;

  void SetUp() override {
    void* memory =
        ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    exchange_ = new (memory) Exchange();
  }
  void TearDown() override { ::munmap(exchange_, kPage); }

  [[noreturn]] void run_target(const Code& code) const {
    const int file = ::memfd_create("code", MFD_CLOEXEC);
    const bool fits = ::ftruncate(file, kPage) == 0;
    const auto map = [&](std::uint64_t at, int protection, int flags, int descriptor) {
      return ::mmap(proc::as_pointer(at), kPage, protection, MAP_PRIVATE | MAP_FIXED | flags,
                    descriptor, 0) != MAP_FAILED;
    };
    if (!fits || !map(kCode, PROT_READ | PROT_EXEC, 0, file) ||
        !map(kWords, PROT_READ | PROT_WRITE, MAP_ANONYMOUS, -1))
      ::_exit(1);
    std::strcpy(static_cast<char*>(proc::as_pointer(kWords)), "/bin/sleep");
    std::strcpy(static_cast<char*>(proc::as_pointer(kWords + 16)), "1000");
    const std::array<std::uint64_t, 3> words{kWords, kWords + 16, 0};
    std::memcpy(proc::as_pointer(kWords + 32), words.data(), sizeof words);
    // As the 32-bit call wants them.
    const std::array<std::uint32_t, 3> short_words{kWords, kWords + 16, 0};
    std::memcpy(proc::as_pointer(kWords + 64), short_words.data(), sizeof short_words);
    std::thread([&] {
      while (exchange_->at == 0)
        ::usleep(100);
      ::mprotect(proc::as_pointer(kCode), kPage, PROT_READ | PROT_WRITE | PROT_EXEC);
      std::memcpy(proc::as_pointer(exchange_->at), code.data(), code.size());
      exchange_->is_done = true;
      for (;;)
        ::pause();
    }).detach();
    exchange_->is_ready = true;
    for (;;)
      asm volatile("pause" : : "b"(kWords), "c"(kWords + 64));
  }

  // What comes of a call whose code is exchanged before it is made.
  Result<void> call_after_exchange(Pid pid, std::uint64_t number) const {
    return call_from_thread(pid, Tid{pid.value}, {},
                            [&](const SystemCall& call, std::uint64_t data) -> Result<void> {
                              exchange_->at = data + kCodeAfterData;
                              while (!exchange_->is_done)
                                std::this_thread::yield();
                              STASIS_TRY(call(number, std::array<std::uint64_t, 2>{kCode, 0}));
                              return {};
                            });
  }

  void expect_refused(const Code& code, std::uint64_t number) {
    const Child child([&] { run_target(code); });
    while (!exchange_->is_ready)
      std::this_thread::yield();
    const auto before = proc::ProcFs().process(child.pid());
    const auto done = call_after_exchange(child.pid(), number);
    EXPECT_FALSE(done);
    const auto now = proc::ProcFs().process(child.pid());
    ASSERT_TRUE(before && now);
    EXPECT_EQ(now->comm, before->comm) << "it has executed another program";
    EXPECT_FALSE(now->has_ended());
  }

  Exchange* exchange_ = nullptr;
};

TEST_F(ExchangedCodeTest, AnotherCallIsNotMade) {
  expect_refused({0xb8, 59,   0,    0,    0,            // mov eax, execve
                  0xbf, 0x00, 0x00, 0x11, 0x00,         // mov edi, the path
                  0xbe, 0x20, 0x00, 0x11, 0x00,         // mov esi, the words
                  0x31, 0xd2, 0x0f, 0x05, 0xeb, 0xfe},  // xor edx, edx; syscall; jmp itself
                 SYS_getppid);
}

// The number of munmap is that of execve in the 32-bit interface, which has its arguments in other
// registers.
TEST_F(ExchangedCodeTest, ACallOfTheOtherInterfaceIsNotMade) {
  expect_refused({0xcd, 0x80, 0xeb, 0xfe}, SYS_munmap);  // int 0x80; jmp itself
}

}  // namespace
}  // namespace stasis
