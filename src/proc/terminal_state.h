// What a terminal (pty) of a tree's own is set to, and CRIU 4.2.1 does not restore: that what is
// written to one of its ends is stopped, and a speed that has no name.
//
// Thread-safe; stateless but for TerminalPairs. Terminals are looked at through copies of the
// descriptors (pidfd_getfd).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "proc/file_state.h"

namespace stasis::proc {

// Numbers of the kernel's admin-guide/devices.txt: a master is 5:2, the slaves are 136:0 to
// 143:255.
inline constexpr unsigned kPtmxMajor = 5;
inline constexpr unsigned kPtmxMinor = 2;
inline constexpr unsigned kSlaveFirst = 136;
inline constexpr unsigned kSlaveLast = 143;
inline constexpr unsigned kPerMajor = 256;
bool is_master(const struct stat& status);
bool is_slave(const struct stat& status);
// The number of the terminal that a slave is of.
int index_of_slave(const struct stat& status);

// The file system of the slaves of a master that the process has: each container has a /dev/pts/0.
// 0 if it cannot be told.
dev_t instance_of_master(Pid pid, int descriptor);

struct TerminalStates {
  std::vector<std::pair<Pid, FileState>> states;
  // Ends of which it cannot be told whether what is written to them is stopped.
  std::vector<std::pair<Pid, int>> unknown;
};
// Of the terminals of which these processes have a master and a slave: all of them stand still. To
// tell how output is stopped, it goes on for a moment.
TerminalStates terminal_states(std::span<const Pid> tree);

// F_SETFL, with the flags that F_GETFL has told. The end stands still meanwhile.
Result<void> set_terminal_flags(Pid pid, int descriptor, unsigned flags,
                                bool goes_on_signalling = false);

// The terminals of which these processes have both ends. All of them stand still while it lives.
class TerminalPairs {
 public:
  explicit TerminalPairs(std::span<const Pid> tree);
  TerminalPairs(const TerminalPairs&) = delete;
  TerminalPairs& operator=(const TerminalPairs&) = delete;
  ~TerminalPairs();
  // What the descriptor of one has not given to its reader is `unread` again, as it was read, with
  // no second echo. `is_written`: it was written to the other end, as a program would. What is left
  // of a line that is not finished stays behind it. kIo, too, where that is more than there is room
  // for: a part of it is there then.
  Result<void> put_unread_back(Pid pid, int descriptor, const std::string& unread,
                               bool is_written) const;

 private:
  struct Known;
  std::unique_ptr<Known> known_;
};

// Through a copy of the descriptor. False, and errno, if the kernel refuses.
bool set_terminal(const UniqueFd& copy, const FileState& wanted);

}  // namespace stasis::proc
