// Whether the names by which a restore opens files lead over links that another user has made.
//
// CRIU opens the files of an image by name, with the rights of the restore, often root's, and
// follows links. A user who may write to a folder on the way, as the program itself often may, can
// put a link there after the dump, and the program would have what the link leads to: a file that
// only root may read or write.
//
// A link of root or of the user who restores leads where they want. A file that has another name
// because of any other is refused.
//
// Private to src/operations. Stateless.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "checkpoint/process.h"
#include "criu/criu.h"

namespace stasis {

// Before CRIU looks any name up, makes a deleted file again or binds a socket: kNotPermitted with
// the link. Links may come later. kImageCorrupt.
Result<void> refuse_foreign_links(const UniqueFd& criu_dir);

// When the processes stand complete and none runs: looks at what they have by now, so that a link
// that was there for a moment is found as well. kNotPermitted, kImageCorrupt. `inherited`: what
// came in the place of files.
Result<void> refuse_foreign_files(const UniqueFd& criu_dir,
                                  const std::vector<std::optional<Process>>& processes,
                                  std::span<const InheritedFd> inherited);

}  // namespace stasis
