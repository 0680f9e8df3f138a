// The tables behind eviction.h and hooks.h. Private to eviction.cc, memory_tables.cc, sharing.cc,
// ipc_broker.cc and hook_*.cc.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "driver_calls.h"
#include "eviction.h"
#include "hints.h"
#include "pools.h"
#include "reach.h"
#include "small_memory.h"

namespace stasis::preload {

// Numbers follow the order in which things are entered: a context may get the handle of one that
// has ended before all that was in the old one is dropped.
inline std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

// Who has made a piece of physical memory for which the agent has a handle of the driver's
// (Physical). That other processes have it, too, is no origin, as they come and go: Reach says it.
// In no Physical is managed memory (Managed), and memory of the driver's own, which the agent knows
// only where another process or a device has it, too (DriverShare, OpenedByDriver, BeyondAgent). Of
// multicast objects that this process makes: Multicast.
enum class MemoryOrigin {
  kServed,    // the agent, for cuMemAlloc: a whole allocation, or a unit of small ones or of a pool
  kProgram,   // the program, by cuMemCreate on a device; or inherited there (sharing.h)
  kHost,      // the same, of the host's memory
  kImported,  // another process: a descriptor, or cuIpcOpenMemHandle, gave it to this one
  kMulticast,  // the same, and it is no memory: an object of cuMulticastCreate
};

// A piece of physical memory.
struct Physical {
  MemoryOrigin origin = MemoryOrigin::kProgram;
  cuda::CUmemGenericAllocationHandle real = 0;  // the driver's, if `present`
  std::size_t size = 0;
  cuda::CUmemAllocationProp prop{};  // as it is made
  unsigned asked_handle_types = 0;   // as the program asked for it
  // By which the program knows it: the address of this, or, of one that was there before the
  // agent, the driver's handle of then.
  cuda::CUmemGenericAllocationHandle handle = 0;
  unsigned handles = 0;  // that the program holds
  unsigned mappings = 0;
  bool present = true;
  Reach reach;  // who else has it
  // Of memory of the host's and of what was inherited, while it is not there: its content, as an
  // anonymous mapping of its size.
  void* saved = nullptr;
  bool is_host() const { return origin == MemoryOrigin::kHost; }
  // The program has made it, or has inherited it: its number names the whole of it.
  bool is_programs() const { return origin == MemoryOrigin::kProgram || is_host(); }
  bool is_imported() const {
    return origin == MemoryOrigin::kImported || origin == MemoryOrigin::kMulticast;
  }
  // The agent can have it back, from its owner by the key.
  bool is_known_import() const { return origin == MemoryOrigin::kImported && reach.has_key(); }
  // Its owner freed it, or has ended: this process is its owner now.
  bool is_inherited() const { return !is_imported() && reach.has_key(); }
  bool is_pending_heir() const { return is_inherited() && saved && !present; }
  // Is not evicted: kDetach gives it up, if it can be had back (sharing.h).
  bool is_for_detach() const { return is_imported() || is_host(); }
  bool can_be_detached() const { return is_known_import() || is_host(); }
  // kDetach or another command about what is shared concerns it (count_shared()).
  bool is_counted_as_shared() const {
    return is_for_detach() || reach.is_known_elsewhere() || reach.is_outside();
  }
  // The agent may evict it.
  bool can_leave() const { return !is_for_detach() && reach.can_leave(); }
};

// The right of one device to a part of a mapping.
struct Access {
  cuda::CUdeviceptr address = 0;
  std::size_t size = 0;
  cuda::CUmemAccessDesc right{};
};

struct Mapping {
  cuda::CUdeviceptr address = 0;
  std::size_t size = 0;
  std::size_t offset = 0;
  Physical* physical = nullptr;
  std::vector<Access> access;  // in the order in which it was given
};

// Memory of another process, as this one has it open by cuIpcOpenMemHandle.
struct Opening {
  unsigned opens = 0;
  int connection = -1;  // to the owner's agent, which so sees how long it is open
  ShareKey key{};
};

// A small piece, which lies in a unit with others (SmallUnit).
struct InUnit {
  cuda::CUdeviceptr unit = 0;
  bool is_outside = false;  // as its unit is, because of it
};

// Has physical memory to itself.
struct Whole {};

// Memory from cuMemAlloc, whole or in a unit, or from cuIpcOpenMemHandle: then it is another
// process's, and not this one's to free or to share.
struct Allocation {
  std::size_t asked = 0;
  std::size_t reserved = 0;
  cuda::CUcontext context = nullptr;
  Physical* physical = nullptr;
  std::variant<Whole, InUnit, Opening> kind{};
  bool sync_memops = false;  // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
  std::uint64_t number = next_number();

