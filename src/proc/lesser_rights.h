// Lets one thread of the tool read and write a target's memory with no more rights than the
// target's own user has, so that the kernel itself refuses a target that has become a more powerful
// program.
//
// process_vm_readv(2) and process_vm_writev(2) move 45 GB/s with 16 threads, a /proc/PID/mem 11 (an
// H100's machine, Linux 6.18), but they take a number, and root may do anything. The kernel asks
// for the caller's real user and group and for CAP_SYS_PTRACE (__ptrace_may_access() of
// kernel/ptrace.c); a setuid program has another user, or is not dumpable.
//
// Immutable; thread-safe.
#pragma once

#include <cstdint>

#include "base/ids.h"

namespace stasis::proc {

class LesserRights {
 public:
  // Of a process as it is now.
  static LesserRights of(Pid pid);

  // While it lives, the calling thread has those rights. Not for other threads: the system calls
  // are made without the C library, which would change them all.
  class Scope {
   public:
    explicit Scope(const LesserRights& rights);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    // False: they cannot be had, and the thread has its own.
    bool holds() const { return holds_; }

   private:
    const LesserRights& rights_;
    bool holds_ = false;
  };

 private:
  enum class Way {
    kNever,    // the kernel would refuse, or too little is known
    kAsItIs,   // the tool may do no more than the target's user, or the target may do all
    kGivenUp,  // by a thread that gives up the rights beyond those
  };
  Way way_ = Way::kNever;
  unsigned uid_ = 0;  // of the target
  unsigned gid_ = 0;
  unsigned own_uid_ = 0;
  unsigned own_gid_ = 0;
  std::uint64_t effective_ = 0;  // the tool's capabilities
  std::uint64_t permitted_ = 0;
  std::uint64_t inheritable_ = 0;
};

}  // namespace stasis::proc
