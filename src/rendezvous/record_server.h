// The part that serves the others, for as long as its operation lasts: a thread that answers what
// they ask of its records. What comes is believed only when it opens with the secret; before that a
// connection has little memory, little time, and a bounded number of others beside it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "base/units.h"
#include "rendezvous/record_store.h"
#include "rendezvous/secret.h"

namespace stasis::rendezvous {

class RecordServer {
 public:
  // `key` must outlive it.
  RecordServer(std::vector<UniqueFd> listeners, const GroupKey& key);
  RecordServer(const RecordServer&) = delete;
  RecordServer& operator=(const RecordServer&) = delete;
  // Closes all connections.
  ~RecordServer();

  RecordStore& store() { return store_; }
  const std::string& id() const { return id_; }

  // From here on others are answered; who came before waits. kOutOfHostMemory, kIo.
  Result<void> start();
  // Not if for a second no part has been connected.
  bool is_needed();

 private:
  class Loop;

  const std::string id_;
  RecordStore store_;
  std::unique_ptr<Loop> loop_;
  Clock::time_point needed_ = Clock::now();
};

}  // namespace stasis::rendezvous
