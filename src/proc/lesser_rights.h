// Moves a target's memory by its number with no more rights than the target's own user has, so that
// the kernel itself refuses a target that has become a more powerful program.
//
// process_vm_readv(2) and process_vm_writev(2) move 45 GB/s with 16 threads, a /proc/PID/mem 11 (an
// H100's machine, Linux 6.18), but they take a number, and root may do anything. The kernel asks
// for the caller's real user and group and for CAP_SYS_PTRACE (__ptrace_may_access() of
// kernel/ptrace.c); a setuid program has another user, or is not dumpable.
//
// A user may kill and stop all that has the same real user (kill_ok_by_cred() of kernel/signal.c),
// and a thread's death is its process's. So a short-lived process that shares our memory does that,
// one for each piece, and what happens to it happens to nothing else.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/ids.h"
#include "proc/served_files.h"

namespace stasis::proc {

class LesserRights {
 public:
  // Of a process as it is now.
  static LesserRights of(Pid pid);

  // How much was moved: nothing if the kernel refuses or it is too little to be worth it, a part if
  // its process was killed or stopped. For the caller's own way to move the rest.
  std::size_t move(ServedPages::Access access, Pid pid, std::uint64_t address, void* data,
                   std::size_t size) const;

 private:
  enum class Way {
    kNever,    // the kernel would refuse, or not refuse a more powerful program, or too little is
               // known
    kAsItIs,   // the tool may do no more than the target's user, or the target may do all
    kGivenUp,  // by a process that gives up the rights beyond those
  };
  Way way_ = Way::kNever;
  unsigned uid_ = 0;  // of the target
  unsigned gid_ = 0;
  std::uint64_t effective_ = 0;  // the tool's capabilities
  std::uint64_t permitted_ = 0;
  std::uint64_t inheritable_ = 0;
  // One of the processes was killed or stopped, as they all may be: no more are made.
  std::shared_ptr<std::atomic<bool>> given_up_ = std::make_shared<std::atomic<bool>>(false);

  std::size_t move_by_process(ServedPages::Access access, Pid pid, std::uint64_t address,
                              void* data, std::size_t size) const;
};

}  // namespace stasis::proc
