#include "job/registry.h"

#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "checkpoint/journal.h"
#include "proc/procfs.h"

namespace stasis::job {
namespace {

namespace fs = std::filesystem;

class JobRegistry : public testing::Test {
 protected:
  JobRegistry() {
    std::string form = (fs::temp_directory_path() / "stasis-registry-XXXXXX").string();
    top_ = ::mkdtemp(form.data());
    ::setenv("STASIS_STATE_DIR", top_.c_str(), 1);
  }
  ~JobRegistry() override {
    ::unsetenv("STASIS_STATE_DIR");
    fs::remove_all(top_);
  }
  static JobEntry entry(const std::string& name, Pid pid = Pid{::getpid()}) {
    return {name, {pid}, Pid{}, Pid{7}, "/state", "/images", {"a", "b"}, {"pipe:[1]"}};
  }

  fs::path top_;
};

TEST_F(JobRegistry, FindsWhatIsEnteredUntilItIsGone) {
  {
    auto entered = Registration::enter(entry("one"));
    ASSERT_TRUE(entered) << entered.error().to_string();
    auto found = find_job("one");
    ASSERT_TRUE(found);
    EXPECT_EQ(found->process.pid.value, ::getpid());
    EXPECT_EQ(found->root.value, 7);
    EXPECT_EQ(found->command, (std::vector<std::string>{"a", "b"}));
    ASSERT_TRUE(entered->set_root(Pid{8}));
    EXPECT_EQ(find_job("one")->root.value, 8);
    EXPECT_EQ(all_jobs().size(), 1U);
    EXPECT_FALSE(find_job("two"));
  }
  EXPECT_FALSE(find_job("one"));
  EXPECT_TRUE(all_jobs().empty());
}

TEST_F(JobRegistry, FindsAProcessWhoseFirstThreadHasEnded) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::thread([] { ::pause(); }).detach();
    ::syscall(SYS_exit, 0);
  }
  {
    const auto entered = Registration::enter(entry("one", Pid{child}));
    ASSERT_TRUE(entered) << entered.error().to_string();
    while (!proc::ProcFs().process(Pid{child})->has_ended())
      std::this_thread::yield();
    EXPECT_TRUE(find_job("one"));
    EXPECT_EQ(all_jobs().size(), 1U);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    EXPECT_FALSE(find_job("one"));
  }
}

// Who fills the records with what takes long to judge keeps root busy no longer than with little.
TEST_F(JobRegistry, OfOneUserNoMoreThanAMegabyteIsRead) {
  if (::geteuid() != 0) GTEST_SKIP() << "files of two users need root";
  constexpr uid_t kAlice = 65431;
  const fs::path state = "/tmp/stasis-65431";
  if (fs::exists(state)) GTEST_SKIP() << "there is such a user";
  const pid_t program = ::fork();
  if (program == 0) {
    if (::setresuid(kAlice, kAlice, kAlice) == 0 && ::prctl(PR_SET_DUMPABLE, 1) == 0) ::pause();
    ::_exit(0);
  }
  struct stat owner {};
  while (::stat(fmt::format("/proc/{}", program).c_str(), &owner) == 0 && owner.st_uid != kAlice)
    ::usleep(1000);
  const auto info = proc::ProcFs().process(Pid{program});
  ASSERT_TRUE(info);
  const fs::path jobs = state / ("jobs" + pid_namespace_mark());
  fs::create_directories(jobs);
  for (const char* name : {"a", "b", "c", "d"}) {
    const fs::path record = jobs / (std::string(name) + ".job");
    std::ofstream(record)
        << std::string(std::size_t{400} << 10, ' ')
        << fmt::format(R"({{"name":"{}","pid":{},"start_ticks":{},"init":0,)", name, program,
                       info->start_ticks)
        << R"("root":0,"state_dir":"","images_dir":"","command":[],"streams":[]})";
    fs::permissions(record, fs::perms::owner_read);
  }
  for (const auto& one : fs::recursive_directory_iterator(state))
    ASSERT_EQ(::chown(one.path().c_str(), kAlice, kAlice), 0);
  ASSERT_EQ(::chown(state.c_str(), kAlice, kAlice), 0);
  ::unsetenv("STASIS_STATE_DIR");
  // Nor by another spelling of the number.
  const fs::path other = "/tmp/stasis-065431";
  fs::create_directories(other / jobs.filename());
  fs::copy(jobs / "a.job", other / jobs.filename() / "a.job");
  for (const fs::path& one : {other, other / jobs.filename(), other / jobs.filename() / "a.job"})
    ASSERT_EQ(::chown(one.c_str(), kAlice, kAlice), 0);
  std::size_t found = 0;
  for (const JobEntry& one : jobs_of_users())
    found += one.process.pid.value == program ? 1 : 0;
  EXPECT_EQ(found, 2U);
  ::kill(program, SIGKILL);
  ::waitpid(program, nullptr, 0);
  fs::remove_all(state);
  fs::remove_all(other);
}

TEST_F(JobRegistry, ANameIsOneLifesAndAfterThatFree) {
  const pid_t other = ::fork();
  if (other == 0) {
    ::pause();
    ::_exit(0);
  }
  auto first = Registration::enter(entry("one", Pid{other}));
  ASSERT_TRUE(first);
  auto second = Registration::enter(entry("one"));
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kBusy);
  ::kill(other, SIGKILL);
  ::waitpid(other, nullptr, 0);
  EXPECT_FALSE(find_job("one"));
  // The next job clears that away.
  EXPECT_TRUE(Registration::enter(entry("two")));
  for (const auto& file : fs::recursive_directory_iterator(top_))
    EXPECT_NE(file.path().extension(), ".job") << file.path();
  EXPECT_TRUE(Registration::enter(entry("one")));
}

TEST_F(JobRegistry, RefusesNamesThatAreNumbersOrPaths) {
  for (const char* name : {"", "12", "1a", "-a", ".a", "a/b", "../x", "a b", "a\n"}) {
    EXPECT_FALSE(check_job_name(name)) << name;
    EXPECT_FALSE(find_job(name)) << name;
  }
  EXPECT_FALSE(check_job_name(std::string(65, 'a')));
  EXPECT_TRUE(check_job_name("train-1.b_c"));
}

TEST_F(JobRegistry, DamagedRecordsAreNone) {
  auto entered = Registration::enter(entry("one"));
  ASSERT_TRUE(entered);
  for (const auto& file : fs::recursive_directory_iterator(top_)) {
    if (file.path().extension() == ".job") std::ofstream(file.path()) << "{\"name\": 1}";
  }
  EXPECT_FALSE(find_job("one"));
  EXPECT_TRUE(all_jobs().empty());
}

}  // namespace
}  // namespace stasis::job
