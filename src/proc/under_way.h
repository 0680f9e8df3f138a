// Descriptors that wait in a unix socket for the program to receive them (SCM_RIGHTS): what of them
// is lost where CRIU 4.2.1 takes them out of the queue, by files of its own, and sends them again.
//
// Stateless; thread-safe. The socket is another process's too, which stands still.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "proc/nameless_files.h"

namespace stasis::proc {

// How many descriptors wait there; 0 where the kernel does not tell (before Linux 5.8).
std::uint32_t descriptors_under_way(Pid pid, int descriptor);

struct UnderWay {
  // False: a file that a program serves holds the look up, or there is no right to descriptors.
  bool is_known = false;
  bool is_held_up = false;  // the former, for five seconds: each further one takes as long
  std::string lost;         // "a lock", of the first that has any; empty: none has
  // Descriptors of messages that are not empty; of a stream, one may count twice.
  std::uint32_t with_bytes = 0;
  // Memory and deleted files among them, the first that there are.
  std::vector<NamelessFile> nameless;
};
// Looks at each of them. That is done by a process of its own, which is left behind where it does
// not end: to close a file of FUSE waits for the program that serves it.
UnderWay look_at_under_way(const UniqueFd& socket, bool is_stream);

}  // namespace stasis::proc
