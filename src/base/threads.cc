#include "direct/threads.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include "base/processors.h"

namespace stasis::direct {

unsigned on_threads(unsigned count, const std::function<void(unsigned)>& work) {
  std::vector<std::thread> others;
  try {
    for (unsigned i = 1; i < count; ++i)
      others.emplace_back(work, i);
  } catch (const std::system_error&) {
    // EAGAIN: a limit on processes, or of the cgroup.
  }
  work(0);
  for (std::thread& thread : others)
    thread.join();
  return static_cast<unsigned>(others.size()) + 1;
}

unsigned default_threads(unsigned gpus) {
  constexpr unsigned kMost = 16;
  return std::clamp(usable_processors() / std::max(1U, gpus), 1U, kMost);
}

}  // namespace stasis::direct