  // The part of its kind, or null.
  const InUnit* in_unit() const { return std::get_if<InUnit>(&kind); }
  const Opening* opening() const { return std::get_if<Opening>(&kind); }
  InUnit* in_unit() { return std::get_if<InUnit>(&kind); }
  Opening* opening() { return std::get_if<Opening>(&kind); }
};

// A small piece that another process shares with this one. Its unit is open as often as all pieces
// in it together.
struct OpenedPiece {
  std::size_t asked = 0;
  unsigned opens = 0;
  std::uint64_t number = next_number();
};

// A unit of small memory of cuMemAlloc (small_memory.h).
struct SmallUnit {
  std::size_t size = 0;
  cuda::CUcontext context = nullptr;
  std::uint64_t life = 0;  // the context's
  std::uint64_t number = next_number();
};

// Managed memory that the agent can free and allocate again where it was: alone in an area of the
// driver's (managed.h).
struct Managed {
  std::size_t asked = 0;
  std::size_t size = 0;
  cuda::CUcontext context = nullptr;
  unsigned flags = 0;
  Hints hints;
  std::uint64_t number = next_number();
  // While it is away: where its content is, which is its own address unless that was taken.
  void* saved = nullptr;
  // Of each block of it, whether it was on the CPU.
  std::vector<bool> on_cpu;
  bool present() const { return saved == nullptr; }
};

// Memory of the driver's own, with the driver's handle, that other processes know by a number too.
struct DriverShare {
  cuda::CUdeviceptr address = 0;
  cuda::CUcontext context = nullptr;
  unsigned open_elsewhere = 0;
  bool being_freed = false;
  std::uint64_t number = next_number();
};

// An object of cuMulticastCreate by this process, which is there for as long as the program has a
// handle or a mapping of it.
struct Multicast {
  unsigned handles = 0;
  std::map<cuda::CUdeviceptr, std::size_t> mapped;
};

// What the driver has opened for the program: once, where the owner has an agent; else as often as
// the program has, without a connection.
struct OpenedByDriver {
  cuda::CUcontext context = nullptr;
  Opening opening;
  std::uint64_t number = next_number();

  bool has_owners_agent() const { return opening.connection >= 0; }
};

// Says that the memory of `owner` is to be accessible to `device`.
struct Peer {
  cuda::CUcontext owner = nullptr;
  cuda::CUcontext accessor = nullptr;
  cuda::CUdevice device = 0;
  std::uint64_t number = next_number();
};

// A green context: the context by which it is made current, and the primary context that its memory
// is in.
struct GreenContext {
  cuda::CUcontext context = nullptr;
  cuda::CUcontext primary = nullptr;
  cuda::CUdevice device = 0;
  std::uint64_t number = next_number();
};

// Tells a context from others that have had its handle.
struct Life {
  std::uint64_t number = 0;   // what has a smaller one was in another
  unsigned long long id = 0;  // the driver's, of a primary context; 0: not known
};

// A mutex of which a thread can tell at any moment whether it has it, also in a handler of a signal
// that comes while it takes it or lets it go, and in a child that is forked there.
class OwnedMutex {
 public:
  void lock() {
    if (!try_lock()) [[unlikely]]
      wait();
  }
  bool try_lock() {
    std::uint32_t free = 0;
    return word_.compare_exchange_strong(free, this_thread(), std::memory_order_acquire);
  }
  void unlock() {
    if (word_.exchange(0, std::memory_order_release) & kWaited) [[unlikely]]
      wake();
  }
  bool is_mine() const {
    return (word_.load(std::memory_order_relaxed) & ~kWaited) == this_thread();
  }

