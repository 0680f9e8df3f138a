// Whose word a path is: root must not run, or go by, what another user could have put where it is
// found.
//
// Stateless; thread-safe.
#pragma once

#include <string>

namespace stasis::proc {

struct TrustedPath {
  // Where it is, without a link. By this path and no other it is what was judged: only
  // root and the caller can put another file, folder or link into any place of it.
  std::string path;
  std::string why_not;  // empty if it may be believed
};

// `path` is absolute. Judged are its folders, each link that it leads over with the folders that
// hold it, and the file or folder itself.
TrustedPath judge_path(const std::string& path);

}  // namespace stasis::proc
