// Long because each file of /proc has its own texts and its own real process.
#include "proc/procfs.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fd.h"

namespace stasis::proc {
namespace {

using testing::AnyOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsSupersetOf;
using testing::Not;
using testing::UnorderedElementsAre;

TEST(ProcFsSockets, ThoseOfTcpAreToldFromTheOthers) {
  const auto open = [](int family, int type) {
    UniqueFd socket(::socket(family, type | SOCK_CLOEXEC, 0));
    struct stat info {};
    EXPECT_EQ(::fstat(socket.get(), &info), 0);
    return std::pair(std::move(socket), static_cast<std::uint64_t>(info.st_ino));
  };
  const auto tcp = open(AF_INET, SOCK_STREAM);
  const auto udp = open(AF_INET, SOCK_DGRAM);
  const auto local = open(AF_UNIX, SOCK_STREAM);
  const Pid self{::getpid()};
  const auto all = ProcFs().socket_inodes(self);
  const auto some = ProcFs().tcp_socket_inodes(self);
  ASSERT_TRUE(all && some);
  EXPECT_THAT(*all, IsSupersetOf({tcp.second, udp.second, local.second}));
  EXPECT_THAT(*some, Contains(tcp.second));
  EXPECT_THAT(*some, Not(AnyOf(Contains(udp.second), Contains(local.second))));
}

// A /proc of our own making.
class FakeProc : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-proc-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(int pid, const std::string& name, const std::string& text) const {
    const std::filesystem::path dir = root_ / std::to_string(pid);
    std::filesystem::create_directories(dir);
    std::ofstream(dir / name) << text;
  }
  void add(int pid, int parent, const std::string& comm = "program", int process = 0,
           int session = 1, int tty = 0) const {
    write(pid, "stat",
          fmt::format("{} ({}) S {} {} {} {} -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 {} 1000 10 0\n",
                      pid, comm, parent, pid, session, tty, 5000 + pid));
    write(pid, "status",
          fmt::format("Name:\t{}\nTgid:\t{}\nPid:\t{}\nPPid:\t{}\nTracerPid:\t0\n"
                      "Uid:\t1000\t1001\t1002\t1003\nNSpid:\t{}\t7\n",
                      comm, process == 0 ? pid : process, pid, parent, pid));
    write(pid, "cmdline", std::string("prog\0two words\0\0last\0", 21));
  }
  ProcFs procfs() const { return ProcFs(root_.string()); }

  std::filesystem::path root_;
};

std::vector<int> numbers(const std::vector<ProcessInfo>& infos) {
  std::vector<int> out;
  out.reserve(infos.size());
  for (const ProcessInfo& info : infos)
    out.push_back(info.pid.value);
  return out;
}

TEST(ParseStat, NameMayHoldAnything) {
  for (const std::string name :
       {"plain", "two words", "a) S 1 2 3 (b", ")", "(", "", ") R 1 (", "new\nline", "\t"}) {
    auto info =
        parse_stat("12 (" + name + ") Z 3 12 44 1025 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 987654321 0 0");
    ASSERT_TRUE(info) << name;
    EXPECT_EQ(info->comm, name);
    EXPECT_EQ(info->pid.value, 12);
    EXPECT_EQ(info->state, 'Z');
    EXPECT_EQ(info->parent.value, 3);
    EXPECT_EQ(info->session, 44);
    EXPECT_EQ(info->tty, 1025);
    EXPECT_EQ(info->start_ticks, 987654321U);
  }
}

TEST(ParseStat, HowOneHasEnded) {
  const std::string start = "12 (x) Z 3 12 44 1025 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 987654321";
  const auto info =
      parse_stat(start + " 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 3 0 0 0 0 0 0 0 0 0 0 0 0 134");
  ASSERT_TRUE(info) << info.error().message;
  EXPECT_EQ(info->exit_code, 134);  // SIGABRT, with a core
  EXPECT_EQ(info->exit_signal, 17);
  EXPECT_EQ(info->processor, 3);
  EXPECT_EQ(parse_stat(start)->exit_code, 0);
}

TEST(ParseStat, RefusesWhatIsNone) {
  for (const char* line : {"", "12", "12 (x", "12 x)", ")(", "12 (x)", "12 (x) S 1 2",
                           "12 (x) S 3 12 44 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0"}) {
    auto info = parse_stat(line);
    ASSERT_FALSE(info) << line;
    EXPECT_EQ(info.error().code, ErrorCode::kInternal);
  }
}

TEST_F(FakeProc, TellsWhatTheKernelSays) {
  add(12, 3, "a (b) c");
  auto info = procfs().process(Pid{12});
  ASSERT_TRUE(info) << info.error().message;
  EXPECT_EQ(info->comm, "a (b) c");
  EXPECT_EQ(info->start_ticks, 5012U);
  auto details = procfs().details(Pid{12});
  ASSERT_TRUE(details);
  EXPECT_EQ(details->uid, 1001U) << "the effective user is the second";
  EXPECT_EQ(details->ns_pid, 7) << "the innermost is the last";
  EXPECT_EQ(details->tracer, 0);
  EXPECT_THAT(details->argv, ElementsAre("prog", "two words", "", "last"));
}

TEST_F(FakeProc, RefusesAthreadAndNamesItsProcess) {
  add(12, 3);
  add(14, 3, "worker", 12);
  auto thread = procfs().process(Pid{14});
  ASSERT_FALSE(thread);
  EXPECT_EQ(thread.error().code, ErrorCode::kThreadId);
  EXPECT_THAT(thread.error().message, HasSubstr("process 12"));
  EXPECT_THAT(thread.error().remedy, HasSubstr("12"));
}

TEST_F(FakeProc, RefusesNumbersOfNoProcess) {
  auto none = procfs().process(Pid{77});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::kNoSuchProcess);
  for (int number : {0, -1}) {
    auto bad = procfs().process(Pid{number});
    ASSERT_FALSE(bad);
    EXPECT_EQ(bad.error().code, ErrorCode::kUsage);
  }
}

