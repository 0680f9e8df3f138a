// The address space in which a process ran when it was opened, and no other.
//
// A number, and a pidfd as well, stands for a process through every execve(2): memory that is read
// and written by them may be that of a setuid program which the process has become in between. The
// kernel binds /proc/PID/mem to the address space at open(2) (mem_open() of fs/proc/base.c); once
// no process runs in that, reads and writes through the descriptor move nothing.
//
// Moves, never copies. All calls are const and thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "proc/lesser_rights.h"
#include "proc/served_files.h"

namespace stasis::proc {

class AddressSpace {
 public:
  // kProcessGone; kNotPermitted: it wants the permission to trace the process; kBusy, after five
  // seconds: it keeps those who look into its memory. Opened by number:
  // a caller that holds a pidfd looks afterwards whether its process is still alive.
  static Result<AddressSpace> open(Pid pid);

  // All of it or an error: kProcessGone if the address space has no process any more; kIo where
  // there is no memory, or none that may be written even by a tracer (EFAULT); kBusy of a page that
  // its file system did not give within a second, and from then on at once (served_files.h).
  // Large pieces go by the process's number, four times as fast, where the kernel lets no more be
  // done so than the target's own user may do (lesser_rights.h), and where it was seen just before
  // that the process still runs in this address space, and provides no page of it itself
  // (userfaultfd): such a page that is not there cannot be read.
  Result<void> read(std::uint64_t address, void* data, std::size_t size) const;
  Result<void> write(std::uint64_t address, const void* data, std::size_t size) const;

  // The same for what the process itself may not write, such as its code, where the kernel lets a
  // tracer do that by such a file. How many bytes were written.
  std::size_t write_protected(std::uint64_t address, std::span<const std::uint64_t> words) const;

  // kProcessGone unless the process still runs in this address space, kBusy as open(): compares
  // what the kernel made at its execve, the places of a randomised start (/proc/PID/auxv) and
  // sixteen random bytes (AT_RANDOM), with those that the process has now. Another process may
  // share the address space and keep it alive, so that read() still works.
  Result<void> check_current() const;

  Pid pid() const { return pid_; }

 private:
  // What tells one execve from another.
  struct Birth {
    std::string auxv;
    std::array<std::byte, 16> random{};
    friend bool operator==(const Birth&, const Birth&) = default;
  };
  AddressSpace(Pid pid, UniqueFd memory, Birth birth)
      : pid_(pid),
        memory_(std::move(memory)),
        birth_(std::move(birth)),
        rights_(LesserRights::of(pid)),
        served_(std::make_unique<ServedPages>(pid)) {}
  // How much of a large piece has been moved by number: nothing if that is not allowed.
  using Direction = ServedPages::Access;
  std::size_t move_by_number(Direction direction, std::uint64_t address, void* data,
                             std::size_t size) const;
  static Result<AddressSpace> open_now(Pid pid);
  static Result<UniqueFd> open_memory(Pid pid);
  static bool is_of(Pid pid, const Birth& birth);
  static Result<Birth> birth_of(Pid pid, const UniqueFd& memory);
  // Whether it may go by number. kNotSupported.
  Result<bool> check_not_served(Direction direction, std::uint64_t address, std::size_t size) const;
  Error refusal(const char* what, std::uint64_t address, std::size_t size, int number) const;

  Pid pid_;
  UniqueFd memory_;
  Birth birth_;
  LesserRights rights_;
  std::unique_ptr<ServedPages> served_;
};

// Do two processes run in the same one (vfork, CLONE_VM)? False also where the kernel does not
// tell.
bool share_address_space(Pid one, Pid other);

}  // namespace stasis::proc
