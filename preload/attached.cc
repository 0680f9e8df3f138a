// How the hooks of an agent that comes later are made: code near the driver's, and the words with
// which the tool has the driver's entry points lead there.
#include "attached.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "activation.h"
#include "agent.h"
#include "driver_mmap.h"
#include "eviction_internal.h"
#include "host_reserve.h"
#include "intercept.h"
#include "own_mappings.h"

namespace stasis::preload {
namespace {

using attach::AttachAnswer;
using attach::AttachState;
using attach::EntryPatch;

struct Extent {
  std::uintptr_t start = 0;
  std::uintptr_t end = 0;
  std::uintptr_t size() const { return end - start; }
};

struct FoundDriver {
  int count = 0;
  char name[4096] = "";
  Extent range;
};

Extent range_of(const dl_phdr_info& info) {
  Extent range{UINTPTR_MAX, 0};
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const auto& header = info.dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    range.start = std::min<std::uintptr_t>(range.start, info.dlpi_addr + header.p_vaddr);
    range.end =
        std::max<std::uintptr_t>(range.end, info.dlpi_addr + header.p_vaddr + header.p_memsz);
  }
  return range;
}

int note_if_driver(dl_phdr_info* info, std::size_t, void* found_at) {
  auto& found = *static_cast<FoundDriver*>(found_at);
  const char* slash = std::strrchr(info->dlpi_name, '/');
  if (std::strncmp(slash ? slash + 1 : info->dlpi_name, "libcuda.so", 10) != 0) return 0;
  ++found.count;
  std::snprintf(found.name, sizeof found.name, "%s", info->dlpi_name);
  found.range = range_of(*info);
  return 0;
}

int note_if_own(dl_phdr_info* info, std::size_t, void* found_at) {
  auto& found = *static_cast<Extent*>(found_at);
  const Extent range = range_of(*info);
  const auto own = reinterpret_cast<std::uintptr_t>(&note_if_own);
  if (own < range.start || own >= range.end) return 0;
  found = range;
  return 1;
}

// The code of one hook, where a jump of the entry point's reaches it. A call that comes from the
// driver itself, or from the agent, goes on to the driver's function: only the program's are
// hooked.
//
//   mov (%rsp),%r11; sub driver_start,%r11; cmp driver_size,%r11; jb real
//   mov (%rsp),%r11; sub agent_start,%r11; cmp agent_size,%r11; jb real
//   jmp *hook
//   real: the entry point's first bytes; jmp *behind
//
// r11 is free at a function's beginning (System V ABI).
class HookCode {
 public:
  static constexpr std::size_t kBytes = 112;
  static constexpr std::size_t kConstants = 32;  // the two ranges, before the first

  // `at`: where it will lie; `constants`: where those do.
  HookCode(std::uintptr_t at, std::uintptr_t constants) : at_(at), constants_(constants) {}

  // Returns where the driver's function begins in it.
  std::uintptr_t make(unsigned char* out, std::uintptr_t entry, const void* hook) {
    out_ = out;
    compare(0);
    compare(16);
    jump(kHookAt);
    const std::size_t real = used_;
    put(reinterpret_cast<const void*>(entry), attach::kEntryBytes);
    jump(kBehindAt);
    std::memcpy(out_ + kHookAt, &hook, sizeof hook);
    const std::uintptr_t behind = entry + attach::kEntryBytes;
    std::memcpy(out_ + kBehindAt, &behind, sizeof behind);
    for (const std::size_t place : branches_)
      put_distance(place, real);
    return at_ + real;
  }

 private:
  static constexpr std::size_t kHookAt = kBytes - 16;
  static constexpr std::size_t kBehindAt = kBytes - 8;

