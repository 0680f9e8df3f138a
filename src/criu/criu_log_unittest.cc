#include "criu/criu_log.h"

#include <fcntl.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include <gtest/gtest.h>

namespace stasis {
namespace {

CriuLog parse_line(const std::string& text) {
  return CriuLog::parse("(00.010000) Error (criu/some.c:12): " + text + "\n");
}

TEST(CriuLog, TakesErrorsAndNothingElse) {
  const CriuLog log = CriuLog::parse(
      "(00.000001) Version: 4.2.1\n"
      "(00.000010) Warn  (criu/x.c:1): Error is a word\n"
      "(00.000020) Error (criu/files.c:12): one\n"
      "pie: 12: Error (criu/pie/parasite.c:588): two\n"
      "Error: Could not process rule: No such file or directory\n"
      "(00.000030)     77: Error (criu/a.c:1): three");
  EXPECT_EQ(log.errors, (std::vector<std::string>{"one", "two", "three"}));
  EXPECT_FALSE(log.diagnosis);
}

TEST(CriuLog, LeavesOutWhatEveryUnprivilegedCriuSays) {
  const CriuLog log =
      parse_line("rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted");
  EXPECT_TRUE(log.errors.empty());
}

TEST(CriuLog, DiagnosesTheFirstLineThatIsUnderstood) {
  const CriuLog log = CriuLog::parse(
      "(00.01) Error (criu/sk-inet.c:1): inet: Connected TCP socket, consider using "
      "--tcp-established option.\n"
      "(00.02) Error (criu/cr-dump.c:1): Dump files (pid: 12) failed with -1\n"
      "(00.02) Error (criu/cr-dump.c:1): Dumping FAILED.\n"
      "(00.03) Error (criu/x.c:1): No space left on device\n");
  ASSERT_TRUE(log.diagnosis);
  EXPECT_EQ(log.diagnosis->code, ErrorCode::kCriuFailed);
  EXPECT_NE(log.diagnosis->remedy.find("--tcp-established"), std::string::npos);
  EXPECT_EQ(log.errors.size(), 4U);
}

TEST(CriuLog, AWarningCountsOnlyWhereNoErrorIsUnderstood) {
  const std::string warning =
      "(00.02) Warn  (compel/src/lib/infect.c:132): Unable to interrupt task: 30267 (Operation not "
      "permitted)\n";
  EXPECT_EQ(CriuLog::parse(warning).diagnosis->code, ErrorCode::kBusy);
  EXPECT_EQ(
      CriuLog::parse(warning + "(00.03) Error (a:1): No space left on device\n").diagnosis->code,
      ErrorCode::kNoSpace);
}

// An unprivileged CRIU ends without one line of the kind "Error".
TEST(CriuLog, AMissingCapabilityIsFoundThoughItIsNoError) {
  const CriuLog log = CriuLog::parse(
      "(00.000000) CRIU run id = c36ba54b-4122-4389-bc3a-868e1a12a882\n"
      "(00.000000) Effective capability 40 missing\n"
      "(00.000000) Effective capability 21 missing\n");
  ASSERT_TRUE(log.diagnosis);
  EXPECT_EQ(log.diagnosis->code, ErrorCode::kNotPermitted);
  EXPECT_EQ(log.diagnosis->line, "Effective capability 40 missing");
}

// Before it has begun.
TEST(CriuLog, ALoaderWithoutMemoryIsUnderstood) {
  for (const char* said :
       {"/usr/sbin/criu: error while loading shared libraries: libnftables.so.1: failed to map "
        "segment from shared object\n",
        "cannot allocate TLS data structures for initial thread\n"}) {
    const CriuLog log = CriuLog::parse(said);
    ASSERT_TRUE(log.diagnosis) << said;
    EXPECT_EQ(log.diagnosis->code, ErrorCode::kOutOfHostMemory) << said;
  }
}

struct Known {
  const char* line;
  ErrorCode code;
  const char* remedy;
};

class CriuDiagnosisTest : public testing::TestWithParam<Known> {};

TEST_P(CriuDiagnosisTest, IsKnown) {
  const auto diagnosis = diagnose_criu_line(GetParam().line);
  ASSERT_TRUE(diagnosis) << GetParam().line;
  EXPECT_EQ(diagnosis->code, GetParam().code);
  EXPECT_NE(diagnosis->remedy.find(GetParam().remedy), std::string::npos) << diagnosis->remedy;
  EXPECT_FALSE(diagnosis->meaning.empty());
}

INSTANTIATE_TEST_SUITE_P(
    Lines, CriuDiagnosisTest,
    testing::Values(
        Known{"Can't fork for 12: File exists", ErrorCode::kPidInUse, "unshare"},
        Known{"skqueue: Control messages in queue, not supported", ErrorCode::kCriuFailed,
              "SO_PASSCRED"},
        Known{"unix: Non-empty write queue on an in-flight socket 0xa66564", ErrorCode::kBusy,
              "accepted"},
        Known{"unix: Found a closed in-flight socket to 0x3a2b1", ErrorCode::kBusy, "accepted"},
        Known{"tty: No CTL for TTY dump, likely SCM case", ErrorCode::kBusy, "received"},
        Known{"Dump eventpoll (pid: 532) failed with -1", ErrorCode::kCriuFailed, "EPOLL_CTL_DEL"},
        Known{"Can't lookup mount=18 for fd=9 path=/memfd:huge (deleted)", ErrorCode::kCriuFailed,
              "vm.nr_hugepages"},
        Known{"Can't lookup mount=18 for fd=9 path=/queue", ErrorCode::kCriuFailed, "mq_close"},
        Known{"pagemap-cache: pmc_init: Can't allocate 392424 bytes", ErrorCode::kOutOfHostMemory,
              "ulimit"},
        Known{"Unknown clock type 9 for 0", ErrorCode::kCriuFailed, "CLOCK_BOOTTIME"},
        Known{"Inconsistent sched params received (6.0.0)", ErrorCode::kCriuFailed, "chrt"},
        Known{"Pid 13 do not match expected 12", ErrorCode::kPidInUse, "unshare"},
        Known{"Current sid 7 intersects with pid (7) in images", ErrorCode::kPidInUse, "setsid"},
        Known{"The root process 12 is not a session leader. Consider using --shell-job option",
              ErrorCode::kCriuFailed, "--shell-job"},
        Known{"tty: Found dangling tty with sid 7 pgid 7 (pts) on peer fd 0.",
              ErrorCode::kCriuFailed, "--shell-job"},
        Known{"unix: External socket is used. Consider using --ext-unix-sk option.",
              ErrorCode::kCriuFailed, "--ext-unix-sk"},
        Known{"Some file locks are hold by dumping tasks! You can try --file-locks to dump them.",
              ErrorCode::kCriuFailed, "--file-locks"},
        Known{"Can't dump ghost file /x of 2097152 size, increase limit", ErrorCode::kCriuFailed,
              "--ghost-limit"},
        Known{"Can't create link remap for /x. Use link-remap option.", ErrorCode::kCriuFailed,
              "--link-remap"},
        Known{"Can't open file tmp/x on restore: No such file or directory", ErrorCode::kCriuFailed,
              "put the file back"},
        Known{"File tmp/x has bad size 4 (expect 5)", ErrorCode::kCriuFailed, "put back"},
        Known{"bfd: The bfd buffer is too small", ErrorCode::kCriuFailed, "shorter path"},
        Known{"File lib/x has bad build-ID", ErrorCode::kCriuFailed, "same versions"},
        Known{"Can't dump file 5 of that type [20666] (chr 195:255 /dev/nvidiactl)",
              ErrorCode::kCriuFailed, "CUDA state must be checkpointed"},
        Known{"Can't dump file 5 of that type [20600] (chr 10:229 /dev/fuse)",
              ErrorCode::kCriuFailed, "close it"},
        Known{"unix: Can't dump half of stream unix connection. name: (null); peer name: /x",
              ErrorCode::kCriuFailed, "--external 'unix["},
        Known{"Can't dump file 5 of that type [600] (unknown anon_inode:[io_uring])",
              ErrorCode::kCriuFailed, "--no-io-uring"},
        Known{"send_fds failed (-22)", ErrorCode::kCriuFailed, "--no-io-uring"},
        Known{"SEIZE 12: task not stopped after seize", ErrorCode::kBusy, "debugger"},
        Known{"Timeout reached. Try to interrupt: 0", ErrorCode::kCriuFailed, "gone on"},
        Known{"Effective capability 40 missing", ErrorCode::kNotPermitted, "run as root"},
        Known{"Can't write to image: No space left on device", ErrorCode::kNoSpace, "free space"},
        Known{"Tracking memory is not available. Consider omitting --track-mem option.",
              ErrorCode::kCriuFailed, "kernel"},
        Known{"Unable to create a thread: -17", ErrorCode::kPidInUse, "unshare"},
        Known{"tty: Don't have tty to inherit session from, aborting", ErrorCode::kCriuFailed,
              "from a terminal"},
        Known{"Can't open dir /proc/self/fd: Too many open files", ErrorCode::kCriuFailed,
              "ulimit -n"},
        Known{"Can't write to image: File too large", ErrorCode::kCriuFailed, "ulimit -f"},
        Known{"mnt: No mapping for 12:(null) mountpoint", ErrorCode::kCriuFailed, "mnt[NAME]:PATH"},
        Known{"vdso: Unexpected rt vDSO area bounds", ErrorCode::kCriuFailed, "newer CRIU"},
        Known{"inet: Can't bind inet socket (id 12): Address already in use",
              ErrorCode::kCriuFailed, "ss -ltnp"},
        Known{"inet: Can't bind inet socket (id 12): Cannot assign requested address",
              ErrorCode::kCriuFailed, "ip address add"},
        Known{"unix: Can't bind id 0x10 ino 7 addr /a/s: No such file or directory",
              ErrorCode::kCriuFailed, "make that directory"},
        Known{"unix: Can't bind id 0x10 ino 1857424 addr : Address already in use",
              ErrorCode::kCriuFailed, "ss -xlp"},
        Known{"Can't dump a pid namespace without the process init", ErrorCode::kCriuFailed,
              "container"}));

TEST(CriuDiagnosis, NamesTheObstacleWhereThereIsOne) {
  const auto of = [](std::string_view line) -> std::string {
    const auto found = diagnose_criu_line(line);
    return found && found->obstacle ? std::string(found->obstacle->name()) : "none";
  };
  EXPECT_EQ(of("inet: Connected TCP socket, consider using --tcp-established option."),
            "tcp-connection");
  EXPECT_EQ(of("Can't dump file 4 of that type [20666] (chr 195:0 /dev/nvidia0)"), "gpu-files");
  EXPECT_EQ(of("Can't dump file 4 of that type [20666] (chr 10:229 /dev/fuse)"), "device");
  EXPECT_EQ(of("write: No space left on device"), "none") << "the code says it";
}

TEST(CriuDiagnosis, KnowsWhatItDoesNotKnow) {
  EXPECT_FALSE(diagnose_criu_line("Dumping FAILED."));
  EXPECT_FALSE(diagnose_criu_line(""));
}

TEST(CriuLog, IsBoundedAndCleansWhatItShows) {
  std::string text;
  for (int i = 0; i < 1000; ++i)
    text += "Error (a:1): line " + std::to_string(i) + "\n";
  text += "Error (a:1): \x1b[31mred\a " + std::string(10000, 'x') + "\n";
  const CriuLog log = CriuLog::parse(text);
  EXPECT_EQ(log.errors.size(), 2 * CriuLog::kKeptErrors);
  EXPECT_EQ(log.errors.front(), "line 0");
  EXPECT_EQ(log.errors[CriuLog::kKeptErrors - 1], "line 15");
  EXPECT_EQ(log.errors.back().size(), CriuLog::kMaxLine);
  EXPECT_EQ(log.errors.back().substr(0, 10), "?[31mred? ");
}

TEST(CriuLog, SurvivesAnything) {
  std::mt19937 random(7);
  const std::string sample = "(00.01)  12: Error (criu/x.c:1): Can't fork for 12: File exists\n";
  for (int round = 0; round < 2000; ++round) {
    std::string text = sample + sample;
    for (int i = 0; i < 8; ++i)
      text[random() % text.size()] = static_cast<char>(random());
    (void)CriuLog::parse(text);
    (void)CriuLog::parse(text.substr(random() % text.size()));
  }
}

TEST(CriuLog, ReadsAFileAndCopesWithoutOne) {
  std::string form = (std::filesystem::temp_directory_path() / "stasis-log-XXXXXX").string();
  const std::filesystem::path path = ::mkdtemp(form.data());
  auto dir = open_file(AT_FDCWD, path.string(), O_RDONLY | O_DIRECTORY);
  ASSERT_TRUE(dir);
  EXPECT_TRUE(CriuLog::read(*dir, "dump.log").errors.empty());
  {
    std::ofstream file(path / "dump.log");
    file << std::string(9 << 20, 'x') << "\nError (a:1): at the end\n";
  }
  EXPECT_EQ(CriuLog::read(*dir, "dump.log").errors, std::vector<std::string>{"at the end"});
  std::filesystem::create_symlink(path / "dump.log", path / "link.log");
  EXPECT_TRUE(CriuLog::read(*dir, "link.log").errors.empty());
  std::filesystem::remove_all(path);
}

}  // namespace
}  // namespace stasis
