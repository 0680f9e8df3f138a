#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "environment.h"

namespace stasis::preload {
namespace {

class Environment : public testing::Test {
 public:
  Environment() {
    path_ = testing::TempDir() + "environment-XXXXXX";
    const int fd = ::mkstemp(path_.data());
    ::close(fd);
  }
  ~Environment() override { ::unlink(path_.c_str()); }

 protected:
  void refresh(const std::string& changes) {
    FILE* file = std::fopen(path_.c_str(), "we");
    std::fwrite(changes.data(), 1, changes.size(), file);
    std::fclose(file);
    refresh_environment(path_.c_str());
    // It is the environment's for ever, and only the last one is to be found there when the leak
    // sanitizer looks, after the destructors of what is static.
    static auto& made = *new std::vector<char**>;
    made.push_back(environ);
  }
  static std::string value(const char* name) {
    const char* found = std::getenv(name);
    return found != nullptr ? found : "(none)";
  }

  std::string path_;
};

std::string list(std::initializer_list<const char*> changes) {
  std::string out;
  for (const char* change : changes)
    out += std::string(change) + '\0';
  return out;
}

TEST_F(Environment, SetsRemovesAndLeavesTheRest) {
  ::setenv("JOB_ID", "1", 1);
  ::setenv("JOB_IDS", "stays", 1);
  ::setenv("GONE", "old", 1);
  ::unsetenv("FRESH");
  refresh(list({"JOB_ID=2", "GONE", "FRESH=a=b"}));
  EXPECT_EQ(value("JOB_ID"), "2");
  EXPECT_EQ(value("JOB_IDS"), "stays");
  EXPECT_EQ(value("GONE"), "(none)");
  EXPECT_EQ(value("FRESH"), "a=b");
  // The C library's own functions go on from there.
  ::setenv("JOB_ID", "3", 1);
  EXPECT_EQ(value("JOB_ID"), "3");
}

TEST_F(Environment, WhatBeginsSoIsReplacedAsAWhole) {
  ::setenv("SLURM_A", "1", 1);
  ::setenv("SLURM_B", "1", 1);
  ::setenv("SLURMX", "stays", 1);
  refresh(list({"SLURM_*", "SLURM_B=2"}));
  EXPECT_EQ(value("SLURM_A"), "(none)");
  EXPECT_EQ(value("SLURM_B"), "2");
  EXPECT_EQ(value("SLURMX"), "stays");
}

TEST_F(Environment, NoFileAnEmptyOneAndOneWithoutAnEndChangeNothingElse) {
  ::setenv("JOB_ID", "1", 1);
  refresh("");
  refresh_environment("/nowhere/at/all");
  EXPECT_EQ(value("JOB_ID"), "1");
  refresh("JOB_ID=2");
  EXPECT_EQ(value("JOB_ID"), "2");
}

// A job of root may start programs of other users, which can write in /dev/shm as well.
TEST_F(Environment, AFileThatAnotherUserMayHaveWrittenIsNotBelieved) {
  // Another name each time: what was believed once stays in the environment.
  int times = 0;
  const auto believed = [&] {
    const std::string name = "JOB_" + std::to_string(++times);
    refresh(list({(name + "=2").c_str()}));
    return value(name.c_str()) == "2";
  };
  EXPECT_TRUE(believed());
  for (const mode_t mode : {0620U, 0602U}) {
    ASSERT_EQ(::chmod(path_.c_str(), mode), 0);
    EXPECT_FALSE(believed());
  }
  ASSERT_EQ(::chmod(path_.c_str(), 0644), 0);
  const std::string second = path_ + "-second";
  ASSERT_EQ(::link(path_.c_str(), second.c_str()), 0);
  EXPECT_FALSE(believed());
  ASSERT_EQ(::unlink(second.c_str()), 0);
  EXPECT_TRUE(believed());
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives a file to another user";
  ASSERT_EQ(::chown(path_.c_str(), 65534, 65534), 0);
  EXPECT_FALSE(believed());
}

}  // namespace
}  // namespace stasis::preload
