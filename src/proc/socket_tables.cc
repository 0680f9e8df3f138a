// The sockets of a process, and the tables of those of a network namespace (/proc/PID/net), to
// which every process in it adds: of any length.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/fd.h"
#include "proc/procfs.h"

namespace stasis::proc {
namespace {

Result<void> for_each_line(const std::string& root, Pid pid, const std::string& name,
                           const std::function<void(const std::string&)>& visit) {
  const std::string path = fmt::format("{}/{}/{}", root, pid.value, name);
  auto file = open_checked(AT_FDCWD, path, O_RDONLY, &is_regular_file);
  if (!file) return fail(why_unread(root, pid, std::move(file.error())));
  std::string line;
  std::array<char, 65536> piece{};
  for (;;) {
    const ssize_t got = TEMP_FAILURE_RETRY(::read(file->get(), piece.data(), piece.size()));
    if (got < 0) return fail(why_unread(root, pid, errno_error("cannot read " + path, errno)));
    std::string_view rest(piece.data(), static_cast<std::size_t>(got));
    while (!rest.empty()) {
      const std::size_t end = rest.find('\n');
      line += rest.substr(0, end);
      if (end == std::string_view::npos) break;
      rest.remove_prefix(end + 1);
      visit(line);
      line.clear();
    }
    if (got > 0) continue;
    if (!line.empty()) visit(line);
    return {};
  }
}

}  // namespace

namespace {

std::vector<std::uint64_t> inodes_of_sockets(const std::vector<OpenFile>& files,
                                             const std::function<bool(const OpenFile&)>& wanted) {
  constexpr std::string_view kSocketLink = "socket:[";
  std::vector<std::uint64_t> out;
  for (const OpenFile& file : files) {
    const std::string_view target = file.path;
    if (!target.starts_with(kSocketLink) || !wanted(file)) continue;
    std::uint64_t inode = 0;
    std::from_chars(target.data() + kSocketLink.size(), target.data() + target.size(), inode);
    out.push_back(inode);
  }
  return out;
}

}  // namespace

std::vector<std::uint64_t> socket_inodes(const std::vector<OpenFile>& files) {
  return inodes_of_sockets(files, [](const OpenFile&) { return true; });
}

Result<std::vector<std::uint64_t>> ProcFs::socket_inodes(Pid pid) const {
  STASIS_TRY_ASSIGN(auto files, open_files(pid));
  return proc::socket_inodes(files);
}

Result<std::vector<std::uint64_t>> ProcFs::tcp_socket_inodes(Pid pid) const {
  STASIS_TRY_ASSIGN(auto files, open_files(pid));
  return inodes_of_sockets(files, [&](const OpenFile& file) {
    const auto name = socket_protocol(pid, file.descriptor);
    return !name || name->find("TCP") != std::string::npos;
  });
}

Result<std::vector<UnixSocket>> ProcFs::unix_sockets(Pid pid, std::string_view named) const {
  std::vector<UnixSocket> out;
  auto done = for_each_line(root_, pid, "net/unix", [&](const std::string& line) {
    if (!named.empty() && line.find(named) == std::string::npos) return;
    // "address: references protocol flags type state inode path"
    std::istringstream words(line);
    std::string skipped;
    std::string flags;
    UnixSocket socket;
    words >> skipped >> skipped >> skipped >> flags >> skipped >> skipped >> socket.inode;
    socket.listens = flags == "00010000";  // __SO_ACCEPTCON of linux/net.h
    if (!words) return;                    // the heading
    std::getline(words >> std::ws, socket.path);
    out.push_back(std::move(socket));
  });
  STASIS_TRY(std::move(done));
  return out;
}

namespace {

// Of the file system that sockets are in, which a socket of a program's own file system is not.
std::optional<std::uint64_t> device_of(const UniqueFd& file) {
  struct statx info {};
  constexpr int kFlags = AT_EMPTY_PATH | AT_STATX_DONT_SYNC;
  if (!file.valid() || ::statx(file.get(), "", kFlags, STATX_TYPE, &info) != 0) return std::nullopt;
  return std::uint64_t{info.stx_dev_major} << 32U | info.stx_dev_minor;
}

}  // namespace

std::optional<std::string> ProcFs::socket_protocol(Pid pid, int descriptor) const {
  static const auto sockets = device_of(UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  const std::string link = fmt::format("{}/{}/fd/{}", root_, pid.value, descriptor);
  const UniqueFd held(::open(link.c_str(), O_PATH | O_CLOEXEC));
  if (!sockets || device_of(held) != sockets) return std::nullopt;
  std::array<char, 64> name{};
  const std::string path = fmt::format("/proc/self/fd/{}", held.get());
  // sockfs in net/socket.c.
  if (::getxattr(path.c_str(), "system.sockprotoname", name.data(), name.size() - 1) < 0)
    return std::nullopt;
  return name.data();
}

namespace {

// ::ffff:a.b.c.d as a.b.c.d (net/ipv6/tcp_ipv6.c prints four words in the machine's byte order).
std::string without_mapping(std::string address) {
  constexpr std::string_view kMapped = "0000000000000000FFFF0000";
  return address.starts_with(kMapped) ? address.substr(kMapped.size()) : address;
}

}  // namespace

Result<std::vector<InetSocket>> ProcFs::tcp_sockets(Pid pid) const {
  return inet_sockets(pid, "tcp");
}

Result<std::vector<InetSocket>> ProcFs::udp_sockets(Pid pid) const {
  return inet_sockets(pid, "udp");
}

Result<std::vector<InetSocket>> ProcFs::inet_sockets(Pid pid, std::string_view protocol) const {
  std::vector<InetSocket> out;
  for (const char* version : {"", "6"}) {
    const std::string table = fmt::format("net/{}{}", protocol, version);
    auto done = for_each_line(root_, pid, table, [&](const std::string& line) {
      // "number: address:port address:port state queues timer retransmits uid timeout inode ..."
      std::istringstream words(line);
      std::string local;
      std::string remote;
      std::string state;
      std::string skipped;
      InetSocket socket;
      words >> skipped >> local >> remote >> state >> skipped >> skipped >> skipped >> skipped >>
          skipped >> socket.inode;
      const std::size_t colon = local.rfind(':');
      if (!words || colon == std::string::npos) return;  // the heading
      socket.listens = state == "0A";                    // TCP_LISTEN of net/tcp_states.h
      socket.is_established = state == "01";             // TCP_ESTABLISHED
      std::from_chars(local.data() + colon + 1, local.data() + local.size(), socket.local_port, 16);
      socket.local = without_mapping(std::move(local));
      socket.remote = without_mapping(std::move(remote));
      out.push_back(std::move(socket));
    });
    if (!done && !out.empty()) break;
    if (!done && done.error().code == ErrorCode::kIo) continue;
    STASIS_TRY(std::move(done));
  }
  return out;
}

}  // namespace stasis::proc
