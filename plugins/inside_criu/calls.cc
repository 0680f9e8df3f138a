// Lets the threads of a dumped program go on with the system calls that wait.
//
// CRIU 4.2.1 lets a call end with EINTR that waits for a time which the kernel keeps
// (compel_get_task_regs() of compel/src/lib/infect.c), and does not know of those that return EINTR
// after any stop. Of an image the tool puts that right itself; a program that runs on after the
// dump gets the registers back that criu has read.
#include "inside_criu/calls.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "abi/interrupted_call.h"

namespace stasis::inside_criu {
namespace {

// A mask of signals of /proc/PID/status.
std::uint64_t mask_of(const char* text, const char* key) {
  const char* at = std::strstr(text, key);
  if (at == nullptr) return 0;
  std::uint64_t mask = 0;
  for (at += std::strlen(key); *at != '\n' && *at != '\0'; ++at) {
    const char letter = *at;
    if (letter >= '0' && letter <= '9') mask = mask << 4 | static_cast<unsigned>(letter - '0');
    if (letter >= 'a' && letter <= 'f') mask = mask << 4 | static_cast<unsigned>(letter - 'a' + 10);
  }
  return mask;
}

// Is a signal waiting that the thread would take? Then the call ends, as it should. Also where that
// cannot be told.
bool has_signal(pid_t thread) {
  char path[40] = "/proc/";
  char digits[12];
  std::size_t count = 0;
  for (unsigned rest = static_cast<unsigned>(thread); rest != 0 || count == 0; rest /= 10)
    digits[count++] = static_cast<char>('0' + rest % 10);
  std::size_t end = std::strlen(path);
  while (count > 0)
    path[end++] = digits[--count];
  std::memcpy(path + end, "/status", sizeof "/status");
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return true;
  // "Groups" may be long, and stands in front of what is looked for.
  static char text[8192];
  std::size_t size = 0;
  std::uint64_t waiting = 0;
  bool found = false;
  for (;;) {
    const ssize_t got = ::read(file, text + size, sizeof text - 1 - size);
    if (got <= 0) break;
    size += static_cast<std::size_t>(got);
    text[size] = '\0';
    if (std::strstr(text, "\nSigIgn:") != nullptr) {
      waiting = (mask_of(text, "\nSigPnd:\t") | mask_of(text, "\nShdPnd:\t")) &
                ~mask_of(text, "\nSigBlk:\t");
      found = true;
      break;
    }
    if (size < sizeof text / 2) continue;
    // The end is enough to find the rest of a line with.
    std::memmove(text, text + size - 512, 512);
    size = 512;
  }
  (void)::close(file);
  return !found || waiting != 0;
}

}  // namespace

void make_call_again(pid_t thread, void* answer) {
  namespace calls = stasis::interrupted;
  const auto* const part = static_cast<const iovec*>(answer);
  // Less: of a program of 32 bits.
  if (part == nullptr || part->iov_len != sizeof(user_regs_struct)) return;
  user_regs_struct registers;
  std::memcpy(&registers, part->iov_base, sizeof registers);
  const auto result = static_cast<std::int64_t>(registers.rax);
  if (static_cast<int>(registers.orig_rax) < 0) return;
  const bool is_timed = result == calls::kRestartBlock;
  const bool is_ended = result == -EINTR && calls::returns_eintr_after_stop(registers.orig_rax);
  if ((!is_timed && !is_ended) || has_signal(thread)) return;
  const auto read = [thread](std::uint64_t address, void* data, std::size_t size) {
    const iovec local{data, size};
    const iovec remote{reinterpret_cast<void*>(address), size};
    return ::syscall(SYS_process_vm_readv, thread, &local, 1, &remote, 1, 0) ==
           static_cast<long>(size);
  };
  const auto number = calls::call_made(read, {registers.orig_rax, registers.rip, registers.rdi,
                                              registers.rsi, registers.rdx, registers.r10});
  if (!number) return;
  registers.orig_rax = *number;
  registers.rax = static_cast<std::uint64_t>(calls::kRestartNoHand);
  std::memcpy(part->iov_base, &registers, sizeof registers);
}

}  // namespace stasis::inside_criu
