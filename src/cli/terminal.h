// What the program says to people: results on standard output; progress, notes and errors on
// standard error. Colours and the moving line only on a terminal, and not with NO_COLOR.
//
// Thread-safe: progress may come from another thread than the rest.
#pragma once

#include <mutex>
#include <string>
#include <string_view>

#include "base/progress.h"
#include "base/units.h"
#include "stasis/error.h"

namespace stasis::cli {

class Terminal final : public Progress {
 public:
  Terminal();

  void set_quiet(bool quiet) { quiet_ = quiet; }
  void set_verbose(int verbose) { verbose_ = verbose; }
  int verbose() const { return verbose_; }

  // One moving line for a step that takes over a second; nothing if standard error is no terminal.
  void update(std::string_view phase, std::uint64_t done, std::uint64_t total) override;

  void out(const std::string& line);    // a result
  void note(const std::string& line);   // worth knowing
  void debug(const std::string& line);  // only with -v
  void error(const Error& error);       // what happened, and on its own line what to do

 private:
  void clear_line();

  std::mutex mutex_;
  bool tty_;
  bool colour_;
  bool quiet_ = false;
  int verbose_ = 0;
  bool line_shown_ = false;
  std::string phase_;
  Clock::time_point phase_start_;
  Clock::time_point last_shown_;
};

// Columns of text, aligned; the first row is the heading.
std::string table(const std::vector<std::vector<std::string>>& rows);

}  // namespace stasis::cli
