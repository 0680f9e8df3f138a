// The records of the part that serves, in its memory. Thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "rendezvous/messages.h"

namespace stasis::rendezvous {

class RecordStore {
 public:
  std::optional<std::string> read(const std::string& name) const;
  // False where that would be more than is kept.
  bool write(const std::string& name, const std::string& owner, const std::string& text);
  // Whether it is the owner's, with this text. Also where it has made the same before: the answer
  // to that may have been lost. Nothing where there is no room.
  std::optional<bool> claim(const std::string& name, const std::string& owner,
                            const std::string& text);
  std::vector<std::string> names() const;
  void remove(const std::vector<std::string>& names);

  // Of a client that is called `owner`.
  Answer answer(const Request& request, const std::string& owner);

 private:
  struct Record {
    std::string owner;
    std::string text;
  };
  bool put(const std::string& name, const std::string& owner, const std::string& text);

  mutable std::mutex mutex_;  // of these
  std::map<std::string, Record> records_;
  std::size_t bytes_ = 0;
};

}  // namespace stasis::rendezvous
