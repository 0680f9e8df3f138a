// Calls of the kernel that another program may hold up without an end, where no signal but SIGKILL
// ends them: a look into the memory of a process that keeps the lock of its own mappings, as one
// does that maps a file of a file system which it serves itself (FUSE).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace stasis {

// What may hold a call up: one left behind says nothing of the others.
enum class HeldUpBy { kMappings, kPage };

// Calls `work` on a thread of its own. False if that has not come back in five seconds, for a page
// in one, or in less where others have not before: it is left behind, and ends with this program,
// or with what holds it up. So `work` owns all that it uses. Not called at all with one left behind
// about the same `process` for the same `cause`, or with many; where the system gives no thread, it
// is called on this one.
bool run_within(Pid process, std::function<void()> work, HeldUpBy cause = HeldUpBy::kMappings);

// Calls `work` with the index of each of the processes in turn, all on one thread; each has the
// time of one alone. Returns which calls came back; the results of the others are not to be read.
std::vector<bool> run_within_each(std::vector<Pid> processes, std::function<void(std::size_t)> work,
                                  HeldUpBy cause = HeldUpBy::kMappings);

class CallThread;

// While it lives, all calls of the thread that has made it go over one other thread, which stays:
// to start one for each takes ten times as long as most of the calls. For one operation, not for
// ever: it has the namespaces and the rights that its maker has at its first call. A forked child
// has none of it.
class KeptCallThread {
 public:
  KeptCallThread();
  // The one of a thread that waits for this one meanwhile; nothing for null.
  explicit KeptCallThread(CallThread* lent);
  KeptCallThread(const KeptCallThread&) = delete;
  KeptCallThread& operator=(const KeptCallThread&) = delete;
  ~KeptCallThread();
  // That of the calling thread; null if it keeps none.
  static CallThread* current();

 private:
  CallThread* before_;
  std::unique_ptr<CallThread> own_;
};

// What `work` gives, if it comes back.
template <class Work>
auto call_within(Pid process, Work work, HeldUpBy cause = HeldUpBy::kMappings)
    -> std::optional<decltype(work())> {
  const auto out = std::make_shared<std::optional<decltype(work())>>();
  if (!run_within(
          process, [out, work = std::move(work)] { out->emplace(work()); }, cause))
    return std::nullopt;
  return std::move(*out);
}

}  // namespace stasis
