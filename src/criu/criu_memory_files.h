// Memory that a process maps as shared and that is of no file, in CRIU's images: CRIU 4.2.1 makes
// it anew as a file of memfd_create(2), with the rights that it had.
#pragma once

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// Takes the right to execute from such memory in the image. The kernel makes it with all rights,
// which show only in a descriptor of it; where it forbids to execute files of memory
// (vm.memfd_noexec) CRIU cannot give that right to the file, and the restore fails. A file that a
// program has made itself by the kernel's name for such memory, "/dev/zero", loses it, too. kIo.
Result<void> drop_execute_rights(const UniqueFd& criu_dir);

}  // namespace stasis
