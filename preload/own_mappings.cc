#include "own_mappings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace stasis::preload {
namespace {

constexpr int kHexadecimal = 16;

// "7f0000000000-7f0000021000 r-xp 00000000 00:00 0   /a/path"
bool parse(char* line, OwnMapping& out) {
  char* at = line;
  out.start = std::strtoull(at, &at, kHexadecimal);
  if (*at++ != '-') return false;
  out.end = std::strtoull(at, &at, kHexadecimal);
  if (*at++ != ' ' || std::strlen(at) < sizeof out.rights) return false;
  std::copy_n(at, sizeof out.rights - 1, out.rights);
  // Behind the rights, the offset and the device.
  for (int words = 0; words < 3 && at; ++words) {
    at = std::strchr(at, ' ');
    if (at) ++at;
  }
  if (!at) return false;
  out.inode = std::strtoull(at, nullptr, 10);
  return true;
}

}  // namespace

bool for_each_own_mapping(const std::function<void(const OwnMapping&)>& visit) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (!maps) return false;
  char line[512];
  // A path may be longer.
  for (bool begins = true; std::fgets(line, sizeof line, maps);) {
    OwnMapping one;
    const bool ends = std::strchr(line, '\n') != nullptr;
    if (begins && parse(line, one)) visit(one);
    begins = ends;
  }
  std::fclose(maps);
  return true;
}

}  // namespace stasis::preload
