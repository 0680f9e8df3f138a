// What becomes of the TCP connections of a tree while it is dumped. Between its own processes they
// are kept without consent: no program outside waits for an answer, and no packets come that CRIU
// would have to hold back. Those that lead to other parts of a group are locked on both sides
// before one of them is saved (part_links.h). All others are the user's decision.
//
// Private to src/operations. One thread at a time.
#pragma once

#include <vector>

#include "base/phases.h"
#include "direct/environment.h"
#include "image/manifest.h"
#include "operations/operations.h"
#include "proc/procfs.h"

namespace stasis {

class DumpConnections {
 public:
  // The references outlive it.
  DumpConnections(const Environment& env, Pid root, const DumpOptions& options)
      : env_(env), root_(root), options_(options) {}
  // Also after an exception: the program would wait for the other parts for ever.
  ~DumpConnections() { unlock(); }
  DumpConnections(const DumpConnections&) = delete;
  DumpConnections& operator=(const DumpConnections&) = delete;

  // What CRIU is to do with them. `tree`: which still runs, and may open the first one; judge()
  // sees that.
  void choose(const std::vector<proc::ProcessInfo>& tree, CriuOptions& criu);
  // In a part of a group: locks them, and agrees with the other parts about them. Nothing
  // otherwise. The tree is suspended. Errors of lock_links() and of GroupPart.
  Result<void> lock(const CriuOptions& criu, Manifest& manifest, Phases& phases);
  // CRIU has them all stand still. kBusy: one was opened since that CRIU was not told of.
  Result<void> judge(Manifest& manifest) const;
  // Whether what they have under way is to count as sent (criu_tcp_queues.h).
  bool are_all_saved() const { return keeps_own_ || is_locked_; }

  // The processes go on with them. What cannot be unlocked is told.
  void unlock();
  // They have ended with the processes.
  void forget() { is_locked_ = false; }

 private:
  Result<void> refuse_new_links(const Manifest& manifest) const;

  const Environment& env_;
  const Pid root_;
  const DumpOptions& options_;
  bool keeps_own_ = false;
  bool is_locked_ = false;
};

}  // namespace stasis