TEST_F(FakeProc, DamagedFilesAreOurProblemAndNotAmissingProcess) {
  add(12, 3);
  write(12, "status", "Name:\tx\n");
  auto info = procfs().process(Pid{12});
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, ErrorCode::kInternal);
  add(12, 3);
  write(12, "stat", "rubbish");
  info = procfs().process(Pid{12});
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, ErrorCode::kInternal);
}

// "Could not ask" must not become "there is no such process".
TEST_F(FakeProc, WithoutDescriptorsLeftSaysSo) {
  add(12, 3);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  auto info = procfs().process(Pid{12});
  ::setrlimit(RLIMIT_NOFILE, &before);
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, ErrorCode::kIo);
  EXPECT_THAT(info.error().remedy, HasSubstr("ulimit -n"));
}

TEST_F(FakeProc, ListsProcessesAndSkipsThoseThatVanish) {
  add(12, 3);
  add(13, 3);
  std::filesystem::create_directories(root_ / "14");  // vanished between listing and reading
  std::filesystem::create_directories(root_ / "sys");
  write(15, "stat", "rubbish");
  auto all = procfs().all();
  ASSERT_TRUE(all);
  EXPECT_THAT(numbers(*all), UnorderedElementsAre(12, 13));
}

TEST_F(FakeProc, TreeHasParentsFirstAndNoProcessTwice) {
  add(100, 1);
  add(20, 100);  // a smaller number than its parent: numbers wrap around
  add(30, 20);
  add(40, 100);
  add(50, 1);  // not ours
  add(60, 30);
  auto tree = procfs().tree(Pid{100});
  ASSERT_TRUE(tree);
  EXPECT_THAT(numbers(*tree), ElementsAre(100, 20, 40, 30, 60));
  auto leaf = procfs().tree(Pid{50});
  ASSERT_TRUE(leaf);
  EXPECT_THAT(numbers(*leaf), ElementsAre(50));
  EXPECT_FALSE(procfs().tree(Pid{99}));
}

// Read while numbers are given anew, /proc can show two processes as each other's parents.
TEST_F(FakeProc, TreeWithAcircleEnds) {
  add(10, 11);
  add(11, 10);
  auto tree = procfs().tree(Pid{10});
  ASSERT_TRUE(tree);
  EXPECT_THAT(numbers(*tree), ElementsAre(10, 11));
}

