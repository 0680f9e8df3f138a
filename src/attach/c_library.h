// What a thread is to the C library of another process (glibc), as far as a thread that the library
// did not make has to look like one of its own while it makes a proper one.
//
// The library itself says where what lies, by the descriptors that it has for debuggers
// (_thread_db_*), and each figure is compared with what a real thread of the process has: a library
// of which that is not true is not known, and is left alone. docs/adr/0052-calls-inside.md.
//
// Plain values; reads only.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attach/libraries.h"
#include "base/units.h"

namespace stasis::attach {

// Of glibc's tcbhead_t (sysdeps/x86_64/nptl/tls.h): what compilers and the kernel's ABI have fixed.
inline constexpr std::uint64_t kTcbSelf = 0;
inline constexpr std::uint64_t kTcbThreadVector = 8;
inline constexpr std::uint64_t kTcbThread = 16;
inline constexpr std::uint64_t kTcbSeveralThreads = 24;
inline constexpr std::uint64_t kTcbStackGuard = 40;
inline constexpr std::uint64_t kTcbPointerGuard = 48;
inline constexpr std::uint64_t kTcbHead = 56;
// glibc's TLS_DTV_UNALLOCATED: __tls_get_addr makes the memory when it is asked for.
inline constexpr std::uint64_t kUnallocated = ~std::uint64_t{0};
// The part of a restartable sequence's area that every kernel and library knows, and its signature
// (RSEQ_SIG of glibc, as the library's own handlers have it).
inline constexpr std::uint32_t kRseqSize = 32;
inline constexpr std::uint32_t kRseqSignature = 0x53053053;

// A library's thread-local storage whose place every thread has at the same distance.
struct StaticThreadStorage {
  std::uint64_t distance = 0;  // below the thread pointer
  std::vector<std::byte> image;
  bool operator==(const StaticThreadStorage&) const = default;
};

class CLibrary {
 public:
  // Of the process's libraries. kNotSupported, with what is not as it should be.
  static Result<CLibrary> read(const proc::AddressSpace& space,
                               const std::vector<proc::Mapping>& mappings);

  std::uint64_t pthread_create() const { return create_; }
  std::uint64_t attr_init() const { return attr_init_; }
  std::uint64_t attr_set_detached() const { return attr_detach_; }
  std::uint64_t dlopen() const { return dlopen_; }
  std::uint64_t dlsym() const { return dlsym_; }
  std::uint64_t dlerror() const { return dlerror_; }

  std::uint64_t thread_size() const { return thread_size_; }  // of struct pthread
  std::uint64_t tid_offset() const { return tid_offset_; }

  // Whether what lies there belongs to a library that the program never unloads.
  bool keeps(const proc::Mapping& mapping) const;

  // malloc() is another library's, or the program's own.
  bool malloc_is_replaced() const { return loaded_.malloc_is_replaced; }

  // A real thread, by its thread pointer, as it must look like; `inner_tid` is its number in the
  // innermost PID namespace. kNotSupported if it does not.
  struct RealThread {
    std::uint64_t stack_guard = 0;
    std::uint64_t pointer_guard = 0;
    std::uint64_t generation = 0;      // of the libraries that it knows
    std::uint64_t capacity = 0;        // how many of them its vector has room for
    std::uint32_t rseq_processor = 0;  // negative as an int: it has registered none
  };
  Result<RealThread> check(const MemoryReader& memory, std::uint64_t thread_pointer,
                           int inner_tid) const;

  // Bytes below the thread pointer that any library may use.
  std::uint64_t static_size() const { return static_size_; }
  const std::vector<StaticThreadStorage>& static_storage() const { return loaded_.storage; }
  // From the thread pointer to the area of restartable sequences; nothing if the library has none.
  std::optional<std::int64_t> rseq_offset() const { return rseq_offset_; }

 private:
  // What its loader's list of libraries says.
  struct Loaded {
    std::vector<StaticThreadStorage> storage;
    std::uint64_t deepest = 0;  // the largest distance
    bool malloc_is_replaced = false;
    std::vector<Library::Range> kept;  // of what was there when the program started
    bool operator==(const Loaded&) const = default;
  };
  CLibrary() = default;
  Result<void> read_descriptors(const Library& library);
  Result<void> read_loader(const proc::AddressSpace& space, const Library& library,
                           const Library& loader);
  Result<Loaded> read_list(const proc::AddressSpace& space, const Library& library,
                           const Library& loader, Clock::time_point deadline) const;

  std::uint64_t create_ = 0;
  std::uint64_t attr_init_ = 0;
  std::uint64_t attr_detach_ = 0;
  std::uint64_t dlopen_ = 0;
  std::uint64_t dlsym_ = 0;
  std::uint64_t dlerror_ = 0;
  std::uint64_t thread_size_ = 0;
  std::uint64_t tid_offset_ = 0;
  std::uint64_t map_offset_ = 0;  // in a link_map, of its storage's distance
  std::uint64_t static_size_ = 0;
  std::optional<std::int64_t> rseq_offset_;
  Loaded loaded_;
};

}  // namespace stasis::attach
