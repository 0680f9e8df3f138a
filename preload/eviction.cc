#include "eviction.h"

#include <algorithm>

#include "eviction_internal.h"
#include "intercept.h"
#include "ipc_broker.h"
#include "local_memory.h"
#include "pools.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

constexpr char kSetAccess[] = "cuMemSetAccess";

Window::Window(CUmemGenericAllocationHandle handle, std::size_t size, const CUmemAccessDesc& right,
               CUdeviceptr place)
    : size_(size), is_own_(place == 0), address_(place) {
  const auto did = [&](CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) outcome_ = failed(result, what);
    return result == CUDA_SUCCESS;
  };
  if (is_own_ &&
      !did(driver().cuMemAddressReserve(&address_, size, 0, 0, 0), "cuMemAddressReserve"))
    address_ = 0;
  if (!outcome_.ok()) return;
  is_mapped_ = did(driver().cuMemMap(address_, size, 0, handle, 0), "cuMemMap");
  if (is_mapped_) did(driver().cuMemSetAccess(address_, size, &right, 1), kSetAccess);
}

Window::~Window() {
  if (is_mapped_) driver().cuMemUnmap(address_, size_);
  if (is_own_ && address_ != 0) driver().cuMemAddressFree(address_, size_);
}

// Where each is mapped, for the same time.
std::map<const Physical*, std::vector<Mapping*>> mappings_by_physical() {
  std::map<const Physical*, std::vector<Mapping*>> found;
  for (auto& [address, mapping] : tables().mappings)
    found[mapping.physical].push_back(&mapping);
  return found;
}

Outcome unmap(const std::vector<Mapping*>& mappings, std::size_t& done) {
  for (done = 0; done < mappings.size(); ++done) {
    const auto result = driver().cuMemUnmap(mappings[done]->address, mappings[done]->size);
    if (result != CUDA_SUCCESS) return failed(result, "cuMemUnmap");
  }
  return {};
}

Outcome map_again(const Mapping& mapping) {
  auto result =
      driver().cuMemMap(mapping.address, mapping.size, mapping.offset, mapping.physical->real, 0);
  if (result != CUDA_SUCCESS) return failed(result, "cuMemMap");
  for (const auto& access : mapping.access) {
    result = driver().cuMemSetAccess(access.address, access.size, &access.right, 1);
    if (result != CUDA_SUCCESS) {
      driver().cuMemUnmap(mapping.address, mapping.size);
      return failed(result, "cuMemSetAccess");
    }
  }
  return {};
}

namespace {

// In the order of the inventory. Used by the agent's thread alone, while the gate is closed.
std::vector<Physical*>& segments() {
  static auto* made = new std::vector<Physical*>;
  return *made;
}

Outcome repopulate(Physical& physical, const std::vector<Mapping*>& mappings) {
  auto result = driver().cuMemCreate(&physical.real, physical.size, &physical.prop, 0);
  if (result != CUDA_SUCCESS) return failed(result, "cuMemCreate");
  for (std::size_t i = 0; i < mappings.size(); ++i) {
    const auto outcome = map_again(*mappings[i]);
    if (outcome.ok()) continue;
    for (std::size_t undo = 0; undo < i; ++undo)
      driver().cuMemUnmap(mappings[undo]->address, mappings[undo]->size);
    driver().cuMemRelease(physical.real);
    return outcome;
  }
  physical.present = true;
  return {};
}

std::vector<Mapping*> of(const std::map<const Physical*, std::vector<Mapping*>>& mappings,
                         const Physical* physical) {
  const auto at = mappings.find(physical);
  return at == mappings.end() ? std::vector<Mapping*>{} : at->second;
}

void empty_again(Physical& physical, const std::vector<Mapping*>& mappings) {
  std::size_t done = 0;
  unmap(mappings, done);
  driver().cuMemRelease(physical.real);
  physical.present = false;
}

// Where the program has all of it mapped, if that is not there; 0 if it nowhere has all of it.
CUdeviceptr free_place_of(const Physical& physical, const std::vector<Mapping*>& mappings) {
  if (physical.present) return 0;
  const auto whole = std::find_if(mappings.begin(), mappings.end(), [&](const Mapping* one) {
    return one->offset == 0 && one->size == physical.size;
  });
  return whole == mappings.end() ? 0 : (*whole)->address;
}

// A context on each device: of the program's, or the device's primary one for as long as this
// lives. To make one may take tenths of a second.
class Contexts {
 public:
  Contexts() = default;
  ~Contexts() {
    for (const auto& [device, context] : retained_)
      driver().cuDevicePrimaryCtxRelease_v2(device);
  }
  Contexts(const Contexts&) = delete;
  Contexts& operator=(const Contexts&) = delete;

