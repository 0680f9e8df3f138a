// A part that asks the one that serves. Each call takes three seconds at most, and connects again
// where the connection was lost.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "base/units.h"
#include "rendezvous/address.h"
#include "rendezvous/messages.h"
#include "rendezvous/sealed_channel.h"
#include "rendezvous/secret.h"

namespace stasis::rendezvous {

// Thread-safe.
class RecordClient {
 public:
  // `place` and `secret_file` are for messages; `key` must outlive it.
  RecordClient(std::string place, std::string secret_file, std::vector<SocketAddress> addresses,
               const GroupKey& key);

  // kTimeout if no part answers; kNotPermitted if what answers has not the secret; kIo if another
  // part serves now than the one that was asked first.
  Result<Answer> ask(const Request& request);
  // Whatever serves now is asked from here on.
  void forget();

 private:
  using Deadline = Clock::time_point;

  Result<Answer> ask_once(const Request& request, Deadline deadline);
  Result<void> connect(Deadline deadline);
  Result<UniqueFd> reach(Deadline deadline) const;
  Result<void> greet(Deadline deadline);
  Result<void> send(std::string_view bytes, Deadline deadline) const;
  Result<std::string> receive(std::size_t count, Deadline deadline) const;
  // A message, opened.
  Result<std::string> hear(std::size_t limit, Deadline deadline);
  Error no_answer(const std::string& why) const;
  Error stranger(const std::string& what) const;
  // Of what should be a message, and is none that this end could open.
  Error not_opened(const std::string& what) const;

  const std::string place_;
  const std::string secret_file_;
  const std::vector<SocketAddress> addresses_;
  const GroupKey& key_;
  const std::string id_;

  std::mutex mutex_;  // of these
  UniqueFd socket_;
  std::optional<SealedChannel> channel_;
  bool has_shown_secret_ = false;  // the other end of this connection
  std::string server_;             // the one that was asked first
  std::optional<Error> failed_;
  Clock::time_point failed_at_;
};

}  // namespace stasis::rendezvous
