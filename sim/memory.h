// The device memory of this process: objects (physical memory, a file each), where they are mapped,
// and what the program was given.
//
// While the process runs, an object is a file of its GPU's folder, mapped shared. While it is
// checkpointed, all content lies in one private anonymous mapping, the addresses are kept by
// PROT_NONE mappings, and no file or descriptor of a GPU is held, which is what lets CRIU dump it.
//
// Ownership: Memory owns everything it hands out; addresses and handles are checked at every use.
// Threads: any thread inside the gate, under an own mutex. save(), let_go() and bring_back() take
// no lock: they run on the restore thread while the process is locked and every other thread is
// outside (or stopped by a debugger in front of the gate).
#pragma once

#include <sys/mman.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "sim/config.h"
#include "sim/managed.h"
#include "sim/registry.h"

namespace stasis::sim {

struct Context;
using Address = cuda::CUdeviceptr;
inline constexpr std::uint64_t kGranule = std::uint64_t{2} << 20;  // as on real GPUs
// Of what plain device memory takes its addresses from: an area is a multiple of this, blocks that
// are smaller share the rest of it, and it is given up with the last of them (580.159.04).
inline constexpr std::uint64_t kAreaUnit = std::uint64_t{32} << 20;

enum class Kind { kDevice, kManaged, kPinned, kRegistered, kIpc, kMapped };

struct Object {
  ObjectId id;
  std::uint64_t size = 0;
  int gpu = 0;                                     // slot of Memory
  enum class Origin { kOwn, kOpened, kImported };  // by legacy IPC, or as a descriptor
  Origin origin = Origin::kOwn;
  ObjectKind kind;
  bool restored = false;  // in this process: it has been away
  int handles = 0;        // references by cuMemCreate, import and retain
  int uses = 0;           // allocations and mappings that refer to it
  // While checkpointed: where the content lies in the image, and which parts of it are not zero.
  std::uint64_t image_offset = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;  // offset, length
};

struct Allocation {
  Address base = 0;
  std::uint64_t size = 0;
  Kind kind = Kind::kDevice;
  int device = 0;  // ordinal
  Context* context = nullptr;
  void* pool = nullptr;
  unsigned flags = 0;
  std::uint64_t id = 0;  // never used twice in a process
  Object* object = nullptr;
  std::uint64_t offset = 0;  // in the object
  bool in_slab = false;
  unsigned opens = 0;  // of an IPC handle
  bool sync_memops = false;
};

// In bytes, of a pool.
struct PoolUse {
  std::uint64_t reserved = 0;
  std::uint64_t reserved_high = 0;
  std::uint64_t used = 0;
  std::uint64_t used_high = 0;
};

// How fast content may move, and what to do on the way (faults).
struct Pace {
  std::uint64_t bytes_per_second = 0;  // 0: as fast as it goes
  std::function<void()> at_half;       // may be empty
};

class Memory {
 public:
  explicit Memory(const Config& config);

  // GPUs, by slot (the machine's index when the process started), here and below `slot` or `index`.
  const GpuSpec& gpu(int slot) const { return slots_[static_cast<std::size_t>(slot)].spec; }
  int gpus() const { return static_cast<int>(slots_.size()); }
  const std::string& dir() const { return dir_; }
  bool hold(int index);  // counts; a process that holds a GPU is listed as its user
  void unhold(int index);
  std::uint64_t free_bytes(int index) const;

