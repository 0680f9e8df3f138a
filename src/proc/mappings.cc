// /proc/PID/maps, which the process that it is about can make as large as it likes.
#include <fcntl.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"
#include "proc/procfs.h"

namespace stasis::proc {
namespace {

constexpr std::string_view kGap = "...";

// The begin and the end, which has the file's name, of a text that is too long.
void shorten(std::string& text, std::size_t longest) {
  if (text.size() <= longest) return;
  const std::size_t head = (longest - kGap.size()) / 2;
  const std::size_t tail = longest - kGap.size() - head;
  text.replace(head, text.size() - head - tail, kGap);
}

// "start-end permissions offset device inode   path", the path with blanks if it has any.
std::optional<Mapping> parse_mapping(std::string_view line) {
  Mapping mapping;
  const auto take = [&line] {
    const std::size_t begin = std::min(line.find_first_not_of(' '), line.size());
    const std::size_t end = std::min(line.find(' ', begin), line.size());
    const std::string_view word = line.substr(begin, end - begin);
    line.remove_prefix(end);
    return word;
  };
  const auto parse = [](std::string_view word, std::uint64_t& value, int base) {
    const auto done = std::from_chars(word.data(), word.data() + word.size(), value, base);
    return done.ec == std::errc() && done.ptr == word.data() + word.size();
  };
  const std::string_view range = take();
  const std::size_t dash = range.find('-');
  if (dash == std::string_view::npos || !parse(range.substr(0, dash), mapping.start, 16) ||
      !parse(range.substr(dash + 1), mapping.end, 16))
    return std::nullopt;
  mapping.permissions = take();
  (void)take();
  const std::string_view device = take();
  const std::size_t colon = device.find(':');
  std::uint64_t major = 0;
  std::uint64_t minor = 0;
  if (colon != std::string_view::npos && parse(device.substr(0, colon), major, 16) &&
      parse(device.substr(colon + 1), minor, 16))
    mapping.device = makedev(static_cast<unsigned>(major), static_cast<unsigned>(minor));
  if (!parse(take(), mapping.inode, 10)) return std::nullopt;
  mapping.path = line.substr(std::min(line.find_first_not_of(' '), line.size()));
  shorten(mapping.path, kLongestPath);
  return mapping;
}

}  // namespace

Result<void> ProcFs::for_each_mapping(Pid pid,
                                      const std::function<bool(const Mapping&)>& visit) const {
  const std::string path = fmt::format("{}/{}/maps", root_, pid.value);
  auto file = open_file(AT_FDCWD, path, O_RDONLY);
  if (!file) return fail(why_unread(root_, pid, std::move(file.error())));
  // A line is kept until its end is there; of one that is far too long, what is cut anyway goes.
  constexpr std::size_t kMostOfLine = 4 * kLongestPath;
  std::array<char, 65536> block{};
  std::string line;
  while (true) {
    const ssize_t size = TEMP_FAILURE_RETRY(::read(file->get(), block.data(), block.size()));
    if (size < 0) return fail(why_unread(root_, pid, errno_error("cannot read " + path, errno)));
    std::string_view rest(block.data(), static_cast<std::size_t>(size));
    while (!rest.empty()) {
      const std::size_t end = rest.find('\n');
      line += rest.substr(0, end);
      if (line.size() > kMostOfLine) shorten(line, 2 * kLongestPath);
      if (end == std::string_view::npos) break;
      rest.remove_prefix(end + 1);
      const auto mapping = parse_mapping(line);
      line.clear();
      if (mapping && !visit(*mapping)) return {};
    }
    if (size == 0) return {};
  }
}

Result<std::vector<Mapping>> ProcFs::mappings(Pid pid) const {
  std::vector<Mapping> out;
  std::size_t held = 0;
  auto done = for_each_mapping(pid, [&](const Mapping& mapping) {
    out.push_back(mapping);
    if (held > kManyPaths) shorten(out.back().path, kShortPath);
    out.back().path.shrink_to_fit();
    held += out.back().path.size();
    return true;
  });
  STASIS_TRY(std::move(done));
  return out;
}

Result<bool> ProcFs::maps_file(Pid pid, const std::string& name) const {
  bool found = false;
  auto done = for_each_mapping(pid, [&](const Mapping& mapping) {
    // The last part of a path: /opt/libcuda.so.d/other does not count.
    const std::size_t slash = mapping.path.rfind('/');
    found = slash != std::string::npos &&
            std::string_view(mapping.path).substr(slash + 1).starts_with(name);
    return !found;
  });
  STASIS_TRY(std::move(done));
  return found;
}

}  // namespace stasis::proc