  void put(const void* bytes, std::size_t count) {
    std::memcpy(out_ + used_, bytes, count);
    used_ += count;
  }
  // Of the instruction whose last four bytes are at `place`.
  void put_distance(std::size_t place, std::size_t to) {
    const auto distance = static_cast<std::int32_t>(to) - static_cast<std::int32_t>(place + 4);
    std::memcpy(out_ + place, &distance, sizeof distance);
  }
  void with_constant(const unsigned char (&code)[3], std::size_t offset) {
    put(code, sizeof code);
    const auto distance =
        static_cast<std::int32_t>(static_cast<std::int64_t>(constants_ + offset) -
                                  static_cast<std::int64_t>(at_ + used_ + sizeof(std::int32_t)));
    put(&distance, sizeof distance);
  }
  void compare(std::size_t range) {
    constexpr unsigned char kLoad[] = {0x4c, 0x8b, 0x1c, 0x24};
    put(kLoad, sizeof kLoad);
    with_constant({0x4c, 0x2b, 0x1d}, range);
    with_constant({0x4c, 0x3b, 0x1d}, range + 8);
    constexpr unsigned char kBelow[] = {0x0f, 0x82, 0, 0, 0, 0};
    put(kBelow, sizeof kBelow);
    branches_[count_++] = used_ - 4;
  }
  void jump(std::size_t pointer_at) {
    constexpr unsigned char kJump[] = {0xff, 0x25, 0, 0, 0, 0};
    put(kJump, sizeof kJump);
    put_distance(used_ - 4, pointer_at);
  }