  // The program's, one on each of the devices.
  static std::map<CUdevice, CUcontext> of_program() {
    const TablesLock lock;
    std::map<CUdevice, CUcontext> found;
    for (const auto& [context, device] : tables().contexts.devices)
      found.emplace(device, context);
    return found;
  }

  // Otherwise what the driver says to one more, such as that it has no memory for it.
  CUresult retain(CUdevice device, CUcontext& found) {
    const auto known = retained_.find(device);
    if (known != retained_.end()) {
      found = known->second;
      return CUDA_SUCCESS;
    }
    const auto result = driver().cuDevicePrimaryCtxRetain(&found, device);
    if (result == CUDA_SUCCESS) retained_.emplace(device, found);
    return result;
  }

 private:
  std::map<CUdevice, CUcontext> retained_;
};

// A copy to the device may return before the data is there.
Outcome settled(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) result = driver().cuCtxSynchronize();
  return result == CUDA_SUCCESS ? Outcome{} : failed(result, what);
}

// Calls `work` with a device, a context of it being current: of the program's, on the device that
// has the memory or, where the program has none there, as with a peer's, on one that reaches it.
// Else of the device's primary one.
template <class Work>
Outcome by_some_context(Contexts& contexts, CUdevice home, const Work& work) {
  const auto own = Contexts::of_program();
  const auto by = [&](CUcontext context, CUdevice device) {
    const CurrentContext current(context);
    return work(device);
  };
  const auto there = own.find(home);
  if (there != own.end()) return by(there->second, home);
  for (const auto& [device, context] : own) {
    const auto done = by(context, device);
    if (done.ok() || done.what != kSetAccess) return done;
  }
  CUcontext context = nullptr;
  if (const auto result = contexts.retain(home, context); result != CUDA_SUCCESS)
    return failed(result, "cuDevicePrimaryCtxRetain");
  return by(context, home);
}

// All of it, or of what has its size, to or from `at` in this process.
Outcome copy_whole(Contexts& contexts, const Physical& physical,
                   CUmemGenericAllocationHandle handle, std::byte* at, bool out,
                   CUdeviceptr place = 0) {
  return by_some_context(contexts, physical.prop.location.id, [&](CUdevice device) {
    const Window window(handle, physical.size, full_right(device), place);
    if (!window.outcome().ok()) return window.outcome();
    return out ? settled(driver().cuMemcpyDtoH_v2(at, window.address(), physical.size),
                         "cuMemcpyDtoH")
               : settled(driver().cuMemcpyHtoD_v2(window.address(), at, physical.size),
                         "cuMemcpyHtoD");
  });
}

