#include "intercept.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <vector>

#include "activation.h"
#include "driver_mmap.h"
#include "gate.h"
#include "thread.h"

namespace stasis::preload {
namespace {

using cuda::CUresult;

// How the arguments of gated calls are passed (calls.h).
using P = void*;
using W = unsigned long long;
using U = unsigned int;
using H = unsigned short;
using B = unsigned char;

// --- The rows: every call of the list, with a number.

// clang-format off
enum Row : int {
#define STASIS_ROW(name, ...) k_##name,
#define STASIS_ROWS_PTSZ(name, ...) k_##name, k_##name##_ptsz,
#define STASIS_ROWS_PTDS(name, ...) k_##name, k_##name##_ptds,
  STASIS_GATED_CALLS(STASIS_ROW, STASIS_ROWS_PTSZ, STASIS_ROWS_PTDS)
  STASIS_HOOKED_CALLS(STASIS_ROW)
  kRows
};
// clang-format on

// The driver's function of each row. Written once, before any call can come to it, except by
// programs that call by the exported name: those calls load the driver themselves.
std::atomic<void*> g_real[kRows];

void load_driver_for_linked_program();

std::atomic<const CallWatch*> g_watch{nullptr};

// They lie together in the list.
constexpr bool is_of_graphs(int row) {
  return row >= k_cuGraphLaunch && row <= k_cuGraphExecNodeSetParams;
}

// The rare case of a gated call: in a program that the agent was brought to.
template <int row, class... Arguments>
[[gnu::noinline]] CUresult call_watched(const CallWatch& watch, void* real,
                                        Arguments... arguments) {
  watch.work();
  if constexpr (is_of_graphs(row)) watch.graph();
  return reinterpret_cast<CUresult (*)(Arguments...)>(real)(arguments...);
}

// A gated call, of any arguments.
template <int row, class... Arguments>
struct Gated {
  static CUresult call(Arguments... arguments) {
    void* real = g_real[row].load(std::memory_order_relaxed);
    if (!real) [[unlikely]] {
      load_driver_for_linked_program();
      real = g_real[row].load(std::memory_order_relaxed);
      if (!real) return cuda::CUDA_ERROR_NOT_INITIALIZED;
    }
    const Gate::Pass pass;
    if (const auto* watch = g_watch.load(std::memory_order_acquire)) [[unlikely]]
      return call_watched<row>(*watch, real, arguments...);
    return reinterpret_cast<CUresult (*)(Arguments...)>(real)(arguments...);
  }
};

// A call that the agent answers itself. The answer never meets a driver that lacks the call.
template <int row, auto answer>
struct Hook;
// Those that wait for the device, in which the driver may let a thread be cancelled.
constexpr bool is_wait(int row) {
  return row == k_cuStreamSynchronize || row == k_cuStreamSynchronize_ptsz ||
         row == k_cuEventSynchronize || row == k_cuCtxSynchronize || row == k_cuCtxSynchronize_v2;
}

template <int row, class... Arguments, CUresult (*answer)(Arguments...)>
struct Hook<row, answer> {
  static CUresult call(Arguments... arguments) {
    if constexpr (is_wait(row)) {
      return ask(arguments...);
    } else {
      const Uncancelled uncancelled;
      return ask(arguments...);
    }
  }

