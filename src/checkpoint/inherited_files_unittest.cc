#include "checkpoint/inherited_files.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <functional>
#include <optional>

#include <gtest/gtest.h>

#include "driver/fake_driver.h"

namespace stasis {
namespace {

constexpr std::size_t kSize = 8192;
constexpr char kContent = 'x';

// This process uses CUDA, and holds and maps the simulated driver's stand-in for a device file.
class InheritedFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    file_ = ::memfd_create("nvidiactl", MFD_CLOEXEC);
    ASSERT_GE(file_, 0);
    ASSERT_EQ(::ftruncate(file_, kSize), 0);
    memory_ =
        static_cast<char*>(::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0));
    ASSERT_NE(memory_, MAP_FAILED);
    memory_[0] = kContent;
    driver_.add(self_);
  }
  void TearDown() override {
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      ::waitpid(child_, nullptr, 0);
    }
    ::munmap(memory_, kSize);
    ::close(file_);
  }

  // A child that does `first` and then waits for a byte, upon which it answers whether its memory
  // and its descriptor are empty now.
  void fork_child(const std::function<void()>& first) {
    std::array<int, 2> to{};
    std::array<int, 2> from{};
    ASSERT_EQ(::pipe2(to.data(), O_CLOEXEC), 0);
    ASSERT_EQ(::pipe2(from.data(), O_CLOEXEC), 0);
    child_ = ::fork();
    if (child_ == 0) {
      first();
      char byte = 1;
      (void)!::write(from[1], &byte, 1);
      while (::read(to[0], &byte, 1) == 1) {
        char answer = memory_[0] == 0 ? 'm' : '-';
        memory_[1] = 'y';                                                   // it can be written to
        if (answer == 'm' && ::ftruncate(file_, kSize) != 0) answer = 'b';  // no file of ours
        (void)!::write(from[1], &answer, 1);
      }
      ::_exit(0);
    }
    ::close(to[0]);
    ::close(from[1]);
    to_ = to[1];
    from_ = from[0];
    char ready = 0;
    ASSERT_EQ(::read(from_, &ready, 1), 1);
  }

  char ask_child() const {
    char byte = '?';
    (void)!::write(to_, &byte, 1);
    (void)!::read(from_, &byte, 1);
    return byte;
  }

  Result<std::vector<InheritedFiles>> find(bool ignore = false) {
    members_.clear();
    auto self = Process::open(driver_, self_);
    auto child = Process::open(driver_, Pid{child_});
    if (!self) return fail(std::move(self.error()));
    if (!child) return fail(std::move(child.error()));
    members_.push_back({std::move(*self), CudaState::kRunning});
    members_.push_back({std::move(*child), std::nullopt});
    return find_inherited_files(proc::ProcFs(), members_, true, ignore);
  }

  const Pid self_{::getpid()};
  FakeDriver driver_;
  std::vector<TreeMember> members_;
  int file_ = -1;
  char* memory_ = nullptr;
  pid_t child_ = -1;
  int to_ = -1;
  int from_ = -1;
};

TEST_F(InheritedFilesTest, AreReplacedInTheChildAndNowhereElse) {
  fork_child([] {});
  EXPECT_EQ(ask_child(), '-');
  auto found = find();
  ASSERT_TRUE(found) << found.error().to_string();
  ASSERT_EQ(found->size(), 1U);
  EXPECT_EQ((*found)[0].descriptors, std::vector<int>{file_});
  ASSERT_EQ((*found)[0].mappings.size(), 1U);
  auto done = replace_inherited_files(*found, nullptr);
  ASSERT_TRUE(done) << done.error().to_string();
  EXPECT_EQ(ask_child(), 'b');
  EXPECT_EQ(memory_[0], kContent);
  struct stat info {};
  EXPECT_EQ(::fstat(file_, &info), 0);
  EXPECT_EQ(info.st_size, static_cast<off_t>(kSize));
  auto again = find();
  ASSERT_TRUE(again);
  EXPECT_TRUE(again->empty());
}

TEST_F(InheritedFilesTest, AFileOfItsOwnIsRefusedAndWithIgnoreLeftAlone) {
  fork_child([this] {
    ::close(file_);
    if (::memfd_create("nvidiactl", 0) != file_) ::_exit(1);
  });
  auto refused = find();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kNotSupported);
  auto ignored = find(true);
  ASSERT_TRUE(ignored);
  EXPECT_TRUE(ignored->empty());
}

// kcmp answers EPERM from now on, as it does in many containers.
bool forbid_kcmp() {
  std::array<sock_filter, 4> code{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_kcmp, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{code.size(), code.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST_F(InheritedFilesTest, WhereFilesCannotBeComparedItSaysSo) {
  fork_child([] {});
  EXPECT_EXIT(
      {
        if (!forbid_kcmp()) ::_exit(3);
        const auto found = find();
        ::_exit(!find(true)                                               ? 4
                : found                                                   ? 1
                : found.error().message.find("kcmp") == std::string::npos ? 2
                                                                          : 0);
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(InheritedFilesTest, OneThatHasEndedMeanwhileIsNoError) {
  fork_child([] {});
  auto found = find();
  ASSERT_TRUE(found);
  ASSERT_EQ(found->size(), 1U);
  ::kill(child_, SIGKILL);
  EXPECT_TRUE(replace_inherited_files(*found, nullptr));  // a zombie
  ::waitpid(child_, nullptr, 0);
  child_ = -1;
  EXPECT_TRUE(replace_inherited_files(*found, nullptr));
}

// clone() of a child that only ever waits. It uses no stack and runs nothing of the C library's or
// a sanitizer's, which would take it for a fork (the thread sanitizer's clone() does).
pid_t clone_waiting(long flags) {
  long answer = SYS_clone;
  asm volatile(
      "xor %%esi, %%esi\n\t"
      "xor %%edx, %%edx\n\t"
      "xor %%r10d, %%r10d\n\t"
      "xor %%r8d, %%r8d\n\t"
      "syscall\n\t"
      "test %%rax, %%rax\n\t"
      "jnz 2f\n"
      "1:\n\t"
      "mov %[pause], %%eax\n\t"
      "syscall\n\t"
      "jmp 1b\n"
      "2:"
      : "+a"(answer), "+D"(flags)
      : [pause] "i"(SYS_pause)
      : "rsi", "rdx", "r10", "r8", "rcx", "r11", "memory", "cc");
  return static_cast<pid_t>(answer);
}

// As posix_spawn() and Python's subprocess make them, for the time until the exec.
TEST_F(InheritedFilesTest, AProcessThatSharesMemoryOrDescriptorsIsNotTouched) {
  for (const int shared : {CLONE_VM, CLONE_FILES}) {
    child_ = clone_waiting(shared | SIGCHLD);
    ASSERT_GT(child_, 0);
    auto found = find();
    ASSERT_TRUE(found) << found.error().to_string();
    EXPECT_TRUE(found->empty()) << shared;
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
    child_ = -1;
  }
}

}  // namespace
}  // namespace stasis
