// How images, and what is left of them, are removed: not past a mount, not into what belongs to
// another user, and by a name that another user may have given to something else only what is
// known to be of an image.
//
// Any thread.
#pragma once

#include <string>
#include <string_view>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// Whether an image has something of that name at its top.
bool is_part_of_image(std::string_view name);

// Removes the folder `name` in `parent` and all below it; links are removed, not followed. It being
// gone already is a success. kIo, or kNotPermitted, with the first path that stays; the rest is
// still tried.
Result<void> remove_tree(const UniqueFd& parent, const std::string& name, const std::string& path);

// The same of an image, of the half of one, or of a file beside it, in a folder in which other
// users may be able to rename: then a folder has to belong to this user, or to the folder's owner,
// and may have nothing in it but what images have. With `known`, that folder and no other:
// kNotPermitted if the name is another's by now.
Result<void> remove_image(const UniqueFd& parent, const std::string& name, const std::string& path,
                          const UniqueFd* known = nullptr);

}  // namespace stasis
