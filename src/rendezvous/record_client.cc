#include "rendezvous/record_client.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "group/group_rendezvous.h"

namespace stasis::rendezvous {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kMostTime{3000};
// For each address: what is lost on the way is sent again by the kernel after one second.
constexpr milliseconds kMostConnect{1500};
// A part that is not there yet is not asked for more often.
constexpr milliseconds kPause{50};

std::string text_of(int error_number) { return std::generic_category().message(error_number); }

// Waits for the event; false at the deadline.
bool wait_for(const UniqueFd& socket, short event, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd polled{socket.get(), event, 0};
    const int got = ::poll(&polled, 1, static_cast<int>(left));
    if (got > 0) return true;
    if (got < 0 && errno != EINTR) return false;
  }
}

}  // namespace

RecordClient::RecordClient(std::string place, std::string secret_file,
                           std::vector<SocketAddress> addresses, const GroupKey& key)
    : place_(std::move(place)),
      secret_file_(std::move(secret_file)),
      addresses_(std::move(addresses)),
      key_(key),
      id_(random_bytes(kIdBytes)) {}

Error RecordClient::no_answer(const std::string& why) const {
  return {ErrorCode::kTimeout, fmt::format("no part answers at {}: {}", place_, why),
          "see that the part on the node with that address is started, too, and that the port is "
          "open to the others (firewall); to resume a part alone, leave out --group"};
}

Error RecordClient::stranger(const std::string& what) const {
  return {ErrorCode::kNotPermitted, fmt::format("what answers at {} {}", place_, what),
          fmt::format("give all parts the same secret (--group-secret {}: compare its checksum on "
                      "all nodes), and a port that no other program serves",
                      secret_file_)};
}

// With the secret shown, nothing but what lies between both can have done it: TCP itself loses and
// changes no byte.
Error RecordClient::not_opened(const std::string& what) const {
  if (!has_shown_secret_) return stranger(what);
  return {
      ErrorCode::kNotPermitted,
      fmt::format("the connection to {} was changed on the way: what comes is not what the part "
                  "that answers there has sent",
                  place_),
      "look for what passes the connection on between the nodes (a proxy, a tunnel, an attacker "
      "on the network), and start the operation again without it"};
}

void RecordClient::forget() {
  const std::lock_guard lock(mutex_);
  socket_.reset();
  channel_.reset();
  server_.clear();
}

Result<Answer> RecordClient::ask(const Request& request) {
  const std::lock_guard lock(mutex_);
  if (failed_ && Clock::now() - failed_at_ < kPause) return fail(Error(*failed_));
  failed_.reset();
  auto answer = ask_once(request, Clock::now() + kMostTime);
  if (answer) return answer;
  socket_.reset();
  channel_.reset();
  failed_ = answer.error();
  failed_at_ = Clock::now();
  return answer;
}

Result<Answer> RecordClient::ask_once(const Request& request, Deadline deadline) {
  if (!channel_) {
    STASIS_TRY(connect(deadline));
  }
  STASIS_TRY(send(channel_->seal(to_bytes(request)), deadline));
  STASIS_TRY_ASSIGN(const auto message, hear(1 + kMostGroupRecord, deadline));
  if (auto answer = answer_from_bytes(message)) return std::move(*answer);
  return fail(stranger("sends malformed answers"));
}

Result<void> RecordClient::connect(Deadline deadline) {
  STASIS_TRY_ASSIGN(socket_, reach(deadline));
  set_no_delay(socket_);
  auto done = greet(deadline);
  if (!done) channel_.reset();
  return done;
}

Result<UniqueFd> RecordClient::reach(Deadline deadline) const {
  std::string why = "no answer";
  for (const SocketAddress& address : addresses_) {
    auto made = stream_socket(address.storage.ss_family);
    if (!made) {
      why = made.error().message;
      continue;
    }
    if (::connect(made->get(), reinterpret_cast<const sockaddr*>(&address.storage), address.size) !=
        0) {
      int status = errno;
      socklen_t size = sizeof status;
      if (status == EINPROGRESS) {
        if (!wait_for(*made, POLLOUT, std::min(deadline, Clock::now() + kMostConnect)))
          status = ETIMEDOUT;
        else if (::getsockopt(made->get(), SOL_SOCKET, SO_ERROR, &status, &size) != 0)
          status = errno;
      }
      why = text_of(status);
      if (status != 0) continue;
    }
    return std::move(*made);
  }
  return fail(no_answer(why));
}

Result<void> RecordClient::greet(Deadline deadline) {
  const Nonce own = new_nonce();
  STASIS_TRY(send(greeting(own), deadline));
  STASIS_TRY_ASSIGN(const auto theirs, receive(kGreetingBytes, deadline));
  const auto server = nonce_of(theirs);
  if (!server) return fail(stranger("is no tool of a group, or one of another version"));
  has_shown_secret_ = false;
  channel_.emplace(key_, Side::kClient, own, *server);
  STASIS_TRY_ASSIGN(const auto header, receive(kHeaderBytes, deadline));
  if (!channel_->begin(header)) return fail(stranger("has another secret"));
  STASIS_TRY_ASSIGN(const auto id, hear(kIdBytes, deadline));
  has_shown_secret_ = true;
  if (id.size() != kIdBytes) return fail(stranger("sends malformed answers"));
  if (!server_.empty() && server_ != id)
    return fail(no_answer("the part that served is gone, and another one serves there"));
  server_ = id;
  return send(channel_->header() + channel_->seal(to_bytes(Request{Verb::kHello, {}, id_})),
              deadline);
}

Result<void> RecordClient::send(std::string_view bytes, Deadline deadline) const {
  while (!bytes.empty()) {
    const ssize_t went =
        TEMP_FAILURE_RETRY(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
    if (went >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(went));
      continue;
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK) return fail(no_answer(text_of(errno)));
    if (!wait_for(socket_, POLLOUT, deadline)) return fail(no_answer(text_of(ETIMEDOUT)));
  }
  return {};
}

// As it comes: what is said to come costs no memory.
Result<std::string> RecordClient::receive(std::size_t count, Deadline deadline) const {
  std::string out;
  char piece[16384];
  while (out.size() < count) {
    const std::size_t most = std::min(sizeof piece, count - out.size());
    const ssize_t got = TEMP_FAILURE_RETRY(::recv(socket_.get(), piece, most, 0));
    if (got > 0) {
      out.append(piece, static_cast<std::size_t>(got));
      continue;
    }
    if (got == 0) return fail(no_answer("the connection was closed"));
    if (errno != EAGAIN && errno != EWOULDBLOCK) return fail(no_answer(text_of(errno)));
    if (!wait_for(socket_, POLLIN, deadline)) return fail(no_answer(text_of(ETIMEDOUT)));
  }
  return out;
}

Result<std::string> RecordClient::hear(std::size_t limit, Deadline deadline) {
  STASIS_TRY_ASSIGN(const auto length, receive(kLengthBytes, deadline));
  const auto size = SealedChannel::sealed_bytes(length, limit);
  if (!size) return fail(not_opened("sends malformed answers"));
  STASIS_TRY_ASSIGN(const auto sealed, receive(*size, deadline));
  if (auto message = channel_->open(sealed)) return std::move(*message);
  return fail(not_opened("has another secret"));
}

}  // namespace stasis::rendezvous
