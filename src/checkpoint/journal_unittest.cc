#include "checkpoint/journal.h"

#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fakes/child.h"

namespace stasis {
namespace {

using fakes::Child;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::StartsWith;

JournalRecord record(int root, std::vector<JournalTarget> targets = {}) {
  JournalRecord out;
  out.operation = Operation::kDump;
  out.root = Pid{root};
  out.image = "/images/\"one\"";
  out.targets = std::move(targets);
  return out;
}

class JournalTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-journal-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    top_ = name;
    dir_ = top_ / "state";
    ::setenv("STASIS_STATE_DIR", dir_.c_str(), 1);
  }
  void TearDown() override {
    ::unsetenv("STASIS_STATE_DIR");
    std::filesystem::remove_all(top_);
  }
  static std::vector<JournalEntry> entries() {
    auto all = read_journal();
    EXPECT_TRUE(all) << (all ? "" : all.error().message);
    return all ? std::move(*all) : std::vector<JournalEntry>();
  }
  // Another process that takes the journal and is killed.
  static void begin_and_die(const JournalRecord& what) {
    Child child([&] {
      auto journal = Journal::begin(what);
      if (journal) ::kill(::getpid(), SIGKILL);
      ::_exit(0);
    });
    EXPECT_EQ(child.wait(), -1) << "it was to be killed";
  }

  std::filesystem::path top_;
  std::filesystem::path dir_;
};

TEST_F(JournalTest, SaysWhatIsUnderWayUntilItIsOver) {
  EXPECT_THAT(entries(), IsEmpty());
  auto journal = Journal::begin(record(100, {{Pid{100}, 7, CudaState::kCheckpointed}}));
  ASSERT_TRUE(journal);
  auto all = entries();
  ASSERT_THAT(all, SizeIs(1));
  EXPECT_TRUE(all[0].under_way);
  EXPECT_EQ(all[0].record.operation, Operation::kDump);
  EXPECT_EQ(all[0].record.root, Pid{100});
  EXPECT_EQ(all[0].record.owner, own_id());
  EXPECT_EQ(all[0].record.image, "/images/\"one\"");
  ASSERT_THAT(all[0].record.targets, SizeIs(1));
  EXPECT_EQ(all[0].record.targets[0].start_ticks, 7U);
  EXPECT_EQ(all[0].record.targets[0].initial, CudaState::kCheckpointed);
  journal->finish();
  EXPECT_THAT(entries(), IsEmpty());
  EXPECT_TRUE(std::filesystem::is_empty(dir_)) << "nothing is left behind";
}

TEST_F(JournalTest, UpdatesReplaceTheTargets) {
  auto journal = Journal::begin(record(100));
  ASSERT_TRUE(journal);
  ASSERT_TRUE(journal->update({{Pid{100}, 1, CudaState::kRunning}}));
  ASSERT_TRUE(
      journal->update({{Pid{100}, 1, CudaState::kRunning}, {Pid{101}, 2, CudaState::kLocked}}));
  EXPECT_THAT(entries()[0].record.targets, SizeIs(2));
}

TEST_F(JournalTest, OneOperationAtAtimeOnOneRoot) {
  auto journal = Journal::begin(record(100));
  ASSERT_TRUE(journal);
  auto second = Journal::begin(record(100));
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kBusy);
  EXPECT_THAT(second.error().message, HasSubstr("stasis dump"));
  EXPECT_THAT(second.error().message, HasSubstr(std::to_string(::getpid())));
  EXPECT_TRUE(Journal::begin(record(200))) << "another root is free";
  journal->finish();
  EXPECT_TRUE(Journal::begin(record(100)));
}

TEST_F(JournalTest, OneOperationAtAtimeOnOneTarget) {
  const JournalTarget shared{Pid{101}, 5, CudaState::kRunning};
  auto journal = Journal::begin(record(100));
  ASSERT_TRUE(journal);
  ASSERT_TRUE(journal->update({shared}));
  auto other = Journal::begin(record(101));
  ASSERT_TRUE(other);
  auto claimed = other->update({shared});
  ASSERT_FALSE(claimed);
  EXPECT_EQ(claimed.error().code, ErrorCode::kBusy);
  // The number alone is not the process.
  EXPECT_TRUE(other->update({{Pid{101}, 6, CudaState::kRunning}}));
  journal->finish();
  EXPECT_TRUE(other->update({shared}));
}

TEST_F(JournalTest, ArecordOutlivesAholderThatIsKilled) {
  begin_and_die(record(100, {{Pid{100}, 1, CudaState::kRunning}}));
  auto all = entries();
  ASSERT_THAT(all, SizeIs(1));
  EXPECT_FALSE(all[0].under_way) << "the kernel drops the lock of the dead";
  auto adopted = Journal::adopt(Pid{100});
  ASSERT_TRUE(adopted);
  ASSERT_TRUE(*adopted);
  EXPECT_THAT((*adopted)->record().targets, SizeIs(1));
  EXPECT_TRUE(entries()[0].under_way);
  EXPECT_EQ((*adopted)->record().owner, own_id()) << "who is at work on it now";
  EXPECT_EQ(worker_name((*adopted)->record()), "stasis recover");
  EXPECT_EQ(Journal::adopt(Pid{100}).error().code, ErrorCode::kBusy);
  (*adopted)->finish();
  EXPECT_THAT(entries(), IsEmpty());
  auto nothing = Journal::adopt(Pid{100});
  ASSERT_TRUE(nothing);
  EXPECT_FALSE(*nothing) << "another tool has recovered it";
  EXPECT_TRUE(std::filesystem::is_empty(dir_));
}

