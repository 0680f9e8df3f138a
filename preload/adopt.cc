// How an agent that came later finds the program's device memory and takes what it can: a block of
// the driver's is copied on the GPU into memory that the agent can give up, freed, and that memory
// is mapped where it was.
//
// A block whose area of addresses has others in it (kDriverArea) keeps its addresses in the
// driver's hands when it is freed, so it is left alone. If an address cannot be had all the same,
// the block goes back to the driver there, with its content (H100, 580.159.04: 161 of PyTorch's 162
// segments were taken, and one went back).
//
// What the program has made by cuMemCreate, and may be exported, stays where it is: the agent
// learns of it, its mapping and its handles. An import of another process's is never exportable, so
// that it is not taken for the program's own.
//
// Long because what is found, the exchange of a block and the way back share what a block is.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <vector>

#include "activation.h"
#include "attached.h"
#include "driver_mmap.h"
#include "eviction_internal.h"
#include "intercept.h"
#include "own_mappings.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

using attach::AttachLeft;

// The unit in which the driver maps device memory; in the areas of a block, at most so far apart as
// small blocks may lie. 292,000 questions take 0.03 s (H200, 580).
constexpr std::size_t kStep = std::size_t{2} << 20;
constexpr std::size_t kDenseStep = 4096;
constexpr std::uint64_t kMostQuestions = std::uint64_t{4} << 20;
// How often the driver is asked for a block until it gives that address.
constexpr int kMostTries = 256;

enum class Kind {
  kPlain,    // of cuMemAlloc, this process's own
  kProgram,  // of cuMemCreate, this process's own, that a mover can have
  kOther,
};

struct Piece {
  CUdeviceptr start = 0;
  std::size_t size = 0;
  CUcontext context = nullptr;
  CUdevice device = 0;
  Kind kind = Kind::kOther;
  bool has_sync_memops = false;
};

std::vector<Piece>& pieces() {
  static auto* found = new std::vector<Piece>;
  return *found;
}

struct Range {
  CUdeviceptr start = 0;
  CUdeviceptr end = 0;
};

// Whether virtual memory is mapped there.
bool has_handle(CUdeviceptr at) {
  CUmemGenericAllocationHandle handle = 0;
  const auto& call = driver();
  if (call.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at)) != CUDA_SUCCESS)
    return false;
  call.cuMemRelease(handle);
  return true;
}

