// Whose word a program is: root must not run what another user could have put where it is found.
//
// Stateless; thread-safe.
#pragma once

#include <string>

namespace stasis {

struct TrustedProgram {
  // Where it is, without a link. Run by this path and no other it is what was judged: only
  // root and the caller can put another file, folder or link into any place of it.
  std::string path;
  std::string why_not;  // empty if it may be run
};

// `path` is absolute. Judged are its folders, each link that it leads over with the folders that
// hold it, and the file.
TrustedProgram judge_program(const std::string& path);

}  // namespace stasis
