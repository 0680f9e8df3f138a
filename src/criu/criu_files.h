// What an image needs of the file system: the files, directories and mapped libraries that CRIU
// opens by their names at a restore, as its files.img says, and finds by size and mode to be what
// they were.
// Reads CRIU's images, which are untrusted: bounded, and wrong input only leaves entries
// out.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

struct NeededFile {
  std::string path;
  std::optional<std::uint64_t> size;  // bytes, where CRIU compares it
  std::optional<std::uint32_t> mode;  // as stat(2) has it
  unsigned flags =
      0;  // of open(2); as for writing, too, where a process writes to what it has mapped
  // CRIU has made this name itself (--link-remap) for a file that had lost the one it was opened
  // by. A restore removes it.
  bool of_criu = false;
};

// A file that a process of the image has, and by what name CRIU opens it.
struct OpenedFile {
  std::string place;        // below /proc/PID: "fd/3", "cwd", "root", "exe", "map_files"
  std::uint64_t start = 0;  // of a mapping: its first address
  std::string name;
  bool loses_name = false;  // CRIU makes this name for a deleted file, and takes it away again
};

// Of all processes of an image. Not what is on mounts of the image's own, in /proc or a terminal,
// or named by --external.
class OpenedFiles {
 public:
  // kImageCorrupt if CRIU's files cannot be parsed, or name too many; here and below.
  static Result<OpenedFiles> read(const UniqueFd& criu_dir);
  // `number`: the process's in its PID namespace.
  Result<std::vector<OpenedFile>> of(const UniqueFd& criu_dir, int number) const;
  // All names that CRIU looks up or makes at a restore, those of unix sockets too.
  const std::vector<std::string>& names() const { return names_; }

 private:
  struct Name {
    std::string path;
    bool loses = false;
  };
  std::map<std::uint64_t, Name> by_id_;
  std::vector<std::string> names_;
};

// Not those of a mount namespace that is in the image, of /proc, or that are named by --external.
std::vector<NeededFile> needed_files(const UniqueFd& criu_dir);

// Gives the files that CRIU has named itself (of_criu) other names in files.img: from the old to
// the new. kImageCorrupt for one that cannot be parsed or is larger than needed_files() reads; kIo.
Result<void> rename_link_remaps(const UniqueFd& criu_dir,
                                const std::map<std::string, std::string>& names);

// Moves unix sockets that listen in front of all else in files.img, where one of them stands behind
// a connection that waits to be accepted by it: a restore by CRIU 4.2.1 looks for the other end of
// a connection when it reads its entry, and not again (try_resolve_unix_peer() of criu/sk-unix.c),
// and ends at "FATAL: Peer ... unresolved". A files.img that cannot be parsed stays as it is. kIo.
Result<void> put_listeners_first(const UniqueFd& criu_dir);

// Takes from files.img that a file signals a thread (F_OWNER_TID of F_SETOWN_EX): a restore by CRIU
// 4.2.1 opens files before there are threads, and ends at "Can't setup ... file owner pid: No such
// process". A files.img that cannot be parsed stays as it is. kIo.
Result<void> drop_owner_threads(const UniqueFd& criu_dir);

// Takes O_ASYNC from terminals, FIFOs and inotify in files.img: of a file that is opened with it,
// as CRIU 4.2.1 opens the first two, the kernel says that it signals, never does, and does not let
// it be changed any more; an inotify is not opened with it, and the restore ends. A files.img that
// cannot be parsed stays as it is. kIo.
Result<void> drop_signalling(const UniqueFd& criu_dir);

// What is wrong with the file on this machine: "is not there", "has 5 bytes, and had 6"; nothing if
// all is well, or it cannot be examined.
std::optional<std::string> what_is_wrong(const NeededFile& file);

}  // namespace stasis
