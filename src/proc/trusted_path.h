// Whose word a path is: root must not run, or go by, what another user could have put where it is
// found.
//
// Stateless; thread-safe.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace stasis::proc {

struct TrustedPath {
  // Where it is, without a link. By this path and no other it is what was judged: only
  // root and the caller can put another file, folder or link into any place of it.
  std::string path;
  std::string why_not;  // empty if it may be believed
};

// A user who is believed as the caller is.
struct TrustedUser {
  std::optional<uid_t> uid;
  std::optional<gid_t> gid;
};

// The user who has called us as root by sudo, if one has.
TrustedUser sudo_caller();

// `path` is absolute. Judged are its folders, each link that it leads over with the folders that
// hold it, and the file or folder itself.
TrustedPath judge_path(const std::string& path, const TrustedUser& caller = {});

// All that judge_path() would object to, one after the other. Where a user namespace does not know
// all users, an owner whom it does not know is not objected to: that is the machine's root, mostly.
std::vector<std::string> doubts_of_path(const std::string& path, const TrustedUser& caller = {});

}  // namespace stasis::proc
