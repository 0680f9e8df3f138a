// Where in its code a thread of another process is: in the driver, or outside of it.
//
// A snapshot of the executable mappings of a process. Reads only; thread-safe. The address space
// must outlive it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "proc/address_space.h"

namespace stasis::proc {

enum class Site {
  kProgram,  // in the program, or in a library function that the program called
  kLibrary,  // in the C or C++ library's own code, called by the program; it may hold its locks
  kDriver,   // in the driver, or in a library function that the driver called
};

class CodeMap {
 public:
  // Empty if the process is gone; then everything is kProgram.
  explicit CodeMap(const AddressSpace& space);

  // `stack` is the thread's stack pointer; the thread does not run. `in_system_call`: it is not in
  // code of the C library but waits in the kernel, so kLibrary is never the answer.
  // The caller of a library function is told from the first return address on the stack that is not
  // a library's. There are no frame pointers there, so a stale address can be taken for it: the
  // answer is good for choosing the moment at which to stop a thread, and for nothing else.
  Site site(std::uint64_t instruction, std::uint64_t stack, bool in_system_call) const;

 private:
  enum class Module { kNone, kProgram, kLibrary, kDriver };
  struct Range {
    std::uint64_t start;
    std::uint64_t end;
    Module module;
  };
  Module module_at(std::uint64_t address) const;
  bool follows_a_call(std::uint64_t address) const;

  const AddressSpace* space_;
  std::vector<Range> ranges_;  // by address
};

}  // namespace stasis::proc