  // Plain memory. Each returns CUDA's result code.
  cuda::CUresult allocate(int index, int device, std::uint64_t size, Context* context,
                          Address& out);
  cuda::CUresult free(Address base);
  cuda::CUresult allocate_host(Kind kind, int device, std::uint64_t size, Context* context,
                               unsigned flags, Address& out);
  // What the program says of a part of managed memory, and what it has said of all of one.
  cuda::CUresult note_managed(Address base, std::uint64_t size,
                              cuda::CUmem_range_attribute attribute, int value);
  cuda::CUresult noted_managed(Address base, std::uint64_t size,
                               cuda::CUmem_range_attribute attribute, int& value) const;
  cuda::CUresult register_host(Address base, std::uint64_t size, int device, Context* context,
                               unsigned flags);
  cuda::CUresult unregister_host(Address base);
  cuda::CUresult free_host(Address base);
  void free_all(const Context* context);
  // The allocation that holds all of [address, address + size).
  bool find(Address address, std::uint64_t size, Allocation& out) const;
  // Of the allocation in which `address` lies.
  cuda::CUresult set_sync_memops(Address address, bool on);
  // True if device work may touch the range: one allocation, or mapped VMM memory without a gap.
  bool accessible(Address address, std::uint64_t size) const;
  int managed() const { return managed_; }
  // What a restore will answer because of memory that belongs to other processes, as driver 580
  // does.
  cuda::CUresult foreign_refusal() const;
  // Touches what only a process that has its GPU can: a page that is gone while it is checkpointed.
  void touch_device() const { (void)*device_page_; }

  // Stream-ordered memory. What was freed in a stream it may have again at once; all others may
  // when pass_pooled() says that the stream has got there.
  cuda::CUresult allocate_pooled(int index, int device, std::uint64_t size, void* pool,
                                 std::uint64_t max_size, std::uint64_t stream, Address& out);
  cuda::CUresult free_pooled(Address base, std::uint64_t stream, std::uint64_t& freed);
  void pass_pooled(std::uint64_t freed);
  void destroy_pool(void* pool);
  // False if it keeps no more than that which it could give back.
  bool trim_pool(void* pool, std::uint64_t keep, bool only_look);
  PoolUse pool_use(void* pool) const;
  void reset_pool_highs(void* pool, bool reserved);

  // Legacy IPC.
  cuda::CUresult export_ipc(Address address, cuda::CUipcMemHandle& out) const;
  cuda::CUresult import_ipc(const cuda::CUipcMemHandle& handle, int device, Context* context,
                            Address& out);
  cuda::CUresult close_ipc(Address base);

  // Virtual memory management.
  cuda::CUresult reserve(std::uint64_t size, std::uint64_t alignment, Address hint, Address& out);
  cuda::CUresult unreserve(Address base, std::uint64_t size);
  cuda::CUresult create(int index, std::uint64_t size, ObjectKind kind, Object*& out);
  cuda::CUresult release(Object* object);
  cuda::CUresult map(Address at, std::uint64_t size, std::uint64_t offset, Object* object,
                     int device);
  cuda::CUresult unmap(Address at, std::uint64_t size);
  // What devices may do, by ordinal: those in `readers` and `writers` may use it, those in `others`
  // not, and of all else it stays as it was. One set of pages serves all of them: what any of them
  // may do is allowed there, and a kernel on a device that may do nothing is refused.
  static constexpr int kHost = 63;  // in the place of a device
  struct Rights {
    std::uint64_t readers = 0;
    std::uint64_t writers = 0;
    std::uint64_t others = 0;
  };
  cuda::CUresult protect(Address at, std::uint64_t size, const Rights& rights);
  cuda::CUresult protection(Address at, int device, int& prot) const;
  // False for memory that the program has mapped, and not for this device.
  bool may_use(Address at, int device) const;
  cuda::CUresult export_fd(Object* object, int& out) const;
  cuda::CUresult import_fd(int fd, Object*& out);
  cuda::CUresult retain(Address at, Object*& out);
  // What is reserved around a mapping; of other memory, itself. Start and size.
  std::pair<Address, std::uint64_t> range_of(const Allocation& allocation) const;
  // 0 and 0 where nothing is reserved for virtual memory.
  std::pair<Address, std::uint64_t> reservation_at(Address at) const;
  bool is_handle(const Object* object) const;

  // Checkpoint, on the restore thread.
  cuda::CUresult save(const Pace& pace);
  void let_go();
  void discard_image();
  // Brings everything back on the given GPUs: target[slot] is the slot's new GPU.
  cuda::CUresult bring_back(const std::string& dir, const std::vector<GpuSpec>& target,
                            const Pace& pace);

