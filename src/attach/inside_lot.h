// The memory in a target in which a thread of ours works: a mapping of code (inside_code.cc), and
// one of data with the block (inside_block.h), a stack, a thread's descriptor as the C library
// wants it, and room for what goes in and comes out. Neither is ever writable and executable.
//
// What the library has noted in the descriptor, such as memory of malloc()'s that it keeps for the
// thread, stays there: such a lot is not unmapped, and the next call takes it again, as if the
// thread had slept in between. It is found by its mark. All of it may be forged; the tool writes
// into the target's own memory alone.
//
// Plain values; the calls act on the target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attach/c_library.h"
#include "attach/inside_block.h"
#include "proc/address_space.h"
#include "proc/procfs.h"

namespace stasis::attach {

// Where things lie in the mapping of data.
struct InsideLayout {
  std::uint64_t stack = 0;      // its lowest byte; the page before it cannot be touched
  std::uint64_t stack_end = 0;  // the first byte behind it
  std::uint64_t storage = 0;    // thread-local storage, up to `thread`
  std::uint64_t thread = 0;     // the descriptor
  std::uint64_t vector = 0;
  std::uint64_t vector_end = 0;
  std::uint64_t input = 0;
  std::uint64_t answers = 0;
  std::uint64_t size = 0;
  std::uint64_t vector_capacity = 0;

  static InsideLayout of(const CLibrary& library, std::uint64_t vector_capacity);
};
inline constexpr std::uint64_t kInsideCodeSize = 8192;

struct InsideLot {
  std::uint64_t code = 0;
  std::uint64_t data = 0;
  InsideLayout layout;
  bool is_new = true;  // nothing of it is written yet

  // The instruction of inside_code.cc at which a thread is made.
  std::uint64_t clone_instruction() const;
};

// The bytes of the code mapping: a mark, where the data lies, and the code.
std::vector<std::uint64_t> inside_code_words(const InsideLot& lot, std::uint64_t owner_start);

// A descriptor for a thread that is none of the library's, with the storage before it, and its
// vector, as they lie from `layout.storage` on.
std::vector<std::byte> make_thread(const CLibrary& library, const CLibrary::RealThread& real,
                                   const InsideLot& lot);

// A lot of this build's that a tool has left and no thread uses. `owner_start`: when the process
// was started; a lot that it has inherited from another one is not its own.
std::optional<InsideLot> find_lot(const proc::AddressSpace& space,
                                  const std::vector<proc::Mapping>& mappings,
                                  const CLibrary& library, std::uint64_t owner_start);

// For as long as a tool works with it, and what it says of a lot whose tool was killed.
Result<void> take_lot(const proc::AddressSpace& space, const InsideLot& lot);
Result<void> release_lot(const proc::AddressSpace& space, const InsideLot& lot);

// The thread that the C library has made has ended, as the kernel tells the library.
bool has_ended(const MemoryReader& memory, const CLibrary& library, const InsideBlock& block);

}  // namespace stasis::attach