TEST_F(FakeProc, FindsMappedFilesByTheirName) {
  add(12, 3);
  const auto maps = [&](const std::string& path) {
    write(12, "maps",
          "00400000-00401000 r-xp 00000000 08:01 5  /usr/bin/prog\n"
          "7f0000000000-7f0000001000 r-xp 00000000 08:01 6  " +
              path + "\n7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0  [stack]\n");
    auto found = procfs().maps_file(Pid{12}, "libcuda.so");
    EXPECT_TRUE(found);
    // A text, which answers no question.
    const auto each = procfs().maps_file_each({Pid{77}, Pid{12}}, "libcuda.so");
    EXPECT_EQ(each[0].error().code, ErrorCode::kNoSuchProcess);
    EXPECT_EQ(*each[1], *found);
    return found && *found;
  };
  EXPECT_TRUE(maps("/usr/lib/libcuda.so.1"));
  EXPECT_TRUE(maps("/usr/lib/libcuda.so.580.159.04 (deleted)"));
  EXPECT_TRUE(maps("/libcuda.so"));
  EXPECT_FALSE(maps("/usr/lib/libcudart.so.13"));
  EXPECT_FALSE(maps("/usr/lib/mylibcuda.so.1"));
  EXPECT_FALSE(maps("/opt/libcuda.so.d/other"));
  EXPECT_TRUE(maps("/opt/libcuda.so.d/libcuda.so.1"));
  EXPECT_FALSE(maps(""));
  EXPECT_EQ(procfs().maps_file(Pid{77}, "x").error().code, ErrorCode::kNoSuchProcess);
}

// A process made 459 MB of this text of 30000 mappings.
TEST_F(FakeProc, ReadsMappingsOfAnyLengthWithBoundedMemory) {
  add(12, 3);
  constexpr int kMany = 1500;
  std::string text;
  for (int i = 0; i < kMany; ++i)
    text += fmt::format("{:x}-{:x} r--s 00000000 00:01 7 /{}/name-{}\n", i << 12, (i + 1) << 12,
                        std::string(40000, 'd'), i);
  write(12, "maps",
        text + "7f0000000000-7f0000001000 r-xp 00000000 00:01 8 /usr/lib/libcuda.so.1\n");
  text = {};
  auto mappings = procfs().mappings(Pid{12});
  ASSERT_TRUE(mappings);
  ASSERT_EQ(mappings->size(), kMany + 1U);
  std::size_t bytes = 0;
  for (const Mapping& mapping : *mappings)
    bytes += mapping.path.capacity();
  EXPECT_LT(bytes, 2 * kManyPaths);
  EXPECT_EQ((*mappings)[0].path.size(), kLongestPath);
  EXPECT_THAT((*mappings)[0].path, testing::EndsWith("ddd/name-0"));
  EXPECT_THAT((*mappings)[kMany - 1].path, testing::EndsWith(fmt::format("/name-{}", kMany - 1)));
  EXPECT_EQ((*mappings)[kMany - 1].path.size(), kShortPath);
  EXPECT_TRUE(*procfs().maps_file(Pid{12}, "libcuda.so"));
  EXPECT_TRUE(*procfs().maps_file(Pid{12}, "name-7"));
  int seen = 0;
  EXPECT_TRUE(procfs().for_each_mapping(Pid{12}, [&](const Mapping&) { return ++seen < 3; }));
  EXPECT_EQ(seen, 3);
}

TEST(ProcFsTime, KnowsTheOffsetOfATimeNamespace) {
  const auto ticks = static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
  EXPECT_EQ(boot_offset_ticks("monotonic           0         0\nboottime            0         0\n"),
            0U);
  EXPECT_EQ(boot_offset_ticks("monotonic           5         0\nboottime          100 500000000\n"),
            100 * ticks + ticks / 2);
  EXPECT_EQ(50 * ticks - boot_offset_ticks("boottime          -50         0\n"), 100 * ticks);
  EXPECT_EQ(boot_offset_ticks(""), 0U);
}

TEST(ProcFsTime, KnowsHowLongAProcessHasLived) {
  constexpr double kLongestTest = 600;  // seconds
  const auto own = ProcFs().process(Pid{::getpid()});
  ASSERT_TRUE(own.has_value());
  EXPECT_GE(age_of(*own), 0.0);
  EXPECT_LT(age_of(*own), kLongestTest);
  ProcessInfo older = *own;
  older.start_ticks -= 100 * static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
  EXPECT_NEAR(age_of(older) - age_of(*own), 100, 1);
}

