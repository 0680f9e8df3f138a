// Work inside a namespace of another process.
//
// Stateless; thread-safe.
#pragma once

#include <sys/types.h>

#include <functional>

#include "base/ids.h"

namespace stasis::proc {

enum class Namespace { kNetwork, kIpc };

// Does `work` by a thread of its own, which enters that namespace of the process and ends there:
// the caller's threads stay where they are. False if it may not be entered, or if it is another one
// than that with `number` (0: any); `work` is not begun then.
bool in_namespace(Pid pid, Namespace kind, const std::function<void()>& work, ino_t number = 0);

}  // namespace stasis::proc
