// Resources from outside of the image: what the tool tells CRIU about them at a restore, from what
// it told CRIU at the dump.
//
// Functions only; any thread.
#pragma once

#include <string>
#include <vector>

namespace stasis {

// CRIU wants a named mount the other way round at the restore ("External bind mounts" of its
// manual): `mnt[/path]:key` at the dump becomes `mnt[key]:/path`. All else stays as it was. What is
// in `given`, in the form of a restore, takes the place of what has the same name, or is added.
std::vector<std::string> externals_for_restore(const std::vector<std::string>& dumped,
                                               const std::vector<std::string>& given);

}  // namespace stasis