TEST_F(FakeProc, ReadsMappings) {
  add(12, 3);
  write(12, "maps",
        "00400000-00401000 r-xp 0001f000 08:01 5                  /usr/bin/two words\n"
        "7f0000000000-7f0000002000 rw-p 00000000 00:00 0 \n"
        "not a mapping\n"
        "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0  [vsyscall]\n");
  auto mappings = procfs().mappings(Pid{12});
  ASSERT_TRUE(mappings);
  ASSERT_EQ(mappings->size(), 3U);
  EXPECT_EQ((*mappings)[0].start, 0x400000U);
  EXPECT_EQ((*mappings)[0].end, 0x401000U);
  EXPECT_EQ((*mappings)[0].permissions, "r-xp");
  EXPECT_EQ((*mappings)[0].inode, 5U);
  EXPECT_EQ((*mappings)[0].device, makedev(8, 1));
  EXPECT_EQ((*mappings)[0].path, "/usr/bin/two words");
  EXPECT_EQ((*mappings)[0].offset, 0x1f000U);
  EXPECT_EQ((*mappings)[1].inode, 0U);
  EXPECT_EQ((*mappings)[1].path, "");
  EXPECT_EQ((*mappings)[2].start, 0xffffffffff600000U);
  EXPECT_EQ((*mappings)[2].path, "[vsyscall]");
  EXPECT_EQ(procfs().mappings(Pid{77}).error().code, ErrorCode::kNoSuchProcess);
}

// A program can have the kernel show any of its memory as its arguments (PR_SET_MM). 60 MiB of
// zeros took 2 GiB.
TEST_F(FakeProc, WhatAProgramShowsAsItsWordsIsReadWithinBounds) {
  add(12, 1);
  for (const char* name : {"cmdline", "environ"})
    write(12, name, std::string(kMostWordBytes + 100000, '\0'));
  const auto details = procfs().details(Pid{12});
  ASSERT_TRUE(details) << details.error().to_string();
  EXPECT_EQ(details->argv.size(), kMostWords);
  const auto variables = procfs().environment(Pid{12});
  ASSERT_TRUE(variables) << variables.error().to_string();
  EXPECT_EQ(variables->size(), kMostWords);
}

// Another user's sockets are in there, too: more than 64 MiB of them were an error of every
// suspend.
TEST_F(FakeProc, ATableOfSocketsMayBeOfAnyLength) {
  std::string table = "Num       RefCount Protocol Flags    Type St Inode Path\n";
  constexpr int kSockets = 500000;
  const std::string name = " @" + std::string(107, 'x') + '\n';
  for (int i = 1; i <= kSockets; ++i) {
    table += "0000000000000000: 00000002 00000000 00010000 0001 01 ";
    table += std::to_string(i) + name;
  }
  ASSERT_GT(table.size(), std::size_t{64} << 20);
  add(12, 3);
  std::filesystem::create_directories(root_ / "12" / "net");
  write(12, "net/unix", table);
  const auto sockets = procfs().unix_sockets(Pid{12});
  ASSERT_TRUE(sockets) << sockets.error().to_string();
  EXPECT_EQ(sockets->size(), kSockets);
}

TEST_F(FakeProc, ReadsSockets) {
  add(12, 3);
  std::filesystem::create_directories(root_ / "12" / "net");
  write(
      12, "net/udp",
      "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout "
      "inode ref pointer drops\n"
      "  100: 0100007F:14E9 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 "
      "4711 2 0000000000000000 0\n");
  const auto udp = procfs().udp_sockets(Pid{12});
  ASSERT_TRUE(udp);
  ASSERT_EQ(udp->size(), 1U);
  EXPECT_EQ((*udp)[0].inode, 4711U);
  EXPECT_EQ((*udp)[0].local_port, 5353);
  EXPECT_FALSE((*udp)[0].listens);
  write(12, "net/unix",
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0000000000000000: 00000002 00000000 00010000 0001 01 17 /run/a socket\n"
        "0000000000000000: 00000003 00000000 00000000 0001 03 18\n");
  const auto unix_sockets = procfs().unix_sockets(Pid{12});
  ASSERT_TRUE(unix_sockets);
  ASSERT_EQ(unix_sockets->size(), 2U);
  EXPECT_EQ((*unix_sockets)[0].path, "/run/a socket");
  EXPECT_TRUE((*unix_sockets)[0].listens);
  EXPECT_FALSE((*unix_sockets)[1].listens);
  const auto named = procfs().unix_sockets(Pid{12}, "/run/a");
  ASSERT_TRUE(named);
  ASSERT_EQ(named->size(), 1U);
  EXPECT_EQ((*named)[0].path, "/run/a socket");
}

