#include "job/terminal.h"

#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <string_view>

#include <fmt/format.h>

#include "proc/procfs.h"

namespace stasis::job {
namespace {

constexpr TerminalStreams kOutputs = 2 | 4;

template <class Number>
bool parse_whole(std::string_view text, Number& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

TerminalStreams our_terminals() {
  TerminalStreams out = 0;
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (::isatty(stream) == 1) out |= 1U << static_cast<unsigned>(stream);
  }
  return (out & kOutputs) != 0 ? out : 0;
}

winsize our_size() {
  winsize size{};
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (::ioctl(stream, TIOCGWINSZ, &size) == 0) return size;
  }
  return {};
}

std::vector<std::string> holder_command(TerminalStreams streams, const winsize& size,
                                        const std::vector<std::string>& command) {
  std::error_code none;
  std::vector<std::string> out = {std::filesystem::read_symlink("/proc/self/exe", none).string(),
                                  kHoldTerminal, std::to_string(streams),
                                  fmt::format("{}x{}", size.ws_row, size.ws_col)};
  out.insert(out.end(), command.begin(), command.end());
  return out;
}

TerminalStreams held_streams(Pid root) {
  const auto details = proc::ProcFs().details(root);
  if (!details || details->argv.size() < 4 || details->argv[1] != kHoldTerminal) return 0;
  TerminalStreams streams = 0;
  return parse_whole(details->argv[2], streams) ? streams : 0;
}

std::optional<HolderOrder> parse_holder_order(const std::vector<std::string>& words) {
  HolderOrder order;
  const std::size_t x = words.size() > 2 ? words[1].find('x') : std::string::npos;
  if (x == std::string::npos || !parse_whole(words[0], order.streams) ||
      !parse_whole(std::string_view(words[1]).substr(0, x), order.size.ws_row) ||
      !parse_whole(std::string_view(words[1]).substr(x + 1), order.size.ws_col))
    return std::nullopt;
  order.command.assign(words.begin() + 2, words.end());
  return order;
}

}  // namespace stasis::job
