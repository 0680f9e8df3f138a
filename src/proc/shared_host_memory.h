// Memory of no file that a process maps as shared (MAP_SHARED | MAP_ANONYMOUS), though no other
// process uses it: the driver's pinned memory is made so (cuMemAllocHost, cuMemHostAlloc; driver
// 580.159.04 on an H200: "/dev/zero (deleted)", before a checkpoint, while it lasts and after it).
// Processes that are forked then, such as a loader's workers, map it as well, and do not touch it.
//
// Its pages belong to an object of the kernel's own and not to the process, which need not have
// them in its page tables: what there is of it is asked of the object. CRIU makes such an object
// anew as a file of memfd_create(2).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "proc/zero_pages.h"

namespace stasis {

struct SharedMapping {
  AddressRange at;
  std::uint64_t offset = 0;  // of at.start in the object
  std::uint64_t inode = 0;   // the object's; a file of another file system may have the same
  UniqueFd object;           // open_own_mappings() opens it, to be read

  bool has(std::uint64_t address) const { return address >= at.start && address < at.end; }
  std::uint64_t offset_of(std::uint64_t address) const { return offset + (address - at.start); }
};

// Of a line of /proc/PID/maps or smaps; nothing if that tells of anything else. It may be written.
std::optional<SharedMapping> shared_mapping_of(const std::string& line);

// Which process of a tree has which object. Looks at all of them, once, when that is first asked:
// for each process anew, a tree of many would stand still for as many looks as there are pairs.
class SharedObjects {
 public:
  explicit SharedObjects(std::vector<Pid> processes) : processes_(std::move(processes)) {}

  // Whether that process of the tree maps it, and no other of them uses it: none has a page of it
  // in its page tables, which fork(2) leaves empty for it, or a descriptor of it. False if it
  // cannot be told. For an image that criu alone restores: a process without CUDA runs there, and
  // finds zeros. One that touches the memory for the first time after that does so still.
  bool has_alone(Pid pid, std::uint64_t inode);

 private:
  void look();

  std::vector<Pid> processes_;
  bool is_looked_at_ = false;
  // By inode: the one that uses it, else the first that maps it; nothing: several use it.
  std::map<std::uint64_t, std::optional<Pid>> owners_;
};

// Those of `mappings`, of process `pid`, that can be read and that it has alone. A second one of
// the same part of an object is left out, too, and so is one of which hardly anything is there.
// None if there are more than this program may open.
std::vector<SharedMapping> open_own_mappings(Pid pid, std::vector<SharedMapping> mappings,
                                             SharedObjects& objects);

// The blocks of `bytes` in `part` of the mapping, aligned in the process's addresses, of which at
// least half is there and not swapped out, as ranges, by address. By mincore(2) of a mapping of our
// own, which is not touched: lseek(2) waits for the object's lock, which each process that has a
// descriptor of it can keep for as long as it likes, by a write out of a page that does not come.
std::vector<AddressRange> blocks_there(const SharedMapping& mapping, const AddressRange& part,
                                       std::uint64_t bytes);

// What is there at `address`, which with all of `bytes` lies in the mapping; what is not reads as
// zeros, and does not come to be there. kIo. Any number of threads at once.
Result<void> read_shared(const SharedMapping& mapping, std::uint64_t address,
                         std::span<std::byte> bytes);

}  // namespace stasis
