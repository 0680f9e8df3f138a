#include "proc/interrupted_call.h"

#include "proc/procfs.h"

namespace stasis::proc {

std::optional<std::uint64_t> call_made(const AddressSpace& space, const CallRegisters& registers) {
  const auto read = [&](std::uint64_t address, void* data, std::size_t size) {
    return space.read(address, data, size).has_value();
  };
  return interrupted::call_made(read, registers);
}

bool has_signal(Pid pid, Tid thread) {
  const auto status = ProcFs().thread_status(pid, thread);
  return status && (status->pending & ~status->blocked) != 0;
}

}  // namespace stasis::proc
