#include "sharing.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "agent.h"
#include "eviction_internal.h"
#include "intercept.h"
#include "ipc_broker.h"
#include "managed.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)
using direct::ShareId;
using direct::ShareRole;

namespace {

ShareId id_of(const ShareKey& key) { return {key.service, key.share}; }
ShareKey key_of_id(const ShareId& id) { return {id[0], id[1]}; }

std::atomic<std::uint32_t> g_sharing_calls{0};

// By which it is seen whether an owner has ended. With the tables locked while it lives.
class Connections {
 public:
  Connections() {
    for (const auto& [address, allocation] : tables().allocations)
      if (const auto* opening = allocation.opening())
        by_ipc_.emplace(allocation.physical, opening->connection);
  }
  // As in AgentShare.
  std::uint32_t status_of(const Physical& imported) {
    if (!imported.present) return direct::kGivenUp;
    return has_hung_up(imported) ? direct::kOwnerLost : 0;
  }

 private:
  bool has_hung_up(const Physical& imported) {
    // By CUDA IPC each piece has one of its own.
    if (const auto at = by_ipc_.find(&imported); at != by_ipc_.end())
      return preload::has_hung_up(at->second, imported.reach.key());
    const auto [known, is_new] = by_descriptor_.try_emplace(imported.reach.key().service, false);
    if (!is_new) return known->second;
    const auto at = tables().owners.find(imported.reach.key().service);
    known->second =
        at != tables().owners.end() && preload::has_hung_up(at->second, imported.reach.key());
    return known->second;
  }

  std::map<const Physical*, int> by_ipc_;
  std::map<std::uint64_t, bool> by_descriptor_;
};

}  // namespace

SharingCall::SharingCall() {
  ++g_sharing_calls;
  // Only a tool that finds an agent asks.
  Agent::start_with_import();
}

SharingCall::~SharingCall() { --g_sharing_calls; }

void count_shared(std::uint32_t& count) {
  // Before the tables: what they get meanwhile counts twice rather than not at all.
  std::uint32_t counted = g_sharing_calls;
  const TablesLock lock;
  for (const auto& [handle, physical] : tables().physicals)
    counted += physical->is_counted_as_shared();
  counted += static_cast<std::uint32_t>(tables().managed.size());
  const auto& beyond = tables().beyond;
  counted += static_cast<std::uint32_t>(beyond.foreign_count() + beyond.outside_count());
  __atomic_store_n(&count, counted, __ATOMIC_RELAXED);
}

void add_shared(std::uint32_t& count) {
  const TablesLock lock;
  __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
}

std::uint32_t detached_count() {
  std::uint32_t count = managed_away();
  const TablesLock lock;
  for (const auto& [handle, physical] : tables().physicals)
    count += (physical->is_for_detach() || physical->saved) && !physical->present;
  return count;
}

std::uint32_t multicast_count() {
  const TablesLock lock;
  std::size_t count = tables().multicasts.size();
  for (const auto& [handle, physical] : tables().physicals)
    count += physical->origin == MemoryOrigin::kMulticast;
  return static_cast<std::uint32_t>(count);
}

std::vector<Shared> list_shared() {
  const TablesLock lock;
  std::vector<Shared> shared;
  Connections connections;
  for (const auto& [handle, physical] : tables().physicals) {
    if (physical->reach.is_outside())
      shared.push_back({{}, physical->size, ShareRole::kOutside, 0});
    if (physical->origin == MemoryOrigin::kMulticast) continue;  // told by their number
    if (physical->origin == MemoryOrigin::kImported) {
      const bool known = physical->is_known_import();
      shared.push_back({id_of(physical->reach.key()), physical->size,
                        known ? ShareRole::kImporter : ShareRole::kForeign,
                        known ? connections.status_of(*physical) : 0});
    } else {
      auto keys = keys_of_own(*physical);
      if (physical->is_inherited()) keys.push_back(physical->reach.key());
      for (const auto& key : keys)
        shared.push_back({id_of(key), physical->size,
                          physical->is_pending_heir() ? ShareRole::kHeir : ShareRole::kOwner,
                          physical->reach.open_elsewhere(), physical->is_host()});
    }
  }
  for (std::size_t i = 0; i < tables().beyond.foreign_count(); ++i)
    shared.push_back({{}, 0, ShareRole::kForeign, 0});
  for (std::size_t i = 0; i < tables().beyond.outside_count(); ++i)
    shared.push_back({{}, 0, ShareRole::kOutside, 0});
  std::uint32_t holders = 0;
  const auto lender = lending(holders);
  if (holders != 0) shared.push_back({id_of(lender), 0, ShareRole::kLender, holders});
  for (const auto& [service, connection] : tables().owners)
    shared.push_back({{service, 0}, 0, ShareRole::kHolder, 0});
  return shared;
}

