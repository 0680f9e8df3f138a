// What the tests with a real CRIU have in common: the CRIU, a directory each for images, log and
// target, and requests that name them.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "criu/criu.h"
#include "criu/criu_test_targets.h"

namespace stasis {

class CriuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    auto found = Criu::find();
    if (!found && ::getenv("STASIS_CRIU") == nullptr) {
      GTEST_SKIP() << found.error().to_string() << ": " << found.error().remedy;
    }
    ASSERT_TRUE(found) << found.error().to_string();
    criu_.emplace(std::move(*found));
    std::string form = (std::filesystem::temp_directory_path() / "stasis-criu-XXXXXX").string();
    dir_ = ::mkdtemp(form.data());
    for (const char* name : {"images", "log", "target"})
      std::filesystem::create_directory(dir_ / name);
    images_ = open_dir("images");
    log_ = open_dir("log");
  }
  void TearDown() override {
    if (dir_.empty()) return;
    if (HasFailure()) {
      GTEST_LOG_(INFO) << "kept for a look: " << dir_;
      return;
    }
    std::filesystem::remove_all(dir_);
  }

  UniqueFd open_dir(const char* name) const {
    auto fd = open_file(AT_FDCWD, (dir_ / name).string(), O_RDONLY | O_DIRECTORY);
    EXPECT_TRUE(fd);
    return std::move(*fd);
  }
  std::string target_dir() const { return (dir_ / "target").string(); }

  Result<void> dump(
      const Target& target, const CriuOptions& options = {},
      const std::function<Result<void>()>& complete = [] { return Result<void>(); }) {
    DumpRequest request{target.pid(), images_, log_, options};
    request.log_path = (dir_ / "log/dump.log").string();
    request.leave_running = leave_running_;
    request.deadline = deadline_;
    return criu_->dump(request, complete, interrupt_);
  }
  Result<RestoredTree> restore(Pid root, const CriuOptions& options = {},
                               const std::function<Result<void>()>& restored = {}) {
    RestoreRequest request{images_, log_, "restore.log", options};
    request.root = root;
    request.pids = pids_.empty() ? std::vector<Pid>{root} : pids_;
    request.threads = threads_;
    request.deadline = deadline_;
    request.log_path = [this] { return (dir_ / "log/restore.log").string(); };
    return criu_->restore(request, restored, interrupt_);
  }
  // The dump fails with this in its message, and the target runs on.
  void expect_dump_fails(Target& target, const CriuOptions& options, const std::string& message,
                         const std::string& remedy) {
    auto dumped = dump(target, options);
    ASSERT_FALSE(dumped);
    EXPECT_NE(dumped.error().message.find(message), std::string::npos)
        << dumped.error().to_string();
    EXPECT_NE(dumped.error().remedy.find(remedy), std::string::npos) << dumped.error().remedy;
    EXPECT_NE(dumped.error().remedy.find("dump.log"), std::string::npos);
    EXPECT_TRUE(target.runs());
  }

  std::optional<Criu> criu_;
  std::filesystem::path dir_;
  UniqueFd images_;
  UniqueFd log_;
  Interrupt interrupt_;
  bool leave_running_ = false;
  std::vector<Tid> threads_;
  std::vector<Pid> pids_;  // of the image, where they are more than the root
  std::chrono::milliseconds deadline_{60000};
};

}  // namespace stasis
