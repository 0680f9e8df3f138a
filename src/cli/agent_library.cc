#include "cli/agent_library.h"

#include <unistd.h>

#include <cstdlib>

#include <fmt/format.h>

#include "base/own_files.h"

namespace stasis::cli {
namespace {

constexpr const char* kLibrary = "libstasis-preload.so";

}  // namespace

Result<std::string> find_agent_library() {
  if (const char* named = std::getenv("STASIS_PRELOAD"); named && *named) {
    if (::access(named, R_OK) == 0) return std::string(named);
    return fail(ErrorCode::kIo, fmt::format("STASIS_PRELOAD names {}, which cannot be read", named),
                "let it name the file libstasis-preload.so, or unset it");
  }
  std::string library = own_file(kLibrary);
  if (::access(library.c_str(), R_OK) == 0) return library;
  return fail(ErrorCode::kIo, fmt::format("{} is not at {}", kLibrary, library),
              "install Stasis whole, or let STASIS_PRELOAD name the file");
}

}  // namespace stasis::cli
