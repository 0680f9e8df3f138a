// Deleted files and directories that processes of an image have open, or stand in. A restore by
// CRIU 4.2.1 makes them again by the name that they had, and removes them: a directory under just
// that name, a file beside it (open_remap_ghost() and create_ghost() of criu/files-reg.c).
#pragma once

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// Gives each deleted directory in files.img a name of its own in the nearest directory that is
// there: what has come by the old name since, or is deleted above it, would be in the way, and an
// empty directory be removed in its place. The same for deleted files whose name would be too long,
// whose directory is none any more, or beside which a name that CRIU makes is taken. A files.img
// that cannot be parsed stays as it is. kIo.
Result<void> rename_deleted(const UniqueFd& criu_dir);

}  // namespace stasis
