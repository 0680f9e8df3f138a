// What the program says to the user: results on standard output; progress, notes and errors on
// standard error. Colours and the moving line only on a terminal, and not with NO_COLOR.
//
// Nothing here throws or fails: an operation must not be cut short because the user cannot be told
// of it (a terminal that has hung up answers EIO). report_lost_output() tells of results that were
// lost.
//
// Thread-safe: progress may come from another thread than the rest.
#pragma once

#include <cerrno>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/printable.h"
#include "base/progress.h"
#include "base/units.h"
#include "cli/log.h"

namespace stasis::cli {

class Terminal final : public Progress {
 public:
  Terminal();

  // Makes room for a table that is shown again and again; nothing if standard output is no
  // terminal.
  void clear_screen() noexcept;
  // What COLUMNS says; else those of standard output, and none if it is no terminal.
  static std::optional<std::size_t> columns() noexcept;

  void set_quiet(bool quiet) { quiet_ = quiet; }
  // Standard error gets records for programs from now on, and no moving line.
  void begin_log();
  // A key of all records from now on; nothing without begin_log().
  void log_with(const std::string& key, nlohmann::json value);
  bool logs() const { return log_.has_value(); }
  // A record with further keys, also if it is quiet; nothing without begin_log().
  void log(const std::string& message, const nlohmann::json& more) noexcept;
  void set_verbose(int verbose) { verbose_ = verbose; }
  bool quiet() const { return quiet_; }
  bool has_moving_line() const { return tty_ && !quiet_; }

  // One moving line for a step that takes over a second; nothing if standard error is no terminal.
  void update(std::string_view phase, std::uint64_t done, std::uint64_t total) noexcept override;

  // The same of a step that tells nothing itself; left out while update() is called.
  void tick(const std::string& phase) noexcept;
  // What update() shows is named "stopping" instead.
  void set_stopping(bool stopping) noexcept;

  // Whatever a terminal could obey is replaced by '?' in all of these.
  void out(const std::string& line) noexcept;        // a result
  void out_block(const std::string& text) noexcept;  // the same, of several lines
  void note(const std::string& line) noexcept;       // worth knowing
  void debug(const std::string& line) noexcept;      // only with -v
  // A result of several lines; its first word, up to `length`, is coloured on a terminal.
  enum class Colour { kRed, kYellow, kGreen };
  void out_marked(const std::string& text, std::size_t length, Colour colour) noexcept;
  void error(const Error& error) noexcept;  // what happened, and what to do

  // Could a result not be written?
  bool lost_output() const noexcept { return lost_ != 0; }
  // Did the reader go away, as that of `stasis doctor | head -1` does?
  bool lost_to_a_closed_pipe() const noexcept { return lost_ == EPIPE; }
  // Could a result not be written? Says so on standard error, the first time it is asked.
  // `acted`: the result was of something done to processes.
  bool report_lost_output(bool acted = true) noexcept;

 private:
  void clear_line(int timeout);
  void show_progress(std::string_view phase, std::uint64_t done, std::uint64_t total);
  void write_result(const std::string& text);
  void write_record(Log::Level level, const std::string& message, const nlohmann::json& more);

  std::mutex mutex_;
  bool tty_;
  bool colour_;      // of standard error
  bool out_colour_;  // of standard output
  bool quiet_ = false;
  int verbose_ = 0;
  std::optional<Log> log_;
  bool line_shown_ = false;
  bool stopping_ = false;
  int lost_ = 0;  // the errno of the first result that could not be written
  bool lost_reported_ = false;
  std::string phase_;
  Clock::time_point phase_start_;
  Clock::time_point last_shown_;
  Clock::time_point last_told_;  // by update()
};

// "stasis: error: " and the text, on standard error, for code that has no Terminal. What cannot be
// written is lost.
void print_error(std::string_view text) noexcept;

// How many columns a text takes on a terminal.
std::size_t columns_of(std::string_view text);
// Columns of text, aligned; the first row is the heading. A line that is longer than
// `width` ends there with "…".
std::string table(const std::vector<std::vector<std::string>>& rows,
                  std::optional<std::size_t> width = std::nullopt);

}  // namespace stasis::cli
