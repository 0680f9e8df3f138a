#include "base/own_helpers.h"

#include <mutex>

namespace stasis {
namespace {

struct Helpers {
  std::mutex mutex;
  std::set<Pid> pids;
};

// Never destroyed: a helper may be ended by the destructor of something static.
Helpers& helpers() {
  static auto* const all = new Helpers;
  return *all;
}

}  // namespace

void add_own_helper(Pid pid) {
  const std::scoped_lock lock(helpers().mutex);
  helpers().pids.insert(pid);
}

void remove_own_helper(Pid pid) {
  const std::scoped_lock lock(helpers().mutex);
  helpers().pids.erase(pid);
}

std::set<Pid> own_helpers() {
  const std::scoped_lock lock(helpers().mutex);
  return helpers().pids;
}

}  // namespace stasis
