#include "criu/criu_tcp_queues.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "criu/criu_messages.h"

namespace stasis {
namespace {

constexpr std::uint32_t kTcpMagic = 0x51465506;  // criu/include/magic.h of CRIU 4.2
constexpr std::string_view kTcpPrefix = "tcp-stream-";
constexpr std::size_t kTcpHead = 12;           // two magic numbers and the size
constexpr std::size_t kMostOfTcp = 4096;       // the message has seventeen numbers
constexpr unsigned char kUnsentTag = 12 << 3;  // unsq_len of images/tcp-stream.proto, a number

// Where the number of unsent bytes is in the message, as begin and end.
std::optional<std::pair<std::size_t, std::size_t>> find_unsent(std::string_view message) {
  const auto end_of_number = [&](std::size_t at) {
    while (at < message.size() && (static_cast<unsigned char>(message[at]) & 0x80) != 0)
      ++at;
    return at + 1;
  };
  for (std::size_t at = 0; at < message.size();) {
    const std::size_t value = end_of_number(at);
    const std::size_t end = end_of_number(value);
    const auto tag = static_cast<unsigned char>(message[at]);
    if ((tag & 7) != 0 || end > message.size()) return std::nullopt;  // all are numbers
    if (value == at + 1 && tag == kUnsentTag) return std::pair(value, end);
    at = end;
  }
  return std::nullopt;
}

Result<void> count_as_sent(const UniqueFd& dir, const std::string& name) {
  STASIS_TRY_ASSIGN(auto file, open_file(dir.get(), name, O_RDWR | O_NOFOLLOW));
  std::array<char, kTcpHead + kMostOfTcp> text{};
  const ssize_t got = ::pread(file.get(), text.data(), text.size(), 0);
  const auto word = [&](std::size_t at) {
    std::uint32_t value = 0;
    std::memcpy(&value, text.data() + at, sizeof value);
    return value;
  };
  if (got < static_cast<ssize_t>(kTcpHead) || word(0) != kAnyImageMagic || word(4) != kTcpMagic ||
      word(8) > static_cast<std::size_t>(got) - kTcpHead)
    return {};
  const auto unsent = find_unsent({text.data() + kTcpHead, word(8)});
  if (!unsent) return {};
  // A zero of as many bytes.
  std::string zero(unsent->second - unsent->first, '\x80');
  zero.back() = '\0';
  const auto at = static_cast<off_t>(kTcpHead + unsent->first);
  if (::pwrite(file.get(), zero.data(), zero.size(), at) != static_cast<ssize_t>(zero.size()))
    return fail(errno_error("cannot write " + name, errno));
  return file.close(name);
}

}  // namespace

Result<void> count_as_sent(const UniqueFd& criu_dir) {
  UniqueFd again(::openat(criu_dir.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto closer = [](DIR* stream) { return ::closedir(stream); };
  const std::unique_ptr<DIR, decltype(closer)> stream(
      again.valid() ? ::fdopendir(again.get()) : nullptr, closer);
  if (!stream) return fail(errno_error("cannot list CRIU's files", errno));
  (void)again.release();
  while (const dirent* entry = ::readdir(stream.get())) {
    const std::string name(static_cast<const char*>(entry->d_name));
    if (name.starts_with(kTcpPrefix)) STASIS_TRY(count_as_sent(criu_dir, name));
  }
  return {};
}

}  // namespace stasis
