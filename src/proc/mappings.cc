// /proc/PID/maps, which the process that it is about can make as large as it likes.
#include <fcntl.h>
#include <linux/limits.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/fd.h"
#include "proc/process_file.h"
#include "proc/procfs.h"

namespace stasis::proc {
namespace {

constexpr std::string_view kGap = "...";

// The begin and the end, which has the file's name, of a text that is too long.
std::string shortened(std::string_view text, std::size_t longest) {
  if (text.size() <= longest) return std::string(text);
  const std::size_t head = (longest - kGap.size()) / 2;
  const std::size_t tail = longest - kGap.size() - head;
  std::string out;
  out.reserve(longest);
  out += text.substr(0, head);
  out += kGap;
  out += text.substr(text.size() - tail);
  return out;
}

void shorten(std::string& text, std::size_t longest) {
  if (text.size() > longest) text = shortened(text, longest);
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
  if (!parse(take(), mapping.offset, 16)) return std::nullopt;
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

// linux/fs.h, since Linux 6.11.
struct MapQuery {
  std::uint64_t size = sizeof(MapQuery);
  std::uint64_t query_flags = 0;
  std::uint64_t query_addr = 0;
  std::uint64_t start = 0;
  std::uint64_t end = 0;
  std::uint64_t flags = 0;
  std::uint64_t page_size = 0;
  std::uint64_t offset = 0;
  std::uint64_t inode = 0;
  std::uint32_t major = 0;
  std::uint32_t minor = 0;
  std::uint32_t name_size = 0;
  std::uint32_t build_id_size = 0;
  std::uint64_t name = 0;
  std::uint64_t build_id = 0;
};
static_assert(sizeof(MapQuery) == 104);
constexpr unsigned long kMapQuery = _IOWR('f', 17, MapQuery);
constexpr std::uint64_t kReadable = 1;
constexpr std::uint64_t kWritable = 2;
constexpr std::uint64_t kExecutable = 4;
constexpr std::uint64_t kShared = 8;
constexpr std::uint64_t kCoveringOrNext = 16;
constexpr std::uint64_t kOfFile = 0x20;

// As the text has it, where a line break would end the line.
std::string escaped(std::string_view name) {
  std::string out;
  out.reserve(name.size());
  for (std::size_t at = 0; at < name.size();) {
    const std::size_t end = std::min(name.find('\n', at), name.size());
    out += name.substr(at, end - at);
    if (end < name.size()) out += "\\012";
    at = end + 1;
  }
  return out;
}

// But for the path.
void take_answer(const MapQuery& answer, Mapping& mapping) {
  mapping.start = answer.start;
  mapping.end = answer.end;
  mapping.permissions = {
      (answer.flags & kReadable) != 0 ? 'r' : '-', (answer.flags & kWritable) != 0 ? 'w' : '-',
      (answer.flags & kExecutable) != 0 ? 'x' : '-', (answer.flags & kShared) != 0 ? 's' : 'p'};
  mapping.offset = answer.offset;
  mapping.inode = answer.inode;
  mapping.device = makedev(answer.major, answer.minor);
}

// What so many questions for one mapping each have told.
struct Told {
  std::vector<Mapping> mappings;
  std::uint64_t next = 0;  // the address of the next question
  bool is_all = false;
  bool wants_text = false;  // from `next` on
};
constexpr std::size_t kQuestionsAtOnce = 128;

// A tenth of the text's cost where the name of one file is long and full of line breaks (30,000
// mappings: 459 MB, 1.2 s). The text has to be read of a kernel that does not know the question,
// and for a name that is longer than it tells.
Told ask_for_some(const UniqueFd& maps, std::uint64_t at, std::uint64_t which = 0) {
  std::array<char, PATH_MAX> name{};
  std::string before;  // the name of the mapping before, which often is the same
  std::string path;
  Told told;
  told.mappings.reserve(kQuestionsAtOnce);
  while (told.mappings.size() < kQuestionsAtOnce) {
    told.next = at;
    MapQuery query;
    query.query_flags = kCoveringOrNext | which;
    query.query_addr = at;
    query.name_size = name.size();
    query.name = reinterpret_cast<std::uint64_t>(name.data());
    if (::ioctl(maps.get(), kMapQuery, &query) != 0) {
      if (errno == EINTR) continue;
      // No further one; or the process has ended, and the text would be empty.
      told.is_all = errno == ENOENT || errno == ESRCH;
      told.wants_text = !told.is_all;
      return told;
    }
    // With its end, a zero; nothing for no name.
    const std::string_view now(name.data(), query.name_size == 0 ? 0 : query.name_size - 1);
    if (now != before) {
      before = now;
      path = escaped(now);
      shorten(path, kLongestPath);
    }
    Mapping& mapping = told.mappings.emplace_back();
    take_answer(query, mapping);
    mapping.path = path;
    at = query.end;
  }
  told.next = at;
  return told;
}

}  // namespace

Result<std::optional<Mapping>> mapping_at(const UniqueFd& maps, std::uint64_t address) {
  MapQuery query;
  query.query_addr = address;
  while (::ioctl(maps.get(), kMapQuery, &query) != 0) {
    if (errno == EINTR) continue;
    if (errno == ENOENT || errno == ESRCH) return std::optional<Mapping>();
    return fail(ErrorCode::kNotSupported, "this kernel does not tell of one mapping alone", {});
  }
  Mapping mapping;
  take_answer(query, mapping);
  return std::optional(std::move(mapping));
}

Result<void> ProcFs::for_each_mapping(Pid pid, const std::function<bool(const Mapping&)>& visit,
                                      Which which) const {
  const std::uint64_t asked = which == Which::kOfFiles ? kOfFile : 0;
  auto file = ProcessFile::open_path(pid, fmt::format("{}/{}/maps", root_, pid.value));
  if (!file) return fail(why_unread(root_, pid, std::move(file.error())));
  std::uint64_t from = 0;
  for (bool wants_text = false; !wants_text;) {
    const auto told = call_within(
        pid, [maps = file->file(), from, asked] { return ask_for_some(*maps, from, asked); });
    if (!told) return fail(keeps_its_memory(pid));
    for (const Mapping& mapping : told->mappings)
      if (!visit(mapping)) return {};
    if (told->is_all) return {};
    from = told->next;
    wants_text = told->wants_text;
  }
  // A line is kept until its end is there; of one that is far too long, what is cut anyway goes.
  constexpr std::size_t kMostOfLine = 4 * kLongestPath;
  constexpr std::size_t kBlock = 65536;
  std::string line;
  while (true) {
    const auto block = file->read(kBlock);
    if (!block) return fail(why_unread(root_, pid, block.error()));
    std::string_view rest = *block;
    while (!rest.empty()) {
      const std::size_t end = rest.find('\n');
      line += rest.substr(0, end);
      if (line.size() > kMostOfLine) shorten(line, 2 * kLongestPath);
      if (end == std::string_view::npos) break;
      rest.remove_prefix(end + 1);
      const auto mapping = parse_mapping(line);
      line.clear();
      if (mapping && mapping->start >= from && !visit(*mapping)) return {};
    }
    if (block->empty()) return {};
  }
}

Result<std::vector<Mapping>> ProcFs::mappings(Pid pid) const {
  std::vector<Mapping> out;
  std::size_t held = 0;
  auto done = for_each_mapping(pid, [&](const Mapping& mapping) {
    Mapping& kept = out.emplace_back();
    kept.start = mapping.start;
    kept.end = mapping.end;
    kept.permissions = mapping.permissions;
    kept.offset = mapping.offset;
    kept.inode = mapping.inode;
    kept.device = mapping.device;
    kept.path = shortened(mapping.path, held > kManyPaths ? kShortPath : kLongestPath);
    held += kept.path.size();
    return true;
  });
  STASIS_TRY(std::move(done));
  return out;
}

namespace {

// The last part of a path: /opt/libcuda.so.d/other does not count.
bool is_of_file(const Mapping& mapping, std::string_view name) {
  const std::size_t slash = mapping.path.rfind('/');
  return slash != std::string::npos &&
         std::string_view(mapping.path).substr(slash + 1).starts_with(name);
}

// For a call that may be held up. Nothing where it does not open, or has to be read as a text.
std::optional<bool> maps_it(const std::string& path, const std::string& name) {
  const UniqueFd maps(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!maps.valid()) return std::nullopt;
  for (std::uint64_t from = 0;;) {
    const Told told = ask_for_some(maps, from, kOfFile);
    if (std::any_of(told.mappings.begin(), told.mappings.end(),
                    [&](const Mapping& mapping) { return is_of_file(mapping, name); }))
      return true;
    if (told.wants_text) return std::nullopt;
    if (told.is_all) return false;
    from = told.next;
  }
}

}  // namespace

Result<bool> ProcFs::maps_file(Pid pid, const std::string& name) const {
  bool found = false;
  auto done = for_each_mapping(
      pid,
      [&](const Mapping& mapping) {
        found = is_of_file(mapping, name);
        return !found;
      },
      Which::kOfFiles);
  STASIS_TRY(std::move(done));
  return found;
}

std::vector<Result<bool>> ProcFs::maps_file_each(const std::vector<Pid>& pids,
                                                 const std::string& name) const {
  struct Asked {
    std::vector<std::string> paths;
    std::vector<std::optional<bool>> answers;
  };
  const auto asked = std::make_shared<Asked>();
  for (const Pid pid : pids)
    asked->paths.push_back(fmt::format("{}/{}/maps", root_, pid.value));
  asked->answers.resize(pids.size());
  // One that comes late writes to what is not looked at.
  const auto came = run_within_each(
      pids, [asked, name](std::size_t i) { asked->answers[i] = maps_it(asked->paths[i], name); });
  const KeptCallThread calls;
  std::vector<Result<bool>> out;
  for (std::size_t i = 0; i < pids.size(); ++i) {
    const bool is_told = came[i] && asked->answers[i].has_value();
    out.push_back(is_told ? Result<bool>(*asked->answers[i]) : maps_file(pids[i], name));
  }
  return out;
}

}  // namespace stasis::proc