  std::uintptr_t at_;
  std::uintptr_t constants_;
  unsigned char* out_ = nullptr;
  std::size_t used_ = 0;
  std::size_t branches_[2] = {};
  std::size_t count_ = 0;
};

// Memory of that size from which every byte of the driver's code is less than 2 GiB away.
void* map_near(const Extent& driver, std::size_t size) {
  constexpr std::uintptr_t kReach = std::uintptr_t{1900} << 20;
  constexpr std::uintptr_t kLowest = std::uintptr_t{1} << 20;
  std::vector<Extent> taken;
  for_each_own_mapping([&](const OwnMapping& mapping) {
    taken.push_back({mapping.start, mapping.end});
  });
  const auto fits = [&](std::uintptr_t at) {
    const auto end = at + size;
    return at >= kLowest && std::max(end, driver.end) - std::min(at, driver.start) < kReach;
  };
  const auto try_at = [&](std::uintptr_t at) -> void* {
    if (!fits(at)) return nullptr;
    void* got = ::mmap(reinterpret_cast<void*>(at), size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == MAP_FAILED) return nullptr;
    if (got == reinterpret_cast<void*>(at)) return got;
    ::munmap(got, size);
    return nullptr;
  };
  // Just below what lies there, the nearest first: a gap between the libraries, or below them.
  for (std::size_t i = taken.size(); i-- > 0;) {
    const std::uintptr_t before = i == 0 ? 0 : taken[i - 1].end;
    if (taken[i].start > driver.end || taken[i].start < before + size) continue;
    if (void* got = try_at(taken[i].start - size)) return got;
  }
  for (std::size_t i = 0; i < taken.size(); ++i) {
    const std::uintptr_t after = i + 1 < taken.size() ? taken[i + 1].start : UINTPTR_MAX;
    if (taken[i].end < driver.start || after - taken[i].end < size) continue;
    if (void* got = try_at(taken[i].end)) return got;
  }
  return nullptr;
}

struct Hooks {
  std::map<std::uintptr_t, std::uintptr_t> real;  // by entry
  std::vector<EntryPatch> patches;
};
Hooks& installed_hooks() {
  static auto* made = new Hooks;
  return *made;
}

void* g_library = nullptr;

void* behind_hook(void* entry) {
  const auto at = installed_hooks().real.find(reinterpret_cast<std::uintptr_t>(entry));
  return at == installed_hooks().real.end() ? entry : reinterpret_cast<void*>(at->second);
}

AttachAnswer answer(AttachAnswer what, const char* words, const char* detail) {
  auto& message = attach_state().message;
  std::size_t used = 0;
  for (const char* text : {words, detail})
    for (; *text && used + 1 < sizeof message; ++text)
      message[used++] = *text;
  message[used] = '\0';
  return what;
}

std::uint64_t word_at(std::uintptr_t at) {
  std::uint64_t word;
  std::memcpy(&word, reinterpret_cast<const void*>(at), sizeof word);
  return word;
}

// The first five bytes are a jump there, the rest stays.
std::uint64_t jump_to(std::uintptr_t entry, std::uintptr_t to) {
  unsigned char word[8];
  std::memcpy(word, reinterpret_cast<const void*>(entry), sizeof word);
  word[0] = 0xe9;
  const auto distance = static_cast<std::int32_t>(static_cast<std::int64_t>(to) -
                                                  static_cast<std::int64_t>(entry + 5));
  std::memcpy(word + 1, &distance, sizeof distance);
  std::uint64_t out;
  std::memcpy(&out, word, sizeof out);
  return out;
}

AttachAnswer make_hooks(void* library, const FoundDriver& driver) {
  std::map<std::uintptr_t, const HookRow*> wanted;
  for (const HookRow& row : hook_rows()) {
    const auto entry = reinterpret_cast<std::uintptr_t>(real_dlsym()(library, row.name));
    if (entry == 0) continue;
    // One word is written at once; what begins otherwise is not known.
    const bool known = entry >= driver.range.start &&
                       entry + attach::kEntryBytes <= driver.range.end &&
                       entry % sizeof(std::uint64_t) == 0 &&
                       std::memcmp(reinterpret_cast<const void*>(entry), attach::kEntryBegin,
                                   attach::kEntryBytes) == 0;
    if (!known)
      return answer(
          AttachAnswer::kUnknownEntry,
          "an entry point of the driver does not begin as those of driver 580 do: ", row.name);
    wanted.emplace(entry, &row);
  }
  ::dlerror();
  if (wanted.empty() || wanted.size() > attach::kMostEntries)
    return answer(AttachAnswer::kNoDriver, "none of the calls that are known are in ", driver.name);
  const std::size_t page = 4096;
  const std::size_t size =
      (HookCode::kConstants + wanted.size() * HookCode::kBytes + page - 1) / page * page;
  void* room = map_near(driver.range, size);
  if (!room)
    return answer(AttachAnswer::kNoRoom, "there is no room for the hooks within 2 GiB of ",
                  driver.name);
  Extent own;
  ::dl_iterate_phdr(&note_if_own, &own);
  const std::uint64_t constants[] = {driver.range.start, driver.range.size(), own.start,
                                     own.size()};
  static_assert(sizeof constants == HookCode::kConstants);
  std::memcpy(room, constants, sizeof constants);
  const auto begin = reinterpret_cast<std::uintptr_t>(room);
  std::uintptr_t at = begin + HookCode::kConstants;
  for (const auto& [entry, row] : wanted) {
    installed_hooks().real[entry] =
        HookCode(at, begin).make(reinterpret_cast<unsigned char*>(at), entry, row->hook);
    installed_hooks().patches.push_back({entry, word_at(entry), jump_to(entry, at)});
    at += HookCode::kBytes;
  }
  if (::mprotect(room, size, PROT_READ | PROT_EXEC) != 0) {
    ::munmap(room, size);
    installed_hooks() = {};
    constexpr int kGetDenied = 66;  // PR_GET_MDWE of linux/prctl.h
    const bool denies_itself = ::prctl(kGetDenied, 0UL, 0UL, 0UL, 0UL) > 0;
    return answer(AttachAnswer::kNoRoom, "it may not make memory executable ",
                  denies_itself ? "(PR_SET_MDWE: systemd's MemoryDenyWriteExecute, say)"
                                : "(SELinux: execmem)");
  }
  return AttachAnswer::kDone;
}

// --- What is watched until memory is adopted, and afterwards.

// The last context that this thread has worked in.
thread_local cuda::CUcontext g_noted __attribute__((tls_model("initial-exec"))) = nullptr;

// Contexts that were there before the agent are met as the program works in them.
void note_context() {
  cuda::CUcontext context = nullptr;
  cuda::CUdevice device = 0;
  if (driver().cuCtxGetCurrent(&context) != cuda::CUDA_SUCCESS || !context || context == g_noted)
    return;
  if (driver().cuCtxGetDevice(&device) != cuda::CUDA_SUCCESS) return;
  const TablesLock lock;
  tables().contexts.devices.emplace(owner_in(context), device);
  g_noted = context;
}

void note_work() {
  auto& calls = attach_state().calls;
  if (__atomic_load_n(&calls, __ATOMIC_RELAXED) == 0) __atomic_store_n(&calls, 1, __ATOMIC_RELAXED);
  note_context();
}

// Whatever was made until memory is adopted may name the driver's, launched then or later.
void note_graph() { __atomic_store_n(&attach_state().graphs, 1, __ATOMIC_RELAXED); }

struct ReserveEnds {
  ReserveEnds() = default;
  ReserveEnds(const ReserveEnds&) = delete;
  ReserveEnds& operator=(const ReserveEnds&) = delete;
  ~ReserveEnds() { give_reserve_back(); }
};

constexpr CallWatch kWatch{&note_work, &note_graph};
// Later nothing is asked of graphs any more.
constexpr CallWatch kLaterWatch{&note_context, [] {}};

}  // namespace