// A second operation on the same root must not make us forget whom the first has frozen.
TEST_F(JournalTest, WhatAkilledOperationLeftIsKept) {
  const JournalTarget mine{Pid{100}, 1, CudaState::kRunning};
  const JournalTarget other{Pid{101}, 2, CudaState::kRunning};
  begin_and_die(record(100, {mine, other}));
  auto journal = Journal::begin(record(100, {mine}));
  ASSERT_TRUE(journal);
  EXPECT_THAT(journal->inherited(), SizeIs(2));
  EXPECT_THAT(entries()[0].record.targets, SizeIs(2)) << "also if we are killed now";
  ASSERT_TRUE(journal->update({mine}));
  journal->finish();
  auto all = entries();
  ASSERT_THAT(all, SizeIs(1));
  EXPECT_FALSE(all[0].under_way);
  ASSERT_THAT(all[0].record.targets, SizeIs(1));
  EXPECT_EQ(all[0].record.targets[0].pid, Pid{101});
}

TEST_F(JournalTest, DamagedRecordsAreLeftOutAndDoNotHideOthers) {
  ASSERT_TRUE(journal_directory());
  for (const char* text :
       {"", "{", "[]", "null", "{\"operation\":1}", "\xff\xfe",
        R"({"operation":"dump","root":"x","owner":1,"image":"","targets":[]})",
        R"({"operation":"dump","root":5,"owner":1,"image":"","targets":[{"pid":1}]})",
        R"({"operation":"dump","root":5,"owner":1,"image":"",
            "targets":[{"pid":1,"start_ticks":1,"initial":"asleep"}]})"}) {
    std::ofstream(dir_ / ("5" + pid_namespace_mark() + ".json")) << text;
    auto journal = Journal::begin(record(100));
    ASSERT_TRUE(journal);
    EXPECT_THAT(entries(), SizeIs(1)) << text;
    journal->finish();
  }
}

TEST_F(JournalTest, ItsDirectoryIsForThisUserAlone) {
  ASSERT_TRUE(journal_directory());
  struct stat info {};
  ASSERT_EQ(::stat(dir_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700U);
  // One that others may write to could be any user's.
  ::chmod(dir_.c_str(), 0777);
  EXPECT_EQ(journal_directory().error().code, ErrorCode::kNotPermitted);
  ::chmod(dir_.c_str(), 0700);
  std::filesystem::create_directory_symlink(dir_, top_ / "link");
  ::setenv("STASIS_STATE_DIR", (top_ / "link").c_str(), 1);
  EXPECT_EQ(journal_directory().error().code, ErrorCode::kNotPermitted);
  ::setenv("STASIS_STATE_DIR", (top_ / "no/such/parent").c_str(), 1);
  EXPECT_FALSE(journal_directory());
}

// The folder's owner renames it, between the look and the reading.
TEST_F(JournalTest, RootsIsInNoFolderOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "files of two users need root";
  constexpr uid_t kAlice = 65533;
  const auto home = top_ / "home";
  std::filesystem::create_directory(home);
  ::setenv("STASIS_STATE_DIR", (home / "state").c_str(), 1);
  EXPECT_TRUE(journal_directory());
  ASSERT_EQ(::chown(home.c_str(), kAlice, kAlice), 0);
  const auto refused = journal_directory();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kNotPermitted);
  EXPECT_THAT(refused.error().message, HasSubstr("belongs to user 65533"));
  // Where all may make entries, and only their owner may rename them.
  ASSERT_EQ(::chown(home.c_str(), 0, 0), 0);
  ASSERT_EQ(::chmod(home.c_str(), 0777), 0);
  EXPECT_FALSE(journal_directory());
  ASSERT_EQ(::chmod(home.c_str(), 01777), 0);
  EXPECT_TRUE(journal_directory());
}

TEST_F(JournalTest, NumbersOfOtherPidNamespacesAreNotOurs) {
  ASSERT_TRUE(journal_directory());
  auto other = R"({"operation":"dump","root":100,"owner":1,"image":"",
      "targets":[{"pid":100,"start_ticks":0,"initial":"running"}]})";
  std::ofstream(dir_ / "100@1.json") << other;
  EXPECT_THAT(entries(), SizeIs(0));
  auto journal = Journal::begin(record(100));
  ASSERT_TRUE(journal) << journal.error().message;
  EXPECT_TRUE(journal->inherited().empty());
  journal->finish();
  EXPECT_TRUE(std::filesystem::exists(dir_ / "100@1.json"));
}

