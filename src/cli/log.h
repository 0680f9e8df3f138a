// What the program says on standard error, as records for other programs (--log-json): one JSON
// object a line; or, where standard error is the system's journal, the journal's fields
// (systemd's native protocol). docs/operators.md lists the keys.
//
// Not thread-safe; Terminal holds its lock.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/fd.h"

namespace stasis::cli {

class Log {
 public:
  enum class Level { kError, kNote, kDebug };

  Log();

  // For all records from now on.
  void set(const std::string& key, nlohmann::json value) { always_[key] = std::move(value); }
  // The record's line, with a line feed; empty if the journal has taken the record. `more` is null
  // or has further keys.
  std::string record(Level level, std::string_view message, const nlohmann::json& more);

 private:
  bool send_to_journal(Level level, std::string_view message, const nlohmann::json& more) const;

  nlohmann::json always_ = nlohmann::json::object();
  UniqueFd journal_;  // connected; not valid if standard error is something else
};

}  // namespace stasis::cli
