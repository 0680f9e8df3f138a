// FIFOs in CRIU's images. CRIU 4.2.1 opens one for reading and writing before it opens it as the
// program has it (do_open_fifo() of its fifo.c): to a reader that never had a writer the kernel
// says then that all of them have gone.
//
// Reads CRIU's images, which are untrusted: bounded, and wrong input changes nothing.
#pragma once

#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// Has these descriptors, each with the number of its process in the PID namespace of that, opened
// as any other file is: by name, with their flags. They must not wait (O_NONBLOCK), and all
// descriptors of one FIFO must be among them. kIo.
Result<void> open_fifos_as_files(const UniqueFd& criu_dir,
                                 const std::vector<std::pair<int, int>>& descriptors);

}  // namespace stasis
