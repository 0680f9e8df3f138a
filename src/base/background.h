// Work beside the caller's, where the system gives a thread for it.
#pragma once

#include <future>
#include <system_error>
#include <utility>

namespace stasis {

// Begins it now, in a thread of its own. Where there is none to be had (a limit on processes, or on
// memory), it is done when the caller asks for its result; never, if the caller does not.
template <class Work>
auto in_background(Work work) -> std::future<decltype(work())> {
  try {
    return std::async(std::launch::async, work);
  } catch (const std::system_error&) {
    return std::async(std::launch::deferred, std::move(work));
  }
}

}  // namespace stasis
