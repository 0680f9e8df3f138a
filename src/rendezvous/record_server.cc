#include "rendezvous/record_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <list>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/threads.h"
#include "group/group_rendezvous.h"
#include "rendezvous/address.h"
#include "rendezvous/messages.h"
#include "rendezvous/sealed_channel.h"

namespace stasis::rendezvous {
namespace {

using std::chrono::milliseconds;

// Of connections that have not shown that they have the secret. A part takes a round trip for that.
constexpr std::size_t kMostStrangers = 256;
constexpr int kMostAtOnce = 64;
constexpr milliseconds kStrangersTime{3000};
constexpr std::size_t kStrangersBytes = 512;
// Of the others: a part has one, and may have lost some of which the server has not heard yet.
constexpr std::size_t kMostPeers = 2048;
// A part says something every half second.
constexpr milliseconds kPeersSilence{30000};
constexpr std::size_t kPiece = 64 << 10;
// How long a part may take to connect again.
constexpr milliseconds kNoneThere{1000};
constexpr milliseconds kLookAgain{2};
constexpr int kMostWaitMs = 200;

}  // namespace

// One connection, as the thread has it.
class Peer {
 public:
  Peer(UniqueFd socket, const GroupKey& key, const std::string& server_id)
      : socket_(std::move(socket)), key_(key), server_id_(server_id) {}

  int fd() const { return socket_.get(); }
  bool is_stranger() const { return owner_.empty(); }
  // It has written a record.
  bool takes_part() const { return takes_part_; }
  bool has_to_send() const { return sent_ < out_.size(); }
  Clock::time_point heard() const { return heard_; }
  bool is_late() const {
    return Clock::now() - heard_ > (is_stranger() ? kStrangersTime : kPeersSilence);
  }

  // What has come, and what is to go. False: to be closed.
  bool serve(RecordStore& store, short events) {
    if ((events & (POLLIN | POLLHUP | POLLERR)) != 0 && !has_to_send() && !receive()) return false;
    if (!send()) return false;
    // One answer after the other: who asks and does not read has one, and no more.
    while (!has_to_send()) {
      const auto went = step(store);
      if (!went) return false;
      if (!*went) break;
      if (!send()) return false;
    }
    return true;
  }

 private:
  bool receive() {
    char piece[kPiece];
    const std::size_t most =
        is_stranger() ? kStrangersBytes - std::min(in_.size(), kStrangersBytes) : sizeof piece;
    if (most == 0) return false;
    const ssize_t got = TEMP_FAILURE_RETRY(::recv(fd(), piece, most, 0));
    if (got > 0) in_.append(piece, static_cast<std::size_t>(got));
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
  }

  bool send() {
    while (has_to_send()) {
      const ssize_t went =
          TEMP_FAILURE_RETRY(::send(fd(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL));
      if (went < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
      sent_ += static_cast<std::size_t>(went);
    }
    out_.clear();
    sent_ = 0;
    return true;
  }

  std::string take(std::size_t count) {
    std::string out = in_.substr(0, count);
    in_.erase(0, count);
    return out;
  }

  // True: something was done. False: more has to come. Nothing: to be closed.
  std::optional<bool> step(RecordStore& store) {
    if (!channel_) return greet();
    if (!has_begun_) {
      if (in_.size() < kHeaderBytes) return false;
      has_begun_ = channel_->begin(take(kHeaderBytes));
      return has_begun_ ? std::optional(true) : std::nullopt;
    }
    if (in_.size() < kLengthBytes) return false;
    const auto size = SealedChannel::sealed_bytes(
        in_, is_stranger() ? kMostHead + kIdBytes : kMostHead + kMostGroupRecord);
    if (!size) return std::nullopt;
    if (in_.size() - kLengthBytes < *size) return false;
    in_.erase(0, kLengthBytes);
    const auto opened = channel_->open(take(*size));
    const auto request = opened ? request_from_bytes(*opened) : std::nullopt;
    if (!request || is_stranger() != (request->verb == Verb::kHello)) return std::nullopt;
    heard_ = Clock::now();
    if (is_stranger()) {
      owner_ = request->text;
      return true;
    }
    takes_part_ = takes_part_ || request->verb == Verb::kWrite || request->verb == Verb::kClaim;
    out_ = channel_->seal(to_bytes(store.answer(*request, owner_)));
    return true;
  }

  std::optional<bool> greet() {
    if (in_.size() < kGreetingBytes) return false;
    const auto client = nonce_of(take(kGreetingBytes));
    if (!client) return std::nullopt;
    const Nonce own = new_nonce();
    channel_.emplace(key_, Side::kServer, *client, own);
    out_ = greeting(own) + channel_->header() + channel_->seal(server_id_);
    return true;
  }

  UniqueFd socket_;
  const GroupKey& key_;
  const std::string& server_id_;
  std::optional<SealedChannel> channel_;
  bool has_begun_ = false;
  std::string owner_;  // what the client calls itself
  bool takes_part_ = false;
  Clock::time_point heard_ = Clock::now();  // a stranger's: when it came
  std::string in_;
  std::string out_;
  std::size_t sent_ = 0;
};

class RecordServer::Loop {
 public:
  Loop(std::vector<UniqueFd> listeners, RecordStore& store, const GroupKey& key,
       const std::string& id)
      : listeners_(std::move(listeners)), store_(store), key_(key), id_(id) {}
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop() {
    if (!thread_.joinable()) return;
    ends_ = true;
    const std::uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof one);
    thread_.join();
  }

  Result<void> start() {
    wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_.valid()) return fail(errno_error("cannot make an eventfd", errno));
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      return fail(no_thread(error));
    }
    return {};
  }

