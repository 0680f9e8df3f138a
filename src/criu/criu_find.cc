#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/units.h"
#include "criu/criu.h"
#include "criu/criu_process.h"
#include "criu/criu_rpc.h"
#include "proc/trusted_path.h"

namespace stasis {
namespace {

constexpr std::chrono::seconds kVersionTimeout{10};

std::string get_one() {
  return fmt::format("{} makes a private one that this program finds", kGetCriu);
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return value == nullptr ? std::string() : std::string(value);
}

bool is_program(const std::string& path) {
  struct stat info = {};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) &&
         ::access(path.c_str(), X_OK) == 0;
}

// criu's version asked over its RPC: 40201 is 4.2.1.
Result<int> ask_version(const std::string& path) {
  CriuProcess::StartOptions options;
  options.plugin_dir = "/";  // never read: no plugin is loaded for this question
  STASIS_TRY_ASSIGN(auto process, CriuProcess::start(path, options));
  criu_rpc::Request request;
  request.type = criu_rpc::Type::kVersion;
  auto sent = process.send(request);
  auto response = sent ? process.receive(kVersionTimeout)
                       : Result<std::optional<criu_rpc::Response>>(fail(sent.error()));
  // A signal of ours (Ctrl-C) cuts the wait short; that says nothing about criu.
  for (const auto start = Clock::now(); response && !*response && since(start) < kVersionTimeout;) {
    response = process.receive(kVersionTimeout);
  }
  const bool answered = response && *response && (*response)->success && (*response)->version;
  const std::string end = process.finish(answered ? kVersionTimeout : std::chrono::seconds(1));
  if (!answered) {
    const std::string said = process.early_errors();
    return fail(ErrorCode::kCriuMissing,
                fmt::format("{} does not answer as criu does: it {}{}", path, end,
                            said.empty() ? "" : ": " + said.substr(0, said.find('\n'))),
                get_one());
  }
  const criu_rpc::Version& version = *(*response)->version;
  return version.major_number * 10000 + version.minor_number * 100 + version.sublevel;
}

// Without a slash, a name is looked for on PATH, as a shell does.
std::string on_path(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const std::string path = variable("PATH");
  std::size_t begin = 0;
  while (begin <= path.size()) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    std::string candidate = path.substr(begin, end - begin) + "/" + name;
    if (candidate.front() == '/' && candidate != "/" + name && is_program(candidate)) {
      return candidate;
    }
    begin = end + 1;
  }
  return {};
}

std::vector<std::string> private_folders() {
  std::vector<std::string> folders = {"/opt/stasis/criu"};
  std::string cache = variable("XDG_CACHE_HOME");
  if (cache.empty() && !variable("HOME").empty()) cache = variable("HOME") + "/.cache";
  if (!cache.empty()) folders.push_back(cache + "/stasis/criu");
  return folders;
}

}  // namespace

Result<Criu> Criu::find(const std::optional<std::string>& explicit_path) {
  std::string named = explicit_path.value_or(std::string());
  if (named.empty()) named = variable("STASIS_CRIU");
  std::vector<std::string> candidates;
  if (!named.empty()) {
    const std::string path = on_path(named);
    if (path.empty() || !is_program(path)) {
      return fail(ErrorCode::kCriuMissing, fmt::format("\"{}\" is no program", named),
                  explicit_path.value_or(std::string()).empty()
                      ? "let STASIS_CRIU name one that is, or unset it; " + get_one()
                      : "name one that is with --criu, or leave it out; " + get_one());
    }
    candidates.push_back(path);
  } else {
    // /usr/sbin is not on every user's PATH, and it is where distributions put criu.
    candidates = {on_path("criu"), "/usr/sbin/criu", "/usr/local/sbin/criu"};
    for (const std::string& folder : private_folders()) {
      candidates.push_back(folder + "/usr/sbin/criu");
    }
  }
  std::optional<Error> trouble;
  for (const std::string& path : candidates) {
    if (path.empty() || !is_program(path)) continue;
    // One that the user has named is the user's word.
    const proc::TrustedPath program =
        named.empty() ? proc::judge_path(path) : proc::TrustedPath{path, std::string()};
    auto version =
        program.why_not.empty()
            ? ask_version(program.path)
            : fail(ErrorCode::kCriuMissing, fmt::format("{} is not run: {}", path, program.why_not),
                   fmt::format("make it, the links to it and the folders above them belong to root "
                               "or to you, writable by no other user; or, if you trust it, set "
                               "STASIS_CRIU={}",
                               path));
    if (version && *version >= kOldestCriu) return Criu(program.path, *version);
    if (trouble) continue;  // the first one is what the user expects to be used
    if (!version) {
      trouble = std::move(version).error();
    } else {
      trouble = Error{ErrorCode::kCriuTooOld,
                      fmt::format("{} is CRIU {}; {} or newer is needed", path,
                                  criu_version_text(*version), criu_version_text(kOldestCriu)),
                      get_one()};
    }
  }
  if (trouble) return fail(std::move(*trouble));
  return fail(ErrorCode::kCriuMissing,
              "there is no criu: neither on PATH nor in /usr/sbin nor in a private folder",
              get_one());
}

}  // namespace stasis