 private:
  static constexpr std::uint32_t kWaited = 1;
  static std::uint32_t this_thread() {
    if (!number_) number_ = last_number_.fetch_add(2, std::memory_order_relaxed) + 2;
    return number_;
  }
  void wait();
  void wake();

  std::atomic<std::uint32_t> word_{0};  // which thread has it, and whether another waits
  static inline std::atomic<std::uint32_t> last_number_{0};
  // Initial-exec: as in gate.h.
  static inline constinit thread_local std::uint32_t number_
      __attribute__((tls_model("initial-exec"))) = 0;
};

// Small memory of cuMemAlloc.
struct SmallTables {
  std::map<cuda::CUdeviceptr, SmallUnit> units;
  // What small ones of a context lie in: of one life, as it takes its units along.
  std::map<std::pair<cuda::CUcontext, std::uint64_t>, SmallMemory> memory;
  // A byte of the driver's own for each of these: with it the driver has a block, in which what
  // wait_for_work() allocates and frees costs little.
  std::map<std::pair<cuda::CUcontext, std::uint64_t>, cuda::CUdeviceptr> anchors;
};

struct ContextTables {
  std::unordered_map<cuda::CUcontext, cuda::CUdevice> devices;
  // Of those that the program has made or retained.
  std::unordered_map<cuda::CUcontext, Life> lives;
  // How often a context was attached to besides (cuCtxAttach), and is not ended by a cuCtxDetach.
  std::unordered_map<cuda::CUcontext, unsigned> attached;
  std::unordered_map<CUgreenCtx, GreenContext> green;
  // Only the driver knows a primary context's handle, and only while it is retained.
  std::map<cuda::CUdevice, cuda::CUcontext> primaries;
  std::vector<Peer> peers;
  // In bytes, of contexts in which it is 0 for now (local_memory.h).
  std::unordered_map<cuda::CUcontext, std::size_t> stack_sizes;
};

// Memory that the agent cannot give up and have again, and of which it has no Physical.
struct BeyondAgent {
  // Another process's: pools, and memory of these.
  std::set<cuda::CUmemoryPool> imported_pools;
  std::set<cuda::CUdeviceptr> imported_pointers;
  // Of memory of the driver's own that a device has as a dma-buf: where it begins.
  std::set<cuda::CUdeviceptr> outside_of_driver;
  // Nothing tells when one of them is used no more.
  std::size_t fabric_exports = 0;

  std::size_t foreign_count() const { return imported_pools.size() + imported_pointers.size(); }
  std::size_t outside_count() const { return outside_of_driver.size() + fabric_exports; }
};

// What a forked child forgets.
struct TableContents {
  std::map<cuda::CUdeviceptr, Mapping> mappings;
  std::map<cuda::CUdeviceptr, Allocation> allocations;
  SmallTables small;
  // By the handle that the program has.
  std::unordered_map<cuda::CUmemGenericAllocationHandle, std::unique_ptr<Physical>> physicals;
  ContextTables contexts;
  // By the number that others know it by, the same for both.
  std::unordered_map<std::uint64_t, Physical*> shares;
  std::map<std::uint64_t, DriverShare> driver_shares;
  // The connections to those whose memory this process has imported by descriptors.
  std::map<std::uint64_t, int> owners;
  std::map<cuda::CUdeviceptr, OpenedByDriver> opened_by_driver;
  // Other processes' small pieces, in the units that were opened for them.
  std::map<cuda::CUdeviceptr, OpenedPiece> opened_pieces;
  BeyondAgent beyond;
  // By the driver's handle.
  std::map<CUmulticastHandle, Multicast> multicasts;
  std::map<cuda::CUdeviceptr, Managed> managed;
  // The addresses of the agent's pools, with their sizes (pools.h).
  std::map<cuda::CUdeviceptr, std::size_t> pool_ranges;
  // Small memory of the driver's own, by context, that is to be freed at the next opportunity: to
  // free it waits for work in flight.
  std::unordered_map<cuda::CUcontext, std::vector<cuda::CUdeviceptr>> spares;
  // Of what a pitch is a multiple, in bytes, by device and element.
  std::map<std::pair<cuda::CUdevice, unsigned>, std::size_t> pitches;
  // What other processes share, closed while a stream was being captured.
  std::vector<std::pair<cuda::CUdeviceptr, Allocation>> to_free;
  // With the context in which the capture began: it ends with that.
  std::map<std::pair<cuda::CUstream, pthread_t>, cuda::CUcontext> capturing;
};

struct Tables : TableContents {
  // Held for look-ups and entries only, never over a call of the driver that may take long.
  OwnedMutex mutex;
  std::atomic<int> captures{0};  // how many are `capturing`, to be read without the lock
  // In a forked child: the thread that has the mutex forgets all before it lets go.
  bool to_be_forgotten = false;
};

Tables& tables();
// With the tables locked, or in a forked child.
void forget_tables();

class TablesLock {
 public:
  TablesLock() { tables().mutex.lock(); }
  ~TablesLock() { unlock(); }
  TablesLock(const TablesLock&) = delete;
  TablesLock& operator=(const TablesLock&) = delete;