TEST_F(FakeProc, ReadsThreads) {
  add(12, 3);
  EXPECT_THAT(procfs().threads(Pid{12}), testing::IsEmpty());
  std::filesystem::create_directories(root_ / "12" / "task" / "12");
  std::filesystem::create_directories(root_ / "12" / "task" / "15");
  EXPECT_THAT(procfs().threads(Pid{12}), UnorderedElementsAre(Tid{12}, Tid{15}));
  write(12, "task/15/stat",
        "15 (a) b) S 3 12 1 0 -1 4194368 100 0 0 0 1 2 3 4 20 0 2 0 99 1000 10 "
        "18446744073709551615 1 1 1 0 0 0 0 0 0 0 0 0 -1 7 0 0\n");
  auto info = procfs().thread(Pid{12}, Tid{15});
  ASSERT_TRUE(info);
  EXPECT_EQ(info->flags, 0x400040U);
  EXPECT_EQ(info->cpu_ticks, 10U);
  EXPECT_EQ(info->processor, 7);
  write(12, "task/15/status",
        "Name:\ta\nSigPnd:\t0000000000000002\nShdPnd:\t8000000000000000\n"
        "SigBlk:\t0000000000000200\nvoluntary_ctxt_switches:\t40\n"
        "nonvoluntary_ctxt_switches:\t2\n");
  auto status = procfs().thread_status(Pid{12}, Tid{15});
  ASSERT_TRUE(status);
  EXPECT_EQ(status->pending, 0x8000000000000002U);
  EXPECT_EQ(status->blocked, 0x200U);
  EXPECT_EQ(status->switches, 42U);
  EXPECT_EQ(procfs().thread(Pid{12}, Tid{16}).error().code, ErrorCode::kIo);
  EXPECT_EQ(procfs().thread_status(Pid{12}, Tid{16}).error().code, ErrorCode::kIo);
  EXPECT_EQ(procfs().thread(Pid{77}, Tid{77}).error().code, ErrorCode::kNoSuchProcess);
}

TEST_F(FakeProc, AProcessWithoutANumberHasEnded) {
  write(12, "status", "Name:\ta\nTgid:\t0\nPid:\t0\n");
  EXPECT_EQ(procfs().process(Pid{12}).error().code, ErrorCode::kNoSuchProcess);
  write(12, "status", "Name:\ta\n");
  EXPECT_EQ(procfs().process(Pid{12}).error().code, ErrorCode::kInternal);
}

TEST_F(FakeProc, ReadsAvailableMemory) {
  std::ofstream(root_ / "meminfo") << "MemTotal:  100 kB\nMemAvailable:   24 kB\nSwapFree: 7 kB\n";
  auto bytes = procfs().memory_available();
  ASSERT_TRUE(bytes);
  EXPECT_EQ(*bytes, 24U * 1024);
  EXPECT_EQ(procfs().swap_free().value(), 7U * 1024);
  EXPECT_FALSE(ProcFs("/nonexistent").memory_available());
}

ProcessInfo in_session(int pid, int session, int tty) {
  ProcessInfo info;
  info.pid = Pid{pid};
  info.session = session;
  info.tty = tty;
  return info;
}

TEST(IsShellJob, WhenTheSessionOrItsTerminalIsOfAnother) {
  EXPECT_FALSE(is_shell_job({in_session(10, 10, 0), in_session(11, 10, 0)}));
  EXPECT_TRUE(is_shell_job({in_session(10, 5, 0)})) << "the leader is not in the tree";
  EXPECT_TRUE(is_shell_job({in_session(10, 10, 34816)})) << "it has a terminal";
  EXPECT_TRUE(is_shell_job({in_session(10, 10, 0), in_session(11, 3, 0)}));
  EXPECT_FALSE(is_shell_job({}));
}

// --- The real /proc, with processes of our own.

class Forked {
 public:
  template <class Body>
  explicit Forked(Body body) : pid_(::fork()) {
    if (pid_ == 0) {
      body();
      ::_exit(0);
    }
  }
  ~Forked() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Forked(const Forked&) = delete;
  Forked& operator=(const Forked&) = delete;
  Pid pid() const { return Pid{pid_}; }