// Of memory that the program has made itself, with a context current. `reserved` is where virtual
// memory was reserved around an address asked for before, most of which may be empty: PyTorch's
// expandable segments reserve more than the GPU has, twice (160,000 questions took 0.44 s, H200).
bool ask(CUdeviceptr at, Piece& piece, Range& reserved) {
  if (at >= reserved.start && at < reserved.end && !has_handle(at)) return false;
  CUpointer_attribute numbers[] = {
      CU_POINTER_ATTRIBUTE_CONTEXT,          CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
      CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
      CU_POINTER_ATTRIBUTE_IS_MANAGED,       CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,   CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
      CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,      CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES};
  std::uint64_t values[std::size(numbers)] = {};
  void* places[std::size(numbers)];
  for (std::size_t i = 0; i < std::size(numbers); ++i)
    places[i] = &values[i];
  if (driver().cuPointerGetAttributes(std::size(numbers), numbers, places, at) != CUDA_SUCCESS)
    return false;
  piece.start = values[2];
  piece.size = values[3];
  if (piece.size == 0 || piece.start > at || at - piece.start >= piece.size) return false;
  piece.context = reinterpret_cast<CUcontext>(values[0]);
  piece.device = static_cast<int>(static_cast<std::uint32_t>(values[6]));
  piece.has_sync_memops = static_cast<std::uint32_t>(values[8]) != 0;
  const bool is_simple = values[1] == CU_MEMORYTYPE_DEVICE &&
                         static_cast<std::uint32_t>(values[4]) == 0 && values[5] == 0;
  if (is_simple && (values[7] & 0xff) != 0) piece.kind = Kind::kPlain;
  const bool is_virtual = !piece.context && piece.kind != Kind::kPlain && values[5] == 0;
  if (!is_virtual) return true;
  // Of virtual memory the range is all that is reserved, also where nothing is mapped; of what is,
  // there is a handle.
  reserved = {piece.start, piece.start + piece.size};
  if (!has_handle(at)) return false;
  const auto found = driver().cuMemGetAddressRange_v2(&piece.start, &piece.size, at);
  if (found != CUDA_SUCCESS || piece.start > at || at - piece.start >= piece.size)
    piece = {at / kStep * kStep, kStep, nullptr, piece.device, Kind::kOther, false};
  else if (is_simple && values[9] == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    piece.kind = Kind::kProgram;
  return true;
}

bool ask(CUdeviceptr at, Piece& piece) {
  Range none;
  return ask(at, piece, none);
}

// Where device memory may lie: the driver keeps its addresses by memory that cannot be touched; the
// simulated one maps its GPU's files there.
bool find_ranges(bool simulated, std::vector<Range>& ranges) {
  return for_each_own_mapping([&](const OwnMapping& mapping) {
    const bool reserved = mapping.inode == 0 && std::strcmp(mapping.rights, "---p") == 0;
    if (!reserved && !(simulated && mapping.inode != 0 && mapping.rights[3] == 's')) return;
    const CUdeviceptr start = (mapping.start + kStep - 1) / kStep * kStep;
    if (start >= mapping.end) return;
    if (!ranges.empty() && ranges.back().end == start)
      ranges.back().end = mapping.end;
    else
      ranges.push_back({start, mapping.end});
  });
}

// False if the mappings cannot be read.
bool walk(bool simulated) {
  auto& found = pieces();
  found.clear();
  std::vector<Range> ranges;
  if (!find_ranges(simulated, ranges)) return false;
  std::uint64_t questions = 0;
  Range reserved;
  CUdeviceptr at = 0;
  for (const Range& range : ranges) {
    for (at = range.start; at < range.end && questions < kMostQuestions; ++questions) {
      Piece piece;
      const bool there = ask(at, piece, reserved);
      if (there) found.push_back(piece);
      const auto next = (at / kStep + 1) * kStep;
      const auto behind = there ? (piece.start + piece.size + kStep - 1) / kStep * kStep : next;
      at = std::max(next, behind);
    }
  }
  // Of what is mapped in several places all are to be known.
  if (!ranges.empty() && at < ranges.back().end)
    for (Piece& piece : found)
      if (piece.kind == Kind::kProgram) piece.kind = Kind::kOther;
  return true;
}

// Whether nothing else lies in its areas, which takes at most as many questions as two of them have
// steps.
bool is_alone(std::size_t index) {
  const auto& all = pieces();
  const Piece& piece = all[index];
  const auto from = piece.start / kDriverArea * kDriverArea;
  const auto to = (piece.start + piece.size + kDriverArea - 1) / kDriverArea * kDriverArea;
  if (index > 0 && all[index - 1].start + all[index - 1].size > from) return false;
  if (index + 1 < all.size() && all[index + 1].start < to) return false;
  const auto is_empty = [&](CUdeviceptr start, CUdeviceptr end) {
    for (auto at = start; at < end; at += kDenseStep) {
      Piece other;
      if (ask(at, other)) return false;
    }
    return true;
  };
  const auto end = (piece.start + piece.size + kDenseStep - 1) / kDenseStep * kDenseStep;
  return is_empty(from, piece.start) && is_empty(end, to);
}

// The driver tells of contexts that others have enabled only by refusing to do so again.
void find_peers(const std::vector<CUcontext>& contexts) {
  for (auto* accessor : contexts) {
    const CurrentContext current(accessor);
    CUdevice device = 0;
    CUcontext now = nullptr;
    if (driver().cuCtxGetCurrent(&now) != CUDA_SUCCESS || now != accessor ||
        driver().cuCtxGetDevice(&device) != CUDA_SUCCESS)
      continue;
    for (auto* owner : contexts) {
      if (owner == accessor) continue;
      {
        const TablesLock lock;
        const auto known = std::any_of(
            tables().contexts.peers.begin(), tables().contexts.peers.end(),
            [&](const Peer& peer) { return peer.owner == owner && peer.accessor == accessor; });
        const auto at = tables().contexts.devices.find(owner);
        if (known || at == tables().contexts.devices.end() || at->second == device) continue;
      }
      const auto result = driver().cuCtxEnablePeerAccess(owner, 0);
      if (result == CUDA_SUCCESS) (void)driver().cuCtxDisablePeerAccess(owner);
      if (result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) continue;
      const TablesLock lock;
      tables().contexts.peers.push_back({owner, accessor, device});
    }
  }
}

void find_primaries() {
  int count = 0;
  if (driver().cuDeviceGetCount(&count) != CUDA_SUCCESS) return;
  for (CUdevice device = 0; device < count; ++device) {
    unsigned flags = 0;
    int active = 0;
    CUcontext context = nullptr;
    const auto& call = driver();
    if (call.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || !active ||
        call.cuDevicePrimaryCtxRetain(&context, device) != CUDA_SUCCESS)
      continue;
    call.cuDevicePrimaryCtxRelease_v2(device);
    enter_primary_context(context, device);
  }
}

bool copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  return driver().cuMemcpyDtoD_v2(to, from, bytes) == CUDA_SUCCESS &&
         driver().cuCtxSynchronize() == CUDA_SUCCESS;
}

