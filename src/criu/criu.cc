#include "src/criu/criu.h"

#include <fmt/format.h>

namespace stasis {

std::string criu_version_text(int version) {
  const int sublevel = version % 100;
  std::string text = fmt::format("{}.{}", version / 10000, version / 100 % 100);
  if (sublevel != 0) text += fmt::format(".{}", sublevel);
  return text;
}

std::string Criu::version_text() const {
  return criu_version_text(version_);
}

}  // namespace stasis
