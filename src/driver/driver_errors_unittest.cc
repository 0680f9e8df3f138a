#include "driver/driver_errors.h"

#include <sys/stat.h>
#include <sys/syscall.h>

#include <atomic>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "driver/fake_driver.h"
#include "tests/fakes/child.h"

namespace stasis {
namespace {

using fakes::Child;
using testing::HasSubstr;

Error explain(int cu_result, Action action, Pid pid) {
  return explain_driver_failure(FakeDriver().describe(cu_result), action, pid, proc::ProcFs());
}

struct Situation {
  int cu_result;
  Action action;
  ErrorCode code;
  const char* message;  // a part of it
  const char* remedy;   // a part of it
};

// What the driver answers about a process that is alive and may be traced.
TEST(Explain, EachAnswerAboutAliveProcess) {
  const Child child;
  const Situation situations[] = {
      {3, Action::kGetState, ErrorCode::kNotCuda, "does not use CUDA", "stasis ps"},
      {3, Action::kLock, ErrorCode::kNotCuda, "does not use CUDA", "stasis ps"},
      {401, Action::kLock, ErrorCode::kWrongState, "does not allow lock", "stasis recover"},
      {600, Action::kLock, ErrorCode::kTimeout, "it runs on", "--timeout"},
      {801, Action::kCheckpoint, ErrorCode::kNotSupported, "cannot checkpoint", "managed memory"},
      {801, Action::kRestore, ErrorCode::kNotSupported, "cannot restore", "NCCL"},
      {801, Action::kLock, ErrorCode::kNotSupported, "cannot lock", "NCCL"},
      {1, Action::kRestore, ErrorCode::kDeviceMapInvalid, "GPU map", "every GPU"},
      {1, Action::kLock, ErrorCode::kDriverError, "could not lock", "dmesg"},
      {2, Action::kRestore, ErrorCode::kOutOfGpuMemory, "GPU memory", "nvidia-smi"},
      {2, Action::kCheckpoint, ErrorCode::kOutOfHostMemory, "host memory", "swap"},
      {100, Action::kRestore, ErrorCode::kGpuMismatch, "no GPU", "nvidia-smi"},
      {304, Action::kGetState, ErrorCode::kDriverError, "alive and may be traced", "crashed"},
      {800, Action::kRestore, ErrorCode::kNotPermitted, "does not permit", "persistence mode"},
      {803, Action::kLock, ErrorCode::kDriverUnsupported, "different versions", "reboot"},
      {999, Action::kCheckpoint, ErrorCode::kNotSupported, "cannot checkpoint", "managed memory"},
      {999, Action::kLock, ErrorCode::kDriverError, "could not lock", "dmesg"},
  };
  for (const Situation& s : situations) {
    const Error error = explain(s.cu_result, s.action, child.pid());
    EXPECT_EQ(error_code_name(error.code), error_code_name(s.code))
        << s.cu_result << " at " << action_name(s.action);
    EXPECT_THAT(error.message, HasSubstr(s.message));
    EXPECT_THAT(error.remedy, HasSubstr(s.remedy));
    // The driver's own answer is never lost.
    ASSERT_TRUE(error.driver);
    EXPECT_EQ(error.driver->number, s.cu_result);
    EXPECT_THAT(error.message, HasSubstr(std::to_string(s.cu_result)));
    EXPECT_THAT(error.message, HasSubstr(error.driver->text));
  }
}

// 304 alone stands for all of these.
TEST(Explain, AmissingProcess) {
  for (int cu_result : {3, 304, 600}) {
    const Error error = explain(cu_result, Action::kLock, Pid{0x7ffffffe});
    EXPECT_EQ(error.code, ErrorCode::kNoSuchProcess) << cu_result;
  }
}

TEST(Explain, Azombie) {
  const Child child;
  child.become_zombie();
  const Error error = explain(3, Action::kGetState, child.pid());
  EXPECT_EQ(error.code, ErrorCode::kZombie);
  EXPECT_THAT(error.message, HasSubstr("has exited"));
}

TEST(Explain, AprocessWhoseFirstThreadHasEnded) {
  const Child child([] {
    std::thread([] { ::pause(); }).detach();
    ::syscall(SYS_exit, 0);
  });
  while (!proc::ProcFs().process(child.pid())->has_ended())
    std::this_thread::yield();
  const Error error = explain(304, Action::kLock, child.pid());
  EXPECT_EQ(error.code, ErrorCode::kNotSupported);
  ASSERT_EQ(error.obstacles.size(), 1U);
  EXPECT_EQ(error.obstacles.front().id, ObstacleId("zombie-leader"));
  EXPECT_EQ(error.obstacles.front().pid, child.pid());
}

TEST(Explain, Athread) {
  std::atomic<int> tid{0};
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    tid = static_cast<int>(::syscall(SYS_gettid));
    while (!stop)
      std::this_thread::yield();
  });
  while (tid == 0)
    std::this_thread::yield();
  const Error error = explain(304, Action::kGetState, Pid{tid});
  stop = true;
  thread.join();
  EXPECT_EQ(error.code, ErrorCode::kThreadId);
  EXPECT_THAT(error.message, HasSubstr(std::to_string(::getpid())));
}

TEST(Explain, AprocessOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const Child target;
  Child asker([&] {
    if (::setresgid(65534, 65534, 65534) != 0 || ::setresuid(65534, 65534, 65534) != 0) ::_exit(9);
    const Error os = explain(304, Action::kGetState, target.pid());
    if (os.code != ErrorCode::kNotPermitted) ::_exit(1);
    if (os.remedy.find("CAP_SYS_PTRACE") == std::string::npos) ::_exit(2);
    // A time-out is a time-out, for every user.
    if (explain(600, Action::kLock, target.pid()).code != ErrorCode::kTimeout) ::_exit(3);
    ::_exit(0);
  });
  EXPECT_EQ(asker.wait(), 0);
}

// /proc that cannot be read says nothing about the process; the driver's answer still counts.
TEST(Explain, WithoutProc) {
  const Child child;
  char name[] = "/tmp/stasis-explain-XXXXXX";
  ASSERT_NE(::mkdtemp(name), nullptr);
  const std::string root = name;
  const std::string dir = root + "/" + std::to_string(child.pid().value);
  ASSERT_EQ(::mkdir(dir.c_str(), 0700), 0);
  const Error error = explain_driver_failure(FakeDriver().describe(600), Action::kLock, child.pid(),
                                             proc::ProcFs(root));
  ::rmdir(dir.c_str());
  ::rmdir(root.c_str());
  EXPECT_EQ(error.code, ErrorCode::kTimeout);
}

}  // namespace
}  // namespace stasis