TEST_F(JournalTest, FollowsNoLinks) {
  ASSERT_TRUE(journal_directory());
  std::ofstream(top_ / "precious") << "content";
  std::filesystem::create_symlink(top_ / "precious",
                                  dir_ / ("100" + pid_namespace_mark() + ".json.new"));
  EXPECT_FALSE(Journal::begin(record(100)));
  std::string text;
  std::ifstream(top_ / "precious") >> text;
  EXPECT_EQ(text, "content");
}

// A newer version may have written it: recovery brings its targets back all the same.
TEST_F(JournalTest, AnOperationThatThisVersionDoesNotKnowKeepsItsName) {
  ASSERT_TRUE(journal_directory());
  const auto file = dir_ / ("100" + pid_namespace_mark() + ".json");
  for (const std::string name : {"hibernate", "criu hibernate", "dump2", "Dump", ""}) {
    std::ofstream(file) << fmt::format(
        R"({{"operation":"{}","root":100,"owner":1,"image":"/i",
             "targets":[{{"pid":100,"start_ticks":0,"initial":"running"}}]}})",
        name);
    const auto all = entries();
    ASSERT_THAT(all, SizeIs(1));
    const bool is_criu = name.starts_with("criu ");
    const Error told = busy(all[0].record, Pid{100});
    EXPECT_THAT(told.message,
                StartsWith(fmt::format("`{}{}` (process 1)", is_criu ? "" : "stasis ", name)));
    EXPECT_EQ(told.remedy.find("stasis recover 100") != std::string::npos, is_criu);
    auto adopted = Journal::adopt(Pid{100});
    ASSERT_TRUE(adopted && *adopted);
    ASSERT_TRUE((*adopted)->update((*adopted)->record().targets));
    std::string text;
    std::getline(std::ifstream(file), text);
    EXPECT_THAT(text, HasSubstr(fmt::format(R"("operation":"{}")", name)));
    EXPECT_THAT(text, HasSubstr(R"("recovered":true)"));
    (*adopted)->finish();
  }
}

// Many tools at once, on the same root: each holds it alone, and none gets stuck.
TEST_F(JournalTest, HoldersTakeTurns) {
  std::atomic<int> inside{0};
  std::atomic<int> turns{0};
  std::atomic<bool> shared{false};
  {
    std::vector<std::jthread> threads;
    threads.reserve(4);
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int turn = 0; turn < 20;) {
          auto journal = Journal::begin(record(100));
          if (!journal) {
            if (journal.error().code != ErrorCode::kBusy) return;
            continue;
          }
          if (++inside != 1) shared = true;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          --inside;
          journal->finish();
          ++turns;
          ++turn;
        }
      });
    }
  }
  EXPECT_FALSE(shared) << "two held it at the same time";
  EXPECT_EQ(turns, 80);
}

TEST_F(JournalTest, KnowsTheCriuAndWhomItEnds) {
  {
    auto journal = Journal::begin(record(7, {{Pid{8}, 80, CudaState::kRunning}}));
    ASSERT_TRUE(journal);
    ASSERT_TRUE(journal->note_criu({Pid{9}, 90}, false));
    ASSERT_TRUE(journal->note_ending({{Pid{7}, 70}, {Pid{8}, 80}}));
  }
  const auto left = entries();
  ASSERT_THAT(left, SizeIs(1));
  ASSERT_TRUE(left[0].record.criu);
  EXPECT_EQ(left[0].record.criu->pid, Pid{9});
  EXPECT_EQ(left[0].record.criu->start_ticks, 90U);
  ASSERT_THAT(left[0].record.ending, SizeIs(2));
  EXPECT_EQ(left[0].record.ending[1].pid, Pid{8});
  // Half of it may have ended: that is for recovery.
  auto again = Journal::begin(record(7));
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, ErrorCode::kBusy);
  EXPECT_THAT(again.error().remedy, HasSubstr("stasis recover 7"));
  EXPECT_THAT(entries(), SizeIs(1));
  auto adopted = Journal::adopt(Pid{7});
  ASSERT_TRUE(adopted && *adopted);
  (*adopted)->finish();
  EXPECT_THAT(entries(), IsEmpty());
}

TEST_F(JournalTest, WhatAKilledToolWasWritingIsSwept) {
  auto journal = Journal::begin(record(7));
  ASSERT_TRUE(journal);
  const std::string mark = pid_namespace_mark();
  for (const char* name : {"/5", "/7"}) {
    std::ofstream(dir_.string() + name + mark + ".json.new") << "{";
  }
  std::ofstream(dir_.string() + "/6" + mark + ".json.lock").close();
  std::ofstream(dir_.string() + "/precious").close();
  sweep_journal();
  EXPECT_FALSE(std::filesystem::exists(dir_.string() + "/5" + mark + ".json.new"));
  EXPECT_FALSE(std::filesystem::exists(dir_.string() + "/6" + mark + ".json.lock"));
  EXPECT_TRUE(std::filesystem::exists(dir_.string() + "/7" + mark + ".json.new")) << "in use";
  EXPECT_TRUE(std::filesystem::exists(dir_.string() + "/7" + mark + ".json"));
  EXPECT_TRUE(std::filesystem::exists(dir_.string() + "/precious"));
}

}  // namespace
}  // namespace stasis