// The same content in other memory, at the same addresses. On a failure all is as it was, if the
// driver maps again what it had mapped.
Outcome renew(Physical& physical) {
  CUmemGenericAllocationHandle fresh = 0;
  if (const auto result = driver().cuMemCreate(&fresh, physical.size, &physical.prop, 0);
      result != CUDA_SUCCESS)
    return failed(result, "cuMemCreate");
  Contexts contexts;
  auto outcome = by_some_context(contexts, physical.prop.location.id, [&](CUdevice device) {
    const Window from(physical.real, physical.size, full_right(device));
    if (!from.outcome().ok()) return from.outcome();
    const Window to(fresh, physical.size, full_right(device));
    if (!to.outcome().ok()) return to.outcome();
    return settled(driver().cuMemcpyDtoD_v2(to.address(), from.address(), physical.size),
                   "cuMemcpyDtoD");
  });
  const auto all = mappings_by_physical();
  const auto mappings = of(all, &physical);
  const auto take = [&](CUmemGenericAllocationHandle handle, std::size_t count) -> Outcome {
    physical.real = handle;
    for (std::size_t i = 0; i < count; ++i) {
      const auto mapped = map_again(*mappings[i]);
      if (mapped.ok()) continue;
      for (std::size_t undo = 0; undo < i; ++undo)
        driver().cuMemUnmap(mappings[undo]->address, mappings[undo]->size);
      return mapped;
    }
    return {};
  };
  const auto old = physical.real;
  if (outcome.ok()) {
    std::size_t unmapped = 0;
    outcome = unmap(mappings, unmapped);
    if (outcome.ok()) outcome = take(fresh, mappings.size());
    if (!outcome.ok()) take(old, unmapped);
  }
  driver().cuMemRelease(outcome.ok() ? old : fresh);
  return outcome;
}

}  // namespace

Outcome copy_device(const Physical& physical, std::byte* at, bool out) {
  Contexts contexts;
  return copy_whole(contexts, physical, physical.real, at, out);
}

std::uint64_t movable_bytes() {
  const TablesLock lock;
  std::uint64_t bytes = 0;
  for (const auto& [handle, physical] : tables().physicals)
    if (physical->can_leave()) bytes += physical->size;
  return bytes;
}

Inventory take_inventory() {
  const TablesLock lock;
  Inventory inventory;
  auto& order = segments();
  order.clear();
  // By address, so that what lies together in the program's memory lies together in the buffer.
  std::set<const Physical*> seen;
  const auto take = [&](Physical* physical, std::uint64_t address) {
    if (!seen.insert(physical).second) return;
    if (!physical->can_leave()) {
      // Those leave another way (sharing.h).
      if (physical->is_for_detach()) return;
      ++inventory.staying;
      inventory.staying_bytes += physical->size;
      return;
    }
    order.push_back(physical);
    inventory.segments.push_back(
        {physical->size, inventory.bytes, address, physical->prop.location.id});
    inventory.bytes += physical->size;
  };
  for (auto& [address, mapping] : tables().mappings)
    take(mapping.physical, address);
  for (auto& [handle, physical] : tables().physicals)
    take(physical.get(), 0);
  return inventory;
}

std::uint32_t shared_pieces() {
  const TablesLock lock;
  auto count = tables().opened_by_driver.size();
  for (const auto& [number, share] : tables().driver_shares)
    count += share.open_elsewhere > 0;
  return static_cast<std::uint32_t>(count);
}

std::vector<CUcontext> known_contexts() {
  const TablesLock lock;
  std::vector<CUcontext> contexts;
  for (const auto& [context, device] : tables().contexts.devices)
    contexts.push_back(context);
  return contexts;
}

int captures_in_progress() { return tables().captures.load(); }

