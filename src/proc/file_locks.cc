#include "proc/file_locks.h"

#include <fcntl.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <charconv>
#include <sstream>

#include "base/fd.h"

namespace stasis::proc {
namespace {

constexpr std::size_t kMostLocks = 100'000;

}  // namespace

std::optional<HeldLock> parse_lock(const std::string& line) {
  std::istringstream words(line);
  HeldLock out;
  std::string number;
  std::string way;
  std::string owner;
  std::string place;
  if (!(words >> number >> out.kind >> way >> out.access >> owner >> place)) return std::nullopt;
  out.text = line.substr(line.find(out.kind));
  unsigned major = 0;
  unsigned minor = 0;
  const char* const end = place.data() + place.size();
  const auto first = std::from_chars(place.data(), end, major, 16);
  if (first.ec != std::errc() || first.ptr == end) return std::nullopt;
  const auto second = std::from_chars(first.ptr + 1, end, minor, 16);
  if (second.ec != std::errc() || second.ptr == end) return std::nullopt;
  const auto third = std::from_chars(second.ptr + 1, end, out.inode);
  if (third.ec != std::errc() || third.ptr != end) return std::nullopt;
  out.device = makedev(major, minor);
  return out;
}

LocksByFile locks_of_open_files() {
  LocksByFile out;
  std::size_t count = 0;
  std::istringstream lines(read_file(AT_FDCWD, "/proc/locks").value_or(""));
  for (std::string line; count < kMostLocks && std::getline(lines, line); ++count) {
    auto lock = parse_lock(line);
    if (lock && (lock->kind == "FLOCK" || lock->kind == "OFDLCK" || lock->kind == "LEASE"))
      out[{lock->device, lock->inode}].push_back(std::move(*lock));
  }
  return out;
}

bool breaks_lease(const LocksByFile& locks, std::uint64_t device, std::uint64_t inode) {
  const auto own = locks.find({device, inode});
  return own != locks.end() &&
         std::any_of(own->second.begin(), own->second.end(), [](const HeldLock& lock) {
           return lock.kind == "LEASE" && lock.access == "WRITE";
         });
}

}  // namespace stasis::proc
