#include "job/registry.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

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
