// Files whose file system a program serves (FUSE) and that the kernel keeps the tool out of:
// another user's. A read of a page that the program holds back ends with that program alone, and no
// signal ends it; so does the closing of such a file. And memory whose pages a program provides
// itself (userfaultfd), for which process_vm_readv(2) and process_vm_writev(2) wait, and
// /proc/PID/mem does not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "proc/procfs.h"

namespace stasis::proc {

// Asks for what is at `path`, mostly a link in /proc, without asking the program.
bool is_kept_from_us(const std::string& path);

// The pages of one process that would be read from such a file, or provided by a program. What the
// process puts in the place of a page between the question and the read is not seen. Thread-safe.
class ServedPages {
 public:
  enum class Access { kRead, kWrite };
  enum class Waits {
    kNever,
    kByNumber,  // unless it goes through the process's /proc/PID/mem: then there is an error
    kAlways,
  };

  explicit ServedPages(Pid pid);

  // Is a page of this not in memory, nor in swap, and one of such a file? Or one that a program
  // provides: that is looked for only with the /proc/PID/mem to try it by. Where the kernel does
  // not tell which pages are there, it is kByNumber.
  Waits waits_in(std::uint64_t address, std::size_t size, Access access, const UniqueFd* memory);
  // Is the page of that address in memory, or in swap? True where the kernel does not tell.
  bool is_there(std::uint64_t address) const;

 private:
  // Of an address whose page is not there: whether it is of such a file, and where its mapping ends
  // (0: there is none).
  struct Absent {
    bool is_served = false;
    std::uint64_t end = 0;
  };
  Absent look_at(std::uint64_t address);
  std::optional<Mapping> mapping_of(std::uint64_t address);
  bool is_device_kept(const Mapping& mapping);

  Pid pid_;
  UniqueFd pages_;  // bound to the address space, as /proc/PID/mem is
  std::mutex mutex_;
  // Of the last mapping that was looked at, and is none.
  std::uint64_t fine_from_ = 0;
  std::uint64_t fine_to_ = 0;
  UniqueFd maps_;
  // All of them, once, where the kernel does not tell of one alone: a process can have so many that
  // to read them takes a second.
  std::optional<std::vector<Mapping>> all_;
  std::map<std::uint64_t, bool> devices_;
};

}  // namespace stasis::proc
