// Work on directories that follows no links: for images, which may come from an untrusted source.
// And what is said of an image that is not what it should be.
//
// Functions only; any thread.
#pragma once

#include <sys/stat.h>

#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// kImageCorrupt, with what to do about it.
tl::unexpected<Error> corrupt_image(std::string message);
// The same remedy for an error of a system call, where that says that the image is at fault.
Error of_image(Error error);

// A path cut into an open parent directory and a last component that is no "." or "..".
struct DirectoryEntry {
  UniqueFd parent;
  std::string parent_path;  // absolute, without links
  std::string name;

  std::string path() const;  // absolute
};

// kUsage for an empty path, "/" and one that ends with "." or ".."; kIo if the parent is not there.
Result<DirectoryEntry> split_path(const std::string& path);

// Which folder a descriptor is of, under whatever name and in whatever mount; kIo.
Result<std::string> folder_id(const UniqueFd& folder);
// kNotPermitted unless `folder`, which was opened as `path`, is the one that has this id; nothing
// is asked for an empty id.
Result<void> check_folder(const UniqueFd& folder, const std::string& id, const std::string& path);

// Opens `path` beneath `directory` without following any link, not even one on the way.
// openat2 where the kernel has it (5.6); otherwise O_NOFOLLOW at each step. kImageCorrupt if it is
// not there, or if a link or a file stands where a directory should; kNotPermitted, kIo.
Result<UniqueFd> open_beneath(const UniqueFd& directory, const std::string& path, int flags);

// A file of an image, to be read, which must be a regular one: a pipe in its place holds nothing
// up.
Result<UniqueFd> open_regular(const UniqueFd& directory, const std::string& path,
                              struct stat& info);

// Of a read of an image's file. kImageCorrupt where the disk or the file system has lost what was
// there; as errno_error otherwise.
Error read_error(const std::string& what, int error_number);

// The names in a directory without "." and "..", sorted.
Result<std::vector<std::string>> list_directory(const UniqueFd& directory, const std::string& path);

// Marks a directory as in use for as long as this descriptor, or a copy of it, is open. On a file
// system without locks nothing happens: they only decide what a message says.
void mark_in_use(const UniqueFd& directory);
// Whether a process has marked it, this one included. kUnknown where no lock can be had (NFS).
enum class InUse { kNo, kYes, kUnknown };
InUse in_use(const UniqueFd& parent, const std::string& name);

// Gives the name `final.name` to the entry `from` of the same directory, and the name `aside` to
// what had it before. Where the file system can, both names exist at every instant
// (RENAME_EXCHANGE); otherwise, or if `exchange` is false, the old entry is named `hold` for an
// instant. Returns the name that the old entry has now: `aside`, unless the last, merely cosmetic
// rename failed. If it fails, everything has its old name.
Result<std::string> swap_entries(const DirectoryEntry& final, const std::string& from,
                                 const std::string& aside, const std::string& hold,
                                 bool exchange = true);

}  // namespace stasis