 private:
  static CUresult ask(Arguments... arguments) {
    if (!g_real[row].load(std::memory_order_relaxed)) [[unlikely]] {
      load_driver_for_linked_program();
      if (!g_real[row].load(std::memory_order_relaxed)) return cuda::CUDA_ERROR_NOT_INITIALIZED;
    }
    return answer(arguments...);
  }
};

using RowInfo = HookRow;

// clang-format off
#define STASIS_INFO(name, ...) {#name, reinterpret_cast<void*>(&Gated<k_##name __VA_OPT__(,) __VA_ARGS__>::call)},
#define STASIS_INFO_PTSZ(name, ...) STASIS_INFO(name, __VA_ARGS__) \
    {#name "_ptsz", reinterpret_cast<void*>(&Gated<k_##name##_ptsz, __VA_ARGS__>::call)},
#define STASIS_INFO_PTDS(name, ...) STASIS_INFO(name, __VA_ARGS__) \
    {#name "_ptds", reinterpret_cast<void*>(&Gated<k_##name##_ptds, __VA_ARGS__>::call)},
#define STASIS_INFO_HOOK(name) {#name, reinterpret_cast<void*>(&Hook<k_##name, &hooks::name>::call)},
// With a C name and outside of any namespace's reach, because the stubs at the end are assembler.
extern "C" {
// NOLINTNEXTLINE(readability-identifier-naming): a C name
__attribute__((visibility("hidden"))) extern const RowInfo stasis_row_info[kRows];
const RowInfo stasis_row_info[kRows] = {
  STASIS_GATED_CALLS(STASIS_INFO, STASIS_INFO_PTSZ, STASIS_INFO_PTDS)
  STASIS_HOOKED_CALLS(STASIS_INFO_HOOK)
};
}
static_assert(sizeof(RowInfo) == 16 && offsetof(RowInfo, hook) == 8, "see the stubs");
// clang-format on

// --- The driver

struct Known {
  void* real;
  void* wrapper;
};

struct Loaded {
  DriverCalls calls;
  std::vector<Known> known;  // sorted by `real`
};
std::atomic<const Loaded*> g_loaded{nullptr};

// CUDA's toolkit has one to link with (lib64/stubs/libcuda.so), which has all names and the same
// answer to each, and which programs may open to look whether there is a driver. The driver tells
// its version also before cuInit (580.159.04).
bool is_driver(void* library) {
  auto* ask =
      reinterpret_cast<fn::cuDriverGetVersion*>(real_dlsym()(library, "cuDriverGetVersion"));
  int version = 0;
  if (!ask) ::dlerror();  // not the program's error
  return ask && ask(&version) != cuda::CUDA_ERROR_STUB_LIBRARY;
}

template <class Find>
void find_all(DriverCalls& calls, Find find) {
#define STASIS_FIND(name) calls.name = reinterpret_cast<fn::name*>(find(#name));
  STASIS_AGENT_NEEDS(STASIS_FIND)
  STASIS_HOOKED_CALLS(STASIS_FIND)
#undef STASIS_FIND
}

// `library` is a handle on the driver's library, and stays open. No lock of ours: looking up takes
// the loader's, and a thread whose library is being loaded comes here with that in its hands. So
// several may look up the same at the same time; the first is kept.
void know_driver(void* library) {
  if (g_loaded.load(std::memory_order_acquire)) return;
  auto* symbol = real_dlsym();
  auto* loaded = new Loaded;
  find_all(loaded->calls, [&](const char* name) { return symbol(library, name); });
  for (int row = 0; row < kRows; ++row) {
    void* real = symbol(library, stasis_row_info[row].name);
    g_real[row].store(real, std::memory_order_relaxed);
    if (real) loaded->known.push_back({real, stasis_row_info[row].hook});
  }
  std::sort(loaded->known.begin(), loaded->known.end(),
            [](const Known& a, const Known& b) { return a.real < b.real; });
  note_driver_library(reinterpret_cast<const void*>(loaded->calls.cuGetErrorName));
  const Loaded* none = nullptr;
  if (!g_loaded.compare_exchange_strong(none, loaded, std::memory_order_acq_rel)) delete loaded;
  // Names that this driver lacks are no error of the program's, which may well ask for one now.
  ::dlerror();
}

// A program that comes by an exported name is linked with the driver, which is loaded then; or it
// guards the call by looking whether the symbol is there at all, and then the driver may not be.
void load_driver_for_linked_program() {
  if (g_loaded.load(std::memory_order_acquire)) return;
  const Uncancelled uncancelled;
  void* library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) library = ::dlopen("libcuda.so.1", RTLD_LAZY);
  if (library) know_driver(library);
}

bool is_export_of_ours(const void* function) {
  Dl_info theirs{};
  Dl_info ours{};
  return ::dladdr(function, &theirs) && ::dladdr(stasis_row_info, &ours) &&
         theirs.dli_fbase == ours.dli_fbase;
}

// Is it "cu" and a capital letter?
bool named_like_a_call(const char* name) {
  return name && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z';
}

}  // namespace

Dlsym* real_dlsym() {
  static std::atomic<Dlsym*> found{nullptr};
  Dlsym* function = found.load(std::memory_order_relaxed);
  if (!function) {
    function = reinterpret_cast<Dlsym*>(::dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
    found.store(function, std::memory_order_relaxed);
  }
  return function;
}

const DriverCalls& driver() {
  static constexpr DriverCalls kNone{};
  const auto* loaded = g_loaded.load(std::memory_order_acquire);
  return loaded ? loaded->calls : kNone;
}

std::span<const HookRow> hook_rows() { return stasis_row_info; }

// What the program is given for a name is the driver's entry point, as before: the hook is there.
void know_driver_behind_hooks(void* library, void* (*real_of)(void* entry)) {
  auto* symbol = real_dlsym();
  const auto find = [&](const char* name) {
    void* entry = symbol(library, name);
    return entry ? real_of(entry) : nullptr;
  };
  auto* loaded = new Loaded;
  find_all(loaded->calls, find);
  for (int row = 0; row < kRows; ++row)
    g_real[row].store(find(stasis_row_info[row].name), std::memory_order_relaxed);
  g_loaded.store(loaded, std::memory_order_release);
  ::dlerror();
}

void watch_calls(const CallWatch* watch) { g_watch.store(watch, std::memory_order_release); }

void tell_watch_of_graph() {
  if (const auto* watch = g_watch.load(std::memory_order_acquire)) watch->graph();
}

void* in_place_of(void* real) {
  const auto* loaded = g_loaded.load(std::memory_order_acquire);
  if (!loaded) return real;
  const auto& known = loaded->known;
  if (known.empty() || real < known.front().real || real > known.back().real) return real;
  const auto at = std::lower_bound(known.begin(), known.end(), real,
                                   [](const Known& one, void* key) { return one.real < key; });
  return at != known.end() && at->real == real ? at->wrapper : real;
}

namespace hooks {

cuda::CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version,
                                   std::uint64_t flags,
                                   cuda::CUdriverProcAddressQueryResult* status) {
  const auto result = driver().cuGetProcAddress_v2(symbol, function, version, flags, status);
  if (result == cuda::CUDA_SUCCESS && function && *function) *function = in_place_of(*function);
  return result;
}

cuda::CUresult cuGetProcAddress(const char* symbol, void** function, int version,
                                std::uint64_t flags) {
  const auto result = driver().cuGetProcAddress(symbol, function, version, flags);
  if (result == cuda::CUDA_SUCCESS && function && *function) *function = in_place_of(*function);
  return result;
}

}  // namespace hooks

namespace {

// What the program gets for a name like the driver's, found at `real`.
void* answer_of_dlsym(void* real, const char* name) {
  if (is_export_of_ours(real)) {
    // Asked of all libraries together. If none but this one has it, there is no driver.
    return real_dlsym()(RTLD_NEXT, name) ? real : nullptr;
  }
  if (is_inactive()) return real;
  Dl_info where{};
  // The file, because the name alone says nothing: a library may have a cuMemAlloc of its own.
  if (!::dladdr(real, &where) || !where.dli_fname || !std::strstr(where.dli_fname, "libcuda.so"))
    return real;
  if (!g_loaded.load(std::memory_order_acquire)) {
    void* library = ::dlopen(where.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return real;
    if (!is_driver(library)) {
      ::dlclose(library);
      return real;
    }
    know_driver(library);
  }
  return in_place_of(real);
}

// What `caller` finds in the libraries that were loaded for it alone, after all others; null if it
// is nothing, or ours. Leaves no error of its own behind.
void* find_beside(void* caller, const char* name) {
  Dl_info where{};
  link_map* map = nullptr;
  if (!::dladdr1(caller, &where, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) || !map ||
      !map->l_name[0])
    return nullptr;
  // Its map is no handle: the C library (2.36) crashes where a library came as another's dependency
  // and was not opened itself.
  void* library = ::dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD);
  void* found = library ? real_dlsym()(library, name) : nullptr;
  if (library) ::dlclose(library);
  return found && !is_export_of_ours(found) ? found : nullptr;
}

}  // namespace

// Called by the stub below. `caller` is where it returns to.
extern "C" __attribute__((visibility("hidden"), used)) void* stasis_dlsym(void* handle,
                                                                          const char* name,
                                                                          void* caller) {
  void* real = real_dlsym()(handle, name);
  // Languages without a linker look it up in the C library (.NET: DllImport("libdl")).
  if (real == reinterpret_cast<void*>(real_dlsym())) return reinterpret_cast<void*>(&::dlsym);
  if (!named_like_a_call(name) || (!real && handle != RTLD_DEFAULT)) return real;
  const Uncancelled uncancelled;
  const int error = errno;
  void* answer = real ? answer_of_dlsym(real, name) : nullptr;
  if (!answer && handle == RTLD_DEFAULT) {
    void* beside = find_beside(caller, name);
    if (beside)
      answer = answer_of_dlsym(beside, name);
    else
      real_dlsym()(RTLD_NEXT, name);  // for dlerror()
  }
  errno = error;
  return answer;
}

// The C library's, if it can answer for itself.
extern "C" __attribute__((visibility("hidden"), used)) Dlsym* stasis_dlsym_instead(
    void* handle, const char* name) {
  if (handle == RTLD_NEXT || (handle == RTLD_DEFAULT && !named_like_a_call(name)))
    return real_dlsym();
  return nullptr;
}

}  // namespace stasis::preload

// dlsym(RTLD_NEXT, ...) means "after the library that calls", and RTLD_DEFAULT among others what
// was loaded for that alone (dlopen with RTLD_LOCAL). The C library tells the caller by the return
// address: such a call is handed on by a jump, with the stack as it came.
asm(R"(
  .text
  .globl dlsym
  .type dlsym, @function
dlsym:
  .cfi_startproc
  endbr64
  push %rdi
  .cfi_adjust_cfa_offset 8
  push %rsi
  .cfi_adjust_cfa_offset 8
  sub $8, %rsp
  .cfi_adjust_cfa_offset 8
  call stasis_dlsym_instead
  add $8, %rsp
  .cfi_adjust_cfa_offset -8
  pop %rsi
  .cfi_adjust_cfa_offset -8
  pop %rdi
  .cfi_adjust_cfa_offset -8
  mov (%rsp), %rdx
  test %rax, %rax
  je stasis_dlsym
  jmp *%rax
  .cfi_endproc
  .size dlsym, .-dlsym
)");

// The driver's names, for programs that are linked with it: each jumps to its row's wrapper. In one
// piece, so that the assembler counts the rows as the compiler did.
// clang-format off
#define STASIS_EXPORT(name, ...) "stasis_export " #name "\n"
#define STASIS_EXPORT_PTSZ(name, ...) STASIS_EXPORT(name) STASIS_EXPORT(name##_ptsz)
#define STASIS_EXPORT_PTDS(name, ...) STASIS_EXPORT(name) STASIS_EXPORT(name##_ptds)
asm(".text\n.set stasis_row, 0\n"
    ".macro stasis_export name\n"
    ".globl \\name\n.type \\name, @function\n\\name:\n.cfi_startproc\nendbr64\n"
    "jmp *stasis_row_info + 16 * stasis_row + 8(%rip)\n.cfi_endproc\n.size \\name, . - \\name\n"
    ".set stasis_row, stasis_row + 1\n"
    ".endm\n"
    STASIS_GATED_CALLS(STASIS_EXPORT, STASIS_EXPORT_PTSZ, STASIS_EXPORT_PTDS)
    STASIS_HOOKED_CALLS(STASIS_EXPORT)
    ".purgem stasis_export\n");
// clang-format on
