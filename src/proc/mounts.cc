#include "proc/mounts.h"

#include <fcntl.h>

#include <sstream>

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis::proc {
namespace {

// The kernel writes blanks, tabs, line ends and backslashes as \040 and so on.
std::string without_escapes(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto digit = [&](std::size_t at) {
      return at < text.size() && text[at] >= '0' && text[at] <= '7';
    };
    if (text[i] == '\\' && digit(i + 1) && digit(i + 2) && digit(i + 3)) {
      out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 +
                               (text[i + 3] - '0'));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

Result<std::vector<Mount>> mounts(const std::string& process, const std::string& proc) {
  STASIS_TRY_ASSIGN(auto text, read_file(AT_FDCWD, fmt::format("{}/{}/mountinfo", proc, process)));
  std::vector<Mount> out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    // "ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAGS...] - TYPE SOURCE SUPER" (`man 5 proc`)
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line);
    std::istringstream after(line.substr(dash + 3));
    Mount mount;
    std::string skipped;
    char colon = 0;
    before >> mount.id >> skipped >> mount.major >> colon >> mount.minor >> mount.root >>
        mount.point;
    if (!before || !(after >> mount.type)) continue;
    after >> skipped >> mount.options;
    mount.root = without_escapes(mount.root);
    mount.point = without_escapes(mount.point);
    out.push_back(std::move(mount));
  }
  return out;
}

}  // namespace stasis::proc
