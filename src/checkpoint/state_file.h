// A file of the state directory: replaced as a whole, and locked through a second file beside it.
// The lock's holder is the operation under way; the kernel drops the lock when the holder dies,
// however it dies. Thread-safe.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// `error` of writing `path`: where the file system is read-only or full, kNoSpace, for those who
// can do without, and what to do.
Error unwritable(Error error, const std::string& path);

// Whether records can be written to the state directory: kNoSpace if it is full or read-only, kIo
// or kNotPermitted if it cannot be written.
Result<void> check_writable(const std::string& directory);

// Takes the lock of `path`. Nothing if another process has it. Tries for some 200 ms, because a
// reader holds each lock for a moment too.
Result<std::optional<UniqueFd>> lock_state_file(const std::string& path);

// Writes `text`, in place where the disk has no room for a second file: recovery must not need what
// the disk has not got. `allowed` is asked before the first byte. kIo, kNoSpace.
Result<void> write_state_file(const std::string& path, const std::string& text,
                              const std::function<Result<void>()>& allowed = {});

struct StateFile {
  std::string text;
  bool under_way = false;  // its lock is held
};

// The text, and whether its operation is under way, as one: a shared lock, held while the file is
// read, keeps an operation from beginning or ending meanwhile. Several readers do not disturb each
// other, and no lock file is made here. Nothing if there is no such file.
Result<std::optional<StateFile>> read_state_file(const std::string& path);

// Removes the file and its lock; to be called by the lock's holder.
void remove_state_file(const std::string& path);

// Removes what killed tools have left of files that `is_ours` says yes to: half of a file, a lock
// without one. What is held is left alone.
void sweep_state_files(const std::string& directory,
                       const std::function<bool(std::string_view)>& is_ours);

}  // namespace stasis
