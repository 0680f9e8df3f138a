// Terminals both of whose ends the tree has, over a dump: what CRIU 4.2.1 does to them is put right
// when it has done so (criu/criu_terminals.h).
//
// Private to src/operations. One thread at a time.
#pragma once

#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "criu/criu_terminals.h"
#include "direct/environment.h"

namespace stasis {

class DumpedTerminals {
 public:
  DumpedTerminals() = default;
  // When CRIU has written all, and all stands still: they wait again where they did.
  // `gives_back`: CRIU has put back what it had taken.
  DumpedTerminals(const UniqueFd& criu_dir, std::vector<Pid> tree, bool gives_back,
                  const Environment& env);
  // Of what was not yet read: a sentence each for what a restore does otherwise.
  void tell_of_unread(std::vector<std::string>& lost) const;
  // The tree goes on although it was to end: it has again what CRIU has taken.
  void give_back(const Environment& env) const;

 private:
  Pid process_of(const SavedTerminal& terminal) const;

  std::vector<Pid> tree_;
  std::vector<int> numbers_;  // of the same processes, in their PID namespaces
  std::vector<SavedTerminal> terminals_;
  bool gives_back_ = false;
};

}  // namespace stasis