 private:
  pid_t pid_;
};

TEST(RealProc, ThisProcess) {
  auto self = ProcFs().process(Pid{::getpid()});
  ASSERT_TRUE(self);
  EXPECT_EQ(self->pid.value, ::getpid());
  EXPECT_EQ(self->parent.value, ::getppid());
  EXPECT_EQ(self->session, ::getsid(0));
  EXPECT_GT(self->start_ticks, 0U);
  auto details = ProcFs().details(Pid{::getpid()});
  ASSERT_TRUE(details);
  EXPECT_EQ(details->uid, ::geteuid());
  ASSERT_FALSE(details->argv.empty());
  EXPECT_THAT(details->argv[0], HasSubstr("unittest"));
  EXPECT_TRUE(*ProcFs().maps_file(Pid{::getpid()}, "libc.so"));
  EXPECT_FALSE(*ProcFs().maps_file(Pid{::getpid()}, "libcuda.so"));
  const Forked child([] { ::pause(); });
  const std::vector<Pid> pids = {Pid{::getpid()}, child.pid()};
  for (const auto& one : ProcFs().maps_file_each(pids, "libc.so"))
    EXPECT_TRUE(*one);
  for (const auto& one : ProcFs().maps_file_each(pids, "libcuda.so"))
    EXPECT_FALSE(*one);
  EXPECT_GT(*ProcFs().memory_available(), 1U << 20U);
}

TEST(RealProc, AthreadOfThisProcess) {
  std::atomic<int> tid{0};
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    tid = static_cast<int>(::syscall(SYS_gettid));
    while (!stop)
      std::this_thread::yield();
  });
  while (tid == 0)
    std::this_thread::yield();
  auto info = ProcFs().process(Pid{tid});
  stop = true;
  thread.join();
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, ErrorCode::kThreadId);
  EXPECT_THAT(info.error().message, HasSubstr(std::to_string(::getpid())));
}

TEST(RealProc, AtreeOfForks) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  // A child with two children, each of which says that it is there and sleeps until the child ends.
  const Forked child([&] {
    ::setsid();
    for (int i = 0; i < 2; ++i) {
      if (::fork() == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)!::write(ends[1], "x", 1);
        ::pause();
      }
    }
    ::pause();
  });
  char byte = 0;
  ASSERT_EQ(::read(ends[0], &byte, 1), 1);
  ASSERT_EQ(::read(ends[0], &byte, 1), 1);
  ::close(ends[0]);
  ::close(ends[1]);
  auto tree = ProcFs().tree(child.pid());
  ASSERT_TRUE(tree);
  ASSERT_EQ(tree->size(), 3U);
  EXPECT_EQ((*tree)[0].pid, child.pid());
  EXPECT_EQ((*tree)[1].parent, child.pid());
  EXPECT_EQ((*tree)[2].parent, child.pid());
  EXPECT_EQ((*tree)[1].session, child.pid().value);
  EXPECT_FALSE(is_shell_job(*tree));
}

TEST(RealProc, Azombie) {
  const Forked child([] {});
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child.pid().value), &info, WEXITED | WNOWAIT), 0);
  auto zombie = ProcFs().process(child.pid());
  ASSERT_TRUE(zombie);
  EXPECT_EQ(zombie->state, 'Z');
  auto details = ProcFs().details(child.pid());
  ASSERT_TRUE(details);
  EXPECT_TRUE(details->argv.empty());
  // The kernel shows no network of it any more, though its number.
  const auto sockets = ProcFs().unix_sockets(child.pid());
  ASSERT_FALSE(sockets);
  EXPECT_EQ(sockets.error().code, ErrorCode::kNoSuchProcess) << sockets.error().to_string();
}

