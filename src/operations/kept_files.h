// Files outside of an image whose content is in it all the same: those that a program which goes on
// had open for writing, and those whose only certain name CRIU has made (link_remap). Recorded at
// the dump in two files beside CRIU's (docs/image-format.md), put back before CRIU opens them
// (docs/adr/0045-files-that-change.md).
//
// Private to src/operations. Functions and values; one thread at a time. The image may be anyone's,
// and the files may be changed by other users at any moment: no link is followed on the way to one,
// and a file of another owner is left alone.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/interrupt.h"
#include "base/result.h"
#include "criu/criu_files.h"

namespace stasis {

// All contents in one image. Larger files are left out, the largest first.
inline constexpr std::uint64_t kMostKept = 64ULL << 20;
// What the end of a file must be for the file to be the one that has grown.
inline constexpr std::uint64_t kKeptTail = 64ULL << 10;

struct KeptFile {
  std::string path;                // of a link: CRIU's name for it
  std::vector<std::string> links;  // other names of CRIU's for the same file
  std::vector<std::string> names;  // of a link: those that the program knows
  std::uint64_t size = 0;
  unsigned mode = 0;  // as stat(2) has it
  unsigned uid = 0;
  unsigned gid = 0;
  std::uint64_t inode = 0;
  std::uint64_t born_ns = 0;  // 0: the file system does not say
  bool link = false;
  std::string mount;                     // the mount that it lies on
  std::optional<std::uint64_t> content;  // where its bytes are in the image
  std::string tail;                      // xxh3_hex() of its last kKeptTail bytes; of no link
  std::string digest;                    // the same of all of it, if that is in the image
  std::uint64_t modified_ns = 0;         // when it was written to last; 0: not known
};

// The directory that `path` lies in, opened without following a link; nothing if that cannot be.
std::optional<UniqueFd> open_folder_of(const std::string& path);
std::string name_of_path(const std::string& path);
// xxh3_hex() of the bytes before `size`, `most` at most; nothing if they cannot be read.
std::optional<std::string> tail_digest(const UniqueFd& file, std::uint64_t size,
                                       std::uint64_t most = kKeptTail);
std::uint64_t modified_ns(const struct stat& info);
std::uint64_t born_ns(const UniqueFd& file);
// The last directory above `path` that is of another device than the one above it; "/" otherwise.
std::string mount_above(const std::string& path);

// --- At the dump

struct KeepReport {
  std::vector<std::string> links;  // names that were given to files: for remove_links()
  std::vector<std::string> lost;   // for people: what a later restore may miss
};

// While the job stands still and CRIU has written its files: gives the names that CRIU has made
// others, which no other image has, and notes the files. `goes_back`: the job may change what it
// writes to and be restored after that. `own_memory`: its /dev/shm is in the image. On failure, no
// name is left. kIo, kNoSpace.
Result<KeepReport> keep_files(const UniqueFd& criu_dir, bool goes_back, bool own_memory);

// The program runs on, or there is no image: nothing needs the names.
void remove_links(const std::vector<std::string>& links);
// The same for the half of an image: of its `files`, those names of CRIU's that still lead to the
// file that CRIU has noted.
void remove_links(const std::vector<NeededFile>& files);

// --- At a restore

// None if the image has no record of any. kImageCorrupt.
Result<std::vector<KeptFile>> read_kept_files(const UniqueFd& criu_dir);

// What a restore does about a file that is not as CRIU wants it.
enum class PutBack {
  kNothing,   // the file is as it was, or cannot be made that
  kMake,      // the file is gone: made again, with the content that it had
  kShorten,   // the file has grown: cut to what it was, the rest is set aside
  kExchange,  // another file has its name, or it has other content: set aside, and made again
  kLink,      // the file has lost CRIU's name only, and has the program's
};
PutBack how_to_put_back(const KeptFile& kept, const NeededFile& file);
// It was written to since, and a restore has no content to put in its place.
bool has_changed_for_good(const KeptFile& kept, const NeededFile& file);

// Puts the files back; the destructor undoes that, as far as they are still as they were made here,
// unless keep() was called.
class FilesPutBack {
 public:
  FilesPutBack(const UniqueFd& criu_dir, std::function<void(std::string)> tell,
               const Interrupt& interrupt)
      : criu_dir_(criu_dir), tell_(std::move(tell)), interrupt_(interrupt) {}
  ~FilesPutBack();
  FilesPutBack(const FilesPutBack&) = delete;
  FilesPutBack& operator=(const FilesPutBack&) = delete;

  // kNoSpace, kIo, kInterrupted; kImageCorrupt.
  Result<void> put_back(const KeptFile& kept, PutBack how);
  void keep();

 private:
  Result<void> make(const KeptFile& kept);
  Result<void> shorten(const KeptFile& kept);
  Result<void> exchange(const KeptFile& kept);
  Result<void> link(const KeptFile& kept);
  Result<void> refill(const UniqueFd& folder, const UniqueFd& file, std::uint64_t size,
                      const KeptFile& kept);
  Result<UniqueFd> content_of(const KeptFile& kept) const;
  Result<void> fill(const UniqueFd& file, const KeptFile& kept);
  Result<bool> holds(const UniqueFd& file, const KeptFile& kept) const;

  const UniqueFd& criu_dir_;
  std::function<void(std::string)> tell_;
  const Interrupt& interrupt_;
  std::vector<std::function<void()>> undo_;
  std::vector<std::string> empty_;  // what was set aside and has nothing in it
};

}  // namespace stasis
