// Long because one fixture stands for the parts of all tests.
#include "group/group_part.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/threads.h"
#include "base/units.h"
#include "group/group_directory.h"

namespace stasis {
namespace {

namespace fs = std::filesystem;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using testing::AnyOf;
using testing::Contains;
using testing::Each;
using testing::Eq;
using testing::HasSubstr;

class GroupPartTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-group-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  std::string path() const { return root_ / "group"; }

  GroupPartOptions options(std::uint32_t parts, const std::string& name) const {
    GroupPartOptions out;
    out.operation = Operation::kSuspend;
    out.parts = parts;
    out.name = name;
    out.timeout = timeout_;
    out.silence = silence_;
    return out;
  }
  Result<std::unique_ptr<GroupPart>> join(const GroupPartOptions& options) {
    STASIS_TRY_ASSIGN(auto directory, GroupDirectory::open(path()));
    return GroupPart::join(std::move(directory), options, interrupt_);
  }

  // What has become of a part: nothing is suspended, or all is.
  struct End {
    bool done = false;
    std::string message;
    ErrorCode code{};
  };
  enum class Step { kJoined, kReady, kRest, kDone };
  // A stub for the local part, and what goes wrong with it.
  struct Local {
    std::function<void(Step)> before;
    std::function<Result<void>(Step)> fails;
  };
  static End ended(GroupPart& part, Error why) {
    const Error told = part.give_up(std::move(why));
    return {false, told.to_string(), told.code};
  }
  End run(const std::string& name, std::uint32_t parts) { return run(name, parts, Local()); }
  End run(const std::string& name, std::uint32_t parts, const Local& local) {
    auto joined = join(options(parts, name));
    if (!joined) return {false, joined.error().to_string(), joined.error().code};
    GroupPart& part = **joined;
    const auto step = [&](Step which) {
      if (local.before) local.before(which);
      return local.fails ? local.fails(which) : Result<void>();
    };
    auto done = step(Step::kJoined);
    if (done) done = part.wait_for_all();
    if (done) done = step(Step::kReady);
    for (bool rests = false; done && !rests;) {
      auto moment = part.wait_until_quiesced();
      if (!moment)
        done = fail(std::move(moment.error()));
      else if (*moment)
        std::this_thread::sleep_for(**moment);
      else
        rests = true;
    }
    if (done) done = step(Step::kRest);
    if (done) done = part.finish();
    if (done) return {true, {}, {}};
    return ended(part, std::move(done.error()));
  }
  // That many parts at once, of which some are not as the others.
  std::vector<End> run_all(std::uint32_t parts) { return run_all(parts, {}); }
  std::vector<End> run_all(std::uint32_t parts, const std::map<std::size_t, Local>& odd) {
    std::vector<End> out(parts);
    at_once(parts, [&](std::size_t i) {
      const auto found = odd.find(i);
      out[i] = run(fmt::format("node{}", i), parts, found == odd.end() ? Local() : found->second);
    });
    return out;
  }
  void wait_for_lead() const {
    while (!fs::exists(fs::path(path()) / "lead"))
      std::this_thread::sleep_for(milliseconds(1));
  }
  static Result<void> broken() { return fail(ErrorCode::kOutOfHostMemory, "no room"); }

