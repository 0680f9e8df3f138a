#include "direct/threads.h"

#include <sched.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

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
  cpu_set_t allowed;
  unsigned processors = std::thread::hardware_concurrency();
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    processors = static_cast<unsigned>(CPU_COUNT(&allowed));
  }
  return std::clamp(processors / std::max(1U, gpus), 1U, kMost);
}

}  // namespace stasis::direct
