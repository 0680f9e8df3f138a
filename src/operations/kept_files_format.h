// Names and limits of the record of kept files; docs/image-format.md.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/json_record.h"
#include "base/json_text.h"
#include "operations/kept_files.h"

namespace stasis {

namespace kept_files_format {

inline constexpr const char* kIndex = "stasis-files.json";
inline constexpr const char* kContent = "stasis-files-content.img";
inline constexpr int kVersion = 1;
inline constexpr std::size_t kMostIndex = 8 << 20;
// More is no record of ours.
inline constexpr JsonLimits kLimits{1 << 19, 8};
inline constexpr std::size_t kMostNames = 1024;  // of one file

struct Index {
  int version = kVersion;
  std::vector<KeptFile> files;
};
void fields(auto& io, Described<Index> auto& index) {
  io("version", index.version, Within{1, kVersion});
  io("files", index.files);
}

inline bool is_path(const std::string& path) {
  return path.starts_with('/') && path.size() < 4096 && !path.ends_with('/') &&
         path.find('\0') == std::string::npos;
}

}  // namespace kept_files_format

void fields(auto& io, Described<KeptFile> auto& kept) {
  using namespace kept_files_format;  // NOLINT(google-build-using-namespace): constants only
  constexpr Within kSize{0, INT64_MAX};
  constexpr Within kAny{0, UINT64_MAX};
  io("path", kept.path);
  io("size", kept.size, kSize);
  io("mode", kept.mode, Within{0, 0177777});
  io("uid", kept.uid);
  io("gid", kept.gid);
  io("inode", kept.inode, kAny);
  io("born_ns", kept.born_ns, kAny);
  io.optional("link", kept.link);
  io.optional("links", kept.links, Items{0, kMostNames});
  io.optional("names", kept.names, Items{0, kMostNames});
  io.optional("content", kept.content, kSize);
  io.optional("mount", kept.mount);
  io.optional("tail", kept.tail);
  io.optional("digest", kept.digest);
  io.optional("modified_ns", kept.modified_ns, kAny);
  io.check(S_ISREG(kept.mode), "mode", "is that of no regular file");
  io.check(is_path(kept.path), "path", "is none");
  io.check(std::all_of(kept.links.begin(), kept.links.end(), is_path), "links", "holds no path");
  io.check(std::all_of(kept.names.begin(), kept.names.end(), is_path), "names", "holds no path");
}

}  // namespace stasis
