// Pipes, sockets and epolls whose lock in the kernel some process keeps: one that writes into a
// pipe or sends from a page that does not come (of a file of FUSE), or is told events into such a
// page. A program that then asks the kernel for the pipe's size, the socket's address or the
// epoll's list waits for that lock, where not even SIGKILL ends it; seen with CRIU 4.2.1, on
// Linux 6.18.
//
// Stateless; thread-safe.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "proc/procfs.h"

namespace stasis::proc {

struct HeldFile {
  Pid pid;
  OpenFile file;
};

struct FilesOf {
  Pid pid;
  const std::vector<OpenFile>* files;
};

// The first one of them. A process of its own asks; where it waits for half a second it is left
// behind, without a file of this program, and ends with what holds it up. Nothing if all answer, if
// `is_over` says that the caller has no use for it any more, or if no process can be started.
std::optional<HeldFile> find_held(const std::vector<FilesOf>& processes,
                                  const std::function<bool()>& is_over);

}  // namespace stasis::proc
