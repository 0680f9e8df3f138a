// Pipes, sockets and epolls whose lock in the kernel some process keeps: one that writes into a
// pipe or sends from a page that does not come (of a file of FUSE), or is told events into such a
// page. A program that then asks the kernel for the pipe's size, the socket's address or the
// epoll's list waits for that lock, where not even SIGKILL ends it; seen with CRIU 4.2.1, on
// Linux 6.18.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
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

// A process that starts others, which ask; one that waits is left behind, without a file of this
// program, and ends with what holds it up. To be made before the caller opens files on other
// machines: it begins with copies of all, and to close a copy of such a file waits until what was
// written to it is there. One thread at a time.
class HeldFiles {
 public:
  // How long one that asks waits for a lock before the file is asked again, and before it is held.
  // A page that was swapped out, or is on a slow disk, comes within that time.
  struct Limits {
    std::chrono::milliseconds first{500};
    std::chrono::milliseconds second{2500};
  };
  HeldFiles() : HeldFiles(Limits{}) {}
  // Where no process can be started find() finds nothing.
  explicit HeldFiles(Limits limits);
  ~HeldFiles();
  HeldFiles(const HeldFiles&) = delete;
  HeldFiles& operator=(const HeldFiles&) = delete;

  // The first of the files that is held: it was asked twice. Nothing if all
  // answer, of the first 65,536, or if `is_over` says that the caller has no use for it any more.
  std::optional<HeldFile> find(const std::vector<FilesOf>& processes,
                               const std::function<bool()>& is_over);

 private:
  struct Shared;
  std::optional<std::size_t> first_held(std::size_t begin, std::size_t end,
                                        std::chrono::milliseconds limit,
                                        const std::function<bool()>& is_over);

  Limits limits_;
  Shared* shared_ = nullptr;
  UniqueFd socket_;
  int server_ = 0;
};

}  // namespace stasis::proc
