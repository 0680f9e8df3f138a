#include "operations/agent_library.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

#include <fmt/format.h>

#include "base/own_files.h"

namespace stasis {
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

Result<std::shared_ptr<const UniqueFd>> open_agent_library() {
  STASIS_TRY_ASSIGN(const auto path, find_agent_library());
  STASIS_TRY_ASSIGN(auto library, open_file(AT_FDCWD, path, O_RDONLY));
  return std::make_shared<const UniqueFd>(std::move(library));
}

}  // namespace stasis
