// SPDX-License-Identifier: GPL-2.0-or-later
// The agent is brought to a tree that runs without it, before CRIU has stopped anything, where the
// user asks for that. By the program `stasis`: what it needs of images and jobs has no place in
// criu, and one that hangs can be left. On criu's main thread.
#pragma once

#include <string>
#include <vector>

#include "base/ids.h"
#include "base/result.h"

namespace stasis::plugin {

// What the user asks for by STASIS_ATTACH or by `--plugin-option cuda_plugin.attach=WORD`, which
// comes first, as options of `stasis attach`; none if by neither. kUsage.
Result<std::vector<std::string>> asked_attach_options();

// `stasis attach` to the tree below `root`, with these options and criu's time where that is more
// than usual, and its notes in CRIU's log. While it works CRIU's alarm stands still. Its errors,
// with remedies in the words of this plugin; kIo where there is no such program.
Result<void> attach_first(Pid root, const std::vector<std::string>& options);

}  // namespace stasis::plugin