  milliseconds timeout_{20000};
  milliseconds silence_{10000};
  fs::path root_;
  Interrupt interrupt_;
};

TEST_F(GroupPartTest, ManyPartsAgreeAgainAndAgainInOneDirectory) {
  for (int i = 0; i < 10; ++i) {
    for (const End& end : run_all(4))
      EXPECT_TRUE(end.done) << end.message;
    EXPECT_FALSE(fs::exists(path())) << "the last part removes it";
  }
}

TEST_F(GroupPartTest, OnePartIsAGroup) { EXPECT_TRUE(run("alone", 1).done); }

TEST_F(GroupPartTest, APartThatFailsAtAnyStepBringsAllBackAndIsNamed) {
  for (const Step at : {Step::kJoined, Step::kReady, Step::kRest}) {
    for (const std::size_t who : {0U, 1U, 2U}) {
      Local local;
      local.fails = [at](Step step) { return step == at ? broken() : Result<void>(); };
      const auto ends = run_all(3, {{who, local}});
      for (std::size_t i = 0; i < ends.size(); ++i) {
        EXPECT_FALSE(ends[i].done);
        EXPECT_EQ(ends[i].code, ErrorCode::kOutOfHostMemory);
        EXPECT_THAT(ends[i].message, HasSubstr("no room"));
        if (i != who) {
          EXPECT_THAT(ends[i].message, HasSubstr(fmt::format("part node{}", who)));
        }
      }
      EXPECT_FALSE(fs::exists(path()));
    }
  }
}

TEST_F(GroupPartTest, APartThatComesAfterAnotherHasFailedHearsOfIt) {
  Local local;
  local.fails = [](Step) { return broken(); };
  std::vector<End> ends(2);
  at_once(2, [&](std::size_t i) {
    if (i == 1) std::this_thread::sleep_for(milliseconds(500));
    ends[i] = run(fmt::format("node{}", i), 2, i == 0 ? local : Local());
  });
  EXPECT_THAT(ends[0].message, HasSubstr("no room"));
  EXPECT_EQ(ends[1].code, ErrorCode::kOutOfHostMemory);
  EXPECT_THAT(ends[1].message, HasSubstr("given up by part node0: no room"));
  EXPECT_FALSE(fs::exists(path()));
}

TEST_F(GroupPartTest, APartThatHasFailedWaitsForNoneThatDoesNotCome) {
  Local local;
  local.fails = [](Step) { return broken(); };
  const auto start = Clock::now();
  EXPECT_THAT(run("node0", 2, local).message, HasSubstr("no room"));
  EXPECT_LT(since(start), std::chrono::seconds(5));
  timeout_ = milliseconds(500);
  EXPECT_THAT(run("node0", 2, local).message, HasSubstr("no room"));
  // Ctrl-C while it waits.
  timeout_ = milliseconds(20000);
  local.before = [this](Step) { interrupt_.request(SIGINT); };
  const auto again = Clock::now();
  EXPECT_FALSE(run("node0", 2, local).done);
  EXPECT_LT(since(again), std::chrono::seconds(2));
}

TEST_F(GroupPartTest, WithoutOnePartAllGoOnInTimeAndSayWhoCame) {
  timeout_ = milliseconds(300);
  const auto start = Clock::now();
  std::vector<End> ends(2);
  at_once(2, [&](std::size_t i) { ends[i] = run(fmt::format("node{}", i), 3); });
  EXPECT_LT(since(start), std::chrono::seconds(5));
  for (const End& end : ends) {
    EXPECT_FALSE(end.done);
    EXPECT_EQ(end.code, ErrorCode::kTimeout);
    EXPECT_THAT(end.message, HasSubstr("2 of 3 parts have come within 300 ms: node0, node1"));
  }
}

TEST_F(GroupPartTest, OneThatDoesNotComeToRestIsNamedAndAllGoOn) {
  timeout_ = milliseconds(500);
  Local slow;
  slow.before = [](Step step) {
    if (step == Step::kReady) std::this_thread::sleep_for(std::chrono::seconds(2));
  };
  for (const std::size_t who : {0U, 1U, 2U}) {
    for (const End& end : run_all(3, {{who, slow}})) {
      EXPECT_FALSE(end.done);
      EXPECT_EQ(end.code, ErrorCode::kTimeout);
      EXPECT_THAT(end.message, HasSubstr("was not quiesced within 500 ms"));
    }
  }
}

TEST_F(GroupPartTest, OneThatIsSlowAtAnyStepIsWaitedFor) {
  for (const Step at : {Step::kJoined, Step::kReady, Step::kRest}) {
    Local slow;
    slow.before = [at](Step step) {
      if (step == at) std::this_thread::sleep_for(milliseconds(700));
    };
    for (const End& end : run_all(3, {{1, slow}}))
      EXPECT_TRUE(end.done) << end.message;
  }
}

TEST_F(GroupPartTest, OneThatIsInterruptedTellsTheOthers) {
  Local asks;
  asks.before = [this](Step step) {
    if (step == Step::kReady) interrupt_.request(SIGTERM);
  };
  // All have the same interrupt here; none may stay.
  for (const End& end : run_all(3, {{2, asks}})) {
    EXPECT_FALSE(end.done);
    EXPECT_THAT(end.code, AnyOf(Eq(ErrorCode::kInterrupted), Eq(ErrorCode::kTimeout)));
  }
}

// A part of a process of its own, which is stopped for good at a step: its files do not change any
// more, as when it was killed or its node cut off.
TEST_F(GroupPartTest, OneThatIsKilledAtAnyStepIsNamedAndAllGoBack) {
  silence_ = milliseconds(1000);
  for (const bool first : {true, false}) {
    for (const Step at : {Step::kJoined, Step::kReady, Step::kRest}) {
      const auto dies = [&] {
        Local local;
        local.before = [at](Step step) {
          if (step == at) ::kill(::getpid(), SIGKILL);
        };
        // Before this process has other threads, whose locks it would have as they are now.
        const pid_t child = ::fork();
        if (child == 0) {
          if (!first) wait_for_lead();
          (void)run("killed", 3, local);
          ::_exit(1);
        }
        return child;
      };
      const pid_t child = dies();
      std::vector<End> ends(2);
      if (first) wait_for_lead();  // it leads
      at_once(2, [&](std::size_t i) { ends[i] = run(fmt::format("node{}", i), 3); });
      for (const End& end : ends) {
        EXPECT_FALSE(end.done);
        EXPECT_EQ(end.code, ErrorCode::kTimeout) << end.message;
        EXPECT_THAT(end.message, AnyOf(HasSubstr("nothing was heard of part killed for 1000 ms"),
                                       HasSubstr("part killed says nothing for 1000 ms")));
      }
      int status = 0;
      EXPECT_EQ(::waitpid(child, &status, WNOHANG), child) << "it hangs";
      EXPECT_TRUE(WIFSIGNALED(status)) << "it ended with status " << status;
      ::kill(child, SIGKILL);
      fs::remove_all(path());
    }
  }
}

// Before the time in which a part has to say something is over, too.
TEST_F(GroupPartTest, OneThatLeadsAndIsKilledIsNamedWhereTheTimeIsOver) {
  timeout_ = milliseconds(2500);
  const pid_t child = ::fork();
  if (child == 0) {
    Local local;
    local.before = [](Step) { ::kill(::getpid(), SIGKILL); };
    (void)run("killed", 2, local);
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  const End end = run("node0", 2);
  EXPECT_EQ(end.code, ErrorCode::kTimeout);
  EXPECT_THAT(end.message,
              HasSubstr("ready within 2500 ms: killed (of which nothing is heard for "));
}

// While others go on writing to it.
void remove_all_of(const std::string& folder) {
  for (std::error_code failed; fs::exists(folder); std::this_thread::sleep_for(milliseconds(1)))
    fs::remove_all(folder, failed);
}

TEST_F(GroupPartTest, WhereTheDirectoryIsGoneAllGoBack) {
  silence_ = milliseconds(500);
  Local removes;
  removes.before = [this](Step step) {
    if (step != Step::kRest) return;
    remove_all_of(path());
  };
  const auto start = Clock::now();
  const std::clock_t before = std::clock();
  // One that is not waiting for the others at that time is stopped.
  std::jthread busy([this, start] {
    const std::string there = root_ / "other";
    auto joined =
        GroupPart::join(std::move(*GroupDirectory::open(there)), options(1, "alone"), interrupt_);
    ASSERT_TRUE(joined && (*joined)->wait_for_all());
    remove_all_of(there);
    while (!(*joined)->interrupt().requested() && since(start) < std::chrono::seconds(20))
      std::this_thread::sleep_for(milliseconds(10));
    const Error told = (*joined)->give_up({ErrorCode::kInterrupted, "stopped", {}});
    EXPECT_THAT(told.to_string(), HasSubstr("nothing was heard of part alone"));
    EXPECT_THAT(told.to_string(), HasSubstr("the other parts could not be told"));
  });
  for (const End& end : run_all(3, {{1, removes}})) {
    EXPECT_FALSE(end.done);
    EXPECT_EQ(end.code, ErrorCode::kTimeout);
    EXPECT_THAT(end.message, HasSubstr("the other parts could not be told"));
  }
  busy.join();
  const Seconds used(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC);
  EXPECT_LT(used, since(start) / 2) << "it is not asked again without a pause";
}

TEST_F(GroupPartTest, WhatThePartsDisagreeAboutIsRefused) {
  std::vector<End> ends(2);
  at_once(2, [&](std::size_t i) { ends[i] = run(fmt::format("node{}", i), i == 0 ? 2 : 3); });
  for (const End& end : ends) {
    EXPECT_FALSE(end.done);
    EXPECT_EQ(end.code, ErrorCode::kUsage) << end.message;
  }
}

TEST_F(GroupPartTest, AnOperationThatThisVersionDoesNotKnowIsAnotherOne) {
  timeout_ = milliseconds(1000);
  const std::string too_long(33, 'x');
  for (const std::string& name : {std::string("hibernate"), std::string(), too_long}) {
    ASSERT_TRUE(GroupDirectory::open(path()));
    std::ofstream(fs::path(path()) / "part.other") << fmt::format(
        R"({{"operation":"{}","parts":2,"stage":"coming","round":0,"beat":1,"left":true,)"
        R"("dump_id":"","code":"","why":""}})",
        name);
    const End end = run("node", 2);
    EXPECT_FALSE(end.done);
    // What is no record counts as if it were not there yet.
    EXPECT_THAT(end.message, name == too_long
                                 ? HasSubstr("not all parts were ready")
                                 : HasSubstr(fmt::format("part other is one of 2 of a {}, and part "
                                                         "node one of 2 of a suspend",
                                                         name)));
    fs::remove_all(path());
  }
}

TEST_F(GroupPartTest, AConnectionHasToBeKnownToBothEnds) {
  const auto dump = [&](const std::vector<GroupLinks>& links) {
    std::vector<std::string> said(links.size());
    at_once(links.size(), [&](std::size_t i) {
      auto own = options(static_cast<std::uint32_t>(links.size()), fmt::format("node{}", i));
      own.operation = Operation::kDump;
      auto joined = join(own);
      if (!joined) {
        said[i] = joined.error().to_string();
        return;
      }
      GroupPart& part = **joined;
      auto done = part.wait_for_all();
      for (bool rests = false; done && !rests;) {
        auto moment = part.wait_until_quiesced();
        rests = moment && !*moment;
        if (!moment) done = fail(std::move(moment.error()));
      }
      if (done) done = part.agree_on_links(links[i]);
      if (done) done = part.finish();
      if (!done) said[i] = part.give_up(std::move(done.error())).to_string();
    });
    EXPECT_FALSE(fs::exists(path()));
    return said;
  };
  const GroupLinks one{{"10.0.0.1:1 10.0.0.2:2", "127.0.0.1:1 127.0.0.1:2 mark"}};
  const GroupLinks other{{"10.0.0.2:2 10.0.0.1:1", "127.0.0.1:2 127.0.0.1:1 mark"}};
  for (const std::string& said : dump({one, other}))
    EXPECT_EQ(said, "");
  GroupLinks elsewhere = other;
  elsewhere.established.back() = "127.0.0.1:2 127.0.0.1:1 another";
  GroupLinks half = other;
  half.established.pop_back();
  // Both ends are of one part, as those of two networks of the same addresses.
  GroupLinks within = one;
  within.established.insert(within.established.end(), other.established.begin(),
                            other.established.end());
  for (const auto& links :
       {std::vector{one, elsewhere}, std::vector{one, half}, std::vector{within, GroupLinks{}}}) {
    for (const std::string& said : dump(links))
      EXPECT_THAT(said, HasSubstr("leads to no other part"));
  }
  GroupLinks closing{{}, other.established};
  closing.closing.emplace_back("10.0.0.2:9 10.0.0.7:9");
  for (const std::string& said : dump({one, closing}))
    EXPECT_EQ(said, "");
  GroupLinks free = one;
  free.may_lead_out = true;
  for (const std::string& said : dump({free, GroupLinks{}}))
    EXPECT_EQ(said, "");
}

TEST_F(GroupPartTest, ARestoreIsOfOneDumpAndHasNoDeadlineOnceAllHaveCome) {
  const auto restore = [&](const std::vector<std::string>& ids) {
    std::vector<std::string> said(ids.size());
    at_once(ids.size(), [&](std::size_t i) {
      auto own = options(static_cast<std::uint32_t>(ids.size()), fmt::format("node{}", i));
      own.operation = Operation::kRestore;
      own.dump_id = ids[i];
      auto joined = join(own);
      if (!joined) {
        said[i] = joined.error().to_string();
        return;
      }
      GroupPart& part = **joined;
      auto done = part.wait_for_all();
      if (done && i == 1) std::this_thread::sleep_for(2 * timeout_);
      if (done) {
        // No part that stands is let go on for a moment.
        const auto moment = part.wait_until_quiesced();
        EXPECT_TRUE(!moment || !*moment);
        if (!moment) done = fail(Error(moment.error()));
      }
      if (done) done = part.finish();
      if (!done) said[i] = part.give_up(std::move(done.error())).to_string();
    });
    return said;
  };
  timeout_ = milliseconds(1000);
  for (const std::string& said : restore({"first", "first", "first"}))
    EXPECT_EQ(said, "");
  const auto said = restore({"first", "first", "second"});
  // Two may have seen it and gone before the third came.
  EXPECT_THAT(said, Each(AnyOf(HasSubstr("of different dumps"), HasSubstr("1 of 3 parts have"))));
  EXPECT_THAT(said, Contains(HasSubstr("of different dumps")).Times(testing::Ge(2)));
}

TEST_F(GroupPartTest, APartThatCannotReadItsImageTellsTheOthers) {
  GroupLinks links;
  links.established = {"10.0.0.1:7 10.0.0.2:9"};
  // Whichever of them leads, and however soon the other looks.
  for (int delay = -20; delay <= 20; delay += 4) {
    std::vector<std::string> said(2);
    at_once(2, [&](std::size_t i) {
      const bool fails = i == 0;
      std::this_thread::sleep_for(milliseconds(std::max(fails ? delay : -delay, 0)));
      auto own = options(2, fmt::format("node{}", i));
      own.operation = Operation::kRestore;
      if (!fails) own.dump_id = "first";
      if (!fails) own.links = links;
      auto joined = join(own);
      if (!joined) {
        said[i] = joined.error().to_string();
        return;
      }
      auto done = fails ? broken() : (*joined)->wait_for_all();
      if (done) {
        const auto moment = (*joined)->wait_until_quiesced();
        if (!moment) done = fail(Error(moment.error()));
      }
      ASSERT_FALSE(done);
      said[i] = (*joined)->give_up(std::move(done.error())).to_string();
    });
    EXPECT_THAT(said[0], HasSubstr("no room"));
    EXPECT_THAT(said[1], HasSubstr("given up by part node0: no room"));
  }
}

TEST_F(GroupPartTest, OneMoreThanThereAreHurtsNoOther) {
  timeout_ = milliseconds(2000);
  Local slow;
  std::atomic<bool> may = false;
  slow.before = [&](Step step) {
    while (step == Step::kRest && !may)
      std::this_thread::sleep_for(milliseconds(1));
  };
  std::vector<End> ends(2);
  at_once(
      2, [&](std::size_t i) { ends[i] = run(fmt::format("node{}", i), 2, slow); },
      [&] {
        while (!fs::exists(fs::path(path()) / "roster"))
          std::this_thread::sleep_for(milliseconds(1));
        const End end = run("late", 2);
        EXPECT_FALSE(end.done);
        EXPECT_THAT(end.code, AnyOf(Eq(ErrorCode::kUsage), Eq(ErrorCode::kBusy))) << end.message;
        may = true;
      });
  for (const End& end : ends)
    EXPECT_TRUE(end.done) << end.message;
}

TEST_F(GroupPartTest, TheSecondOfANameIsRefused) {
  timeout_ = milliseconds(1500);
  End first;
  {
    std::jthread waits([&] { first = run("same", 2); });
    while (!fs::exists(fs::path(path()) / "part.same"))
      std::this_thread::sleep_for(milliseconds(1));
    timeout_ = milliseconds(100);
    const End second = run("same", 2);
    EXPECT_FALSE(second.done);
    EXPECT_EQ(second.code, ErrorCode::kBusy) << second.message;
  }
  EXPECT_FALSE(first.done);
}

// --- The directory

TEST_F(GroupPartTest, ADirectoryThatOthersMayWriteToIsRefused) {
  fs::create_directory(path());
  ::chmod(path().c_str(), 0777);
  const auto opened = GroupDirectory::open(path());
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::kNotPermitted);
  fs::remove(path());
  fs::create_directory(root_ / "there");
  fs::create_symlink("there", path());
  EXPECT_FALSE(GroupDirectory::open(path())) << "a link is not followed";
}

TEST_F(GroupPartTest, ForgedFilesAreNeitherFollowedNorBelieved) {
  fs::create_directory(path());
  fs::permissions(path(), fs::perms::owner_all);
  auto directory = GroupDirectory::open(path());
  ASSERT_TRUE(directory);
  fs::create_symlink("/etc/passwd", fs::path(path()) / "link");
  EXPECT_FALSE((*directory)->read("link", 1 << 20));
  ASSERT_EQ(::mkfifo((fs::path(path()) / "fifo").c_str(), 0600), 0);
  EXPECT_FALSE((*directory)->read("fifo", 1 << 20));
  std::ofstream(fs::path(path()) / "large") << std::string(5000, 'x');
  EXPECT_FALSE((*directory)->read("large", 4096));
  const auto none = (*directory)->read("none", 4096);
  ASSERT_TRUE(none);
  EXPECT_FALSE(*none);
  // A lead and parts that are no records: the group does not come together, and none is harmed.
  timeout_ = milliseconds(500);
  silence_ = milliseconds(300);
  for (const char* text : {"", "{", "[]", R"({"leader":"x","beat":-1})", R"({"leader":""})"}) {
    std::ofstream(fs::path(path()) / "lead") << text;
    std::ofstream(fs::path(path()) / "part.x") << text;
    const End end = run("node0", 2);
    EXPECT_FALSE(end.done);
    EXPECT_EQ(end.code, ErrorCode::kTimeout) << end.message;
    fs::remove(fs::path(path()) / "rest");
    fs::remove(fs::path(path()) / "part.node0");
  }
}

TEST_F(GroupPartTest, WhatElseIsInTheDirectoryStays) {
  fs::create_directory(path());
  fs::permissions(path(), fs::perms::owner_all);
  std::ofstream(fs::path(path()) / "mine") << "kept";
  for (const End& end : run_all(2))
    EXPECT_TRUE(end.done) << end.message;
  EXPECT_TRUE(fs::exists(fs::path(path()) / "mine"));
  EXPECT_FALSE(fs::exists(fs::path(path()) / "lead"));
}

TEST_F(GroupPartTest, OneOfAllWhoClaimAtOnceSucceeds) {
  auto directory = GroupDirectory::open(path());
  ASSERT_TRUE(directory);
  std::atomic<int> won = 0;
  at_once(16, [&](std::size_t i) {
    const auto claimed = (*directory)->claim("it", std::to_string(i), std::to_string(i));
    if (claimed && *claimed) ++won;
  });
  EXPECT_EQ(won, 1);
}

TEST_F(GroupPartTest, NamesOfParts) {
  EXPECT_TRUE(is_part_name(default_part_name()));
  for (const char* good : {"a", "node-1.example_org"})
    EXPECT_TRUE(is_part_name(good));
  for (const char* bad : {"", "a/b", "..x/", "a b", "\x1b"})
    EXPECT_FALSE(is_part_name(bad));
  EXPECT_FALSE(is_part_name(std::string(65, 'a')));
}

// How long it takes that many parts to agree, all in threads of this process. STASIS_GROUP_PARTS is
// how many; for the page of results (docs/groups.md).
TEST_F(GroupPartTest, TimeToAgree) {
  const char* asked = std::getenv("STASIS_GROUP_PARTS");
  const std::uint32_t parts = asked != nullptr ? static_cast<std::uint32_t>(std::atoi(asked)) : 8;
  timeout_ = milliseconds(0);
  silence_ = milliseconds(60000);
  std::atomic<Clock::rep> last_ready = 0;
  std::atomic<Clock::rep> last_rest = 0;
  std::atomic<Clock::rep> first_ready = std::numeric_limits<Clock::rep>::max();
  std::vector<End> ends(parts);
  const auto start = Clock::now();
  Local local;
  local.before = [&](Step step) {
    const auto now = (Clock::now() - start).count();
    const auto raise = [&](std::atomic<Clock::rep>& to) {
      for (auto seen = to.load(); seen < now && !to.compare_exchange_weak(seen, now);) {
      }
    };
    if (step == Step::kReady) {
      raise(last_ready);
      for (auto seen = first_ready.load();
           seen > now && !first_ready.compare_exchange_weak(seen, now);) {
      }
    }
    if (step == Step::kRest) raise(last_rest);
  };
  at_once(parts, [&](std::size_t i) { ends[i] = run(fmt::format("node{}", i), parts, local); });
  for (const End& end : ends)
    ASSERT_TRUE(end.done) << end.message;
  const auto ms = [](Clock::rep ticks) {
    return std::chrono::duration<double, std::milli>(Clock::duration(ticks)).count();
  };
  fmt::print(
      "{} parts: all ready {:.0f} ms, quiesced {:.0f} ms later ({:.0f} after the first), all "
      "of it {:.0f} ms\n",
      parts, ms(last_ready), ms(last_rest) - ms(last_ready), ms(last_rest) - ms(first_ready),
      ms((Clock::now() - start).count()));
}

}  // namespace
}  // namespace stasis
