#include "cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <fmt/format.h>

namespace stasis::cli {
namespace {

constexpr std::chrono::milliseconds kQuietTime{1000};
constexpr std::chrono::milliseconds kInterval{100};
constexpr std::size_t kBarWidth = 24;

std::size_t terminal_width() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

// A terminal must not obey what a program calls itself, or a file.
std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return text;
}

void write_line(std::FILE* stream, const std::string& text) {
  fmt::print(stream, "{}\n", text);
  std::fflush(stream);
}

}  // namespace

Terminal::Terminal() {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  tty_ = ::isatty(STDERR_FILENO) == 1 && term != nullptr && std::string_view(term) != "dumb";
  colour_ = tty_ && (no_color == nullptr || *no_color == '\0');
}

void Terminal::update(std::string_view phase, std::uint64_t done, std::uint64_t total) {
  const std::scoped_lock lock(mutex_);
  if (!tty_ || quiet_) return;
  const auto now = Clock::now();
  if (phase != phase_) {
    clear_line();
    phase_ = phase;
    phase_start_ = now;
    last_shown_ = {};
  }
  if (now - phase_start_ < kQuietTime || now - last_shown_ < kInterval) return;
  last_shown_ = now;
  std::string line = fmt::format("{:<11}", phase);
  if (total > 0) {
    const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
    const auto filled = static_cast<std::size_t>(share * static_cast<double>(kBarWidth));
    line += fmt::format("[{}{}] {:3.0f}%  ", std::string(filled, '#'),
                        std::string(kBarWidth - filled, '.'), share * 100);
  }
  line += fmt::format("{}  {}", format_bytes(done), format_rate(done, now - phase_start_));
  const std::size_t width = terminal_width();
  if (line.size() >= width) line.resize(width - 1);
  fmt::print(stderr, "\r\x1b[K{}", line);
  std::fflush(stderr);
  line_shown_ = true;
}

void Terminal::clear_line() {
  if (!line_shown_) return;
  fmt::print(stderr, "\r\x1b[K");
  line_shown_ = false;
}

void Terminal::out(const std::string& line) {
  const std::scoped_lock lock(mutex_);
  clear_line();
  write_line(stdout, line);
}

void Terminal::note(const std::string& line) {
  const std::scoped_lock lock(mutex_);
  clear_line();
  if (!quiet_) write_line(stderr, "note: " + printable(line));
}

void Terminal::debug(const std::string& line) {
  const std::scoped_lock lock(mutex_);
  clear_line();
  if (verbose_ > 0) write_line(stderr, line);
}

void Terminal::error(const Error& error) {
  const std::scoped_lock lock(mutex_);
  clear_line();
  const char* red = colour_ ? "\x1b[1;31m" : "";
  const char* bold = colour_ ? "\x1b[1m" : "";
  const char* plain = colour_ ? "\x1b[0m" : "";
  write_line(stderr, fmt::format("{}stasis: error:{} {} [{}]", red, plain,
                                 printable(error.to_string()), error_code_name(error.code)));
  if (!error.remedy.empty()) {
    write_line(stderr, fmt::format("{}what to do:{} {}", bold, plain, printable(error.remedy)));
  }
}

std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string cell = printable(row[i]);
      line += i + 1 < row.size() ? fmt::format("{:<{}}  ", cell, widths[i]) : cell;
    }
    out += (out.empty() ? "" : "\n") + line;
  }
  return out;
}

}  // namespace stasis::cli
