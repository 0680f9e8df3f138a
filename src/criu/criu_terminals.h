// Pseudo terminals both of whose ends CRIU has dumped. To read what is in them it makes them not
// wait (O_NONBLOCK) and takes it out, and puts neither right where the dump ends the tree (CRIU
// 4.2.1, tty_dump_queued_data() of its tty.c), also if it does not come to that.
//
// Reads CRIU's images, which are untrusted: bounded, and wrong input only leaves terminals out.
#pragma once

#include <string>
#include <vector>

#include "base/fd.h"

namespace stasis {

// A descriptor of a process of the image.
struct SavedTerminal {
  int number = 0;  // the process's, in its PID namespace
  int descriptor = -1;
  unsigned flags = 0;     // of its open file, as F_GETFL has told them before
  bool is_first = false;  // of the open files of its end of the terminal
  std::string unread;     // what CRIU has taken from this end, with the first
  // There was more than CRIU takes: it is still there, behind this.
  bool has_more = false;
};

// One for each open file, in the order of `numbers`.
std::vector<SavedTerminal> saved_terminals(const UniqueFd& criu_dir,
                                           const std::vector<int>& numbers);

}  // namespace stasis
