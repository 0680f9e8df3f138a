// Calls of the kernel that another program may hold up without an end, where no signal but SIGKILL
// ends them: a look into the memory of a process that keeps the lock of its own mappings, as one
// does that maps a file of a file system which it serves itself (FUSE).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/ids.h"

namespace stasis {

// Calls `work` on a thread of its own. False if that has not come back in five seconds, or in less
// where others have not before: it is left behind, and ends with this program, or with what holds
// it up. So `work` owns all that it uses. Not called at all with one left behind about the same
// `process`, or with many; where the system gives no thread, it is called on this one.
bool run_within(Pid process, std::function<void()> work);

// What `work` gives, if it comes back.
template <class Work>
auto call_within(Pid process, Work work) -> std::optional<decltype(work())> {
  const auto out = std::make_shared<std::optional<decltype(work())>>();
  if (!run_within(process, [out, work = std::move(work)] { out->emplace(work()); }))
    return std::nullopt;
  return std::move(*out);
}

}  // namespace stasis