namespace {

// Of one piece. On a failure it is mapped as before.
Outcome give_up(Physical& physical, const std::vector<Mapping*>& mapped) {
  std::size_t done = 0;
  auto outcome = unmap(mapped, done);
  if (outcome.ok()) {
    const auto result = driver().cuMemRelease(physical.real);
    if (result != CUDA_SUCCESS) outcome = {result, "cuMemRelease"};
  }
  if (outcome.ok()) {
    physical.present = false;
    return outcome;
  }
  for (std::size_t i = 0; i < done; ++i)
    map_again(*mapped[i]);
  return outcome;
}

// The memory that `physical.real` is now.
Outcome map_all(Physical& physical, const std::vector<Mapping*>& mapped) {
  for (std::size_t i = 0; i < mapped.size(); ++i) {
    const auto outcome = map_again(*mapped[i]);
    if (outcome.ok()) continue;
    for (std::size_t undo = 0; undo < i; ++undo)
      driver().cuMemUnmap(mapped[undo]->address, mapped[undo]->size);
    driver().cuMemRelease(physical.real);
    return outcome;
  }
  physical.present = true;
  return {};
}

// Between memory of the host's, which the processor reaches where it is mapped for that, and
// `saved`.
Outcome copy_host(const Physical& physical, bool out) {
  const CUmemAccessDesc right{physical.prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const Window window(physical.real, physical.size, right);
  if (!window.outcome().ok()) return window.outcome();
  auto* mapped = reinterpret_cast<void*>(window.address());
  std::memcpy(out ? physical.saved : mapped, out ? mapped : physical.saved, physical.size);
  return {};
}

void drop_saved(Physical& physical) {
  if (physical.saved) ::munmap(physical.saved, physical.size);
  physical.saved = nullptr;
}

Outcome copy_saved(const Physical& physical, bool out) {
  if (physical.prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE) return copy_host(physical, out);
  return copy_device(physical, static_cast<std::byte*>(physical.saved), out);
}

Outcome save(Physical& physical) {
  void* saved =
      ::mmap(nullptr, physical.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (saved == MAP_FAILED) return {CUDA_ERROR_OUT_OF_MEMORY, "mmap"};
  physical.saved = saved;
  const auto outcome = copy_saved(physical, true);
  if (!outcome.ok()) drop_saved(physical);
  return outcome;
}

}  // namespace

namespace {

// Of what was imported, and has been saved and given up.
void become_owner(Physical& physical) {
  physical.origin = physical.prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE
                        ? MemoryOrigin::kProgram
                        : MemoryOrigin::kHost;
  // The driver says it of no imported memory; the others are to have it from here.
  physical.prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

}  // namespace

Outcome detach_all(std::uint64_t& room) {
  const CurrentContext current(any_context());
  auto mappings = mappings_by_physical();
  for (const auto& [handle, physical] : tables().physicals) {
    if (!physical->present || !physical->can_be_detached()) continue;
    if (physical->is_host()) {
      if (physical->size > room) return {CUDA_ERROR_OUT_OF_MEMORY, "room for memory of the host's"};
      // A piece that others have is freed when the last of them has given it up: its copy needs
      // room of its own.
      if (physical->reach.others_may_have()) room -= physical->size;
      if (const auto saved = save(*physical); !saved.ok()) return saved;
    }
    const auto outcome = give_up(*physical, mappings[physical.get()]);
    if (!outcome.ok()) {
      drop_saved(*physical);
      return outcome;
    }
    if (physical->saved && !physical->is_host()) become_owner(*physical);
  }
  return {};
}

namespace {

// Of a GPU that this process does not see the driver says that it is none (CU_DEVICE_INVALID, on an
// H200), and makes no memory there for it. What is inherited then comes to one of those that have
// access to it.
CUdevice visible_user_of(const Physical& physical) {
  for (const auto& [address, mapping] : tables().mappings) {
    if (mapping.physical != &physical) continue;
    for (const Access& access : mapping.access)
      if (access.right.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        return access.right.location.id;
  }
  CUdevice current = 0;
  (void)driver().cuCtxGetDevice(&current);
  return current;
}

}  // namespace

Outcome inherit(const ShareId& id) {
  const CurrentContext current(any_context());
  const auto& all = tables().physicals;
  const auto at = std::find_if(all.begin(), all.end(), [&](const auto& entry) {
    return entry.second->present && entry.second->is_known_import() &&
           id_of(entry.second->reach.key()) == id;
  });
  if (at == all.end()) return {CUDA_ERROR_INVALID_HANDLE, "no such memory"};
  Physical& physical = *at->second;
  drop_saved(physical);
  const auto asked = driver().cuMemGetAllocationPropertiesFromHandle(&physical.prop, physical.real);
  if (asked != CUDA_SUCCESS) return {asked, "cuMemGetAllocationPropertiesFromHandle"};
  if (physical.prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE && physical.prop.location.id < 0)
    physical.prop.location.id = visible_user_of(physical);
  return save(physical);
}

void name_connections() {
  const TablesLock lock;
  for (const auto& [service, connection] : tables().owners)
    name_connection(connection, service);
  for (const auto& [address, allocation] : tables().allocations)
    if (const auto* opening = allocation.opening())
      name_connection(opening->connection, opening->key.service);
}

void forget_saved() {
  for (const auto& [handle, physical] : tables().physicals)
    if (physical->present) drop_saved(*physical);
}

Outcome retake_saved() {
  const CurrentContext current(any_context());
  auto mappings = mappings_by_physical();
  for (const auto& [handle, physical] : tables().physicals) {
    if (!physical->saved || physical->present) continue;
    const auto result = driver().cuMemCreate(&physical->real, physical->size, &physical->prop, 0);
    if (result != CUDA_SUCCESS) return {result, "cuMemCreate"};
    if (const auto copied = copy_saved(*physical, false); !copied.ok()) {
      driver().cuMemRelease(physical->real);
      return copied;
    }
    if (const auto mapped = map_all(*physical, mappings[physical.get()]); !mapped.ok())
      return mapped;
    drop_saved(*physical);
  }
  return {};
}

Outcome lend(const ShareId& id, bool closed, int& fd) {
  Physical* lent = nullptr;
  CUmemGenericAllocationHandle real = 0;
  {
    const TablesLock lock;
    const auto at = tables().shares.find(id[1]);
    if (is_own_locked(key_of_id(id)) && at != tables().shares.end() && at->second->present)
      lent = at->second;
    for (const auto& [handle, physical] : tables().physicals)
      if (id_of(physical->reach.key()) == id && physical->present && !physical->is_known_import())
        lent = physical.get();
    if (lent) real = lent->real;
  }
  if (!lent) return {CUDA_ERROR_INVALID_HANDLE, "no such memory"};
  // The driver refuses only memory that it has restored itself. No other process can have that: the
  // driver would have refused it to that one as well.
  if (closed) return export_piece(*lent, true, fd);
  // The program runs, and may free it meanwhile.
  const auto result =
      driver().cuMemExportToShareableHandle(&fd, real, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  return {result, "cuMemExportToShareableHandle"};
}

MissingImports::MissingImports() : mappings_(mappings_by_physical()) {
  for (const auto& [handle, physical] : tables().physicals)
    if (physical->origin == MemoryOrigin::kImported && !physical->present)
      missing_.emplace(id_of(physical->reach.key()), physical.get());
}

Outcome MissingImports::attach(const ShareId& id, int fd) {
  const CurrentContext current(any_context());
  const auto [first, last] = missing_.equal_range(id);
  for (auto at = first; at != last; at = missing_.erase(at)) {
    Physical& physical = *at->second;
    // The descriptor travels in the pointer itself.
    const auto result = driver().cuMemImportFromShareableHandle(
        &physical.real, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result != CUDA_SUCCESS) return {result, "cuMemImportFromShareableHandle"};
    if (const auto mapped = map_all(physical, mappings_[&physical]); !mapped.ok()) return mapped;
  }
  return {};
}

}  // namespace stasis::preload
