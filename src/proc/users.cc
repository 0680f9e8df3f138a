// Which users our user namespace knows.
#include <fcntl.h>

#include <cstdint>
#include <fstream>
#include <sstream>

#include "base/fd.h"
#include "proc/procfs.h"

namespace stasis::proc {
namespace {

struct KnownUsers {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

// As numbers inside of our user namespace.
std::vector<KnownUsers> known_users() {
  std::ifstream map("/proc/self/uid_map");
  std::vector<KnownUsers> out;
  std::uint64_t outside = 0;
  for (KnownUsers one; map >> one.first >> outside >> one.count;)
    out.push_back(one);
  return out;
}

}  // namespace

std::optional<uid_t> unknown_owner() {
  std::ifstream overflow("/proc/sys/kernel/overflowuid");
  uid_t unknown = 0;
  if (!(overflow >> unknown)) return std::nullopt;
  for (const KnownUsers& one : known_users())
    if (unknown >= one.first && unknown - one.first < one.count) return std::nullopt;
  return unknown;
}

bool knows_one_user() {
  const auto users = known_users();
  return users.size() == 1 && users.front().count == 1;
}

bool ProcFs::in_own_user_namespace() const {
  const auto map = read_file(AT_FDCWD, root_ + "/self/uid_map");
  if (!map) return false;
  std::istringstream line(*map);
  std::uint64_t inside = 1, outside = 1, count = 0;
  line >> inside >> outside >> count;
  return inside != 0 || outside != 0 || count != 0xffffffff;
}

}  // namespace stasis::proc