TEST(RealProc, AKilledOneWhoseThreadsAreTracedHasEndedBeforeItsPidfdSaysSo) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const Forked child([&] {
    std::thread another([] { ::pause(); });
    (void)!::write(ends[1], "x", 1);
    ::pause();
    another.join();
  });
  char byte = 0;
  ASSERT_EQ(::read(ends[0], &byte, 1), 1);
  const auto threads = ProcFs().threads(child.pid());
  ASSERT_EQ(threads.size(), 2U);
  for (const Tid thread : threads)
    ASSERT_EQ(::ptrace(PTRACE_SEIZE, thread.value, nullptr, nullptr), 0);
  const auto pidfd = Pidfd::open(child.pid());
  ASSERT_TRUE(pidfd);
  EXPECT_FALSE(ProcFs().has_ended(child.pid()));
  ::kill(child.pid().value, SIGKILL);
  for (int i = 0; i < 500 && !ProcFs().has_ended(child.pid()); ++i)
    ::usleep(10000);
  EXPECT_TRUE(ProcFs().has_ended(child.pid()));
  EXPECT_TRUE(pidfd->alive());
  for (const Tid thread : threads)
    if (thread.value != child.pid().value) ::waitpid(thread.value, nullptr, __WALL);
}

TEST(RealProc, AnEndedProcess) {
  pid_t pid = ::fork();
  if (pid == 0) ::_exit(0);
  ::waitpid(pid, nullptr, 0);
  auto info = ProcFs().process(Pid{pid});
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, ErrorCode::kNoSuchProcess);
}

TEST(MayTrace, AsksTheKernel) {
  EXPECT_TRUE(may_trace(Pid{::getpid()}));
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  // Another user's process is not his to trace.
  const Forked child([] { ::pause(); });
  const pid_t asker = ::fork();
  if (asker == 0) {
    const bool changed =
        ::setresgid(65534, 65534, 65534) == 0 && ::setresuid(65534, 65534, 65534) == 0;
    ::_exit(!changed ? 2 : may_trace(child.pid()) ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(asker, &status, 0), asker);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// Asks the kernel for one mapping after the other, where it knows that, and reads the text
// otherwise or for a name that is longer than it tells.
TEST(ProcFsMappings, NamesOfAnyLengthAndWithLineBreaksAreAsInTheText) {
  const std::filesystem::path before = std::filesystem::current_path();
  char folder[] = "/tmp/stasis-mappings-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  std::vector<void*> mapped;
  std::filesystem::current_path(folder);
  const auto map = [&](const char* name) {
    const UniqueFd file(::open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    ASSERT_EQ(::ftruncate(file.get(), 3 * 4096), 0);
    mapped.push_back(::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, file.get(), 2 * 4096));
    ASSERT_NE(mapped.back(), MAP_FAILED);
  };
  map("line\nbreak");
  map("short");
  map("short");
  // Together longer than PATH_MAX.
  for (int i = 0; i < 25; ++i) {
    const std::string name(200, 'd');
    ASSERT_EQ(::mkdir(name.c_str(), 0700), 0);
    ASSERT_EQ(::chdir(name.c_str()), 0);
  }
  map("deep");
  const auto found = ProcFs().mappings(Pid{::getpid()});
  ASSERT_TRUE(found);
  std::uint64_t last = 0;
  for (const Mapping& mapping : *found) {
    EXPECT_GE(mapping.start, last);
    last = mapping.end;
  }
  // Of those of files none is missing.
  std::size_t of_files = 0;
  EXPECT_TRUE(ProcFs().for_each_mapping(
      Pid{::getpid()}, [&](const Mapping& one) { return of_files += one.inode != 0, true; },
      ProcFs::Which::kOfFiles));
  EXPECT_EQ(of_files,
            static_cast<std::size_t>(std::count_if(
                found->begin(), found->end(), [](const Mapping& one) { return one.inode != 0; })));
  const std::vector<std::string> ends = {"/line\\012break", "/short", "/short", "/deep"};
  for (std::size_t i = 0; i < mapped.size(); ++i) {
    const auto it = std::find_if(found->begin(), found->end(), [&](const Mapping& one) {
      return one.start == reinterpret_cast<std::uint64_t>(mapped[i]);
    });
    ASSERT_NE(it, found->end()) << ends[i];
    EXPECT_THAT(it->path, testing::EndsWith(ends[i]));
    EXPECT_EQ(it->permissions, "r--s");
    EXPECT_NE(it->inode, 0U);
    EXPECT_EQ(it->offset, 2 * 4096U);
    ::munmap(mapped[i], 4096);
  }
  std::filesystem::current_path(before);
  // Step by step: its whole path is too long for a call.
  EXPECT_EQ(std::system(("rm -rf " + std::string(folder)).c_str()), 0);
}

}  // namespace
}  // namespace stasis::proc
