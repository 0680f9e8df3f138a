// Locks of files, as the kernel lists them. Stateless; thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace stasis::proc {

// A line of /proc/locks, or behind "lock:" of /proc/PID/fdinfo/N, which are alike:
// "1: FLOCK  ADVISORY  WRITE 12 fe:00:34 0 EOF". One that waits has "->" behind its number.
struct HeldLock {
  std::string text;    // without its number, which counts the lines
  std::string kind;    // "FLOCK", "OFDLCK", "POSIX", "LEASE"
  std::string access;  // "READ", "WRITE"
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
};

std::optional<HeldLock> parse_lock(const std::string& line);

// By device and inode.
using LocksByFile = std::map<std::pair<std::uint64_t, std::uint64_t>, std::vector<HeldLock>>;

// Those that stay with an open file, of the whole machine; others are a process's, and end with any
// of its descriptors.
LocksByFile locks_of_open_files();

// Would an open() for reading break a lease of the file (F_SETLEASE with F_WRLCK)? Its holder gets
// a signal then, which ends a program that has no handler for it.
bool breaks_lease(const LocksByFile& locks, std::uint64_t device, std::uint64_t inode);

}  // namespace stasis::proc
