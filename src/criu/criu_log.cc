#include "criu/criu_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace stasis {
namespace {

constexpr off_t kMaxRead = 8 << 20;

// "(00.012) 12: Error (criu/files.c:123): text" -> "text"; empty if it is no line of that kind.
std::string_view text_after(std::string_view line, std::string_view kind) {
  const std::size_t begin = line.find(kind);
  if (begin > 64) return {};  // npos as well
  const std::size_t end = line.find("): ", begin);
  if (end == std::string_view::npos || end - begin > 128) return {};
  return line.substr(end + 3);
}

// Errors that every CRIU without CAP_SYS_RESOURCE logs and then goes on.
bool harmless(std::string_view text) {
  return text.starts_with("rlimit: Can't setup RLIMIT_NOFILE for self");
}

// What is no error by its form and yet the only cause that is given; empty for all other lines.
std::string_view announcement(std::string_view line) {
  if (line.find("Unable to interrupt task") != std::string_view::npos) {
    return text_after(line, "Warn  (");
  }
  // Of the loader, before criu itself is there.
  for (const std::string_view words :
       {"error while loading shared libraries: ", "cannot allocate TLS data structures"}) {
    const std::size_t loading = line.find(words);
    if (loading <= CriuLog::kMaxLine) return line.substr(loading);  // not npos either
  }
  const std::size_t capability = line.find("Effective capability ");
  if (capability > 64) return {};  // npos as well
  return line.substr(capability);
}

std::string printable(std::string_view text) {
  std::string clean(text.substr(0, CriuLog::kMaxLine));
  while (!clean.empty() && (clean.back() == ' ' || clean.back() == '\r'))
    clean.pop_back();
  for (char& c : clean) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return clean;
}

}  // namespace

CriuLog CriuLog::parse(std::string_view text) {
  CriuLog log;
  std::optional<CriuDiagnosis> announced;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!announced) {
      if (const auto said = announcement(line); !said.empty())
        announced = diagnose_criu_line(printable(said));
    }
    const std::string_view found = text_after(line, "Error (");
    if (found.empty() || harmless(found)) continue;
    std::string error = printable(found);
    if (error.empty()) continue;
    if (!log.diagnosis) log.diagnosis = diagnose_criu_line(error);
    log.errors.push_back(std::move(error));
    if (log.errors.size() > 2 * kKeptErrors) log.errors.erase(log.errors.begin() + kKeptErrors);
  }
  if (!log.diagnosis) log.diagnosis = std::move(announced);
  return log;
}

CriuLog CriuLog::read(const UniqueFd& directory, const std::string& name) {
  auto file = open_checked(directory.get(), name, O_RDONLY | O_NOFOLLOW, is_regular_file);
  if (!file) return {};
  return read(*file).value_or(CriuLog());
}

Result<CriuLog> CriuLog::read(const UniqueFd& file) {
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) return fail(errno_error("cannot stat the log", errno));
  std::string text(static_cast<std::size_t>(std::min(info.st_size, kMaxRead)), '\0');
  const off_t start = info.st_size - static_cast<off_t>(text.size());
  std::size_t have = 0;
  while (have < text.size()) {
    const ssize_t got = ::pread(file.get(), text.data() + have, text.size() - have,
                                start + static_cast<off_t>(have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail(errno_error("cannot read the log", errno));
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  text.resize(have);
  CriuLog log = parse(text);
  log.truncated = start > 0;
  return log;
}

}  // namespace stasis
