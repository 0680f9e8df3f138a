#include "tests/workloads/meeting.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "examples/common/cuda_api.h"

namespace stasis::workloads {
namespace {

constexpr const char* kTcp = "tcp:";

void sleep_ms(long ms) {
  const timespec pause{0, ms * 1000000};
  ::nanosleep(&pause, nullptr);
}

[[noreturn]] void fail(const std::string& what) {
  programs::die(1, what + ": " + std::strerror(errno));
}

// What the ranks share: a file, so that it is theirs also after exec and in an image.
struct Places {
  // How many have come to any round. A rank comes to a round when all have left the one before the
  // last, so two sets of places do.
  std::atomic<std::uint64_t> arrived;
  std::array<std::array<std::atomic<std::uint64_t>, kMostRanks>, 2> values;
  std::array<std::array<std::atomic<bool>, kMostRanks>, 2> wants_to_stop;
};

Places* places_in(const std::string& path, int flags) {
  const UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0600));
  if (!file.valid() || ::ftruncate(file.get(), sizeof(Places)) != 0) fail(path);
  void* memory = ::mmap(nullptr, sizeof(Places), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) fail(path);
  return static_cast<Places*>(memory);
}

class FileMeeting : public Meeting {
 public:
  FileMeeting(const std::string& path, std::uint32_t rank, std::uint32_t ranks)
      : places_(places_in(path, 0)), rank_(rank), ranks_(ranks) {}

  Outcome meet(std::uint64_t round, std::uint64_t value, bool stop) override {
    auto& values = places_->values[round % 2];
    auto& stops = places_->wants_to_stop[round % 2];
    values[rank_] = value;
    stops[rank_] = stop;
    ++places_->arrived;
    // The others may be held for seconds: less and less often, up to 2 ms.
    for (timespec pause{0, 50000}; places_->arrived < round * ranks_;
         pause.tv_nsec = std::min(2 * pause.tv_nsec, 2'000'000L))
      ::nanosleep(&pause, nullptr);
    Outcome out;
    for (std::uint32_t i = 0; i < ranks_; ++i) {
      out.total += values[i];
      out.stop = out.stop || stops[i];
    }
    return out;
  }

 private:
  Places* places_;
  std::uint32_t rank_;
  std::uint32_t ranks_;
};

struct Message {
  std::uint64_t round = 0;
  std::uint64_t value = 0;
  std::uint64_t stop = 0;
};

// The whole of it; false at the end of what is read.
template <class Bytes, class Call>
bool whole(const Call& call, Bytes* bytes, std::size_t size, const char* what) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t moved = call(bytes + done, size - done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) fail(what);
    if (moved == 0) return false;
    done += static_cast<std::size_t>(moved);
  }
  return true;
}
void send_all(const UniqueFd& to, const void* data, std::size_t size) {
  (void)whole(
      [&](const char* at, std::size_t left) { return ::send(to.get(), at, left, MSG_NOSIGNAL); },
      static_cast<const char*>(data), size, "send");
}
bool receive_all(const UniqueFd& from, void* data, std::size_t size) {
  return whole([&](char* at, std::size_t left) { return ::recv(from.get(), at, left, 0); },
               static_cast<char*>(data), size, "receive");
}