  static void unlock() {
    if (tables().to_be_forgotten) [[unlikely]]
      forget_tables();
    tables().mutex.unlock();
  }
};

// Makes `context` current for a moment, if it is not null.
class CurrentContext {
 public:
  explicit CurrentContext(cuda::CUcontext context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

// For questions and calls that want a context current, which the agent's thread has not. Null if
// none is known. Takes the tables' lock.
cuda::CUcontext any_context();

// --- With the tables locked

Physical* physical_of(cuda::CUmemGenericAllocationHandle handle);
Physical* enter_physical(MemoryOrigin origin, cuda::CUmemGenericAllocationHandle real,
                         std::size_t size, const cuda::CUmemAllocationProp& prop,
                         unsigned asked_handle_types);
// One that was there before the agent, of which the program holds so many handles.
Physical* enter_program_memory(cuda::CUmemGenericAllocationHandle real, unsigned handles,
                               std::size_t size, const cuda::CUmemAllocationProp& prop);
// The context that owns what is allocated while `current` is.
cuda::CUcontext owner_in(cuda::CUcontext current);
// The mapping in which `address` lies, or null.
Mapping* mapping_at(cuda::CUdeviceptr address);
// The allocation in which it lies, also behind what was asked for; or the end.
std::map<cuda::CUdeviceptr, Allocation>::iterator allocation_in(cuda::CUdeviceptr address);
// The number of the life that the context has now; 0: not known.
std::uint64_t life_of(cuda::CUcontext context);
// No piece comes into the unit any more.
void forget_places_in(const std::pair<const cuda::CUdeviceptr, SmallUnit>& unit);
// Whether it is a unit that was opened for a small piece of another process's.
bool has_opened_piece(const std::pair<const cuda::CUdeviceptr, Allocation>& opened);
// The managed memory in which it lies, also behind what was asked for; or the end.
std::map<cuda::CUdeviceptr, Managed>::iterator managed_at(cuda::CUdeviceptr address);
// Records that [address, address + size) of the mappings has this right.
void enter_access(cuda::CUdeviceptr address, std::size_t size, const cuda::CUmemAccessDesc& right);
// The driver's handles that the program no longer needs, for after the lock: to give memory back
// may take the driver milliseconds.
using Unneeded = std::vector<cuda::CUmemGenericAllocationHandle>;
// Unmaps everything in [address, address + size). What lies beyond either end stays mapped.
void drop_mappings(cuda::CUdeviceptr address, std::size_t size, Unneeded& unneeded);
// Forgets it if it is neither mapped nor held.
void forget_if_unused(Physical* physical, Unneeded& unneeded);
// The memory in the range cannot be evicted from now on.
void mark_staying(cuda::CUdeviceptr address, std::size_t size);
// The same of what a device has as a dma-buf. False if none of it is the agent's.
bool mark_outside(cuda::CUdeviceptr address, std::size_t size);
// A piece has left the unit: whether a device still has another one of it.
void look_outside_again(const std::pair<const cuda::CUdeviceptr, SmallUnit>& unit);
// While a stream is being captured: gives the allocation back when the capture ends.
bool defer_in_capture(cuda::CUdeviceptr address, const Allocation& allocation);
// Whether the range touches memory of cuMemAlloc, which the program may not map or unmap.
bool is_allocated(cuda::CUdeviceptr address, std::size_t size);

// --- Without

// What begins there; nothing if it is not the agent's.
std::optional<Allocation> find_allocation(cuda::CUdeviceptr address);
// The same, taken out of the tables; nothing if it is not, now, this process's own.
std::optional<Allocation> take_own(cuda::CUdeviceptr address);
// Of a stream; the current one where the driver does not say.
cuda::CUcontext context_of(cuda::CUstream stream);
// What was attached to the stream, which is gone, is not attached to it again.
void forget_stream(cuda::CUstream stream);
inline Outcome failed(cuda::CUresult result, const char* what) { return {result, what}; }

// Memory mapped once more, as long as this lives: the program's own mappings may cover parts of it,
// or none. At `place`, if that is not 0.
class Window {
 public:
  Window(cuda::CUmemGenericAllocationHandle handle, std::size_t size,
         const cuda::CUmemAccessDesc& right, cuda::CUdeviceptr place = 0);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  const Outcome& outcome() const { return outcome_; }
  cuda::CUdeviceptr address() const { return address_; }

 private:
  std::size_t size_;
  bool is_own_;
  bool is_mapped_ = false;
  cuda::CUdeviceptr address_;
  Outcome outcome_;
};

// Of one piece, with the gate closed. unmap() says how many it has done.
Outcome unmap(const std::vector<Mapping*>& mappings, std::size_t& done);
Outcome map_again(const Mapping& mapping);
std::map<const Physical*, std::vector<Mapping*>> mappings_by_physical();
// All of device memory that is there, to or from `at` in this process.
Outcome copy_device(const Physical& physical, std::byte* at, bool out);
// A descriptor of it. Where the driver refuses that, and it may be renewed, other memory takes its
// place: with the gate closed and the work drained, and with no other process that has it.
Outcome export_piece(Physical& physical, bool may_renew, int& fd);
void release(const Unneeded& unneeded);
inline cuda::CUmemAccessDesc full_right(cuda::CUdevice device) {
  return {{cuda::CU_MEM_LOCATION_TYPE_DEVICE, device}, cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
}
// Of the devices that the program has let into what is allocated in that context.
std::vector<cuda::CUmemAccessDesc> rights_of_peers(cuda::CUcontext context);
// Memory as that of cuMemAlloc is, of whole units, that can be given to another process.
struct Served {
  cuda::CUcontext context = nullptr;  // which owns it
  std::size_t asked = 0;
  // From make_served().
  cuda::CUmemGenericAllocationHandle real = 0;
  std::size_t size = 0;
  cuda::CUmemAllocationProp prop{};
  std::vector<cuda::CUmemAccessDesc> rights{};  // first those of its own device
  // From who maps it.
  cuda::CUdeviceptr address = 0;
};
cuda::CUresult make_served(cuda::CUdevice device, Served& made);
// At its address, of as many bytes, which is given back if that fails.
bool map_served(const Served& made);
// It is mapped.
void enter_served(const Served& mapped);
// A context that was there before the agent.
void enter_primary_context(cuda::CUcontext context, cuda::CUdevice device);
// Whether the agent can serve memory on this device.
bool can_be_served(cuda::CUdevice device);
// Gives memory of cuMemAlloc back, which is in no table any more. Waits for nothing.
void let_go(cuda::CUdeviceptr address, const Allocation& allocation);
// What the driver says to `allocate`; again if it has no memory and the agent's pools kept some, as
// the driver takes what its own only keep.
template <class Allocate>
cuda::CUresult unless_pools_keep_it(cuda::CUdevice device, Allocate allocate) {
  const auto result = allocate();
  return result == cuda::CUDA_ERROR_OUT_OF_MEMORY && give_back_idle(device) ? allocate() : result;
}
// By `free`, which asks the driver: memory of the driver's own, that the agent may know.
cuda::CUresult free_of_driver(cuda::CUdeviceptr pointer,
                              const std::function<cuda::CUresult()>& free);
// Waits for work in flight and lets another process's memory go.
cuda::CUresult give_back(cuda::CUdeviceptr address, const Allocation& allocation);
// Gives back what was deferred because a stream was being captured.
void give_back_deferred();
void drop_and_release(cuda::CUdeviceptr address, std::size_t size);

}  // namespace stasis::preload