// The driver's areas in which it lies.
Range area_of(const Piece& piece) {
  return {piece.start / kDriverArea * kDriverArea,
          (piece.start + piece.size + kDriverArea - 1) / kDriverArea * kDriverArea};
}

bool reserve_at(CUdeviceptr wanted, std::size_t size) {
  CUdeviceptr got = 0;
  if (driver().cuMemAddressReserve(&got, size, 0, wanted, 0) != CUDA_SUCCESS) return false;
  if (got == wanted) return true;
  driver().cuMemAddressFree(got, size);
  return false;
}

CUdeviceptr take(std::size_t size) {
  CUdeviceptr got = 0;
  return driver().cuMemAlloc_v2(&got, size) == CUDA_SUCCESS ? got : 0;
}

// Memory from `from` on, up to `to` at most, where the driver has room for it; 0 if none comes
// there.
CUdeviceptr fill(CUdeviceptr from, CUdeviceptr to) {
  for (auto size = (to - from) / kStep * kStep; size > 0; size = size / 2 / kStep * kStep) {
    const auto got = take(size);
    if (got == from) return got;
    if (got) driver().cuMemFree_v2(got);
  }
  return 0;
}

// The driver's block again where it was. The driver gives the first place that is large enough, so
// what comes elsewhere is held until the right one has come. In an area that it has kept for other
// blocks, what comes before the right place may reach into it: the room between is filled.
bool take_back(const Piece& piece, bool gave_area_up) {
  std::vector<CUdeviceptr> others;
  bool back = false;
  std::optional<SteeredMapping> steered;
  const auto area = area_of(piece);
  if (gave_area_up) steered.emplace(area.start, area.end - area.start);
  for (int i = 0; i < kMostTries && !back; ++i) {
    auto got = take(piece.size);
    if (!gave_area_up && got && got < piece.start) {
      driver().cuMemFree_v2(got);
      const auto filler = fill(got, piece.start);
      got = filler ? filler : take(piece.size);
    }
    if (!got) break;
    back = got == piece.start;
    if (!back) others.push_back(got);
  }
  for (const auto other : others)
    driver().cuMemFree_v2(other);
  return back;
}

enum class Exchanged { kDone, kNoRoom, kAddress, kFailed, kLost };

