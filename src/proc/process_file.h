// What /proc/PID tells only after a look into the process: for that the kernel waits as long as the
// process keeps the lock of its mappings, or an execve(2) of it takes (base/call_within.h).
#pragma once

#include <cstdint>
#include <istream>
#include <memory>
#include <streambuf>
#include <string>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "proc/procfs.h"

namespace stasis::proc {

// /proc/PID/NAME, open to be read. Errors are those of open(2) and read(2); kBusy after five
// seconds in which the process did not let it be looked at, and from then on at once.
class ProcessFile {
 public:
  static Result<ProcessFile> open(Pid pid, const std::string& name);
  // By its whole path: also a regular file of the process's, which its program may serve.
  static Result<ProcessFile> open_path(Pid pid, const std::string& path);

  // Of what comes next, or of what lies at `offset`, at most so many bytes; none at its end.
  Result<std::string> read(std::size_t most) const;
  Result<std::string> read_at(std::uint64_t offset, std::size_t most) const;

  // For calls that `call_within` makes of it.
  std::shared_ptr<const UniqueFd> file() const { return file_; }

 private:
  ProcessFile(Pid pid, std::shared_ptr<const UniqueFd> file) : pid_(pid), file_(std::move(file)) {}

  Pid pid_;
  std::shared_ptr<const UniqueFd> file_;
};

// The same as a text, which ends where it cannot be read on, and after half a minute.
class ProcessText : private std::streambuf, public std::istream {
 public:
  ProcessText(Pid pid, const std::string& name);

 private:
  std::streambuf::int_type underflow() override;

  Result<ProcessFile> file_;
  std::string block_;
  std::int64_t left_ms_;
};

// Leads to the file of a mapping, in /proc/PID/map_files; to be followed within a limit of time.
std::string link_of_mapping(Pid pid, const Mapping& mapping);

// A file that a process has mapped, as a place (O_PATH).
class MappedFile {
 public:
  MappedFile(Pid pid, const Mapping& mapping);

  // A name that leads to it while this lives; empty if it could not be had.
  const std::string& link() const { return link_; }

 private:
  UniqueFd place_;
  std::string link_;
};

// /proc/PID/..., by its path, for many reads, which cost no thread each: when the first of them has
// come, it is hoped that the others will.
Result<UniqueFd> open_after_look(Pid pid, const std::string& path);

}  // namespace stasis::proc
