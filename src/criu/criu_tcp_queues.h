// CRIU's files of TCP connections: tcp-stream-NUMBER.img, one protobuf message behind two magic
// numbers and its size, and the content of both queues.
// The files are untrusted: what is read is bounded. Stateless.
#pragma once

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// Has all that was not yet acknowledged count as sent. CRIU 4.2.1 restores what was not yet sent by
// sending it, to the other end, which may not be there again: its node answers with a reset (the
// restore fails: "Can't restore not-sent send queue data"). What counts as sent is sent again by
// the kernel, as what was lost. Changes the files in their places. kIo.
Result<void> count_as_sent(const UniqueFd& criu_dir);

}  // namespace stasis
