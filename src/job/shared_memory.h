// What is in the /dev/shm of a job: saved beside CRIU's files, which hold no file that has a name,
// and put back before CRIU opens them. docs/image-format.md says how.
// Functions; no other process may write to the directory meanwhile. Files of other file systems
// that are mounted below it are left alone.
#pragma once

#include <string>

#include "base/fd.h"
#include "base/result.h"

namespace stasis::job {

inline constexpr const char* kSharedMemory = "/dev/shm";

// All of `directory`, into two new files of `into`; none if there is nothing. Bytes written.
// kNoSpace, kIo.
Result<std::uint64_t> save_shared_memory(const std::string& directory, const UniqueFd& into);

// Removes what is in `directory` and makes it what save_shared_memory() has found, from the files
// in `from`; of no files: empty. kImageCorrupt, kNoSpace, kIo.
Result<void> restore_shared_memory(const std::string& directory, const UniqueFd& from);

}  // namespace stasis::job
