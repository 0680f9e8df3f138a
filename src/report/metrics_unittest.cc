#include "report/metrics.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace stasis {
namespace {

class Metrics : public testing::Test {
 protected:
  Metrics() : file_(::geteuid() == 0 ? "stasis.prom" : fmt::format("stasis-{}.prom", ::geteuid())) {
    std::string form = testing::TempDir() + "metrics_XXXXXX";
    top_ = ::mkdtemp(form.data());
    auto opened = open_metrics(top_);
    if (opened) dir_ = std::move(*opened);
  }
  ~Metrics() override { std::filesystem::remove_all(top_); }

  std::string path() const { return top_ + "/" + file_; }
  std::string text() const {
    std::ifstream in(path());
    std::stringstream all;
    all << in.rdbuf();
    return all.str();
  }
  // The value of a sample; empty if it is not there.
  std::string value(const std::string& name, const std::string& labels) const {
    const std::string begin =
        fmt::format("\n{}{{uid=\"{}\",verb=\"dump\"{}}} ", name, ::geteuid(), labels);
    const std::string all = text();
    const std::size_t at = all.find(begin);
    if (at == std::string::npos) return {};
    return all.substr(at + begin.size(), all.find('\n', at + 1) - at - begin.size());
  }

  std::string top_;
  std::string file_;
  UniqueFd dir_;
};

OperationFigures figures() {
  OperationFigures out;
  out.total = Seconds(0.75);
  out.downtime = Seconds(0.2);
  out.phases = {{"lock", 0.25}, {"a \"b\"", 0.5}};
  out.gpu_bytes = 1 << 20;
  out.image_bytes = 3 << 20;
  return out;
}

TEST_F(Metrics, AreSummedUp) {
  for (int i = 0; i < 3; ++i)
    ASSERT_TRUE(add_metrics(dir_, "dump", figures()));
  ASSERT_TRUE(add_metrics(dir_, "dump", std::optional<OperationFigures>()));
  ASSERT_TRUE(add_metrics(dir_, "dump", Error{ErrorCode::kTimeout, "too late", {}}));
  EXPECT_EQ(value("stasis_operations_total", ",result=\"ok\""), "4");
  EXPECT_EQ(value("stasis_operations_total", ",result=\"timeout\""), "1");
  EXPECT_EQ(value("stasis_operation_duration_seconds_count", ""), "3");
  EXPECT_EQ(value("stasis_operation_duration_seconds_sum", ""), "2.25");
  EXPECT_EQ(value("stasis_operation_duration_seconds_bucket", ",le=\"0.5\""), "0");
  EXPECT_EQ(value("stasis_operation_duration_seconds_bucket", ",le=\"1\""), "3");
  EXPECT_EQ(value("stasis_operation_duration_seconds_bucket", ",le=\"+Inf\""), "3");
  EXPECT_EQ(value("stasis_downtime_seconds_bucket", ",le=\"0.25\""), "3");
  EXPECT_EQ(value("stasis_phase_seconds_total", ",phase=\"a \\\"b\\\"\""), "1.5");
  EXPECT_EQ(value("stasis_gpu_bytes_total", ""), "3145728");
  EXPECT_EQ(value("stasis_image_bytes_total", ""), "9437184");
  EXPECT_EQ(value("stasis_written_bytes_total", ""), "");
  EXPECT_NE(value("stasis_last_success_timestamp_seconds", ""), "");
  EXPECT_NE(value("stasis_last_failure_timestamp_seconds", ""), "");
}

TEST_F(Metrics, HaveEachFamilyOnceWithItsType) {
  ASSERT_TRUE(add_metrics(dir_, "dump", figures()));
  ASSERT_TRUE(add_metrics(dir_, "restore", figures()));
  const std::string all = text();
  for (const char* head :
       {"# TYPE stasis_operations_total counter\n", "# TYPE stasis_downtime_seconds histogram\n",
        "# TYPE stasis_last_success_timestamp_seconds gauge\n"}) {
    const std::size_t first = all.find(head);
    ASSERT_NE(first, std::string::npos) << head;
    EXPECT_EQ(all.find(head, first + 1), std::string::npos) << head;
  }
}

TEST_F(Metrics, OfSeveralAtOnceAreAllThere) {
  constexpr int kThreads = 4;
  constexpr int kEach = 10;
  std::vector<std::jthread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      for (int k = 0; k < kEach; ++k)
        EXPECT_TRUE(add_metrics(dir_, "dump", figures()));
    });
  threads.clear();
  EXPECT_EQ(value("stasis_operations_total", ",result=\"ok\""), std::to_string(kThreads * kEach));
}

TEST_F(Metrics, LeaveOutWhatIsNotOurs) {
  std::ofstream(path()) << "other 1\nstasis_operations_total{uid=\"0\"} x\nstasis_strange{} 1\n";
  ASSERT_TRUE(add_metrics(dir_, "dump", figures()));
  EXPECT_EQ(text().find("other"), std::string::npos);
  EXPECT_EQ(text().find("strange"), std::string::npos);
  EXPECT_EQ(value("stasis_operations_total", ",result=\"ok\""), "1");
}

TEST_F(Metrics, WriteThroughNoLinkAndNoFifo) {
  const std::string other = top_ + "/other";
  std::ofstream(other) << "as it was";
  ASSERT_EQ(::symlink(other.c_str(), path().c_str()), 0);
  EXPECT_FALSE(add_metrics(dir_, "dump", figures()));
  std::ifstream in(other);
  std::string line;
  std::getline(in, line);
  EXPECT_EQ(line, "as it was");
  ASSERT_EQ(::unlink(path().c_str()), 0);
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  EXPECT_FALSE(add_metrics(dir_, "dump", figures()));
}

TEST_F(Metrics, AreWrittenBesideWhatCannotBeRemoved) {
  const std::string in_the_way = top_ + "/." + file_ + ".new";
  ASSERT_EQ(::mkdir(in_the_way.c_str(), 0755), 0);
  for (const auto* count : {"1", "2"}) {
    ASSERT_TRUE(add_metrics(dir_, "dump", figures()));
    EXPECT_EQ(value("stasis_operations_total", ",result=\"ok\""), count);
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(top_), {}), 2);
}

TEST_F(Metrics, DoNotWaitLongForAnothersLock) {
  const UniqueFd other(::open(top_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(::flock(other.get(), LOCK_EX), 0);
  const auto added = add_metrics(dir_, "dump", figures());
  ASSERT_FALSE(added);
  EXPECT_EQ(added.error().code, ErrorCode::kBusy);
}

TEST_F(Metrics, WantADirectory) {
  EXPECT_EQ(open_metrics(top_ + "/none").error().code, ErrorCode::kUsage);
}

}  // namespace
}  // namespace stasis
