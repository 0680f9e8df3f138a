// What went wrong in CRIU, from its log: its error lines, what they mean and what to do.
//
// CRIU gives no error codes; the text of its errors is the only source. Nothing depends on the
// decoding but the words that a person reads, and the choice between kCriuFailed and a narrower
// code. Bounded and safe on any input. Plain values; functions callable from any thread.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "base/obstacle.h"
#include "base/result.h"

namespace stasis {

// What an error line of CRIU means.
struct CriuDiagnosis {
  ErrorCode code = ErrorCode::kCriuFailed;
  std::string meaning;  // "process number 12 is taken"
  std::string remedy;
  std::string line;  // the line that says so, without time and place
  // What of the program or of this machine it is about, if it is in the list of obstacles.
  std::optional<ObstacleId> obstacle;
};

struct CriuLog {
  // CRIU's errors in their order, without time and place: at most the first and the last
  // kKeptErrors, each cut at kMaxLine bytes, with control characters replaced.
  std::vector<std::string> errors;
  // The first error that is understood: what comes after it is its consequence. If no error is
  // understood, a line of another kind that is known to announce a failure.
  std::optional<CriuDiagnosis> diagnosis;

  bool truncated = false;  // only the end of the file was read

  static constexpr std::size_t kKeptErrors = 16;
  static constexpr std::size_t kMaxLine = 400;

  static CriuLog parse(std::string_view text);
  // Reads at most the last 8 MiB of a log; empty if there is none.
  static CriuLog read(const UniqueFd& directory, const std::string& name);
  // The same of a regular file that is open. kIo.
  static Result<CriuLog> read(const UniqueFd& file);
};

// A line that is known: `first` and `second` stand in it, in this order; either may be empty.
struct CriuRule {
  std::string_view first;
  std::string_view second;
  ErrorCode code;
  std::string_view meaning;
  std::string_view remedy;
  std::optional<ObstacleId> obstacle = {};
};

// In the order in which they are tried.
std::span<const CriuRule> criu_rules();

// What one error line means, if it is known.
std::optional<CriuDiagnosis> diagnose_criu_line(std::string_view line);

}  // namespace stasis
