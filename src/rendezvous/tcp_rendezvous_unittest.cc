// Parts of one process, and of children, that meet at an address of this machine alone.
// Long because each way in which an agreement breaks is one test of the same fixture.
#include "rendezvous/tcp_rendezvous.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fd.h"
#include "base/threads.h"
#include "base/units.h"
#include "group/group_part.h"
#include "rendezvous/address.h"
#include "rendezvous/messages.h"
#include "rendezvous/sealed_channel.h"
#include "tests/fakes/failing_network.h"

namespace stasis::rendezvous {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using testing::AnyOf;
using testing::Each;
using testing::HasSubstr;

class TcpRendezvousTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-tcp-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    root_ = name;
    secret_ = secret_of("sixteen bytes and more");
    address_ = new_address();
  }
  void TearDown() override { fs::remove_all(root_); }

  // No other test's: the whole of 127/8 is this machine's.
  static std::string new_address() {
    static int count = 0;
    const int number = ::getpid();
    return fmt::format("tcp://127.{}.{}.{}:{}", 64 | ((number >> 16) & 63), (number >> 8) & 255,
                       number & 255, 7000 + ++count);
  }
  std::string secret_of(const std::string& text) {
    const fs::path path = root_ / fmt::format("secret{}", ++secrets_);
    std::ofstream(path) << text;
    fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
    return path;
  }
  std::unique_ptr<TcpRendezvous> open() const { return open(address_); }
  std::unique_ptr<TcpRendezvous> open(const std::string& address) const {
    auto opened = TcpRendezvous::open(address, secret_);
    EXPECT_TRUE(opened) << opened.error().to_string();
    return opened ? std::move(*opened) : nullptr;
  }
  // One that serves, and one that asks it.
  struct Two {
    std::unique_ptr<TcpRendezvous> server;
    std::unique_ptr<TcpRendezvous> client;
  };
  Two two() const {
    Two out{open(), nullptr};
    EXPECT_TRUE(out.server->serves());
    EXPECT_TRUE(out.server->joined());
    out.client = open();
    EXPECT_FALSE(out.client->serves());
    return out;
  }
  UniqueFd connect() const {
    auto addresses = resolve(*parse_host_port(address_));
    UniqueFd out(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(out.get(), reinterpret_cast<const sockaddr*>(&addresses->front().storage),
                        addresses->front().size),
              0);
    return out;
  }
  static void say(const UniqueFd& to, const std::string& bytes) {
    EXPECT_EQ(::send(to.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  static std::string hear(const UniqueFd& from, std::size_t count) {
    std::string out(count, '\0');
    const ssize_t got = ::recv(from.get(), out.data(), count, MSG_WAITALL);
    out.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return out;
  }
  // The other end closes it, and in less than ten seconds.
  static bool is_closed(const UniqueFd& socket) {
    pollfd polled{socket.get(), POLLIN, 0};
    char none = 0;
    return ::poll(&polled, 1, 10'000) == 1 && ::recv(socket.get(), &none, 1, 0) <= 0;
  }

  struct End {
    bool done = false;
    std::string message;
    ErrorCode code{};
  };
  enum class Step { kJoined, kReady, kRest };
  using Hook = std::function<void(Step)>;
  End run(const std::string& address, const std::string& name, std::uint32_t parts,
          const Hook& before = {}) {
    GroupPartOptions options;
    options.operation = Operation::kSuspend;
    options.parts = parts;
    options.name = name;
    options.timeout = timeout_;
    options.silence = silence_;
    const auto step = [&](Step which) {
      if (before) before(which);
    };
    auto opened = TcpRendezvous::open(address, secret_);
    if (!opened) return {false, opened.error().to_string(), opened.error().code};
    auto joined = GroupPart::join(std::move(*opened), options, interrupt_);
    if (!joined) {
      const Error& why = joined.error();
      return {false, fmt::format("{}; {}", why.to_string(), why.remedy), why.code};
    }
    GroupPart& part = **joined;
    step(Step::kJoined);
    auto done = part.wait_for_all();
    if (done) step(Step::kReady);
    for (bool rests = false; done && !rests;) {
      auto moment = part.wait_until_quiesced();
      rests = moment && !*moment;
      if (!moment) done = fail(std::move(moment.error()));
    }
    if (done) step(Step::kRest);
    if (done) done = part.finish();
    if (done) {
      auto heard = part.leave();
      return heard ? End{true, {}, {}} : End{true, heard.error().message, heard.error().code};
    }
    const Error told = part.give_up(std::move(done.error()));
    return {false, told.to_string(), told.code};
  }
  std::vector<End> run_all(std::uint32_t parts, const std::map<std::size_t, Hook>& odd = {}) {
    std::vector<End> out(parts);
    at_once(parts, [&](std::size_t i) {
      const auto found = odd.find(i);
      out[i] = run(address_, fmt::format("node{}", i), parts,
                   found == odd.end() ? Hook() : found->second);
    });
    return out;
  }
  static void all_are_done(const std::vector<End>& ends) {
    for (const End& end : ends)
      EXPECT_TRUE(end.done && end.message.empty()) << end.message;
  }
  // Two parts; the network to the second fails when the first hears that it has done its part.
  std::vector<End> run_two_with_a_failure(milliseconds away) {
    const std::string other = new_address();
    fakes::FailingNetwork network(other, address_);
    std::atomic<bool> serves = false;
    std::vector<End> out(2);
    at_once(2, [&](std::size_t i) {
      if (i == 0) {
        out[0] = run(address_, "node0", 2, [&](Step step) {
          if (step == Step::kJoined) serves = true;
        });
        return;
      }
      while (!serves)
        std::this_thread::sleep_for(milliseconds(1));
      out[1] = run(other, "node1", 2, [&](Step step) {
        if (step == Step::kRest) network.fail_for(milliseconds(300), away);
      });
    });
    return out;
  }

  milliseconds timeout_{20000};
  milliseconds silence_{10000};
  fs::path root_;
  std::string secret_;
  std::string address_;
  int secrets_ = 0;
  Interrupt interrupt_;
};

// --- Records

TEST_F(TcpRendezvousTest, ARecordIsReadAsAnotherPartHasWrittenIt) {
  const Two two = this->two();
  const std::string large(5 << 20, 'x');
  for (GroupRendezvous* from : {two.server.get(), two.client.get()}) {
    EXPECT_TRUE(from->write("part.a", "first"));
    EXPECT_TRUE(from->write("part.a", large));
    for (GroupRendezvous* to : {two.server.get(), two.client.get()}) {
      const auto text = to->read("part.a", large.size());
      ASSERT_TRUE(text) << text.error().to_string();
      EXPECT_EQ(*text, large);
      EXPECT_FALSE(to->read("part.a", large.size() - 1)) << "above the limit";
      const auto none = to->read("none", 10);
      ASSERT_TRUE(none);
      EXPECT_FALSE(*none);
      const auto names = to->names();
      ASSERT_TRUE(names);
      EXPECT_EQ(*names, std::vector<std::string>({"part.a"}));
    }
    from->remove({"part.a"});
  }
}

TEST_F(TcpRendezvousTest, OneOfAllWhoClaimAtOnceSucceeds) {
  const Two two = this->two();
  std::atomic<int> won = 0;
  at_once(16, [&](std::size_t i) {
    const auto own = i == 0 ? nullptr : open();
    const auto claimed = (own ? *own : *two.server).claim("it", "", std::to_string(i));
    if (claimed && *claimed) ++won;
  });
  EXPECT_EQ(won, 1);
}

TEST_F(TcpRendezvousTest, OnePartServesAndAnotherDoesSoAfterIt) {
  Two two = this->two();
  EXPECT_TRUE(two.client->write("part.a", "text"));
  two.server.reset();
  EXPECT_FALSE(two.client->read("part.a", 10));
  // Another one that serves there is not taken for it.
  const auto next = open();
  ASSERT_TRUE(next->serves());
  EXPECT_TRUE(next->joined());
  std::this_thread::sleep_for(milliseconds(60));
  const auto read = two.client->read("part.a", 10);
  ASSERT_FALSE(read);
  EXPECT_THAT(read.error().message, HasSubstr("another one serves there"));
  // Unless it has not joined yet.
  EXPECT_TRUE(two.client->renew());
  std::this_thread::sleep_for(milliseconds(60));
  EXPECT_TRUE(two.client->read("part.a", 10));
}

// --- What is hostile

TEST_F(TcpRendezvousTest, AnotherSecretIsRefusedAtOnceAndSaysWhatToDo) {
  const Two two = this->two();
  EXPECT_TRUE(two.client->write("part.a", "text"));
  secret_ = secret_of("sixteen other bytes");
  const End end = run(address_, "node1", 2);
  EXPECT_FALSE(end.done);
  EXPECT_EQ(end.code, ErrorCode::kNotPermitted);
  EXPECT_THAT(end.message, HasSubstr("has another secret"));
  EXPECT_THAT(end.message, HasSubstr("give all parts the same secret"));
  EXPECT_EQ(*two.server->names(), std::vector<std::string>({"part.a"}));
}

// It lies between two parts that have the same secret.
TEST_F(TcpRendezvousTest, AMessageThatIsChangedOnTheWayIsNoMatterOfTheSecret) {
  const auto server = open();
  ASSERT_TRUE(server->joined());
  const std::string between = new_address();
  const auto listeners = listen_at(*resolve(*parse_host_port(between)));
  std::atomic<bool> changes{false};
  std::jthread relay([&](const std::stop_token& stop) {
    pollfd polled{listeners->front().get(), POLLIN, 0};
    ASSERT_EQ(::poll(&polled, 1, 10'000), 1);
    const UniqueFd near(::accept4(polled.fd, nullptr, nullptr, SOCK_CLOEXEC));
    const UniqueFd far = connect();
    char bytes[4096];
    for (bool from_server = false; !stop.stop_requested(); from_server = !from_server) {
      polled.fd = (from_server ? far : near).get();
      if (::poll(&polled, 1, 5) != 1) continue;
      const ssize_t got = ::recv(polled.fd, bytes, sizeof bytes, 0);
      if (got <= 0) return;
      if (from_server && changes) bytes[got - 1] ^= 1;
      say(from_server ? near : far, {bytes, static_cast<std::size_t>(got)});
    }
  });
  const auto client = open(between);
  ASSERT_FALSE(client->serves());
  EXPECT_TRUE(client->write("part.b", "text"));
  changes = true;
  const auto read = client->read("part.b", 10);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kNotPermitted);
  EXPECT_THAT(read.error().message, HasSubstr("was changed on the way"));
}

TEST_F(TcpRendezvousTest, AnotherProgramThatServesThereIsNoPart) {
  const auto listeners = listen_at(*resolve(*parse_host_port(address_)));
  ASSERT_TRUE(listeners);
  std::jthread other([&] {
    pollfd polled{listeners->front().get(), POLLIN, 0};
    ASSERT_EQ(::poll(&polled, 1, 10'000), 1);
    UniqueFd client(::accept4(listeners->front().get(), nullptr, nullptr, SOCK_CLOEXEC));
    say(client, "SSH-2.0-a server of another kind, which says more than a greeting has\r\n");
    (void)hear(client, 1000);
  });
  const End end = run(address_, "node1", 2);
  EXPECT_EQ(end.code, ErrorCode::kNotPermitted);
  EXPECT_THAT(end.message, HasSubstr("is no tool of a group"));
}

TEST_F(TcpRendezvousTest, ConnectionsWithoutTheSecretAreClosedAndChangeNothing) {
  const Two two = this->two();
  EXPECT_TRUE(two.client->write("part.a", "text"));
  const std::string random = random_bytes(kGreetingBytes);
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n"), random,
        greeting(new_nonce()) + std::string(kHeaderBytes, 'h') + std::string(4, '\0'),
        greeting(new_nonce()) + std::string(kHeaderBytes, 'h') + "\xff\xff\xff\x7f",
        greeting(new_nonce()) + std::string(400, '\x20')}) {
    const UniqueFd socket = connect();
    say(socket, bytes);
    if (bytes.starts_with(kMagic)) (void)hear(socket, kGreetingBytes + kHeaderBytes + 4 + 17 + 16);
    EXPECT_TRUE(is_closed(socket)) << bytes.substr(0, 8);
  }
  const auto text = two.client->read("part.a", 10);
  ASSERT_TRUE(text) << text.error().to_string();
  EXPECT_EQ(*text, "text");
}

// What a part has said is recorded on the way, and said again on another connection.
TEST_F(TcpRendezvousTest, WhatWasRecordedCannotBeSaidAgain) {
  const Two two = this->two();
  const auto key = GroupKey::from_file(secret_);
  ASSERT_TRUE(key);
  const auto begin = [&](const UniqueFd& socket, const Nonce& own) {
    say(socket, greeting(own));
    const auto server = nonce_of(hear(socket, kGreetingBytes));
    EXPECT_TRUE(server);
    (void)hear(socket, kHeaderBytes + kLengthBytes + 17 + kIdBytes);
    return *server;
  };
  const Nonce own = new_nonce();
  const UniqueFd socket = connect();
  SealedChannel channel(*key, Side::kClient, own, begin(socket, own));
  const std::string said =
      channel.header() +
      channel.seal(to_bytes(Request{Verb::kHello, {}, std::string(kIdBytes, 'i')})) +
      channel.seal(to_bytes(Request{Verb::kClaim, "rest", "go-on"}));
  say(socket, said);
  EXPECT_EQ(hear(socket, kLengthBytes + 17 + 1).size(), kLengthBytes + 17 + 1);
  ASSERT_EQ(*two.server->names(), std::vector<std::string>({"rest"})) << "it was good once";
  two.server->remove({"rest"});
  const UniqueFd again = connect();
  (void)begin(again, own);
  say(again, said);
  EXPECT_TRUE(is_closed(again));
  // And its last message alone, once more on the connection that it was of.
  say(socket, said.substr(said.size() - (kLengthBytes + 17 + 2 + 4 + 5)));
  EXPECT_TRUE(is_closed(socket));
  EXPECT_TRUE(two.server->names()->empty());
}

TEST_F(TcpRendezvousTest, ConnectionsThatSayNothingKeepNoPartOut) {
  std::vector<UniqueFd> silent;
  Hook floods = [&](Step step) {
    for (int i = 0; step == Step::kJoined && i < 100; ++i)
      silent.push_back(connect());
  };
  std::vector<End> ends(3);
  at_once(3, [&](std::size_t i) {
    // The first one serves.
    if (i > 0) std::this_thread::sleep_for(milliseconds(100));
    ends[i] = run(address_, fmt::format("node{}", i), 3, i == 0 ? floods : Hook());
  });
  all_are_done(ends);
  // Of those that stay, too few are kept to hold any up, and none for long.
  const Two two = this->two();
  silent.clear();
  for (int i = 0; i < 300; ++i)
    silent.push_back(connect());
  EXPECT_TRUE(two.client->write("part.a", "text"));
  for (const UniqueFd& socket : silent)
    EXPECT_TRUE(is_closed(socket));
  EXPECT_TRUE(two.client->read("part.a", 10));
}

// --- The agreement

TEST_F(TcpRendezvousTest, ManyPartsAgreeAgainAndAgainAtOneAddress) {
  for (int i = 0; i < 10; ++i)
    all_are_done(run_all(4));
  EXPECT_TRUE(run(address_, "alone", 1).done);
}

TEST_F(TcpRendezvousTest, WithoutThePartThatServesTheOthersSaySo) {
  timeout_ = milliseconds(300);
  // An address that this machine has not, and at which none answers.
  const End end = run("tcp://[100::1]:7777", "node1", 2);
  EXPECT_EQ(end.code, ErrorCode::kTimeout) << end.message;
  EXPECT_THAT(end.message, HasSubstr("no part answers at tcp://[100::1]:7777"));
}

TEST_F(TcpRendezvousTest, OneThatIsSlowAtAnyStepIsWaitedForAlsoByTheOneThatServes) {
  for (const Step at : {Step::kJoined, Step::kReady, Step::kRest}) {
    const Hook slow = [at](Step step) {
      if (step == at) std::this_thread::sleep_for(milliseconds(300));
    };
    all_are_done(run_all(3, {{1, slow}}));
  }
  // All have heard the outcome before the one that serves ends.
  Hook late = [](Step step) {
    if (step == Step::kRest) std::this_thread::sleep_for(milliseconds(200));
  };
  all_are_done(run_all(3, {{0, late}, {1, late}}));
}

// The one that serves is a process of its own, which is killed at a step.
TEST_F(TcpRendezvousTest, WhenTheOneThatServesIsKilledTheOthersGoBackAndSaySo) {
  silence_ = milliseconds(1000);
  const std::vector<Step> steps = {Step::kJoined, Step::kReady, Step::kRest};
  // How many have joined: the one that serves first, and at the first step all.
  struct Joined {
    std::atomic<unsigned> count[3];
    void wait_for(std::size_t step, unsigned wanted) const {
      for (int i = 0; i < 20'000 && count[step] < wanted; ++i)
        std::this_thread::sleep_for(milliseconds(1));
    }
  };
  auto* joined = static_cast<Joined*>(
      ::mmap(nullptr, sizeof(Joined), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(joined, MAP_FAILED);
  std::vector<std::string> addresses;
  std::vector<pid_t> servers;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    addresses.push_back(new_address());
    const pid_t child = ::fork();
    if (child == 0) {
      (void)run(addresses.back(), "killed", 3, [&, i](Step step) {
        if (step == Step::kJoined) ++joined->count[i];
        if (step == Step::kJoined && steps[i] == step) joined->wait_for(i, 3);
        if (step == steps[i]) ::kill(::getpid(), SIGKILL);
      });
      ::_exit(1);
    }
    servers.push_back(child);
  }
  for (std::size_t i = 0; i < steps.size(); ++i)
    joined->wait_for(i, 1);
  std::vector<End> ends(2 * steps.size());
  at_once(ends.size(), [&](std::size_t i) {
    ends[i] = run(addresses[i / 2], fmt::format("node{}", i % 2), 3, [&](Step step) {
      if (step == Step::kJoined) ++joined->count[i / 2];
    });
  });
  for (const pid_t server : servers)
    ::waitpid(server, nullptr, 0);
  ::munmap(joined, sizeof(Joined));
  for (const End& end : ends) {
    EXPECT_FALSE(end.done);
    EXPECT_EQ(end.code, ErrorCode::kTimeout) << end.message;
    // Those of the first step may not have heard its name yet; nor may one for which it is ready,
    // and dead, too soon.
    const auto step = (&end - ends.data()) / 2;
    EXPECT_THAT(end.message, AnyOf(HasSubstr("nothing was heard of part killed for 1000 ms"),
                                   HasSubstr(step > 0 ? "by its name" : "of part that leads for"),
                                   HasSubstr(step < 2 ? "of part that leads for" : "by its name")));
    EXPECT_THAT(end.message, HasSubstr("the other parts could not be told"));
  }
}

// As GroupPartTest.TimeToAgree, by TCP (docs/groups.md).
// The one that serves knows that all have done it, and the other one does not.
TEST_F(TcpRendezvousTest, AfterACutAtTheLastMomentAllHearThatAllHaveDoneIt) {
  all_are_done(run_two_with_a_failure(milliseconds(1500)));
}

TEST_F(TcpRendezvousTest, OneThatNeverHearsThatAllHaveDoneItIsNamed) {
  silence_ = milliseconds(500);
  const auto ends = run_two_with_a_failure(milliseconds(60000));
  EXPECT_TRUE(ends[0].done);
  EXPECT_EQ(ends[0].code, ErrorCode::kTimeout);
  EXPECT_THAT(ends[0].message, HasSubstr("part node1 has not said that it has heard so"));
  EXPECT_FALSE(ends[1].done);
  EXPECT_THAT(ends[1].message, HasSubstr("the other parts could not be told"));
}

TEST_F(TcpRendezvousTest, TimeToAgree) {
  const char* asked = std::getenv("STASIS_GROUP_PARTS");
  const auto parts =
      static_cast<std::uint32_t>(asked != nullptr ? std::strtoul(asked, nullptr, 10) : 8);
  timeout_ = milliseconds(0);
  silence_ = milliseconds(60000);
  std::atomic<Clock::rep> last_ready = 0;
  std::atomic<Clock::rep> last_rest = 0;
  const auto start = Clock::now();
  const Hook notes = [&](Step step) {
    const auto now = (Clock::now() - start).count();
    auto& to = step == Step::kReady ? last_ready : last_rest;
    if (step == Step::kJoined) return;
    for (auto seen = to.load(); seen < now && !to.compare_exchange_weak(seen, now);) {
    }
  };
  std::vector<End> ends(parts);
  at_once(parts,
          [&](std::size_t i) { ends[i] = run(address_, fmt::format("node{}", i), parts, notes); });
  all_are_done(ends);
  const auto ms = [](Clock::rep ticks) {
    return std::chrono::duration<double, std::milli>(Clock::duration(ticks)).count();
  };
  fmt::print("{} parts: all ready {:.0f} ms, quiesced {:.0f} ms later, all of it {:.0f} ms\n",
             parts, ms(last_ready), ms(last_rest) - ms(last_ready),
             ms((Clock::now() - start).count()));
}

}  // namespace
}  // namespace stasis::rendezvous
