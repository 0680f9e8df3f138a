// Terminals both of whose ends the tree has, over a dump and a restore: what CRIU 4.2.1 does to
// them is put right when it has done so (criu/criu_terminals.h).
//
// Private to src/operations. One thread at a time.
#pragma once

#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "criu/criu_terminals.h"

namespace stasis {

class DumpedTerminals {
 public:
  // What was not yet read.
  enum class Unread { kTaken, kWritten };

  DumpedTerminals() = default;
  // When CRIU has written, or restored, all, and all stands still. kWritten: CRIU has written what
  // it took to the other end, where the terminal changes it: ends of lines, and the echo of what
  // was typed.
  DumpedTerminals(const UniqueFd& criu_dir, std::vector<Pid> tree, Unread unread);
  // They wait again where they did. What does not succeed is in `failed`; here and below.
  // `are_rewritten`: the image may say no more which of them signal (O_ASYNC), and those that do so
  // now go on.
  void wait_again(std::vector<std::string>& failed, bool are_rewritten = false) const;
  // A sentence for each thing that a restore does not bring back.
  void tell_of_unread(std::vector<std::string>& lost) const;
  // They have again what CRIU has taken, as it was.
  void give_back(std::vector<std::string>& failed) const;

 private:
  Pid process_of(const SavedTerminal& terminal) const;

  std::vector<Pid> tree_;
  std::vector<int> numbers_;  // of the same processes, in their PID namespaces
  std::vector<SavedTerminal> terminals_;
  Unread unread_ = Unread::kTaken;
};

}  // namespace stasis
