#include "cli/log.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cctype>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <fmt/chrono.h>
#include <fmt/format.h>

namespace stasis::cli {
namespace {

using nlohmann::json;

constexpr const char* kJournal = "/run/systemd/journal/socket";

const char* name_of(Log::Level level) {
  switch (level) {
    case Log::Level::kError:
      return "error";
    case Log::Level::kNote:
      return "note";
    case Log::Level::kDebug:
      return "debug";
  }
  return "";
}

// syslog(3): LOG_ERR, LOG_NOTICE, LOG_DEBUG.
int priority_of(Log::Level level) {
  switch (level) {
    case Log::Level::kError:
      return 3;
    case Log::Level::kNote:
      return 5;
    case Log::Level::kDebug:
      return 7;
  }
  return 5;
}

// systemd.exec(5): "DEVICE:INODE" of what it has connected standard error with.
bool is_journal(int fd) {
  const char* const said = std::getenv("JOURNAL_STREAM");
  struct stat info {};
  return said != nullptr && ::fstat(fd, &info) == 0 &&
         fmt::format("{}:{}", info.st_dev, info.st_ino) == said;
}

UniqueFd connect_to_journal() {
  UniqueFd out(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, kJournal);
  if (!out.valid() ||
      ::connect(out.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return {};
  return out;
}

// "KEY\n", the value's size as 64 bits, least first, the value, "\n": takes any value.
void add_field(std::string& text, std::string_view name, std::string_view value) {
  text += name;
  text += '\n';
  const std::uint64_t size = value.size();
  for (unsigned byte = 0; byte < 8; ++byte)
    text += static_cast<char>(size >> (8 * byte) & 0xff);
  text += value;
  text += '\n';
}

void add_fields(std::string& text, const json& object) {
  for (const auto& [key, value] : object.items()) {
    std::string name = "STASIS_";
    for (const char c : key)
      name += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    add_field(text, name, value.is_string() ? value.get<std::string>() : value.dump());
  }
}

}  // namespace

Log::Log() {
  if (is_journal(STDERR_FILENO)) journal_ = connect_to_journal();
}

bool Log::send_to_journal(Level level, std::string_view message, const json& more) const {
  if (!journal_.valid()) return false;
  std::string text;
  add_field(text, "MESSAGE", message);
  add_field(text, "PRIORITY", std::to_string(priority_of(level)));
  add_field(text, "SYSLOG_IDENTIFIER", "stasis");
  add_fields(text, always_);
  add_fields(text, more);
  return ::send(journal_.get(), text.data(), text.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(text.size());
}

std::string Log::record(Level level, std::string_view message, const json& more) {
  if (send_to_journal(level, message, more)) return {};
  json out = always_;
  if (more.is_object()) out.update(more);
  const auto now = std::chrono::system_clock::now();
  const auto thousandth =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  out["time"] = fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z",
                            fmt::gmtime(std::chrono::system_clock::to_time_t(now)), thousandth);
  out["level"] = name_of(level);
  out["message"] = message;
  out["pid"] = ::getpid();
  return out.dump(-1, ' ', true, json::error_handler_t::replace) + "\n";
}

}  // namespace stasis::cli
