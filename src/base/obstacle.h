// What stands in the way of an operation, found before anything is touched: what the driver, an
// agent or CRIU would refuse or lose of a process, and what this machine lacks. The doctor's lists
// have what is fine too, in green.
//
// Plain values; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/ids.h"

namespace stasis {

enum class Severity {
  kGreen,   // fine
  kYellow,  // works, with a limit that is worth knowing
  kRed,     // the operation will fail
};
std::string_view severity_name(Severity severity);  // "green", "yellow", "red"

// The option by which a user who knows better goes on in spite of it.
enum class Override { kNone, kIgnoreObstacles, kIgnoreUndumpable };

// "--ignore-obstacles"; empty if there is none.
std::string_view option_of(Override by);

// A row of the list of ids.
struct ObstacleInfo {
  std::string_view id;
  std::string_view meaning;
  bool is_told;  // at every dump
};
inline constexpr auto kObstacles = std::to_array<ObstacleInfo>({
#define STASIS_OBSTACLE(id, meaning) {id, meaning, false},
#define STASIS_OBSTACLE_TOLD(id, meaning) {id, meaning, true},
#include "base/obstacle_ids.inc"
#undef STASIS_OBSTACLE
#undef STASIS_OBSTACLE_TOLD
});

// What an obstacle is, for programs: "managed-memory", "tcp-connection", "criu-check". One that is
// not in the list does not compile.
class ObstacleId {
 public:
  template <std::size_t size>
  // NOLINTNEXTLINE(google-explicit-constructor): of a literal
  consteval ObstacleId(const char (&name)[size]) : row_(row_of({name, size - 1})) {
    if (row_ == kObstacles.size()) throw "base/obstacle_ids.inc does not have this id";
  }
  // One that another process has named; nothing if it is not in the list.
  static std::optional<ObstacleId> find(std::string_view name);

  constexpr std::string_view name() const { return kObstacles[row_].id; }
  constexpr bool is_told() const { return kObstacles[row_].is_told; }
  constexpr bool operator==(const ObstacleId&) const = default;

 private:
  constexpr explicit ObstacleId(std::size_t row) : row_(row) {}
  static constexpr std::size_t row_of(std::string_view name) {
    std::size_t row = 0;
    while (row < kObstacles.size() && kObstacles[row].id != name)
      ++row;
    return row;
  }

  std::size_t row_;
};

struct Obstacle {
  ObstacleId id;
  Severity severity = Severity::kRed;
  Pid pid = {};             // of what one process has; 0: of the machine, or of the whole tree
  std::string what;         // with the value seen: "driver 580.159.04", "4 GiB free in /images"
  std::string remedy = {};  // what to do; empty if green
  Override by = Override::kNone;
};

// The severity of the worst of them; green if there are none.
Severity worst(std::span<const Obstacle> obstacles);

}  // namespace stasis
