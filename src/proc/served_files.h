// Files that may be far away: with a program that serves their file system (FUSE), or on a network.
// A read of a page that is held back there ends with that alone: of /proc/PID/mem no signal ends
// it, and so it is with the closing of such a file. So a page of one is asked for first, on a
// thread that may be left behind (base/call_within.h), and in a way that SIGKILL ends. And memory
// whose pages a program provides itself (userfaultfd), for which process_vm_readv(2) and
// process_vm_writev(2) wait, and /proc/PID/mem does not.
#pragma once

#include <sys/stat.h>
#include <sys/vfs.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "proc/procfs.h"

namespace stasis::proc {

// Is that descriptor of `process`, or what that link of its /proc leads to, a file or a directory
// that a program may serve: of FUSE, of an overlay that a user of fewer rights may have mounted on
// top of such (in a user namespace of his own)? Where no mount of the process's or of ours has the
// file, also of a file system that does not answer; no program is asked otherwise.
bool is_served(Pid process, int descriptor);
bool is_served(Pid process, const std::string& link);
// May the way to that path, as the process sees it, lead over such a mount?
bool leads_over_served(Pid process, const std::string& path);
// Is that path of ours on a disk of this machine, or in its memory, as our mounts say? Asks
// nothing.
bool is_on_this_machine(const std::string& path);

// May a file system of that type (Mount::type) be on another machine, or served by a program, or on
// top of one that is?
bool may_be_far(const std::string& type);

using stasis::known_status;

// Does the file system answer statfs(2), on which that file of the process's is? False after five
// seconds: a network that is down, or a program that serves it and hangs. Those of this machine, as
// the process's mounts say, are not asked.
bool answers(Pid process, const std::string& link);
// What it says; nothing where it does not answer.
std::optional<struct statfs> file_system_of(Pid process, const std::string& link);

// The pages of one process that are read from such a file, or provided by a program. What the
// process puts in the place of a page between the question and the read is not seen. Thread-safe.
class ServedPages {
 public:
  enum class Access { kRead, kWrite };
  enum class Waits {
    kNever,
    kByNumber,  // unless it goes through the process's /proc/PID/mem: then there is an error
    kStill,     // for a page that did not come within call_within()'s time
  };

  explicit ServedPages(Pid pid);

  // Brings the pages of this that are of such files, and not in memory, nor in swap, into memory.
  // Is one of the others provided by a program? That is looked for only with the /proc/PID/mem to
  // try it by. Where the kernel does not tell which pages are there, it is kByNumber.
  Waits waits_in(std::uint64_t address, std::size_t size, Access access, const UniqueFd* memory);
  // Is the page of that address in memory, or in swap? True where the kernel does not tell.
  bool is_there(std::uint64_t address) const;

 private:
  // Of an address whose page is not there: whether it is of such a file, and where its mapping ends
  // (0: there is none).
  struct Absent {
    bool is_far = false;
    std::uint64_t end = 0;
  };
  Absent probe(std::uint64_t address);
  std::optional<Mapping> mapping_of(std::uint64_t address);
  bool is_far(std::uint64_t device);
  bool come(const std::vector<std::uint64_t>& pages) const;

  Pid pid_;
  UniqueFd pages_;  // bound to the address space, as /proc/PID/mem is
  std::mutex mutex_;
  // Of the last mapping that was looked at, and is near.
  std::uint64_t fine_from_ = 0;
  std::uint64_t fine_to_ = 0;
  UniqueFd maps_;
  // All of them, once, where the kernel does not tell of one alone: a process can have so many that
  // to read them takes a second.
  std::optional<std::vector<Mapping>> all_;
  // Those of file systems whose pages the kernel brings by itself; read once.
  std::optional<std::set<std::uint64_t>> near_;
};

}  // namespace stasis::proc