bool is_simulated() { return g_library && real_dlsym()(g_library, "stasis_sim_driver_version"); }

void watch_contexts_alone() { watch_calls(&kLaterWatch); }

}  // namespace stasis::preload

// For the tool, by their names.
// NOLINTBEGIN(readability-identifier-naming): C names
extern "C" {
__attribute__((visibility("default"))) stasis::attach::AttachState stasis_attach_state{};

__attribute__((visibility("default"))) int stasis_attach_prepare(std::uint64_t) {
  using namespace stasis::preload;  // NOLINT(google-build-using-namespace)
  using stasis::attach::AttachAnswer;
  auto& state = stasis_attach_state;
  if (state.magic == stasis::attach::kAttachMagic) return 0;
  state.version = stasis::attach::kAttachVersion;
  state.bytes = sizeof state;
  if (!is_attached()) set_attached();
  if (must_be_inactive()) {
    const bool is_tool = activation() == stasis::direct::Activation::kCudaTool;
    return static_cast<int>(
        answer(AttachAnswer::kInactive,
               is_tool ? "a CUDA tool is at work in it (CUPTI, Nsight, compute-sanitizer, cuda-gdb)"
                       : "its environment has STASIS_AGENT=off",
               ""));
  }
  // What is made here has to be made, or it would end the program.
  if (!make_reserve())
    return static_cast<int>(
        answer(AttachAnswer::kNoRoom, "it has no memory left for the hooks", ""));
  const ReserveEnds ends;
  static FoundDriver found;
  found = {};
  ::dl_iterate_phdr(&note_if_driver, &found);
  void* library = found.count == 1 ? ::dlopen(found.name, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
  if (!library) {
    return static_cast<int>(answer(AttachAnswer::kNoDriver, "it has not one libcuda.so.1",
                                   found.count > 1 ? " but several" : ""));
  }
  if (!stand_in_for_driver_library(real_dlsym()(library, "cuInit")))
    return static_cast<int>(
        answer(AttachAnswer::kNoDriver,
               "the driver's calls of mmap() and munmap() cannot be met: ", found.name));
  const auto made = make_hooks(library, found);
  if (made != AttachAnswer::kDone) return static_cast<int>(made);
  g_library = library;
  know_driver_behind_hooks(library, &behind_hook);
  watch_calls(&kWatch);
  state.patches = reinterpret_cast<std::uint64_t>(installed_hooks().patches.data());
  state.patch_count = static_cast<std::uint32_t>(installed_hooks().patches.size());
  __atomic_store_n(&state.magic, stasis::attach::kAttachMagic, __ATOMIC_RELEASE);
  return 0;
}

__attribute__((visibility("default"))) int stasis_attach_begin(std::uint64_t) {
  stasis::preload::Agent::start();
  return 0;
}
}
// NOLINTEND(readability-identifier-naming)

namespace stasis::preload {
attach::AttachState& attach_state() { return stasis_attach_state; }
}  // namespace stasis::preload
