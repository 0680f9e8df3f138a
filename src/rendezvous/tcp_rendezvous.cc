#include "rendezvous/tcp_rendezvous.h"

#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/units.h"
#include "rendezvous/address.h"
#include "rendezvous/messages.h"
#include "rendezvous/record_client.h"
#include "rendezvous/record_server.h"
#include "rendezvous/secret.h"

namespace stasis::rendezvous {
namespace {}  // namespace

// Both that this part can be.
class TcpRendezvous::Ends {
 public:
  Ends(std::string place, std::string secret_file, std::vector<SocketAddress> addresses,
       GroupKey key)
      : place_(std::move(place)),
        addresses_(addresses),
        key_(std::move(key)),
        client_(place_, std::move(secret_file), std::move(addresses), key_) {}

  const std::string& place() const { return place_; }
  bool serves() const { return serves_; }

  Result<void> renew() {
    if (serves_) return {};
    client_.forget();
    STASIS_TRY_ASSIGN(auto listeners, listen_at(addresses_));
    serves_ = !listeners.empty();
    if (serves_) server_ = std::make_unique<RecordServer>(std::move(listeners), key_);
    return {};
  }

  Result<void> start() { return server_ ? server_->start() : Result<void>(); }

  bool is_needed() { return server_ && server_->is_needed(); }

  void leave() { server_.reset(); }

  Result<Answer> ask(const Request& request) {
    if (!server_) return client_.ask(request);
    return server_->store().answer(request, server_->id());
  }

 private:
  const std::string place_;
  const std::vector<SocketAddress> addresses_;
  const GroupKey key_;
  RecordClient client_;
  bool serves_ = false;  // not changed any more once this part has joined
  std::unique_ptr<RecordServer> server_;
};

TcpRendezvous::TcpRendezvous(std::unique_ptr<Ends> ends) : ends_(std::move(ends)) {}
TcpRendezvous::~TcpRendezvous() = default;

bool TcpRendezvous::is_address(const std::string& place) { return place.starts_with(kScheme); }

Result<std::unique_ptr<TcpRendezvous>> TcpRendezvous::open(const std::string& place,
                                                           const std::string& secret_file) {
  STASIS_TRY_ASSIGN(const auto where, parse_host_port(place));
  STASIS_TRY_ASSIGN(auto key, GroupKey::from_file(secret_file));
  STASIS_TRY_ASSIGN(auto addresses, resolve(where));
  auto ends = std::make_unique<Ends>(place, secret_file, std::move(addresses), std::move(key));
  STASIS_TRY(ends->renew());
  return std::unique_ptr<TcpRendezvous>(new TcpRendezvous(std::move(ends)));
}

bool TcpRendezvous::serves() const { return ends_->serves(); }

const std::string& TcpRendezvous::place() const { return ends_->place(); }

std::string TcpRendezvous::when_in_use() const {
  return "give each operation that is under way a port of its own (--group), and each part a name "
         "(--part)";
}

std::string TcpRendezvous::when_silent() const {
  return "see whether that node can be reached and its tool lives (`stasis recover` there, if it "
         "was killed), then try again with all parts";
}

Result<std::optional<std::string>> TcpRendezvous::read(const std::string& name, std::size_t limit) {
  STASIS_TRY_ASSIGN(auto answer, ends_->ask({Verb::kRead, name, {}}));
  if (answer.outcome != Outcome::kText) return std::optional<std::string>();
  if (answer.text.size() <= limit) return std::optional<std::string>(std::move(answer.text));
  return fail(ErrorCode::kIo, fmt::format("{}/{} is larger than {} bytes", place(), name, limit));
}

Result<void> TcpRendezvous::write(const std::string& name, const std::string& text) {
  STASIS_TRY_ASSIGN(const auto answer, ends_->ask({Verb::kWrite, name, text}));
  if (answer.outcome == Outcome::kDone) return {};
  return fail(ErrorCode::kNoSpace, fmt::format("{} keeps no more", place()));
}

Result<bool> TcpRendezvous::claim(const std::string& name, const std::string& /*who*/,
                                  const std::string& text) {
  STASIS_TRY_ASSIGN(const auto answer, ends_->ask({Verb::kClaim, name, text}));
  if (answer.outcome == Outcome::kFull)
    return fail(ErrorCode::kNoSpace, fmt::format("{} keeps no more", place()));
  return answer.outcome == Outcome::kDone;
}

Result<std::vector<std::string>> TcpRendezvous::names() {
  STASIS_TRY_ASSIGN(const auto answer, ends_->ask({Verb::kNames, {}, {}}));
  if (auto names = names_from_text(answer.text)) return std::move(*names);
  return fail(ErrorCode::kIo, fmt::format("{} sends malformed names", place()));
}

void TcpRendezvous::remove(const std::vector<std::string>& names) {
  (void)ends_->ask({Verb::kRemove, {}, names_to_text(names)});
}

Result<void> TcpRendezvous::renew() { return ends_->renew(); }

Result<void> TcpRendezvous::joined() { return ends_->start(); }

bool TcpRendezvous::cleans_up() const { return serves(); }

bool TcpRendezvous::serves_others() const { return serves(); }
bool TcpRendezvous::is_needed() { return ends_->is_needed(); }

void TcpRendezvous::leave() { ends_->leave(); }

}  // namespace stasis::rendezvous