// Before the free nothing has changed; behind it, the block is one or the other's, or lost.
Exchanged exchange(const Piece& piece) {
  const auto& call = driver();
  const CurrentContext current(piece.context);
  CUcontext now = nullptr;
  if (call.cuCtxGetCurrent(&now) != CUDA_SUCCESS || now != piece.context) return Exchanged::kFailed;
  // Since it was found, the block may have been freed by a call that was under way then.
  Piece again;
  if (!ask(piece.start, again) || again.start != piece.start || again.size != piece.size ||
      again.kind != Kind::kPlain)
    return Exchanged::kFailed;
  Served made{piece.context, piece.size};
  const auto created = make_served(piece.device, made);
  if (created == CUDA_ERROR_OUT_OF_MEMORY) return Exchanged::kNoRoom;
  if (created != CUDA_SUCCESS) return Exchanged::kFailed;
  bool copied = false;
  {
    const Window beside(made.real, made.size, made.rights.front());
    copied = beside.outcome().ok() && copy(beside.address(), piece.start, piece.size);
  }
  std::optional<KeptAddresses> kept;
  const auto area = area_of(piece);
  kept.emplace(area.start, area.end - area.start);
  if (!copied || call.cuMemFree_v2(piece.start) != CUDA_SUCCESS) {
    call.cuMemRelease(made.real);
    return Exchanged::kFailed;
  }
  const bool gave_area_up = kept->all();
  bool good = reserve_at(piece.start, made.size);
  if (!good) {
    kept->let_go();
    good = reserve_at(piece.start, made.size);
  }
  kept.reset();
  made.address = piece.start;
  if (good && map_served(made)) {
    enter_served(made);
    return Exchanged::kDone;
  }
  bool back = take_back(piece, gave_area_up);
  if (back) {
    const Window beside(made.real, made.size, made.rights.front());
    back = beside.outcome().ok() && copy(piece.start, beside.address(), piece.size);
  }
  call.cuMemRelease(made.real);
  return back ? Exchanged::kAddress : Exchanged::kLost;
}

// Which devices may do what with the mapping.
std::vector<CUmemAccessDesc> rights_at(CUdeviceptr address) {
  std::vector<CUmemAccessDesc> rights;
  int count = 0;
  if (driver().cuDeviceGetCount(&count) != CUDA_SUCCESS) return rights;
  for (CUdevice device = 0; device < count; ++device) {
    const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, device};
    unsigned long long flags = 0;
    if (driver().cuMemGetAccess(&flags, &location, address) == CUDA_SUCCESS &&
        flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
      rights.push_back({location, static_cast<CUmemAccess_flags>(flags)});
  }
  return rights;
}

// The agent's from now on, where they are: the memory that is mapped there, and the handles that
// the program has of it. How many those are, the driver says only by refusing to release one more;
// while the memory is mapped it gives the same one again (H100, 580.159.04).
Exchanged learn(const Piece& piece) {
  const auto& call = driver();
  const CurrentContext current(any_context());
  Piece again;
  CUmemGenericAllocationHandle real = 0;
  if (!ask(piece.start, again) || again.start != piece.start || again.size != piece.size ||
      again.kind != Kind::kProgram ||
      call.cuMemRetainAllocationHandle(&real, reinterpret_cast<void*>(piece.start)) != CUDA_SUCCESS)
    return Exchanged::kFailed;
  CUmemAllocationProp prop{};
  const bool good = call.cuMemGetAllocationPropertiesFromHandle(&prop, real) == CUDA_SUCCESS &&
                    prop.type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                    prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                    prop.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  const auto rights = rights_at(piece.start);
  Physical* physical = nullptr;
  {
    const TablesLock lock;
    physical = physical_of(real);
  }
  // One of several mappings of it may be known; what else has that number is not this.
  if (!good || (physical && physical->real != real)) {
    call.cuMemRelease(real);
    return Exchanged::kFailed;
  }
  if (physical) {
    call.cuMemRelease(real);
  } else {
    unsigned handles = 0;
    while (call.cuMemRelease(real) == CUDA_SUCCESS)
      ++handles;
    CUmemGenericAllocationHandle same = 0;
    if (call.cuMemRetainAllocationHandle(&same, reinterpret_cast<void*>(piece.start)) !=
            CUDA_SUCCESS ||
        same != real)
      return Exchanged::kLost;
    const TablesLock lock;
    physical = enter_program_memory(real, handles - 1, piece.size, prop);
  }
  const TablesLock lock;
  ++physical->mappings;
  tables().mappings.insert_or_assign(piece.start,
                                     Mapping{piece.start, piece.size, 0, physical, {}});
  for (const auto& right : rights)
    enter_access(piece.start, piece.size, right);
  return Exchanged::kDone;
}

