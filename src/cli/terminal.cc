#include "cli/terminal.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "base/listing.h"

namespace stasis::cli {
namespace {

constexpr std::chrono::milliseconds kQuietTime{1000};
constexpr std::chrono::milliseconds kInterval{100};
constexpr std::size_t kBarWidth = 24;
// In the place of a phase, once a stop was asked for.
constexpr std::string_view kStoppingText = "stopping";

std::size_t terminal_width() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

// How long to wait for a reader, in milliseconds. A terminal that was halted (Ctrl-S) takes
// nothing, and the job may stand still meanwhile.
constexpr int kProgressTimeout = 0;
constexpr int kNoteTimeout = 1000;
constexpr int kForEver = -1;

// 0, or the errno. EAGAIN if no program read in time.
int write_text(int fd, std::string_view text, int timeout) {
  while (!text.empty()) {
    pollfd wait{fd, POLLOUT, 0};
    const int ready = ::poll(&wait, 1, timeout);
    if (ready == 0) return EAGAIN;
    const ssize_t done = ready < 0 ? -1 : ::write(fd, text.data(), text.size());
    if (done < 0 && errno != EINTR && errno != EAGAIN) return errno;
    if (done > 0) text.remove_prefix(static_cast<std::size_t>(done));
  }
  return 0;
}

// Without memory for a message there is no message. Was there one?
template <class F>
bool quietly(const F& say) noexcept {
  try {
    say();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Several obstacles to a dump are a list, each with its own remedy: in one line, behind each other,
// a reader finds neither.
std::string undumpable_text(Error error) {
  error.message = fmt::format("{} things stand in the way of a dump", error.obstacles.size());
  return error.to_string();
}

std::string obstacle_lines(std::span<const Obstacle> obstacles, std::string_view bold,
                           std::string_view plain) {
  const auto shown = obstacles.first(std::min(obstacles.size(), kShownOfList));
  std::string out;
  for (const Obstacle& obstacle : shown) {
    out += fmt::format("- {}\n  {}what to do:{} {}\n", printable(obstacle.what), bold, plain,
                       printable(obstacle.remedy));
  }
  if (shown.size() < obstacles.size())
    out +=
        fmt::format("- and {} more: `stasis doctor` shows all\n", obstacles.size() - shown.size());
  return out +
         fmt::format("to let CRIU try all the same: {}\n", option_of(Override::kIgnoreUndumpable));
}

}  // namespace

// Characters, which are a column each but for wide ones (Chinese, Japanese, Korean) and marks.
std::size_t columns_of(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0U) != 0x80;
  }));
}

Terminal::Terminal() {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  const bool clever = term != nullptr && std::string_view(term) != "dumb";
  const bool wanted = no_color == nullptr || *no_color == '\0';
  tty_ = clever && ::isatty(STDERR_FILENO) == 1;
  colour_ = tty_ && wanted;
  out_colour_ = clever && wanted && ::isatty(STDOUT_FILENO) == 1;
}

void Terminal::update(std::string_view phase, std::uint64_t done, std::uint64_t total) noexcept {
  quietly([&] {
    const std::scoped_lock lock(mutex_);
    if (!tty_ || quiet_) return;
    last_told_ = Clock::now();
    show_progress(stopping_ ? kStoppingText : phase, done, total);
  });
}

void Terminal::set_stopping(bool stopping) noexcept {
  quietly([&] {
    const std::scoped_lock lock(mutex_);
    stopping_ = stopping;
  });
}

void Terminal::tick(const std::string& phase) noexcept {
  quietly([&] {
    const std::scoped_lock lock(mutex_);
    if (!tty_ || quiet_ || Clock::now() - last_told_ < kQuietTime) return;
    if (stopping_ || !phase.empty()) show_progress(stopping_ ? kStoppingText : phase, 0, 0);
  });
}

void Terminal::show_progress(std::string_view phase, std::uint64_t done, std::uint64_t total) {
  const auto now = Clock::now();
  if (phase != phase_) {
    clear_line(kProgressTimeout);
    phase_ = phase;
    phase_start_ = now;
    last_shown_ = {};
  }
  if (now - phase_start_ < kQuietTime || now - last_shown_ < kInterval) return;
  last_shown_ = now;
  std::string line = fmt::format("{:<10} ", phase);
  if (total > 0) {
    const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
    const auto filled = static_cast<std::size_t>(share * static_cast<double>(kBarWidth));
    line += fmt::format("[{}{}] {:3.0f}%  ", std::string(filled, '#'),
                        std::string(kBarWidth - filled, '.'), share * 100);
  }
  line += done == 0 && total == 0
              ? format_age(std::chrono::duration_cast<std::chrono::seconds>(now - phase_start_))
              : fmt::format("{}  {}", format_bytes(done), format_rate(done, now - phase_start_));
  const std::size_t width = terminal_width();
  if (line.size() >= width) line.resize(width - 1);
  write_text(STDERR_FILENO, "\r\x1b[K" + line, kProgressTimeout);
  line_shown_ = true;
}

std::optional<std::size_t> Terminal::columns() noexcept {
  if (const char* const asked = std::getenv("COLUMNS")) {
    const char* const end = asked + std::strlen(asked);
    std::size_t columns = 0;
    const auto [last, error] = std::from_chars(asked, end, columns);
    if (error == std::errc() && last == end && columns > 0) return columns;
  }
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
  return size.ws_col;
}

void Terminal::clear_screen() noexcept {
  const char* term = std::getenv("TERM");
  if (::isatty(STDOUT_FILENO) != 1 || term == nullptr || std::string_view(term) == "dumb") return;
  quietly([&] {
    const std::scoped_lock lock(mutex_);
    write_text(STDOUT_FILENO, "\x1b[H\x1b[J", kNoteTimeout);
  });
}

