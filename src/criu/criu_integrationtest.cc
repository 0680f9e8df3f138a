// Dump and restore with a real CRIU. Needs root; where no CRIU can be found the tests are skipped,
// unless STASIS_CRIU names one.
// Long because each case dumps and restores a target of its own kind with the same fixture.
#include <fcntl.h>
#include <pty.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "criu/criu.h"
#include "criu/criu_test_fixture.h"
#include "criu/criu_test_targets.h"
#include "proc/procfs.h"
#include "tests/fakes/thoroughness.h"

namespace stasis {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

TEST_F(CriuTest, GoesOnWhereItWas) {
  Target target("plain", target_dir());
  const Pid pid = target.pid();
  const std::string before = description(pid);
  bool complete = false;
  auto dumped = dump(target, {}, [&]() -> Result<void> {
    complete = true;
    EXPECT_TRUE(fs::exists(dir_ / "images/inventory.img"));
    EXPECT_EQ(process_state(pid), 't') << "it must stand still, and live";
    return {};
  });
  ASSERT_TRUE(dumped) << dumped.error().to_string();
  EXPECT_TRUE(complete);
  ASSERT_TRUE(target.reap());
  const std::uint64_t count = target.count();
  bool stood = false;
  auto restored = restore(pid, {}, [&]() -> Result<void> {
    stood = target.count() == count && process_state(pid) != '-';
    return {};
  });
  ASSERT_TRUE(restored) << restored.error().to_string();
  EXPECT_TRUE(stood) << "nothing may run before on_restored";
  EXPECT_EQ(restored->root, pid);
  target.adopt(restored->root);
  EXPECT_TRUE(target.runs());
  EXPECT_LT(target.count(), count + 100000);
  EXPECT_EQ(description(pid), before);
  // It is our child: we can wait for it.
  ASSERT_TRUE(restored->root_fd.signal(SIGTERM));
  int status = 0;
  EXPECT_EQ(::waitpid(pid.value, &status, 0), pid.value);
  EXPECT_TRUE(WIFSIGNALED(status));
  target.adopt(Pid{0});
}

TEST_F(CriuTest, ATreeComesBackWithItsChildren) {
  Target target("tree", target_dir());
  const Pid pid = target.pid();
  ASSERT_TRUE(dump(target));
  ASSERT_TRUE(target.reap());
  auto restored = restore(pid);
  ASSERT_TRUE(restored) << restored.error().to_string();
  target.adopt(restored->root);
  EXPECT_TRUE(target.runs());
  // It may still be on its way back into its pause().
  for (int i = 0; i < 15000 && process_state(target.child()) != 'S'; ++i)
    std::this_thread::sleep_for(milliseconds(2));
  EXPECT_EQ(process_state(target.child()), 'S');
}

TEST_F(CriuTest, CanLeaveTheTargetRunning) {
  leave_running_ = true;
  Target target("plain", target_dir());
  ASSERT_TRUE(dump(target));
  EXPECT_TRUE(target.runs());
}

TEST_F(CriuTest, RunsOnIfTheImageCannotBeCompleted) {
  Target target("tree", target_dir());
  auto dumped =
      dump(target, {}, []() -> Result<void> { return fail(ErrorCode::kNoSpace, "no space"); });
  ASSERT_FALSE(dumped);
  EXPECT_EQ(dumped.error().code, ErrorCode::kNoSpace);
  EXPECT_EQ(dumped.error().message, "no space");
  EXPECT_TRUE(target.runs());
}

TEST_F(CriuTest, AnInterruptStopsADumpAndTheTargetRunsOn) {
  interrupt_.request(SIGINT);
  Target target("plain", target_dir());
  auto dumped = dump(target);
  ASSERT_FALSE(dumped);
  EXPECT_EQ(dumped.error().code, ErrorCode::kInterrupted);
  EXPECT_TRUE(target.runs());
}

TEST_F(CriuTest, AnInterruptStopsALongDumpInTheMiddle) {
  Target target("large", target_dir());
  const std::string before = description(target.pid());
  std::thread user([&] {
    std::this_thread::sleep_for(milliseconds(80));
    interrupt_.request(SIGINT);
  });
  auto dumped = dump(target);
  user.join();
  if (dumped) {
    ASSERT_TRUE(target.reap());
    GTEST_SKIP() << "criu was faster than the interrupt: make the target larger";
  }
  EXPECT_EQ(dumped.error().code, ErrorCode::kInterrupted) << dumped.error().to_string();
  EXPECT_TRUE(target.runs());
  EXPECT_EQ(description(target.pid()), before);
}

TEST_F(CriuTest, ADeadlineStopsADumpAndTheTargetRunsOn) {
  Target target("large", target_dir());
  const std::string before = description(target.pid());
  deadline_ = milliseconds(60);  // freezing alone takes half of it
  auto dumped = dump(target);
  ASSERT_FALSE(dumped) << "make the target larger: criu was faster than the deadline";
  EXPECT_EQ(dumped.error().code, ErrorCode::kTimeout) << dumped.error().to_string();
  EXPECT_TRUE(target.runs());
  EXPECT_EQ(description(target.pid()), before);
  deadline_ = milliseconds(60000);
  dumped = dump(target);
  EXPECT_TRUE(dumped) << dumped.error().to_string();
}

// Collects all below us but the target, what killed ones have left included: we are the subreaper.
bool only_the_target_is_left(Pid target) {
  for (int i = 0; i < 6000; ++i) {
    bool more = false;
    const auto tree = proc::ProcFs().tree(Pid{::getpid()});
    if (!tree) return false;
    for (const proc::ProcessInfo& process : *tree) {
      if (process.pid.value == ::getpid() || process.pid == target) continue;
      more = true;
      ::waitpid(process.pid.value, nullptr, WNOHANG);
    }
    if (!more) return true;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return false;
}

// Our program dies at any instant of the dump: the target is dumped or runs on, and criu is gone.
TEST_F(CriuTest, TheTargetRunsOnIfWeAreKilled) {
  Target target("large", target_dir());
  const std::string before = description(target.pid());
  for (int delay = 0; delay <= 400; delay += fakes::times(80, 40)) {
    const pid_t tool = ::fork();
    if (tool == 0) {
      (void)dump(target, {}, []() -> Result<void> {
        ::raise(SIGKILL);
        return {};
      });
      ::_exit(0);
    }
    std::this_thread::sleep_for(milliseconds(delay));
    if (delay < 400) ::kill(tool, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(tool, &status, 0), tool);
    EXPECT_TRUE(WIFSIGNALED(status));
    // One that had hardly begun goes on alone, and would hold the target a moment later.
    ASSERT_TRUE(only_the_target_is_left(target.pid())) << "killed after " << delay << " ms";
    ASSERT_TRUE(target.runs()) << "killed after " << delay << " ms, state "
                               << process_state(target.pid());
    EXPECT_EQ(description(target.pid()), before);
  }
  auto dumped = dump(target);
  EXPECT_TRUE(dumped) << dumped.error().to_string();
}

TEST_F(CriuTest, TcpConnectionsNeedAWord) {
  Target target("tcp", target_dir());
  expect_dump_fails(target, {}, "open TCP connections", "--tcp-established");
  CriuOptions options;
  options.tcp_established = true;
  options.network_lock = NetworkLock::kSkip;
  const Pid pid = target.pid();
  auto dumped = dump(target, options);
  ASSERT_TRUE(dumped) << dumped.error().to_string();
  ASSERT_TRUE(target.reap());
  auto restored = restore(pid, options);
  ASSERT_TRUE(restored) << restored.error().to_string();
  target.adopt(restored->root);
  EXPECT_TRUE(target.runs());
}

TEST_F(CriuTest, ADeletedFileMayBeTooLarge) {
  Target target("ghost", target_dir());
  CriuOptions options;
  options.ghost_limit = 1U << 20;
  expect_dump_fails(target, options, "deleted file", "--ghost-limit");
  const Pid pid = target.pid();
  ASSERT_TRUE(dump(target));
  ASSERT_TRUE(target.reap());
  auto restored = restore(pid);
  ASSERT_TRUE(restored) << restored.error().to_string();
  target.adopt(restored->root);
  EXPECT_TRUE(target.runs());
}

TEST_F(CriuTest, ARemovedNameNeedsLinkRemap) {
  Target target("link", target_dir());
  CriuOptions options;
  options.link_remap = false;
  expect_dump_fails(target, options, "whose name was removed", "--link-remap");
  const Pid pid = target.pid();
  ASSERT_TRUE(dump(target));
  ASSERT_TRUE(target.reap());
  auto restored = restore(pid);
  ASSERT_TRUE(restored) << restored.error().to_string();
  target.adopt(restored->root);
}

TEST_F(CriuTest, AUnixSocketToOutsideIsRefused) {
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  const UniqueFd ours(pair[0]);
  const UniqueFd theirs(pair[1]);
  Target target("plain", target_dir(), {true, &theirs});
  expect_dump_fails(target, {}, "unix socket connected to a process outside", "--ext-unix-sk");
}

TEST_F(CriuTest, FileLocksNeedAWord) {
  Target target("lock", target_dir());
  expect_dump_fails(target, {}, "holds file locks", "--file-locks");
}

TEST_F(CriuTest, AForeignSessionNeedsShellJob) {
  Target target("plain", target_dir(), {false, nullptr});
  expect_dump_fails(target, {}, "session of a shell", "--shell-job");
}

TEST_F(CriuTest, AShellJobComesBackIntoOurSessionAndGroup) {
  Target target("plain", target_dir(), {false, nullptr});
  const Pid pid = target.pid();
  CriuOptions options;
  options.shell_job = true;
  auto dumped = dump(target, options);
  ASSERT_TRUE(dumped) << dumped.error().to_string();
  ASSERT_TRUE(target.reap());
  auto restored = restore(pid, options);
  ASSERT_TRUE(restored) << restored.error().to_string();
  target.adopt(restored->root);
  EXPECT_TRUE(target.runs());
  EXPECT_EQ(::getsid(pid.value), ::getsid(0));
  EXPECT_EQ(::getpgid(pid.value), ::getpgrp());
}

// On a terminal of its own, as from a shell: the terminal is taken from our standard input.
TEST_F(CriuTest, AShellJobComesBackOntoOurTerminal) {
  int master_number = -1;
  const pid_t shell = ::forkpty(&master_number, nullptr, nullptr, nullptr);
  ASSERT_GE(shell, 0);
  if (shell == 0) {
    // Exits tell the step that failed; output goes to the terminal, which the test prints.
    const UniqueFd terminal(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 10));
    Target target("plain", target_dir(), {false, &terminal});
    const Pid pid = target.pid();
    CriuOptions options;
    options.shell_job = true;
    auto dumped = dump(target, options);
    if (!dumped) std::cout << dumped.error().to_string() << std::endl;
    if (!dumped || !target.reap()) ::_exit(10);
    auto restored = restore(pid, options);
    if (!restored) std::cout << restored.error().to_string() << std::endl;
    if (!restored) ::_exit(11);
    target.adopt(pid);
    if (!target.runs()) ::_exit(12);
    if (description(pid).find("3 -> /dev/pts/") == std::string::npos) ::_exit(13);
    ::kill(pid.value, SIGKILL);
    ::_exit(0);
  }
  const UniqueFd master(master_number);
  std::string said;
  char buffer[1024];
  for (ssize_t got = 0; (got = ::read(master.get(), buffer, sizeof buffer)) > 0;) {
    said.append(buffer, static_cast<std::size_t>(got));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(shell, &status, 0), shell);
  EXPECT_EQ(status, 0) << said;
}

TEST_F(CriuTest, AFullDiskIsSaidToBeFull) {
  const std::string small = (dir_ / "small").string();
  fs::create_directory(small);
  if (::mount("none", small.c_str(), "tmpfs", 0, "size=8m") != 0) GTEST_SKIP() << "cannot mount";
  {
    for (const char* name : {"images", "log"})
      fs::create_directory(small + "/" + name);
    images_ = open_dir("small/images");
    log_ = open_dir("small/log");
    Target target("16 MiB", target_dir());
    auto dumped = dump(target);
    EXPECT_FALSE(dumped);
    if (!dumped) {
      EXPECT_EQ(dumped.error().code, ErrorCode::kNoSpace) << dumped.error().to_string();
      EXPECT_NE(dumped.error().message.find("0 B free"), std::string::npos)
          << dumped.error().to_string();
    }
    EXPECT_TRUE(target.runs());
  }
  images_.reset();
  log_.reset();
  EXPECT_EQ(::umount2(small.c_str(), MNT_DETACH), 0);
}

TEST_F(CriuTest, ADescriptorCanBeGivenInPlaceOfAPipe) {
  int pair[2];
  ASSERT_EQ(::pipe2(pair, O_CLOEXEC), 0);
  const UniqueFd reader(pair[0]);
  UniqueFd writer(pair[1]);
  const std::string key = fs::read_symlink("/proc/self/fd/" + std::to_string(writer.get()));
  Target target("plain", target_dir(), {true, &writer});
  const Pid pid = target.pid();
  writer.reset();
  CriuOptions options;
  auto dumped = dump(target, options);
  ASSERT_TRUE(dumped) << dumped.error().to_string();
  ASSERT_TRUE(target.reap());
  ASSERT_EQ(::pipe2(pair, O_CLOEXEC), 0);
  const UniqueFd new_reader(pair[0]);
  const UniqueFd new_writer(pair[1]);
  RestoreRequest request{images_, log_, "restore.log", options};
  request.inherit = {{key, &new_writer}};
  request.root = pid;
  auto restored = criu_->restore(request, {}, interrupt_);
  ASSERT_TRUE(restored) << restored.error().to_string();
  target.adopt(pid);
  EXPECT_TRUE(target.runs());
  EXPECT_EQ(fs::read_symlink("/proc/" + std::to_string(pid.value) + "/fd/3"),
            fs::read_symlink("/proc/self/fd/" + std::to_string(new_writer.get())));
}

TEST_F(CriuTest, ATerminalFromOutsideIsExplained) {
  const UniqueFd master(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(master.valid());
  ASSERT_EQ(::grantpt(master.get()), 0);
  ASSERT_EQ(::unlockpt(master.get()), 0);
  const UniqueFd slave(::open(::ptsname(master.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  Target target("plain", target_dir(), {true, &slave});
  auto dumped = dump(target);
  if (dumped) {
    ASSERT_TRUE(target.reap());
    GTEST_SKIP() << "this CRIU dumps it";
  }
  EXPECT_NE(dumped.error().message.find("terminal"), std::string::npos)
      << dumped.error().to_string();
  EXPECT_TRUE(target.runs());
}

TEST_F(CriuTest, IoUringIsExplained) {
  Target target("uring", target_dir());
  if (target.count() == 0) GTEST_SKIP() << "the kernel allows no io_uring";
  expect_dump_fails(target, {}, "io_uring", "--no-io-uring");
}

TEST_F(CriuTest, ATracedProcessIsBusy) {
  Target target("plain", target_dir());
  ASSERT_EQ(::ptrace(PTRACE_SEIZE, target.pid().value, nullptr, nullptr), 0);
  auto dumped = dump(target);
  ASSERT_FALSE(dumped);
  EXPECT_EQ(dumped.error().code, ErrorCode::kBusy) << dumped.error().to_string();
  ::ptrace(PTRACE_INTERRUPT, target.pid().value, nullptr, nullptr);
  ::waitpid(target.pid().value, nullptr, __WALL);
  ::ptrace(PTRACE_DETACH, target.pid().value, nullptr, nullptr);
  EXPECT_TRUE(target.runs());
}

TEST_F(CriuTest, ATakenNumberIsFoundBeforehand) {
  Target target("plain", target_dir());
  const Pid pid = target.pid();
  leave_running_ = true;
  ASSERT_TRUE(dump(target));
  auto restored = restore(pid);
  ASSERT_FALSE(restored);
  EXPECT_EQ(restored.error().code, ErrorCode::kPidInUse);
  EXPECT_NE(restored.error().message.find("(exe)"), std::string::npos)
      << restored.error().to_string();
  EXPECT_TRUE(target.runs());

  // Unknown beforehand: CRIU finds it, and the one who has the number is not touched.
  auto late = restore(Pid{4194303});
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::kPidInUse) << late.error().to_string();
  EXPECT_TRUE(target.runs());
}

TEST_F(CriuTest, FilesMustBeAsTheyWere) {
  Target target("file", target_dir());
  const Pid pid = target.pid();
  ASSERT_TRUE(dump(target));
  ASSERT_TRUE(target.reap());
  const std::string file = target_dir() + "/data";
  fs::resize_file(file, 4);
  auto restored = restore(pid);
  ASSERT_FALSE(restored);
  EXPECT_NE(restored.error().message.find("its size is another"), std::string::npos)
      << restored.error().to_string();
  EXPECT_NE(restored.error().message.find(file.substr(1)), std::string::npos);
  fs::remove(file);
  restored = restore(pid);
  ASSERT_FALSE(restored);
  EXPECT_NE(restored.error().message.find("is not there"), std::string::npos)
      << restored.error().to_string();
  EXPECT_NE(restored.error().remedy.find("restore.log"), std::string::npos);
  EXPECT_EQ(process_state(pid), '-');
}

TEST_F(CriuTest, NothingIsLeftOfARefusedRestore) {
  Target target("tree", target_dir());
  const Pid pid = target.pid();
  pids_ = {pid, target.child()};
  ASSERT_TRUE(dump(target));
  ASSERT_TRUE(target.reap());
  auto restored =
      restore(pid, {}, []() -> Result<void> { return fail(ErrorCode::kGpuMismatch, "no GPU"); });
  ASSERT_FALSE(restored);
  EXPECT_EQ(restored.error().code, ErrorCode::kGpuMismatch);
  EXPECT_EQ(process_state(pid), '-');
  EXPECT_EQ(process_state(target.child()), '-');
  // And the numbers are free: it works now.
  restored = restore(pid);
  ASSERT_TRUE(restored) << restored.error().to_string();
  target.adopt(restored->root);
  EXPECT_TRUE(target.runs());
}

// Our program dies at any instant of a restore: the tree is there and runs, or nothing of it is.
TEST_F(CriuTest, ARestoreIsWholeOrNothingIfWeAreKilled) {
  Target target("large", target_dir());
  const Pid pid = target.pid();
  ASSERT_TRUE(dump(target));
  ASSERT_TRUE(target.reap());
  int gone = 0;
  for (int delay = 0; delay <= 450; delay += fakes::times(150, 90)) {
    const pid_t tool = ::fork();
    if (tool == 0) {
      (void)restore(pid, {}, []() -> Result<void> {
        ::raise(SIGKILL);
        return {};
      });
      ::_exit(0);
    }
    std::this_thread::sleep_for(milliseconds(delay));
    if (delay < 450) ::kill(tool, SIGKILL);
    // We are the subreaper: criu, and what it restored, end up with us.
    for (int i = 0; i < 12000; ++i) {
      const pid_t ended = ::waitpid(-1, nullptr, WNOHANG);
      if (ended < 0) break;  // no child is left
      if (ended == 0) std::this_thread::sleep_for(milliseconds(5));
      if (ended == 0 && process_state(pid) == 'S' && target.runs()) break;
    }
    if (process_state(pid) == '-') {
      ++gone;
      continue;
    }
    target.adopt(pid);
    EXPECT_TRUE(target.runs()) << "killed after " << delay << " ms, state " << process_state(pid);
    ::kill(pid.value, SIGKILL);
    ASSERT_TRUE(target.reap());
  }
  EXPECT_GT(gone, 0);
}

// Its first thread is a zombie then, and others of it are not yet, with all of its memory.
TEST_F(CriuTest, OneThatIsJustEndingWhenARestoreIsGivenUpIsReaped) {
  Target target("large threads", target_dir());
  const Pid pid = target.pid();
  ASSERT_TRUE(dump(target));
  ASSERT_TRUE(target.reap());
  for (int i = 0; i < 3; ++i) {
    auto restored = restore(pid, {}, [&]() -> Result<void> {
      ::kill(pid.value, SIGKILL);
      return fail(ErrorCode::kGpuMismatch, "no GPU");
    });
    ASSERT_FALSE(restored);
    ASSERT_EQ(process_state(pid), '-') << "in round " << i;
  }
}

TEST_F(CriuTest, ADeadlineStopsARestoreAndNothingIsLeft) {
  Target target("large", target_dir());
  const Pid pid = target.pid();
  ASSERT_TRUE(dump(target));
  ASSERT_TRUE(target.reap());
  deadline_ = milliseconds(60);
  auto restored = restore(pid);
  ASSERT_FALSE(restored) << "make the target larger: criu was faster than the deadline";
  EXPECT_EQ(restored.error().code, ErrorCode::kTimeout) << restored.error().to_string();
  EXPECT_EQ(process_state(pid), '-');
}

TEST_F(CriuTest, AnImageThatIsNoImageIsExplained) {
  auto restored = restore(Pid{4194303});
  ASSERT_FALSE(restored);
  EXPECT_EQ(restored.error().code, ErrorCode::kCriuFailed);
  EXPECT_NE(restored.error().message.find("CRIU could not restore"), std::string::npos);
}

TEST_F(CriuTest, AProcessThatIsNotThereIsSaidToBe) {
  DumpRequest request{Pid{4194303}, images_, log_, {}};
  auto dumped = criu_->dump(
      request, [] { return Result<void>(); }, interrupt_);
  ASSERT_FALSE(dumped);
  EXPECT_EQ(dumped.error().code, ErrorCode::kNoSuchProcess);
}

TEST(CriuFind, AProgramThatIsNamedMustWork) {
  auto criu = Criu::find("/bin/true");
  ASSERT_FALSE(criu);
  EXPECT_EQ(criu.error().code, ErrorCode::kCriuMissing);
  criu = Criu::find("/nonexistent/criu");
  ASSERT_FALSE(criu);
  EXPECT_EQ(criu.error().code, ErrorCode::kCriuMissing);
  EXPECT_NE(criu.error().remedy.find("tools/get-criu"), std::string::npos);
}

}  // namespace
}  // namespace stasis

int main(int argc, char** argv) {
  if (argc > 2 && std::string_view(argv[1]) == "--target") return stasis::run_target(argc, argv);
  // Children of an ended tree come to us and not to an init that may not reap them.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