 private:
  struct Placement {
    std::uint64_t size = 0;
    std::uint64_t offset = 0;
    Object* object = nullptr;
    int prot = PROT_NONE;
    int device = 0;
    // By ordinal, of what the program has mapped itself.
    std::uint64_t readers = 0;
    std::uint64_t writers = 0;
  };
  struct Slot {
    GpuSpec spec;
    std::unique_ptr<Holding> holding;
    int holds = 0;
  };
  struct Slab {
    Object* object = nullptr;
    Address base = 0;
    std::map<std::uint64_t, std::uint64_t> used;  // offset -> size
  };

  struct Area {
    int index = 0;  // slot
    std::uint64_t size = 0;
    std::map<Address, std::uint64_t> blocks;  // with their sizes
  };
  struct PoolBlock {
    std::uint64_t size = 0;
    std::uint64_t stream = 0;
    std::uint64_t freed = 0;  // 0: in use
  };
  struct PoolArea {
    Address base = 0;
    std::uint64_t size = 0;
    int index = 0;
    bool destroyed = false;
    std::map<Address, PoolBlock> blocks;
    std::uint64_t reserved = 0;
    std::uint64_t reserved_before = 0;  // an allocation that fails leaves
    std::uint64_t reserved_high = 0;
    std::uint64_t used = 0;
    std::uint64_t used_high = 0;
  };

  Slot& slot(int index) { return slots_[static_cast<std::size_t>(index)]; }
  const Slot& slot(int index) const { return slots_[static_cast<std::size_t>(index)]; }
  cuda::CUresult new_object(int index, std::uint64_t size, ObjectKind kind, Object*& out);
  cuda::CUresult adopt(int index, const ObjectTrailer& trailer, int fd, Object::Origin origin,
                       Object*& out);
  void drop_if_unused(Object* object);
  bool place(Address at, const Placement& placement);
  void clear(Address at, std::uint64_t size);  // back to PROT_NONE
  void save_contexts();
  bool contexts_are_whole() const;
  Address reserve_range(std::uint64_t size, std::uint64_t alignment, Address hint);
  // Addresses for a block of whole granules, which cannot be touched yet; 0 if there are none.
  Address take_in_area(int index, std::uint64_t size);
  void give_back_in_area(Address base);
  std::vector<Address> missing_units(const PoolArea& area, Address at, std::uint64_t size) const;
  bool find_in_pool(const PoolArea& area, std::uint64_t size, std::uint64_t stream,
                    Address& out) const;
  static void cut_freed(PoolArea& area, Address at, std::uint64_t size);
  bool trim_area(PoolArea& area, std::uint64_t keep, bool only_look = false);
  void drop_area_if_unused(void* pool);
  bool trim_all(int index);
  cuda::CUresult allocate_in_slab(int index, Allocation& allocation);
  void free_locked(std::map<Address, Allocation>::iterator it);
  Allocation& remember(Allocation allocation);
  const Allocation* find_locked(Address address, std::uint64_t size) const;

  mutable std::mutex mutex_;
  std::string dir_;
  std::vector<Slot> slots_;
  std::set<Object*> objects_;
  std::map<Address, Allocation> allocations_;
  std::map<Address, Placement> placements_;
  std::map<Address, std::uint64_t> reservations_;
  std::vector<std::unique_ptr<Slab>> slabs_;
  std::map<void*, PoolArea> pool_areas_;
  std::map<Address, Area> areas_;
  std::map<std::uint64_t, Address> given_up_;  // by size, where the last area of it was
  int managed_ = 0;
  ManagedAreas managed_areas_;
  std::uint64_t next_id_ = 1;
  const volatile char* device_page_ = nullptr;
  char* image_ = nullptr;
  std::uint64_t image_size_ = 0;
  // What is kept of the contexts themselves lies at the image's end.
  std::uint64_t context_bytes_;
  bool takes_freed_;
  std::uint64_t exports_restored_below_;
  std::uint64_t contexts_at_ = 0;
};

}  // namespace stasis::sim