void Terminal::clear_line(int timeout) {
  if (!line_shown_) return;
  write_text(STDERR_FILENO, "\r\x1b[K", timeout);
  line_shown_ = false;
}

void Terminal::write_result(const std::string& text) {
  clear_line(kNoteTimeout);
  const int error = write_text(STDOUT_FILENO, text + "\n", kForEver);
  if (error != 0 && lost_ == 0) lost_ = error;
}

void Terminal::out(const std::string& line) noexcept {
  const bool made = quietly([&] {
    const std::scoped_lock lock(mutex_);
    write_result(printable(line));
  });
  if (!made && lost_ == 0) lost_ = ENOMEM;
}

void Terminal::out_block(const std::string& text) noexcept {
  const bool made = quietly([&] {
    const std::scoped_lock lock(mutex_);
    write_result(printable(text, true));
  });
  if (!made && lost_ == 0) lost_ = ENOMEM;
}

void Terminal::out_marked(const std::string& text, std::size_t length, Colour colour) noexcept {
  const bool made = quietly([&] {
    const std::scoped_lock lock(mutex_);
    std::string shown = printable(text, true);
    if (out_colour_ && length <= shown.size()) {
      const char* begin = colour == Colour::kRed      ? "\x1b[1;31m"
                          : colour == Colour::kYellow ? "\x1b[33m"
                                                      : "\x1b[32m";
      shown = begin + shown.substr(0, length) + "\x1b[0m" + shown.substr(length);
    }
    write_result(shown);
  });
  if (!made && lost_ == 0) lost_ = ENOMEM;
}

void Terminal::begin_log() {
  const std::scoped_lock lock(mutex_);
  if (!log_) log_.emplace();
  tty_ = false;
}

void Terminal::log_with(const std::string& key, nlohmann::json value) {
  const std::scoped_lock lock(mutex_);
  if (log_) log_->set(key, std::move(value));
}

void Terminal::write_record(Log::Level level, const std::string& message,
                            const nlohmann::json& more) {
  write_text(STDERR_FILENO, log_->record(level, message, more), kNoteTimeout);
}

void Terminal::log(const std::string& message, const nlohmann::json& more) noexcept {
  quietly([&] {
    const std::scoped_lock lock(mutex_);
    if (log_) write_record(Log::Level::kNote, message, more);
  });
}

void Terminal::note(const std::string& line) noexcept {
  quietly([&] {
    const std::scoped_lock lock(mutex_);
    clear_line(kNoteTimeout);
    if (quiet_) return;
    if (log_) return write_record(Log::Level::kNote, line, {});
    write_text(STDERR_FILENO, "note: " + printable(line) + "\n", kNoteTimeout);
  });
}

void Terminal::debug(const std::string& line) noexcept {
  quietly([&] {
    const std::scoped_lock lock(mutex_);
    clear_line(kNoteTimeout);
    if (verbose_ == 0) return;
    if (log_) return write_record(Log::Level::kDebug, line, {});
    write_text(STDERR_FILENO, printable(line) + "\n", kNoteTimeout);
  });
}

void print_error(std::string_view text) noexcept {
  quietly(
      [&] { write_text(STDERR_FILENO, fmt::format("stasis: error: {}\n", text), kNoteTimeout); });
}

void Terminal::error(const Error& error) noexcept {
  quietly([&] {
    const std::scoped_lock lock(mutex_);
    clear_line(kNoteTimeout);
    if (log_) {
      return write_record(Log::Level::kError, error.to_string(),
                          {{"code", error_code_name(error.code)}, {"remedy", error.remedy}});
    }
    const char* red = colour_ ? "\x1b[1;31m" : "";
    const char* bold = colour_ ? "\x1b[1m" : "";
    const char* plain = colour_ ? "\x1b[0m" : "";
    const bool many = error.code == ErrorCode::kUndumpable && error.obstacles.size() > 1;
    std::string text = fmt::format("{}stasis: error:{} {} [{}]\n", red, plain,
                                   printable(many ? undumpable_text(error) : error.to_string()),
                                   error_code_name(error.code));
    if (many) {
      text += obstacle_lines(error.obstacles, bold, plain);
    } else if (!error.remedy.empty()) {
      text += fmt::format("{}what to do:{} {}\n", bold, plain, printable(error.remedy));
    }
    write_text(STDERR_FILENO, text, kForEver);
  });
}

bool Terminal::report_lost_output(bool acted) noexcept {
  int number = 0;
  {
    const std::scoped_lock lock(mutex_);
    if (lost_ == 0 || lost_reported_) return lost_ != 0;
    lost_reported_ = true;
    number = lost_;
  }
  quietly([&] {
    error(
        {ErrorCode::kIo,
         fmt::format("the result cannot be written to standard output: {}", std::strerror(number)),
         acted ? "redirect it to a place that accepts it; what was done to processes stays done, "
                 "and `stasis ps` shows it"
               : "redirect it to a place that accepts it"});
  });
  return true;
}

std::string table(const std::vector<std::vector<std::string>>& rows,
                  std::optional<std::size_t> width) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], columns_of(printable(row[i])));
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string cell = printable(row[i]);
      line += cell;
      if (i + 1 < row.size()) line.append(widths[i] - columns_of(cell) + 2, ' ');
    }
    if (width) line = shortened(line, *width);
    out += (out.empty() ? "" : "\n") + line;
  }
  return out;
}

}  // namespace stasis::cli
