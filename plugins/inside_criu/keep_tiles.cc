// Keeps criu from a thread in the middle of a computation with AMX.
//
// CRIU 4.2.1 runs code of its own in threads. It first asks the kernel for the state of the
// thread's processor (get_task_xsave() of compel/arch/x86/src/lib/infect.c) and later gives that
// back, without AMX's tiles: a thread that had some ends by SIGILL or computes something else,
// whatever becomes of the dump. So this library answers the question with an error where there are
// tiles, and criu ends its dump before it has touched the thread.
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstring>

#include "abi/processor_state.h"
#include "inside_criu/calls.h"
#include "inside_criu/table.h"

namespace {

// sys/ptrace.h declares the function with an enumeration, after which va_start() is not defined.
constexpr int kPeekFirst = 1;  // PTRACE_PEEKTEXT
constexpr int kPeekLast = 3;   // PTRACE_PEEKUSER
constexpr int kGetRegisterSet = 0x4204;
constexpr std::uintptr_t kRegistersNote = 1;  // NT_PRSTATUS of linux/elf.h

// Of these the kernel's answer comes by memory, and the C library's by value.
bool answers_a_word(int request) { return request >= kPeekFirst && request <= kPeekLast; }

bool has_tiles(const void* answer) {
  namespace state = stasis::processor_state;
  const auto* const part = static_cast<const iovec*>(answer);
  if (part == nullptr || part->iov_len < state::kInUseAt + sizeof(std::uint64_t)) return false;
  std::uint64_t in_use = 0;
  std::memcpy(&in_use, static_cast<const char*>(part->iov_base) + state::kInUseAt, sizeof in_use);
  return (in_use & state::kTiles) != 0;
}

}  // namespace

extern "C" long ptrace(int request, ...) noexcept;
extern "C" long ptrace(int request, ...) noexcept {
  using stasis::inside_criu::table;
  va_list list;
  va_start(list, request);
  const pid_t thread = va_arg(list, pid_t);
  void* const address = va_arg(list, void*);
  void* data = va_arg(list, void*);
  va_end(list);
  long word = 0;
  if (answers_a_word(request)) data = &word;
  const long result = ::syscall(SYS_ptrace, request, thread, address, data);
  if (result >= 0 && answers_a_word(request)) {
    errno = 0;
    return word;
  }
  const auto note = reinterpret_cast<std::uintptr_t>(address);
  if (request == kGetRegisterSet && note == kRegistersNote && result == 0 && table != nullptr)
    stasis::inside_criu::make_call_again(thread, data);
  const bool asks = request == kGetRegisterSet && note == stasis::processor_state::kNote;
  if (!asks || result != 0 || table == nullptr || !has_tiles(data)) return result;
  table->tiles_of.store(static_cast<std::uint64_t>(thread), std::memory_order_release);
  errno = EBUSY;
  return -1;
}