  std::size_t parts() const { return parts_; }

 private:
  void run() {
    std::vector<pollfd> polled;
    while (!ends_) {
      polled.assign(1, {wake_.get(), POLLIN, 0});
      for (const UniqueFd& listener : listeners_)
        polled.push_back({listener.get(), POLLIN, 0});
      const std::size_t first = polled.size();
      for (const Peer& peer : peers_) {
        polled.push_back({peer.fd(), static_cast<short>(peer.has_to_send() ? POLLOUT : POLLIN), 0});
      }
      if (::poll(polled.data(), polled.size(), kMostWaitMs) < 0 && errno != EINTR) return;
      serve(polled, first);
      for (std::size_t i = 1; i < first; ++i)
        if (polled[i].revents != 0) accept_from(listeners_[i - 1]);
      drop_surplus();
      parts_ = static_cast<std::size_t>(std::count_if(
          peers_.begin(), peers_.end(), [](const Peer& p) { return p.takes_part(); }));
    }
  }

  void serve(const std::vector<pollfd>& polled, std::size_t first) {
    std::size_t i = first;
    std::erase_if(peers_, [&](Peer& peer) {
      const short events = polled[i++].revents;
      return (events != 0 && !peer.serve(store_, events)) || peer.is_late();
    });
  }

  void accept_from(const UniqueFd& listener) {
    for (int i = 0; i < kMostAtOnce; ++i) {
      UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket.valid()) {
        const bool is_full = errno == EMFILE || errno == ENFILE;
        if (is_full && !allow_descriptors(kMostStrangers) && !drop_oldest(true))
          std::this_thread::sleep_for(kLookAgain);
        return;
      }
      set_no_delay(socket);
      peers_.emplace_back(std::move(socket), key_, id_);
    }
  }

  // Those that came first: a part has shown the secret within a round trip.
  void drop_surplus() {
    auto strangers = static_cast<std::size_t>(
        std::count_if(peers_.begin(), peers_.end(), [](const Peer& p) { return p.is_stranger(); }));
    std::size_t others = peers_.size() - strangers;
    for (; strangers > kMostStrangers; --strangers)
      (void)drop_oldest(true);
    for (; others > kMostPeers; --others)
      (void)drop_oldest(false);
  }

  bool drop_oldest(bool stranger) {
    auto oldest = peers_.end();
    for (auto peer = peers_.begin(); peer != peers_.end(); ++peer) {
      if (peer->is_stranger() != stranger) continue;
      if (oldest == peers_.end() || peer->heard() < oldest->heard()) oldest = peer;
    }
    if (oldest == peers_.end()) return false;
    peers_.erase(oldest);
    return true;
  }

  const std::vector<UniqueFd> listeners_;
  RecordStore& store_;
  const GroupKey& key_;
  const std::string& id_;
  UniqueFd wake_;
  std::thread thread_;
  std::atomic<bool> ends_ = false;
  std::atomic<std::size_t> parts_ = 0;
  std::list<Peer> peers_;  // of the thread
};

RecordServer::RecordServer(std::vector<UniqueFd> listeners, const GroupKey& key)
    : id_(random_bytes(kIdBytes)),
      loop_(std::make_unique<Loop>(std::move(listeners), store_, key, id_)) {}

RecordServer::~RecordServer() = default;

Result<void> RecordServer::start() { return loop_->start(); }

bool RecordServer::is_needed() {
  if (loop_->parts() > 0) needed_ = Clock::now();
  return Clock::now() - needed_ < kNoneThere;
}

}  // namespace stasis::rendezvous