// Large memory that the driver's own restore has made is not given out by it any more
// (export_trial.h), and what we make is. Without room for that the driver's answer stays.
Outcome export_piece(Physical& physical, bool may_renew, int& fd) {
  const auto give_out = [&] {
    return driver().cuMemExportToShareableHandle(&fd, physical.real,
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  };
  auto result = physical.reach.is_refused() ? CUDA_ERROR_INVALID_VALUE : give_out();
  if (result == CUDA_ERROR_INVALID_VALUE && may_renew && renew(physical).ok()) {
    physical.reach.forget_trial();
    result = give_out();
  }
  return result == CUDA_SUCCESS ? Outcome{} : failed(result, "cuMemExportToShareableHandle");
}

Outcome export_segment(std::size_t index, int& fd) {
  auto& physical = *segments()[index];
  return export_piece(physical, physical.reach.can_be_renewed(is_lending), fd);
}

Outcome evict_all() {
  const auto mappings = mappings_by_physical();
  Outcome outcome;
  auto& order = segments();
  std::size_t at = 0;
  for (; at < order.size() && outcome.ok(); ++at) {
    auto& physical = *order[at];
    const auto mapped = of(mappings, &physical);
    std::size_t unmapped = 0;
    outcome = unmap(mapped, unmapped);
    if (outcome.ok()) {
      const auto result = driver().cuMemRelease(physical.real);
      if (result != CUDA_SUCCESS) outcome = failed(result, "cuMemRelease");
    }
    if (!outcome.ok()) {
      for (std::size_t i = 0; i < unmapped; ++i)
        map_again(*mapped[i]);
      break;
    }
    physical.present = false;
  }
  if (outcome.ok()) return outcome;
  for (std::size_t i = 0; i < at; ++i)
    if (!order[i]->present) repopulate(*order[i], of(mappings, order[i]));
  return outcome;
}

Outcome repopulate_all() {
  const auto mappings = mappings_by_physical();
  auto& order = segments();
  Outcome outcome;
  std::size_t at = 0;
  for (; at < order.size() && outcome.ok(); ++at)
    if (!order[at]->present) outcome = repopulate(*order[at], of(mappings, order[at]));
  if (outcome.ok()) outcome = take_local_memory();
  if (outcome.ok()) return outcome;
  release_local_memory();
  for (auto* physical : order)
    if (physical->present) empty_again(*physical, of(mappings, physical));
  return outcome;
}

Outcome copy_all(std::byte* buffer, bool out) {
  Contexts contexts;
  std::uint64_t offset = 0;
  for (const auto* physical : segments()) {
    const auto outcome = copy_whole(contexts, *physical, physical->real, buffer + offset, out);
    if (!outcome.ok()) return outcome;
    offset += physical->size;
  }
  return {};
}

Outcome copy_pinned(std::span<const int> fds, std::byte* buffer) {
  const auto mappings = mappings_by_physical();
  Contexts contexts;
  std::uint64_t offset = 0;
  for (std::size_t i = 0; i < fds.size(); ++i) {
    const auto& physical = *segments()[i];
    CUmemGenericAllocationHandle pinned = 0;
    // The descriptor travels in the pointer itself.
    const auto result = driver().cuMemImportFromShareableHandle(
        &pinned, reinterpret_cast<void*>(static_cast<std::intptr_t>(fds[i])),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result != CUDA_SUCCESS) return failed(result, "cuMemImportFromShareableHandle");
    // The program may be allowed no more addresses than it has.
    const auto place = free_place_of(physical, of(mappings, &physical));
    const auto outcome = copy_whole(contexts, physical, pinned, buffer + offset, true, place);
    driver().cuMemRelease(pinned);
    if (!outcome.ok()) return outcome;
    offset += physical.size;
  }
  return {};
}

void forget_tables() {
  auto& all = tables();
  all.to_be_forgotten = false;
  // Or the others would take it for open as long as the child lives.
  for (const auto& [address, allocation] : all.allocations)
    if (const auto* opening = allocation.opening()) end_connection(*opening);
  for (const auto& [address, allocation] : all.to_free)
    if (const auto* opening = allocation.opening()) end_connection(*opening);
  for (const auto& [address, opened] : all.opened_by_driver)
    end_connection(opened.opening);
  for (const auto& [service, connection] : all.owners)
    end_connection(connection, {service, 0});
  forget_service_after_fork();
  static_cast<TableContents&>(all) = {};
  all.captures.store(0);
  segments().clear();
}

namespace {

// It is the fork that has the tables, and not what it has interrupted.
bool g_locked_for_fork = false;

}  // namespace

void lock_memory_for_fork() {
  const bool interrupted = tables().mutex.is_mine();
  if (!interrupted) tables().mutex.lock();
  g_locked_for_fork = !interrupted;
}

void unlock_memory_after_fork() {
  if (g_locked_for_fork) TablesLock::unlock();
}

void forget_memory_after_fork() {
  forget_pools_after_fork();
  if (tables().mutex.is_mine())
    tables().to_be_forgotten = true;
  else
    forget_tables();
}

}  // namespace stasis::preload