void count_left(AttachLeft why, std::size_t bytes) {
  auto& state = attach_state();
  ++state.left_count[why];
  state.left_bytes[why] += bytes;
}

bool is_known(const Piece& piece) {
  const TablesLock lock;
  return mapping_at(piece.start) != nullptr;
}

// What is left for certain, before any block is touched; the rest stays in the list.
void choose() {
  std::vector<Piece> chosen;
  for (std::size_t i = 0; i < pieces().size(); ++i) {
    const Piece& piece = pieces()[i];
    if (is_known(piece)) continue;
    // MPI libraries and GPUDirect have said something of that block to the driver.
    if (piece.kind == Kind::kProgram && can_be_served(piece.device))
      chosen.push_back(piece);
    else if (piece.kind != Kind::kPlain || !piece.context || piece.has_sync_memops ||
             !can_be_served(piece.device))
      count_left(attach::kLeftOther, piece.size);
    else if (piece.size < kLeastAdopted)
      count_left(attach::kLeftSmall, piece.size);
    else if (piece.start % kStep != 0 || !is_alone(i))
      count_left(attach::kLeftShared, piece.size);
    else
      chosen.push_back(piece);
  }
  pieces().swap(chosen);
}

}  // namespace

Outcome look_for_memory() {
  auto& state = attach_state();
  state.converted_count = 0;
  state.converted_bytes = state.lost_bytes = 0;
  std::fill(std::begin(state.left_count), std::end(state.left_count), 0);
  std::fill(std::begin(state.left_bytes), std::end(state.left_bytes), 0);
  find_primaries();
  const CurrentContext current(any_context());
  if (!walk(is_simulated()))
    return failed(CUDA_ERROR_OPERATING_SYSTEM,
                  "/proc/self/maps cannot be read: has the process a descriptor left (ulimit -n)?");
  {
    const TablesLock lock;
    for (const Piece& piece : pieces())
      if (piece.context && piece.kind == Kind::kPlain)
        tables().contexts.devices.emplace(owner_in(piece.context), piece.device);
  }
  find_peers(known_contexts());
  choose();
  // By now, so that nothing of the program's heap is needed while its threads are still.
  return {};
}

Outcome adopt_memory() {
  auto& state = attach_state();
  Outcome outcome;
  for (const Piece& piece : pieces()) {
    if (!outcome.ok()) {
      count_left(attach::kLeftFailed, piece.size);
      continue;
    }
    switch (piece.kind == Kind::kProgram ? learn(piece) : exchange(piece)) {
      case Exchanged::kDone:
        ++state.converted_count;
        state.converted_bytes += piece.size;
        break;
      case Exchanged::kNoRoom:
        count_left(attach::kLeftNoRoom, piece.size);
        break;
      case Exchanged::kAddress:
        count_left(attach::kLeftAddress, piece.size);
        break;
      case Exchanged::kFailed:
        count_left(attach::kLeftFailed, piece.size);
        break;
      case Exchanged::kLost:
        state.lost_bytes += piece.size;
        outcome = failed(CUDA_ERROR_MAP_FAILED,
                         "memory of the program's has lost its address or its handle: neither the "
                         "agent nor the driver gets it again");
    }
  }
  pieces().clear();
  // Memory of the agent's is in the tables even if the last block failed: it serves from here on.
  begin_to_serve();
  watch_contexts_alone();
  return outcome;
}

}  // namespace stasis::preload