// Numbers one after the other, in both directions, without a pause for an answer: by a process
// without CUDA, which goes on when those with CUDA stand still. It ends with this one.
class Talk {
 public:
  Talk(UniqueFd peer, const std::string& record) : child_(::fork()) {
    if (child_ < 0) fail("fork");
    if (child_ > 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const UniqueFd file(::open(record.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!file.valid()) fail(record);
    std::thread([&peer] { say(peer); }).detach();
    hear(peer, file);
  }

  void check() const {
    int status = 0;
    if (::waitpid(child_, &status, WNOHANG) != 0) programs::die(1, "talk has ended");
  }

 private:
  using Numbers = std::array<std::uint64_t, 512>;

  // The other may have ended because all do: this one does, too, before that.
  [[noreturn]] static void broken(const char* what) {
    const int why = errno;
    sleep_ms(900);
    programs::die(1, std::string(what) + ": " + std::strerror(why));
  }

  static void say(const UniqueFd& peer) {
    Numbers numbers{};
    for (std::uint64_t next = 0;; sleep_ms(1)) {
      for (std::uint64_t& number : numbers)
        number = next++;
      const auto* bytes = reinterpret_cast<const char*>(numbers.data());
      std::size_t done = 0;
      while (done < sizeof numbers) {
        const ssize_t sent = ::send(peer.get(), bytes + done, sizeof numbers - done, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) broken("talk: send");
        done += static_cast<std::size_t>(sent);
      }
    }
  }

  [[noreturn]] static void hear(const UniqueFd& peer, const UniqueFd& record) {
    Numbers numbers{};
    for (std::uint64_t next = 0;;) {
      // Always of the same size: CRIU restores a process only if its files are as they were.
      std::array<char, 32> text{};
      const int size = std::snprintf(text.data(), text.size(), "%020llu\n",
                                     static_cast<unsigned long long>(next));
      [[maybe_unused]] const ssize_t written =
          ::pwrite(record.get(), text.data(), static_cast<std::size_t>(size), 0);
      auto* bytes = reinterpret_cast<char*>(numbers.data());
      std::size_t done = 0;
      while (done < sizeof numbers) {
        const ssize_t got = ::recv(peer.get(), bytes + done, sizeof numbers - done, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) broken("talk: receive");
        done += static_cast<std::size_t>(got);
      }
      for (const std::uint64_t number : numbers)
        if (number != next++) programs::die(1, "talk: what came is not what was sent");
    }
  }

  pid_t child_;
};

constexpr char kForSums = 's';
constexpr char kForTalk = 't';

// Rank 0 hears all others, and tells them the sum.
class TcpMeeting : public Meeting {
 public:
  TcpMeeting(const std::string& where, std::uint32_t rank, std::uint32_t ranks,
             const std::string& talk)
      : where_(where), rank_(rank), talk_(talk) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    const auto colon = where.find(':');
    if (colon == std::string::npos ||
        ::inet_pton(AF_INET, where.substr(0, colon).c_str(), &address.sin_addr) != 1) {
      programs::die(1, where + ": no address and port");
    }
    address.sin_port = htons(static_cast<std::uint16_t>(std::stoul(where.substr(colon + 1))));
    if (rank == 0)
      hear_all(address, ranks);
    else
      connect_to_first(address);
  }

  Outcome meet(std::uint64_t round, std::uint64_t value, bool stop) override {
    for (const Talk& talk : talks_)
      talk.check();
    if (rank_ != 0) {
      send(0, {round, value, stop ? 1U : 0U});
      return outcome(receive(0, round));
    }
    Message sum{round, value, stop ? 1U : 0U};
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      const Message one = receive(i, round);
      sum.value += one.value;
      sum.stop |= one.stop;
    }
    for (std::size_t i = 0; i < peers_.size(); ++i)
      send(i, sum);
    return outcome(sum);
  }

 private:
  static Outcome outcome(const Message& message) { return {message.value, message.stop != 0}; }

  void hear_all(const sockaddr_in& address, std::uint32_t ranks) {
    const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int yes = 1;
    (void)::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    while (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address)) {
      // The node's address comes a little later than the node.
      if (errno != EADDRNOTAVAIL) fail(where_);
      sleep_ms(10);
    }
    if (::listen(listener.get(), static_cast<int>(ranks)) != 0) fail(where_);
    while (peers_.size() + 1 < ranks || (!talk_.empty() && talks_.size() + 1 < ranks)) {
      UniqueFd peer(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!peer.valid() && errno == EINTR) continue;
      char purpose = 0;
      if (!peer.valid() || !receive_all(peer, &purpose, 1)) fail(where_);
      add(std::move(peer), purpose);
    }
  }

  void connect_to_first(const sockaddr_in& address) {
    for (const char purpose : {kForSums, kForTalk}) {
      if (purpose == kForTalk && talk_.empty()) continue;
      UniqueFd peer;
      for (;; sleep_ms(10)) {
        peer = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (::connect(peer.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
          break;
      }
      send_all(peer, &purpose, 1);
      add(std::move(peer), purpose);
    }
  }

  void add(UniqueFd peer, char purpose) {
    if (purpose == kForTalk) {
      talks_.emplace_back(std::move(peer), talk_ + "." + std::to_string(talks_.size()));
      return;
    }
    const int yes = 1;
    if (::setsockopt(peer.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) != 0) fail(where_);
    peers_.push_back(std::move(peer));
  }

  void send(std::size_t peer, const Message& message) {
    send_all(peers_[peer], &message, sizeof message);
  }

  Message receive(std::size_t peer, std::uint64_t round) {
    Message message;
    if (!receive_all(peers_[peer], &message, sizeof message))
      programs::die(1, "another rank has closed its connection");
    if (message.round != round) programs::die(1, "another rank is in another round");
    return message;
  }

  std::string where_;
  std::uint32_t rank_;
  std::string talk_;
  std::vector<Talk> talks_;
  std::vector<UniqueFd> peers_;  // of rank 0 all others, of these rank 0
};

}  // namespace

std::unique_ptr<Meeting> Meeting::open(const std::string& where, std::uint32_t rank,
                                       std::uint32_t ranks, const std::string& talk) {
  if (where.starts_with(kTcp))
    return std::make_unique<TcpMeeting>(where.substr(std::strlen(kTcp)), rank, ranks, talk);
  return std::make_unique<FileMeeting>(where, rank, ranks);
}

void make_meeting(const std::string& file) {
  ::munmap(places_in(file, O_CREAT | O_TRUNC), sizeof(Places));
}

}  // namespace stasis::workloads
